"""FINCH on points whose nearest neighbours are worked out by hand. It is the authors' package; see also test_fpl."""

from __future__ import annotations

import math

import numpy as np

from fedskew.objectives import coarsest_clusters


def at(*degrees: float) -> np.ndarray:
    """Unit vectors: cosine distance grows with the angle between."""
    return np.array([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=np.float32)


def groups(points: np.ndarray) -> set[frozenset[int]]:
    clusters = coarsest_clusters(points)
    return {frozenset(np.flatnonzero(clusters == cluster).tolist()) for cluster in clusters}


def test_pairs_that_are_each_others_neighbours_are_clusters():
    # Neighbours 0-1, 2-3. The two means are each other's neighbours: one cluster, which isn't a partition.
    assert groups(at(0, 10, 90, 105)) == {frozenset({0, 1}), frozenset({2, 3})}


def test_clusters_are_clustered_again_until_one_is_left():
    # Eight points in four pairs, 0-1, 2-3, 4-5 and 6-7; the means at 5, 35, 125 and 155 degrees make two.
    assert groups(at(0, 10, 30, 40, 120, 130, 150, 160)) == {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}


def test_a_chain_of_neighbours_is_one_cluster():
    # 0's neighbour is 1, 1's is 2, 2's is 3 and back.
    assert groups(at(0, 30, 50, 60)) == {frozenset(range(4))}


def test_lengths_mean_nothing():
    points = at(0, 10, 90, 105)
    assert groups(points * np.array([[1], [5], [0.1], [30]], dtype=np.float32)) == groups(points)


def test_few_and_equal_points():
    assert coarsest_clusters(at(20)).tolist() == [0]
    assert len(groups(at(0, 170))) == 1
    assert len(groups(at(7, 7, 7))) == 1
    assert len(groups(np.zeros((3, 2), dtype=np.float32))) == 1
