"""Rounds of federated learning: the algorithm, written once, and the backends that train a cohort."""

from fedskew.engine._backend import (
    Assignment,
    Backend,
    Conditions,
    LocalTraining,
    Observer,
    Sent,
    Update,
    cohort_size,
)
from fedskew.engine._evaluation import evaluation, plain, predict
from fedskew.engine._faults import stilled
from fedskew.engine._fedconcat import FedConcatRunner, FedConcatState
from fedskew.engine._finish import FinishedModel, answer, check_finish, finish_model
from fedskew.engine._local_work import ClientData, ClientSamples, LocalWork, PartitionedData
from fedskew.engine._records import ClientEvaluation, Cohort, Evaluation, RoundOutcome, RoundRecord, RoundRunner
from fedskew.engine._sequential import SequentialBackend
from fedskew.engine._states import ClientStates, ServerState
from fedskew.engine._target import EstimatedMix, Estimation, logits_of
from fedskew.engine._weights import Weights
from fedskew.engine._workers import ProcessBackend, RankBackend, from_the_first
from fedskew.engine.cohort import CohortBackend, faster_together, run_round_together
from fedskew.engine.contracts import adapting, hooked, shortage
from fedskew.engine.round import Federation
from fedskew.engine.sums import Floats

__all__ = [
    "Assignment",
    "Backend",
    "ClientData",
    "ClientEvaluation",
    "ClientSamples",
    "ClientStates",
    "Cohort",
    "CohortBackend",
    "Conditions",
    "EstimatedMix",
    "Estimation",
    "Evaluation",
    "FedConcatRunner",
    "FedConcatState",
    "Federation",
    "FinishedModel",
    "Floats",
    "LocalTraining",
    "LocalWork",
    "Observer",
    "PartitionedData",
    "ProcessBackend",
    "RankBackend",
    "RoundOutcome",
    "RoundRecord",
    "RoundRunner",
    "Sent",
    "SequentialBackend",
    "ServerState",
    "Update",
    "Weights",
    "adapting",
    "answer",
    "check_finish",
    "cohort_size",
    "evaluation",
    "faster_together",
    "finish_model",
    "from_the_first",
    "hooked",
    "logits_of",
    "plain",
    "predict",
    "run_round_together",
    "shortage",
    "stilled",
]
