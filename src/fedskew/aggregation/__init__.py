"""Aggregation: how the weighted updates of a round become one change of the model.

`mean` is the weighted mean, FedAvg's. The others bound what a few bad clients can do, whatever the weighting. They use
the same weights, so a client that lies about its samples counts for more here too: limit its weight by
`training.weight_limit`.

Rules that keep the clients' updates apart (norm clipping, the geometric median, Krum) go with every server update.
Those that merge them coordinate by coordinate (median, trimmed mean) go with the plain one. Buffers (batch-norm
statistics) are aggregated separately by the same rule, since their scale differs.
"""

from fedskew.aggregation._by_coordinate import Median, TrimmedMean
from fedskew.aggregation._geometric_median import GeometricMedian
from fedskew.aggregation._krum import Krum
from fedskew.aggregation._mean import Mean as Mean
from fedskew.aggregation._norm_clipping import NormClipping
from fedskew.aggregation._protocol import Aggregation as Aggregation

INDEX: dict[str, type] = {
    "mean": Mean,
    "norm_clipping": NormClipping,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
    "krum": Krum,
}
