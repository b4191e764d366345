"""FedPALS's quadratic programme: client weights whose label mix is near a target, with a penalty on uneven weights.

    min over a >= 0, sum a = 1   ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i

S_i is the label mix (marginal) of client i, n_i its number of samples, T the target mix and lambda the strength of the
penalty. With N = sum n_i, p_i = n_i / N, x_i = a_i / p_i and kappa = lambda / N, the penalty is kappa sum p_i x_i^2;
x = 1 is FedAvg. `Programme(counts, target, sizes).solve(kappa)` takes one of two ways:

1. For kappa >= 1e-6 Newton steps maximise the programme's dual, which has one unknown for each class, however many
   clients there are; the weights follow from its solution.
2. For smaller kappa and the limit 0, dividing by kappa would amplify rounding errors beyond the differences between the
   clients' scores. Therefore the mix T - r nearest to T that weighted clients can have is found first
   (`Programme.projection`). Around it, the programme is solved in the scale of kappa by the method of multipliers.

Both ways end with certificates, computed from the weights alone, that bound how far the weights are from optimal.

`limited` cuts weights of any origin at a share that none may exceed.
"""

from fedskew.mixing._solver import Programme as Programme
from fedskew.mixing._solver import Solution as Solution
from fedskew.mixing._solver import limited as limited
