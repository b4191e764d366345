"""Differences in pairs, intervals, ranks: small cases by hand, and other people's code."""

import math
from statistics import fmean

import numpy as np
import pytest

from fedskew.arena import Scores


def line(method: str, place: str, partition: int, seed: int, score: float, **more: str) -> dict[str, str]:
    values = {"stage": "run", "steps": "100", "megabytes": "10", "finish_megabytes": "", "curve": f"{10_000 * score}"}
    return values | {"place": place, "method": method, "partition": f"{partition}", "seed": f"{seed}"} | more


def test_differences_are_paired_on_partition_and_seed_and_trainings_count_alike() -> None:
    lines = [
        line("fedavg", "a", 0, 0, 0.50),
        line("fedavg", "a", 0, 1, 0.60),
        line("fedavg", "a", 1, 0, 0.70),
        line("fedavg", "b", 0, 0, 0.40),
        line("mine", "a", 0, 0, 0.55),  # +5
        line("mine", "a", 0, 1, 0.57),  # -3: the partition's mean is +1
        line("mine", "a", 1, 0, 0.71),  # +1; the situation's mean is +1
        line("mine", "a", 1, 1, 0.99),  # no FedAvg of this seed
        line("mine", "b", 0, 0, 0.35),  # -5
        line("mine", "c", 0, 0, 0.90),  # no FedAvg there
    ]
    found = Scores.of(lines, ["place"], "fedavg")
    (own,) = found.standings("fedavg")
    assert own.difference == pytest.approx((1 - 5) / 2)
    assert (own.trainings, own.federations) == (2, 3)
    assert (own.ahead, own.harmed) == (0.5, 0.5)
    assert math.isnan(own.low)  # of two situations
    assert math.isnan(own.p)
    for place, gain in {"a": 1, "b": -5}.items():
        (part,) = found.standings("fedavg", {"place": place})
        assert (part.difference, part.trainings, math.isnan(part.low)) == (pytest.approx(gain), 1, True)


MIXES = ("even", "9:1")


def test_personal_models_are_compared_by_their_own_column() -> None:
    lines = [
        line("fedavg", "a", 0, 0, 0.9, personal="0.80000", common="0.5"),
        line("fedavg", "a", 0, 1, 0.9, personal="0.60000", common="0.5"),
        line("mine", "a", 0, 0, 0.1, personal="0.85000", common="0.4"),
        line("mine", "a", 0, 1, 0.1, personal="0.61000", common="0.4"),
        line("theirs", "a", 0, 0, 0.1, personal="", common=""),
    ]
    for view, difference, score in (("personal", 3, 73), ("common", -10, 40), ("rounds", -80, 10)):
        own, *others = Scores.of(lines, ["place"], "fedavg", view, 1).standings("fedavg")
        assert (own.difference, own.score) == (pytest.approx(difference), pytest.approx(score))
        assert len(others) == (view == "rounds")
    without = [line("fedavg", "a", 0, 0, 0.9), line("mine", "a", 0, 0, 0.9)]
    assert Scores.of(without, ["place"], "fedavg", "personal").values == {}


def test_situations_that_are_one_training_count_once() -> None:
    # three trainings, each scored on two mixes; the last one lacks a score, and has one seed 30 points behind
    gains = {("a", "even"): 1, ("a", "9:1"): 3, ("b", "even"): 4, ("b", "9:1"): 0, ("c", "even"): -30}
    lines = []
    for (place, mix), gain in gains.items():
        for method, score in (("fedavg", 0.5), ("mine", 0.5 + gain / 100), ("other", 0.4), ("half", 0.9)):
            if method != "half" or mix == "even":
                lines.append(line(method, place, 0, 0, score) | {"mix": mix})
    trainings = {key: key[0] for key in gains}
    found = Scores.of(lines, ["place", "mix"], "fedavg", trainings=trainings)
    own = next(row for row in found.standings("fedavg") if row.method == "mine")
    assert (own.trainings, own.federations, own.collapsed, own.runs) == (3, 3, 1, 3)
    assert own.difference == pytest.approx((2 + 2 - 30) / 3)
    assert own.median == pytest.approx(2)
    assert own.score == pytest.approx((52 + 52 + 20) / 3)
    assert (own.ahead, own.harmed) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (found.ranks().trainings, found.ranks().left_out) == (3, ("half",))
    assert dict(zip(found.ranks().methods, found.ranks().ranks, strict=True)) == {
        "mine": pytest.approx((1 + 1 + 3) / 3),
        "fedavg": pytest.approx((2 + 2 + 1) / 3),
        "other": pytest.approx((3 + 3 + 2) / 3),
    }
    parts = [next(row for row in found.standings("fedavg", {"mix": mix}) if row.method == "mine") for mix in MIXES]
    assert [(part.difference, part.trainings, part.collapsed, part.median) for part in parts] == [
        (pytest.approx((1 + 4 - 30) / 3), 3, 1, pytest.approx(1)),
        (pytest.approx((3 + 0) / 2), 2, 0, pytest.approx(1.5)),
    ]
    alone = Scores.of(lines, ["place", "mix"], "fedavg").standings("fedavg")
    assert [row.trainings for row in alone if row.method != "half"] == [5, 5]


def test_a_finished_model_is_compared_with_the_same_round_and_pays_for_its_traffic() -> None:
    lines = [
        line("fedavg", "a", 0, 0, 0.60, curve="4000 6000 8000"),  # the mean of three evaluations is 60 %
        line("ended", "a", 0, 0, 0.85, curve="8500", megabytes="15", finish_megabytes="5"),
        line("ended", "a", 0, 0, 0.70, curve="7000", megabytes="10", finish_megabytes="5", stage="traffic"),
        line("dear", "a", 0, 0, 0.85, curve="8500", megabytes="30", finish_megabytes="20"),
        line("dear", "a", 0, 0, 0.50, curve="5000", megabytes="20", finish_megabytes="20", stage="traffic"),
        line("mine", "a", 0, 0, 0.65, curve="4500 6500 8500"),
    ]

    def gains(view):
        found = Scores.of(lines, ["place"], "fedavg", view, last=3)
        return {row.method: (row.score, row.difference) for row in found.standings("fedavg")}

    assert gains("rounds") == {"mine": (65, 5), "ended": (85, 5), "dear": (85, 5)}
    assert gains("compute") == gains("rounds")
    # after fewer rounds and its finish it has spent as much as FedAvg; a finish above all of that has no score
    assert gains("traffic") == {"mine": (65, 5), "ended": (70, -10)}


def test_intervals_and_p_values_are_those_of_the_trainings() -> None:
    gains = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    lines = [line("fedavg", str(at), seed, seed, 0.5) for at in range(8) for seed in range(3)]
    lines += [line("up", str(at), seed, seed, 0.5 + gain / 100) for at, gain in enumerate(gains) for seed in range(3)]
    lines += [line("same", str(at), seed, seed, 0.5) for at in range(8) for seed in range(3)]
    found = {row.method: row for row in Scores.of(lines, ["place"], "fedavg").standings("fedavg")}
    up = found["up"]
    # signed ranks of eight positive values: p = 2 / 2**8; the other method has no test, so nothing is corrected
    assert up.p == pytest.approx(2 / 256)
    low, high = up.low, up.high
    spread = np.std(gains) / math.sqrt(8)
    assert low == pytest.approx(4.5 - 1.96 * spread, abs=0.35)
    assert high == pytest.approx(4.5 + 1.96 * spread, abs=0.35)
    assert (found["same"].low, found["same"].high) == (0.0, 0.0)
    assert math.isnan(found["same"].p)
    few = Scores.of([one for one in lines if int(one["place"]) < 4], ["place"], "fedavg").standings("fedavg")
    assert all(math.isnan(row.low) and math.isnan(row.p) for row in few if row.method == "up")


def test_with_blocks_tasks_count_alike_and_an_interval_is_as_wide_as_tasks_differ() -> None:
    gains = {"easy": [1.0, 1.2, 0.8, 1.0, 1.1, 0.9], "hard": [4.0, 4.2], "other": [7.0, 6.8]}
    lines = []
    for task, own in gains.items():
        for at, gain in enumerate(own):
            for method, ahead in (("fedavg", 0.0), ("up", gain)):
                lines.append(line(method, f"{task}-{at}", 0, 0, 0.5 + ahead / 100) | {"task": task})
    axes = ["task", "place"]
    found = [Scores.of(lines, axes, "fedavg", blocks=blocks).standings("fedavg")[0] for blocks in (None, "task")]
    assert found[0].difference == pytest.approx(sum(map(sum, gains.values())) / 10)
    assert found[1].difference == pytest.approx((1.0 + 4.1 + 6.9) / 3)
    # Of three blocks one in 27 resamples draws the lowest alone, or the highest: these are the ends of the interval.
    assert (found[1].low, found[1].high) == pytest.approx((1.0, 6.9), abs=0.15)
    assert found[0].high - found[0].low < 0.8 * (found[1].high - found[1].low)
    assert found[1].p == pytest.approx(0.25)  # all signs alike: two of eight
    two = [one for one in lines if one["task"] != "other"]
    assert math.isnan(Scores.of(two, ["task", "place"], "fedavg", blocks="task").standings("fedavg")[0].p)


def of(found, method: str) -> float:
    return fmean(scored.score for scored in found.values[method].values())


def test_at_equal_compute_or_traffic_a_method_stops_where_the_reference_has_spent_as_much() -> None:
    curve = " ".join(str(100 * value) for value in range(1, 11))  # 1 % to 10 %
    lines = [
        line("fedavg", "a", 0, 0, 0.09, curve=curve),
        line("twice", "a", 0, 0, 0.09, curve=curve, steps="200", megabytes="10"),
        line("cheap", "a", 0, 0, 0.09, curve=curve, steps="50", megabytes="25"),
    ]
    compute = Scores.of(lines, ["place"], "fedavg", "compute", last=3)
    assert of(compute, "fedavg") == pytest.approx(9)  # as it is
    assert of(compute, "twice") == pytest.approx((3 + 4 + 5) / 3)  # half of the rounds
    assert of(compute, "cheap") == pytest.approx(9)
    traffic = Scores.of(lines, ["place"], "fedavg", "traffic", last=3)
    assert of(traffic, "cheap") == pytest.approx((2 + 3 + 4) / 3)  # two fifths
    assert of(traffic, "twice") == pytest.approx(9)


@pytest.mark.parametrize(
    ("spent", "score"),
    [
        # of four evaluations 2.5: half way from 20 to 60 %, and before that half way from 10 to 20 %
        (160, (40 + 15) / 2),
        # hardly more than FedAvg's 100: almost the last two
        (100.1, (80 - 20 * (4 - 400 / 100.1) + 60 - 40 * (4 - 400 / 100.1)) / 2),
        (100, 70),
        (400, 10),  # the first evaluation, and none before it
        (401, None),
    ],
)
def test_between_evaluations_a_score_is_interpolated(spent, score) -> None:
    curve = "1000 2000 6000 8000"
    lines = [line("fedavg", "a", 0, 0, 0.7, curve=curve), line("mine", "a", 0, 0, 0.7, curve=curve, steps=f"{spent}")]
    found = Scores.of(lines, ["place"], "fedavg", "compute", last=2)
    assert score is None if "mine" not in found.values else of(found, "mine") == pytest.approx(score)


def test_ranks_and_their_critical_difference() -> None:
    # Four methods on 14 data sets: the critical difference is 1.25 (Demsar 2006, section 3.2.2: 2.569 sqrt(20 / 84))
    rng = np.random.default_rng(1)
    table = rng.normal(size=(14, 4)) + np.array([0.0, 0.2, 3.0, 3.1])
    lines = [line(f"m{at}", str(row), 0, 0, value) for (row, at), value in np.ndenumerate(table)]
    lines += [line("rare", "0", 0, 0, 9.0)]
    found = Scores.of(lines, ["place"], "m0").ranks()
    assert found.critical == pytest.approx(1.25, abs=0.005)
    assert found.trainings == 14
    assert found.left_out == ("rare",)
    by_hand = (4 - np.argsort(np.argsort(table, axis=1), axis=1)).mean(axis=0)
    ranks = dict(zip(found.methods, found.ranks, strict=True))
    assert [ranks[f"m{at}"] for at in range(4)] == pytest.approx(by_hand.tolist())
    assert list(found.ranks) == sorted(found.ranks)


def test_one_training_alone_has_ranks_and_no_critical_difference() -> None:
    found = Scores.of([line("fedavg", "a", 0, 0, 0.5), line("mine", "a", 0, 0, 0.6)], ["place"], "fedavg").ranks()
    assert found.methods == ("mine", "fedavg")
    assert math.isnan(found.critical)
