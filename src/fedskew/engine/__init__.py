"""Rounds of federated learning: the algorithm, written once, and the backends that train a cohort."""

from fedskew.engine._backend import (
    Assignment,
    Backend,
    ClientData,
    ClientSamples,
    Conditions,
    LocalWork,
    Observer,
    PartitionedData,
    Sent,
    Update,
    cohort_size,
)
from fedskew.engine._faults import stilled
from fedskew.engine._private import Private
from fedskew.engine._records import (
    ClientEvaluation,
    Cohort,
    Evaluation,
    RoundRecord,
    RoundRunner,
    plain,
    predict,
    predict_findings,
)
from fedskew.engine._sequential import SequentialBackend
from fedskew.engine._states import ClientStates, ServerState
from fedskew.engine._training import Group, LocalTraining
from fedskew.engine.round import Federation
from fedskew.engine.workers import ProcessBackend, RankBackend

__all__ = [
    "Assignment",
    "Backend",
    "ClientData",
    "ClientEvaluation",
    "ClientSamples",
    "ClientStates",
    "Cohort",
    "Conditions",
    "Evaluation",
    "Federation",
    "Group",
    "LocalTraining",
    "LocalWork",
    "Observer",
    "PartitionedData",
    "Private",
    "ProcessBackend",
    "RankBackend",
    "RoundRecord",
    "RoundRunner",
    "Sent",
    "SequentialBackend",
    "ServerState",
    "Update",
    "cohort_size",
    "plain",
    "predict",
    "predict_findings",
    "stilled",
]
