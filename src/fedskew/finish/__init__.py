"""Finish: what happens once, after the last round. Most methods have none.

A finish asks the clients for sums over their samples (of the trained model's features and logits), and computes a new
last layer from them; all other weights stay. It goes with every other component, since it needs nothing from the rounds
before it. The trained model is kept too, and both are evaluated.
"""

from fedskew.finish._adapt import LEAST_SAMPLES, Adapt, Calibrate
from fedskew.finish._ccvr import CCVR
from fedskew.finish._fedcof import FedCOF
from fedskew.finish._gaussian import GaussianHead
from fedskew.finish._protocol import Finish, Finished, Head, Known, Observed, Source
from fedskew.finish._ridge import RidgeHead

INDEX: dict[str, type] = {"adapt": Adapt, "ccvr": CCVR, "fedcof": FedCOF, "gaussian": GaussianHead, "ridge": RidgeHead}

__all__ = ["INDEX", "LEAST_SAMPLES", "Calibrate", "Finish", "Finished", "Head", "Known", "Observed", "Source"]
