from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from fedskew.selection import Uniform

COUNTS = np.ones((5, 2))


def test_every_cohort_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seen = Counter(frozenset(Uniform().select(None, COUNTS, 2, rng)[0].tolist()) for _ in range(4000))
    assert set(seen) == set(map(frozenset, itertools.combinations(range(5), 2)))
    # 10 cohorts, 400 each, standard deviation 19.
    assert all(abs(times - 400) < 95 for times in seen.values())


def test_after_a_given_first_client_the_others_are_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seconds = np.bincount([Uniform().select(None, COUNTS, 2, rng, first=2)[0][1] for _ in range(4000)], minlength=5)
    assert seconds[2] == 0
    np.testing.assert_allclose(np.delete(seconds, 2), 1000, atol=140)


def test_label_counts_do_not_matter() -> None:
    ones, _ = Uniform().select(None, COUNTS, 3, np.random.default_rng(4))
    others, _ = Uniform().select(None, np.diag([9.0] * 5), 3, np.random.default_rng(4))
    assert ones.tolist() == others.tolist()
