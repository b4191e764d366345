"""Rounds of federated learning: the algorithm, written once, and the backends that train a cohort."""

from fedskew.engine._backend import Assignment, Backend, LocalTraining, Observer, Sent, Update
from fedskew.engine._clients import ClientStates
from fedskew.engine._contracts import (
    checked_aggregate,
    checked_choice,
    checked_finished,
    checked_model,
    checked_share,
    checked_step,
    checked_sums,
    checked_weights,
)
from fedskew.engine._evaluation import evaluation, plain, predict
from fedskew.engine._fedconcat import FedConcatRunner, FedConcatState
from fedskew.engine._federation import (
    Conditions,
    Federation,
    RoundRunner,
    ServerState,
    adapting,
    cohort_size,
    hooked,
    run_round_together,
)
from fedskew.engine._finish import FinishedModel, answer, check_finish, finish_model
from fedskew.engine._finite import stilled
from fedskew.engine._local_work import ClientData, ClientSamples, LocalWork, PartitionedData
from fedskew.engine._masked import (
    Asked,
    add_up,
    answers_in_sum,
    decode_answers,
    decode_sums,
    encode_answer,
    encode_update,
    summable,
    whole_weight,
)
from fedskew.engine._processes import ProcessBackend
from fedskew.engine._ranks import RankBackend, from_the_first
from fedskew.engine._records import ClientEvaluation, Cohort, Evaluation, RoundOutcome, RoundRecord, Summed
from fedskew.engine._sequential import SequentialBackend
from fedskew.engine._target import EstimatedMix, Estimation, Target, logits_of
from fedskew.engine._update_buffer import UpdateBuffer, as_matrix
from fedskew.engine.cohort import CohortBackend, faster_together

__all__ = [
    "Asked",
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
    "Summed",
    "Target",
    "Update",
    "UpdateBuffer",
    "adapting",
    "add_up",
    "answer",
    "answers_in_sum",
    "as_matrix",
    "check_finish",
    "checked_aggregate",
    "checked_choice",
    "checked_finished",
    "checked_model",
    "checked_share",
    "checked_step",
    "checked_sums",
    "checked_weights",
    "cohort_size",
    "decode_answers",
    "decode_sums",
    "encode_answer",
    "encode_update",
    "evaluation",
    "faster_together",
    "finish_model",
    "from_the_first",
    "hooked",
    "logits_of",
    "plain",
    "predict",
    "run_round_together",
    "stilled",
    "summable",
    "whole_weight",
]
