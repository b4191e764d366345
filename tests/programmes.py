"""Quadratic programmes by clarabel, an interior point solver, as a judge of ours."""

import clarabel
import numpy as np
from scipy import sparse


def minimum(
    quadratic: np.ndarray,
    linear: np.ndarray,
    equal: np.ndarray | None = None,
    goal: np.ndarray | None = None,
    limit: float | None = None,
) -> np.ndarray:
    """The least x' Q x / 2 + c' x over 0 <= x (<= limit) with E x = g; without E and g, of sum 1."""
    size = len(linear)
    if equal is None:
        equal, goal = np.ones((1, size)), np.ones(1)
    else:  # of equations that say the same but for rounding, the solver concludes that nothing fits
        left, scales, _ = np.linalg.svd(equal, full_matrices=False)
        independent = left[:, scales > 1e-12 * scales[0]].T
        equal, goal = independent @ equal, independent @ goal
    bounds = [-np.eye(size)] if limit is None else [-np.eye(size), np.eye(size)]
    most = [] if limit is None else [np.full(size, limit)]
    options = clarabel.DefaultSettings()
    options.verbose = False
    options.tol_gap_abs = options.tol_gap_rel = options.tol_feas = 1e-12
    options.max_iter = 400
    solver = clarabel.DefaultSolver(
        sparse.triu(sparse.csc_matrix(quadratic)).tocsc(),
        linear,
        sparse.csc_matrix(np.vstack([equal, *bounds])),
        np.concatenate([goal, np.zeros(size), *most]),
        [clarabel.ZeroConeT(len(goal)), clarabel.NonnegativeConeT(len(bounds) * size)],
        options,
    )
    return np.array(solver.solve().x)
