"""fedskew's noise on updates beside pfl's Gaussian mechanism: the same noise multiplier, the same epsilon, the same
noise.

    pip install --no-deps --target build/pfl pfl==0.6.0 prv_accountant
    PYTHONPATH=build/pfl python benchmarks/same_noise.py

Printed: epsilon of pfl's PLD accountant and ours for some noise multipliers, rounds and deltas, without sampling; then
the standard deviation of the noise in the mean of ten updates, each clipped, by both.
"""

from __future__ import annotations

import numpy as np
from pfl.internal.ops import numpy_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.stats import MappedVectorStatistics

from fedskew.privacy import UpdateNoise, epsilon
from fedskew.sums.fixed_point import UPDATES, add

CLIENTS, PARAMETERS, CLIP, NOISE = 10, 20_000, 0.5, 2.0


def main() -> None:
    set_framework_module(numpy_ops)
    for noise, rounds, delta in ((1.0, 20, 1e-5), (2.0, 100, 1e-5), (4.0, 50, 1e-3), (0.8, 5, 1e-6)):
        theirs = PLDPrivacyAccountant(
            num_compositions=rounds, sampling_probability=1.0, mechanism="gaussian", delta=delta, noise_parameter=noise
        ).epsilon
        print(
            f"noise {noise}, {rounds} rounds, delta {delta}: pfl {theirs!r}, fedskew {epsilon(noise, rounds, delta)!r}"
        )

    rng = np.random.default_rng(0)
    updates = [rng.normal(size=PARAMETERS) * rng.exponential() * 0.01 for _ in range(CLIENTS)]
    mechanism = GaussianMechanism(CLIP, NOISE)
    clipped = [
        mechanism.constrain_sensitivity(MappedVectorStatistics({"update": update.copy()}, weight=1.0))[0]["update"]
        for update in updates
    ]
    total = np.sum(clipped, axis=0)
    noisy, _ = mechanism.add_noise(MappedVectorStatistics({"update": total.copy()}, weight=CLIENTS), CLIENTS, seed=1)
    ours = UpdateNoise(CLIP, NOISE, weight_limit=1 / CLIENTS, answers=CLIENTS)
    sent = [ours.protect(update, 1 / CLIENTS, np.random.default_rng(at)) for at, update in enumerate(updates)]
    print("noise of the mean, standard deviation:")
    print("  pfl    ", ((noisy["update"] - total) / CLIENTS).std())
    print("  fedskew", (UPDATES.decode(add(sent)) - total / CLIENTS).std())
    print("  formula", NOISE * CLIP / CLIENTS)


if __name__ == "__main__":
    main()
