"""The factor that local steps with momentum add up to: FedNova divides updates by it, SCAFFOLD its control variates."""

from __future__ import annotations

from fedskew.errors import ArgumentError


def fednova_normaliser(steps: int, momentum: float) -> float:
    """Compute how many gradients an SGD update with momentum amounts to, a(tau, rho), from a fresh buffer.

        a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)

    Args:
        steps: Number of local steps, tau.
        momentum: Momentum, rho, in [0, 1).

    Returns:
        The factor; equal to `steps` without momentum.

    Raises:
        ArgumentError: Negative or fractional steps, or a momentum outside [0, 1).
    """
    check_momentum(momentum)
    if not (float(steps).is_integer() and steps >= 0):
        raise ArgumentError(f"steps: must be whole numbers, 0 or above, got {steps}")
    steps = int(steps)
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


def check_momentum(momentum: float) -> None:
    """Raise ArgumentError for a momentum outside [0, 1)."""
    if not 0 <= momentum < 1:
        raise ArgumentError(f"momentum: must be in [0, 1), got {momentum}")
