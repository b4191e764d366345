"""Advice from evidence: the simulated federations that are nearest to yours, and what each method gained there.

    found = advice.advise(counts, participation=0.2)
    print(found)

The evidence is a table that comes with fedskew, made by `fedskew arena @advice`. `fedskew advise --validate` measures
how good the advice from it is; see the page "Advice, and how good it is".
"""

from __future__ import annotations

from fedskew.advice._advise import Advice, MethodGains, Neighbour, advise
from fedskew.advice._features import features
from fedskew.advice._predict import HARM, NEIGHBOURS, PREDICTORS, FixedRule, Gains, Predictor, by_forest, by_neighbours
from fedskew.advice._table import SHIPPED, TEXTS, Evidence, evidence_bytes, is_shipped, read_evidence
from fedskew.advice._validate import (
    SHIPPED_VALIDATION,
    Validation,
    accepted_predictor,
    read_validation,
    validate,
    validation_text,
)

__all__ = [
    "HARM",
    "NEIGHBOURS",
    "PREDICTORS",
    "SHIPPED",
    "SHIPPED_VALIDATION",
    "TEXTS",
    "Advice",
    "Evidence",
    "FixedRule",
    "Gains",
    "MethodGains",
    "Neighbour",
    "Predictor",
    "Validation",
    "accepted_predictor",
    "advise",
    "by_forest",
    "by_neighbours",
    "evidence_bytes",
    "features",
    "is_shipped",
    "read_evidence",
    "read_validation",
    "validate",
    "validation_text",
]
