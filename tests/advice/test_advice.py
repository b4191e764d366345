"""Advice from a table: neighbours and their gains by hand, the fixed rule, and what is accepted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedskew.advice import (
    Evidence,
    FixedRule,
    Gains,
    advise,
    by_forest,
    by_neighbours,
    evidence_bytes,
    features,
    read_evidence,
    read_validation,
    validate,
    validation_text,
)
from fedskew.errors import ArgumentError, DataError

COUNTS = np.array([[50, 50, 0, 0], [0, 50, 50, 0], [0, 0, 50, 50], [50, 0, 0, 50]])


def table(gains: list[list[float]], participation: list[float], tasks: list[str] | None = None) -> Evidence:
    """Federations that are alike but for the participation."""
    rows = [features(COUNTS, None, share, 1) for share in participation]
    names = tuple(rows[0])
    count, methods = len(gains), len(gains[0])
    return Evidence(
        federations=tuple(f"number {at}" for at in range(count)),
        tasks=tuple(tasks or ["digits"] * count),
        rules=("quantity", "iid") * (count // 2) + ("iid",) * (count % 2),
        names=names,
        features=np.array([[row[name] for name in names] for row in rows]),
        methods=tuple("abcdef"[:methods]),
        gains=np.array(gains, dtype=float),
        worst=np.array(gains, dtype=float) / 2,
    )


def test_features_are_figures_of_the_federation_and_never_nan() -> None:
    found = features(COUNTS, [1, 1, 1, 1], 0.5, 3)
    assert found["clients_log"] == pytest.approx(math.log(4))
    assert found["samples_per_client_log"] == pytest.approx(math.log(100))
    assert found["client_richness"] == 0.5
    assert found["evenness"] == pytest.approx(1)
    # six pairs of classes; 50 samples together in four of them, none in (0, 2) and (1, 3)
    assert found["pairs_hardly_together"] == pytest.approx(2 / 6)
    assert found["pairs_seldom_together"] == 1.0
    assert found["participants_log"] == pytest.approx(math.log(2))
    assert found["epochs_log"] == pytest.approx(math.log(3))
    assert (found["target"], found["target_distance"]) == (1.0, pytest.approx(0, abs=1e-9))
    # two of four clients: their labels are all four (2 of 6 pairs), or 1:2:1 of three classes (1.5 bits)
    assert found["cohort_evenness"] == pytest.approx((2 * 2 + 4 * 1.5) / 6 / 2, abs=0.03)
    assert features(COUNTS, None, 1.0, 3)["cohort_evenness"] == pytest.approx(1)
    single = features([[3, 0]], None, 1.0, None)
    assert all(math.isfinite(value) for value in single.values())


def test_a_federation_is_compared_with_its_nearest() -> None:
    shares = [0.1] * 10 + [1.0] * 10
    evidence = table([[float(at), -1.0] for at in range(20)], shares)
    found = advise(COUNTS, None, 0.1, 1, evidence=evidence)
    assert {one.federation for one in found.neighbours} == {f"number {at}" for at in range(10)}
    first, second = found.methods
    assert (first.method, first.median, first.gained) == ("a", 4.5, 0.9)
    assert (first.low, first.high) == (pytest.approx(0.9), pytest.approx(8.1))
    assert first.worst_class == pytest.approx(2.25)
    assert (second.method, second.median, second.gained) == ("b", -1.0, 0.0)
    assert found.neighbours[3].best == ("a", 3.0)
    assert found.supported
    assert [one.method for one in advise(COUNTS, None, 0.1, 1, without=["a"], evidence=evidence).methods] == ["b"]


def test_without_an_accepted_predictor_the_fixed_rule_recommends() -> None:
    shares = [0.1] * 10 + [1.0] * 10
    gains = [[2.0, 1.0]] * 10 + [[-1.0, 0.5]] * 10
    evidence = table(gains, shares)
    part, everyone = (advise(COUNTS, None, share, 1, evidence=evidence) for share in (0.1, 1.0))
    assert (part.method, everyone.method) == ("a", "b")
    assert "by a fixed rule: where not all clients take part in a round" in part.reason
    none = advise(COUNTS, None, 1.0, 1, without=["b"], evidence=evidence)
    assert none.method == "fedavg"
    predicted = advise(COUNTS, None, 0.1, 1, evidence=evidence, predictor=by_neighbours)
    assert (predicted.method, "+2.0 points" in predicted.reason) == ("a", True)


def test_a_method_that_may_harm_is_not_advised_by_a_predictor() -> None:
    gains = [[10.0, 1.0]] * 8 + [[-9.0, 1.0]] * 2 + [[0.0, 0.0]] * 10  # a: a tenth of the neighbours at -9
    evidence = table(gains, [0.1] * 10 + [1.0] * 10)
    assert advise(COUNTS, None, 0.1, 1, evidence=evidence, predictor=by_neighbours).method == "b"


def test_a_method_that_needs_a_target_is_advised_only_where_there_is_one() -> None:
    # a: run only where there is a target, and best there; ten neighbours are of both kinds
    evidence = table([[9.0, 1.0]] * 15 + [[math.nan, 1.0]] * 5, [0.1] * 20)
    place = evidence.names.index("target")
    figures = evidence.features.copy()
    figures[:15, place] = 1.0
    evidence = replace(evidence, features=figures)
    without = advise(COUNTS, None, 0.1, 1, evidence=evidence)
    assert (without.method, [one.method for one in without.methods]) == ("b", ["b"])
    assert advise(COUNTS, [1, 1, 1, 1], 0.1, 1, evidence=evidence).method == "a"


def test_outside_the_table_nothing_is_recommended() -> None:
    evidence = table([[2.0, 1.0]] * 20, np.linspace(0.1, 1, 20).tolist())
    other = np.full((300, 100), 7)
    found = advise(other, None, 0.1, 1, evidence=evidence)
    assert (found.supported, found.method) == (False, None)
    assert "unlike all simulated ones" in str(found)
    assert "gained most" not in str(found)
    assert len(found.neighbours) == 10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"participation": 0}, "participation: must be a share"),
        ({"epochs": 0}, "epochs: must be above 0"),
        ({"without": ["bb"]}, "without: the table has no method 'bb'"),
    ],
)
def test_wrong_arguments(more: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        advise(COUNTS, evidence=table([[1.0, 2.0]] * 12, [0.1] * 12), **more)


def test_the_fixed_rule_takes_the_best_that_can_be_run() -> None:
    nan = math.nan
    evidence = table([[3.0, 2.0, -1.0]] * 5 + [[nan, -2.0, 1.0]] * 5, [0.1] * 5 + [1.0] * 5)
    rule = FixedRule.of(evidence)
    assert (rule.part, rule.all) == ((0, 1), (2,))
    assert rule.choose(False, np.array([True, True, True])) == 0
    assert rule.choose(False, np.array([False, True, True])) == 1
    assert rule.choose(True, np.array([True, True, False])) is None


def test_a_table_is_written_and_read_alike(tmp_path: Path) -> None:
    evidence = table([[1.25, math.nan], [-3.5, 2.0]], [0.1, 1.0])
    (tmp_path / "table.csv.gz").write_bytes(evidence_bytes(evidence))
    again = read_evidence(tmp_path / "table.csv.gz")
    assert np.array_equal(again.gains, evidence.gains, equal_nan=True)
    assert np.allclose(again.features, evidence.features, rtol=1e-5)
    assert (again.names, again.methods, again.rules) == (evidence.names, evidence.methods, evidence.rules)
    assert evidence_bytes(again) == evidence_bytes(replace(again))
    (tmp_path / "table.csv.gz").write_bytes(b"no table")
    with pytest.raises(DataError, match="can't be read"):
        read_evidence(tmp_path / "table.csv.gz")


@pytest.mark.slow
def test_a_relation_that_holds_everywhere_is_found_and_accepted() -> None:
    # a gains where few take part and harms where many do; b never does either: the rule, on average, takes a
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.1, 0.9, 120)
    gains = np.column_stack([20 * (0.6 - shares), np.zeros(120)]) + rng.normal(0, 0.2, (120, 2))
    evidence = table(gains.tolist(), shares.tolist(), ["digits", "mnist", "fashion"] * 40)
    found = {(one.left_out, one.predictor): one for one in validate(evidence)}
    assert set(found) == {(out, name) for out in ("task", "rule") for name in ("neighbours", "forest")}
    best = found["task", "forest"]
    assert best.federations == 120
    assert best.spearman > 0.8
    assert best.oracle == pytest.approx(np.maximum(gains.max(axis=1), 0).mean())
    assert best.rule == pytest.approx(gains[:, 0].mean())
    assert best.harmed_by_rule == pytest.approx((gains[:, 0] < -1).mean())
    assert best.coverage > 0.7
    # where no method is safe the rule decides, so that harm can't vanish; it is what the acceptance is about
    assert best.advised >= best.rule - 0.3
    assert best.accepted == (best.harmed <= best.harmed_by_rule / 2)


@pytest.mark.slow
def test_noise_alone_is_not_accepted(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    evidence = table(rng.normal(0.5, 8, (60, 3)).tolist(), rng.uniform(0.1, 0.9, 60).tolist(), ["digits", "mnist"] * 30)
    found = validate(evidence)
    assert not any(one.accepted for one in found if one.predictor == "neighbours")
    (tmp_path / "validation.csv").write_text(validation_text(found))
    again = read_validation(tmp_path / "validation.csv")
    assert [one.accepted for one in again] == [one.accepted for one in found]
    assert again[0].coverage == pytest.approx(found[0].coverage, abs=1e-3)
    with pytest.raises(DataError, match="only one task, digits"):
        validate(evidence.take(np.array([task == "digits" for task in evidence.tasks])))


@pytest.mark.slow
def test_a_forest_predicts_nothing_of_a_method_that_was_hardly_run() -> None:
    gains = [[1.0, math.nan]] * 18 + [[1.0, 2.0]] * 2
    (found,) = by_forest(table(gains, [0.5] * 20), table(gains, [0.5] * 20).features[:1])
    assert isinstance(found, Gains)
    assert found.middle[0] == pytest.approx(1.0)
    assert math.isnan(found.middle[1])
