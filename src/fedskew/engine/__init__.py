"""Runs rounds: the algorithm once, and the backends that train a cohort."""

from fedskew.engine._backend import Assignment, Backend, LocalTraining, Observer, Sent, Update
from fedskew.engine._clients import ClientStates
from fedskew.engine._cohort import Cohort
from fedskew.engine._cohort_rule import faster_together
from fedskew.engine._cohort_seeds import play_together
from fedskew.engine._conditions import Conditions
from fedskew.engine._course import Course
from fedskew.engine._evaluation import evaluation, plain, predict
from fedskew.engine._fedconcat import FedConcatCourse, FedConcatState
from fedskew.engine._federation import Federation, ServerState, cohort_size, hooked
from fedskew.engine._local_work import ClientData, Divided, LocalWork, Samples
from fedskew.engine._processes import Processes
from fedskew.engine._ranks import Ranks, from_the_first
from fedskew.engine._records import ClientEvaluation, Evaluation, Round
from fedskew.engine._rows import Rows
from fedskew.engine._sequential import Sequential

__all__ = [
    "Assignment",
    "Backend",
    "ClientData",
    "ClientEvaluation",
    "ClientStates",
    "Cohort",
    "Conditions",
    "Course",
    "Divided",
    "Evaluation",
    "FedConcatCourse",
    "FedConcatState",
    "Federation",
    "LocalTraining",
    "LocalWork",
    "Observer",
    "Processes",
    "Ranks",
    "Round",
    "Rows",
    "Samples",
    "Sent",
    "Sequential",
    "ServerState",
    "Update",
    "cohort_size",
    "evaluation",
    "faster_together",
    "from_the_first",
    "hooked",
    "plain",
    "play_together",
    "predict",
]
