"""Runs rounds: the algorithm once, and the backends that train a cohort."""

from fedskew.engine._backend import Assignment, Backend, LocalTraining, Observer, Sent, Update
from fedskew.engine._clients import ClientStates
from fedskew.engine._cohort import CohortBackend
from fedskew.engine._cohort_rule import faster_together
from fedskew.engine._cohort_seeds import run_round_together
from fedskew.engine._conditions import Conditions
from fedskew.engine._course import RoundRunner
from fedskew.engine._evaluation import evaluation, plain, predict
from fedskew.engine._fedconcat import FedConcatRunner, FedConcatState
from fedskew.engine._federation import Federation, ServerState, cohort_size, hooked
from fedskew.engine._local_work import ClientData, Divided, LocalWork, Samples
from fedskew.engine._processes import ProcessBackend
from fedskew.engine._ranks import RankBackend, from_the_first
from fedskew.engine._records import ClientEvaluation, Evaluation, Round
from fedskew.engine._rows import Rows
from fedskew.engine._sequential import SequentialBackend

__all__ = [
    "Assignment",
    "Backend",
    "ClientData",
    "ClientEvaluation",
    "ClientStates",
    "CohortBackend",
    "Conditions",
    "Divided",
    "Evaluation",
    "FedConcatRunner",
    "FedConcatState",
    "Federation",
    "LocalTraining",
    "LocalWork",
    "Observer",
    "ProcessBackend",
    "RankBackend",
    "Round",
    "RoundRunner",
    "Rows",
    "Samples",
    "Sent",
    "SequentialBackend",
    "ServerState",
    "Update",
    "cohort_size",
    "evaluation",
    "faster_together",
    "from_the_first",
    "hooked",
    "plain",
    "predict",
    "run_round_together",
]
