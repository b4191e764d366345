"""When an estimate of the target's label mix is made, and whether it is used."""

import numpy as np
import pytest
import torch

from fedskew.engine.target import Estimation, logits_of
from fedskew.errors import ArgumentError, RunError

MIX = np.array([0.5, 0.3, 0.2])
PROFILES = np.array([[0.6, 0.2, *[0.05] * 4], [0.05, 0.15, 0.5, 0.2, 0.05, 0.05], [0.05, 0.05, 0.1, 0.1, 0.4, 0.3]])
RULES = Estimation(3, warmup=4, every=3, bins=2)
FITTING = {0: 1000 * PROFILES, 1: 500 * PROFILES}
CELLS = 2000 * MIX @ PROFILES
ELSEWHERE = np.array([0, 0, 0, 0, 0, 300.0])  # no mix of the classes has so many there
ODD = {**FITTING, 7: 200 * PROFILES[[1, 0, 2]]}


def updated(rules=RULES, round=4, tables=FITTING, cells=CELLS, known=None):
    return rules.update(known or rules.unknown, round, tables.items, cells)


def test_estimates_are_made_after_the_warmup_and_every_so_many_rounds():
    assert [round for round in range(13) if RULES.is_due(round)] == [4, 7, 10]


def test_a_good_estimate_is_used_and_recorded_and_before_the_first_there_is_no_target():
    start = RULES.unknown
    assert (start.used, start.unused) == (None, "the first estimate is made after round 4")
    known, record = updated()
    np.testing.assert_allclose(known.used, MIX, atol=1e-3)
    assert record["p"] > 0.9
    assert {
        "mix": known.mix.tolist(),
        "se": known.errors.tolist(),
        "held_out": 4500,
        "samples": 2000,
    }.items() <= record.items()
    assert (known.round, record["misfit"], record["unused"], record["unseen"]) == (4, False, None, [])
    assert record["sites"] == {"tested": 2, "odd": {}}


def test_a_site_whose_classes_look_otherwise_is_named():
    _, record = updated(tables=ODD)
    assert record["sites"]["tested"] == 3
    assert record["sites"]["odd"]["7"] < 1e-6


def test_an_unsure_estimate_is_left_out_and_the_newest_good_one_stays():
    good, _ = updated()
    few = 10 * MIX @ PROFILES  # the share of a class of ten samples is known to 0.15 or worse
    after, record = updated(round=7, cells=few, known=good)
    assert after is good
    assert record["unused"] is None
    first, record = updated(cells=few)
    assert first.used is None
    assert first.unused == record["unused"]
    assert "no estimate is sure enough yet: standard error 0.2" in first.unused


def test_of_many_classes_each_must_be_known_better():
    # A share of 1 % of 40 samples is known to 0.016, but a hundred of these add up to more than the whole.
    profiles = 0.99 * np.eye(100) + 1e-4
    rules = Estimation(100, bins=1)
    known, _ = updated(rules, 10, {0: 100 * profiles}, np.full(100, 0.4))
    assert known.used is None


@pytest.mark.parametrize("before", [False, True])
def test_where_label_shift_does_not_hold_there_is_no_target_and_the_reason_is_said(before):
    known = updated()[0] if before else RULES.unknown
    after, record = updated(round=7, cells=CELLS + ELSEWHERE, known=known)
    assert after.used is None
    assert record["misfit"]
    assert record["unused"] == after.unused
    assert after.unused.startswith("label shift does not hold after round 7: the target's samples look like no mix of")
    again, _ = updated(round=10, known=after)
    assert again.used is not None
    assert not again.misfit


@pytest.mark.parametrize("way", ["warn", "stop"])
def test_an_estimate_that_does_not_fit_is_used_with_a_warning_or_ends_the_run(way):
    rules = Estimation(3, warmup=4, every=3, bins=2, on_misfit=way)
    rules.check(rules.unknown)
    rules.check(updated(rules)[0])
    known, record = updated(rules, cells=CELLS + ELSEWHERE)
    assert record["misfit"]
    if way == "warn":
        assert known.used is not None
        rules.check(known)
    else:
        with pytest.raises(RunError, match=r"target\.on_misfit: label shift does not hold after round 4.*'warn'$"):
            rules.check(known)


def test_a_model_at_chance_or_that_says_one_class_only_gives_no_target():
    flat = np.tile(PROFILES.mean(axis=0), (3, 1))
    one = np.zeros((3, 6))
    one[:, 0] = 1
    for profiles in (flat, one):
        known, record = updated(tables={0: 1000 * profiles}, cells=2000 * MIX @ profiles)
        assert known.used is None
        assert max(record["se"]) > 0.3


def test_a_class_without_held_out_samples_is_named():
    seen = PROFILES.copy()
    seen[2] = 0
    _, record = updated(tables={0: 1000 * seen}, cells=2000 * np.array([0.6, 0.4, 0]) @ PROFILES)
    assert record["unseen"] == [2]
    assert record["mix"][2] == 0


@pytest.mark.parametrize(
    ("tables", "cells", "says"),
    [
        ({}, CELLS, "there is no estimate: tables: there is no held-out sample"),
        (FITTING, np.zeros(6), "there is no estimate: cells: there is no sample of the target"),
        (FITTING, np.full(6, np.nan), "there is no estimate: cells: every number must be finite"),
        (FITTING, np.ones(5), "there is no estimate: cells: must have the shape"),
    ],
)
def test_what_can_not_be_estimated_is_said_in_the_record(tables, cells, says):
    known, record = updated(tables=tables, cells=cells)
    assert record["mix"] is None
    assert record["skipped"].startswith(says)
    assert known.unused == record["skipped"]
    good, _ = updated()
    assert updated(tables=tables, cells=cells, known=good)[0] is good


def test_cells_are_the_predicted_class_and_its_probability():
    logits = np.log([[0.6, 0.3, 0.1], [0.02, 0.97, 0.01], [0.1, 0.05, 0.85]])
    assert Estimation(3).outcomes(logits).tolist() == [0 + 1, 4 + 3, 8 + 2]  # edges .5, .8, .95
    assert Estimation(3, bins=1).outcomes(logits).tolist() == [0, 1, 2]
    assert Estimation(3, bins=2).outcomes(logits).tolist() == [0, 3, 4]  # edge .95


def test_outputs_that_are_not_finite_are_an_error_of_one_line():
    network = torch.nn.Linear(2, 3)
    inputs = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    assert logits_of(network, inputs, np.array([0])).shape == (1, 3)
    with pytest.raises(ArgumentError, match="logits: the model's outputs are not finite"):
        logits_of(network, inputs, np.array([0, 1]))
