"""Runs rounds: the algorithm once, and the backends that train a cohort."""

from fedskew.engine._backend import Backend, LocalTraining, Update
from fedskew.engine._evaluation import evaluation, plain, predict
from fedskew.engine._federation import Federation, ServerState
from fedskew.engine._records import ClientEvaluation, Evaluation, Round
from fedskew.engine._sequential import Observer, Sequential

__all__ = [
    "Backend",
    "ClientEvaluation",
    "Evaluation",
    "Federation",
    "LocalTraining",
    "Observer",
    "Round",
    "Sequential",
    "ServerState",
    "Update",
    "evaluation",
    "plain",
    "predict",
]
