"""The number of gradients that local steps with momentum amount to; FedNova and SCAFFOLD divide by it."""

from __future__ import annotations

from fedskew.errors import ArgumentError


def fednova_normaliser(steps: int, momentum: float) -> float:
    """Compute how many gradients a local update by SGD with momentum amounts to, a(tau, rho).

        a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)

    The momentum buffer is empty before the first step. FedNova divides updates by a, SCAFFOLD its control variates.
    """
    check_momentum(momentum)
    if not (float(steps).is_integer() and steps >= 0):
        raise ArgumentError(f"steps: must be whole numbers, 0 or above, got {steps}")
    steps = int(steps)
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


def check_momentum(momentum: float) -> None:
    """Check that a momentum is from 0 to below 1."""
    if not 0 <= momentum < 1:
        raise ArgumentError(f"momentum: must be in [0, 1), got {momentum}")
