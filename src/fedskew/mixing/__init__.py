"""FedPALS's programme: the client weights whose label mix comes nearest to a target, at a price for uneven weights.

    min over a >= 0, sum a = 1   ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i

S_i are the label marginals of client i, n_i its size, T the target mix and lambda the strength. With p_i = n_i / N,
x_i = a_i / p_i and kappa = lambda / N the penalty is kappa sum p_i x_i^2, and x = 1 is FedAvg. One solve,
`Programme(counts, target, sizes).solve(kappa)`, takes one of two ways, both in `_solver.py`:

1. kappa >= 1e-6: `ascend` (`_dual.py`) maximises the programme's dual, which has as many unknowns as classes however
   many clients there are, by Newton steps; the weights follow from its solution.
2. Smaller kappa, and the limit 0: the scores of the clients that matter differ from those of the others by less than
   rounding allows to divide by kappa. The nearest mix T - r that weighted clients can have is found first
   (`Programme.projection`), and the programme is solved in the scale of kappa around it by the method of multipliers
   (`_meet`), which calls `ascend` at falling curvatures.

Both end in a certificate, computed from the weights alone: how far they can be from optimal. Everything here works on
float64 arrays that were checked before.
"""

from __future__ import annotations

from fedskew.mixing._solver import Programme, Projection, Solution

__all__ = ["Programme", "Projection", "Solution"]
