"""Finish: what happens once, after the last round. Most methods have none.

A finish asks the clients for sums over their samples (of the trained model's features and logits), and computes a new
last layer from them; all other weights stay. It goes with every other component, since it needs nothing from the rounds
before it. The trained model is kept too, and both are evaluated.
"""

from fedskew.finish._adapt import LEAST_SAMPLES as LEAST_SAMPLES
from fedskew.finish._adapt import Adapt
from fedskew.finish._adapt import Calibrate as Calibrate
from fedskew.finish._ccvr import CCVR
from fedskew.finish._fedcof import FedCOF
from fedskew.finish._gaussian import GaussianHead
from fedskew.finish._protocol import Finish as Finish
from fedskew.finish._protocol import Finished as Finished
from fedskew.finish._protocol import Head as Head
from fedskew.finish._protocol import Known as Known
from fedskew.finish._protocol import Observed as Observed
from fedskew.finish._protocol import Source as Source
from fedskew.finish._ridge import RidgeHead

INDEX: dict[str, type] = {"adapt": Adapt, "ccvr": CCVR, "fedcof": FedCOF, "gaussian": GaussianHead, "ridge": RidgeHead}
