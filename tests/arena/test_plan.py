"""What an arena trains next follows from what it has trained: rates, values of its own, then what is compared."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fedskew.arena import Arena, ArenaJob, Plan
from fedskew.errors import ConfigError

FILE = """
name = "small"
seeds = [0, 1]
data = {name = "digits", validation = 0.2}
partition = {rule = "iid", clients = 4}
model = {name = "logistic"}
training = {rounds = 2}
[arena]
partitions = [0, 1]
rates = [0.01, 0.1, 1.0]
budget = 5
[sweep]
methods = ["fedavg", {label = "fedprox", preset = "fedprox", own = {method.local_step.mu = [0.5, 2.0]}}]
[sweep.grid]
place = [{label = "few", set = {training.participation = 0.5}}, {label = "all", set = {training.epochs = 2}}]
"""


def arena_of(tmp_path: Path, text: str = FILE, **more: object):
    (tmp_path / "small.toml").write_text(text)
    return Arena.read(tmp_path / "small.toml", **more)


def noted(jobs: list[ArenaJob], scores: list[float]) -> dict[str, dict[str, str]]:
    """What the runs of some jobs would be in `runs.csv`."""
    found = {}
    for job, score in zip(jobs, scores, strict=True):
        found |= {key: {"validation": f"{score}", "failure": ""} for key in job.keys.values()}
    return found


def rates(jobs: list[ArenaJob]) -> list[float]:
    return [job.config.training.lr for job in jobs]


def test_a_method_tries_rates_then_its_own_values_with_the_best_rate_then_all_partitions(tmp_path) -> None:
    plan = Plan(arena := arena_of(tmp_path), next(one for one in arena.entries if one.method == "fedprox"))
    assert plan.number == 5 + 2 * 2
    first = plan.missing({})
    assert rates(first) == [0.01, 0.1, 1.0]
    tuned = {(tuple(job.config.seeds), job.config.partition.seed, job.stage) for job in first}
    assert tuned == {((1_000_003,), 1_000_003, "tune")}
    book = noted(first, [0.2, 0.7, 0.6])
    second = plan.missing(book)
    assert [(job.config.training.lr, job.config.method["local_step"]["mu"]) for job in second] == [
        (0.1, 0.5),
        (0.1, 2.0),
    ]
    book |= noted(second, [0.8, 0.1])
    third = plan.missing(book)
    assert [(job.stage, job.config.seeds, job.config.partition.seed) for job in third] == [
        ("run", [0, 1], 0),
        ("run", [0, 1], 1),
    ]
    assert {job.config.method["local_step"]["mu"] for job in third} == {0.5}
    assert {job.own for job in third} == {"local_step.mu = 0.5"}
    book |= noted(third, [0.0, 0.0])
    assert plan.missing(book) == []


@pytest.mark.parametrize(
    ("scores", "beside"),
    [([0.2, 0.7, 0.6], [0.316, 0.0316]), ([0.2, 0.3, 0.6], [10.0, 0.316]), ([0.6, 0.3, 0.6], [0.0316, 0.001])],
)
def test_a_method_without_a_parameter_of_its_own_spends_the_same_on_rates_beside_the_best(
    tmp_path, scores, beside
) -> None:
    # halfway in ratio to the neighbours, sqrt(0.1 * 1) and sqrt(0.01 * 0.1); beyond an end as far again
    plan = Plan(arena := arena_of(tmp_path), arena.entries[0])
    assert plan.entry.method == "fedavg"
    assert plan.number == 9
    assert rates(plan.missing(noted(plan.missing({}), scores))) == beside


TOGETHER = (
    FILE.replace('"fedavg", {', '"fedavg", "fedla", {')
    .replace("training = {rounds = 2}", "training = {rounds = 2}\nengine = {backend = 'cohort', seeds_together = true}")
    .replace("budget = 5", "budget = 5\ntogether = 6")
)


def named(calls: list[list[ArenaJob]]) -> list[list[tuple[str, str, float]]]:
    return [[(job.entry.method, job.stage, job.config.training.lr) for job in call] for call in calls]


def test_runs_of_a_situation_train_together_whatever_is_done_already(tmp_path) -> None:
    arena = arena_of(tmp_path, TOGETHER, only={"place": "few"})
    plans = [Plan(arena, entry) for entry in arena.entries]
    calls = Plan.next_calls(plans, {}, ())
    # fedavg and fedla train alike at clients; fedprox has another local step, and six runs fill a call
    assert named(calls) == [
        [(method, "tune", rate) for method in ("fedavg", "fedla") for rate in (0.01, 0.1, 1.0)],
        [("fedprox", "tune", rate) for rate in (0.01, 0.1, 1.0)],
    ]
    assert named(Plan.next_calls(plans, noted(calls[0], [0.5] * 6), ())) == named(calls[1:])
    assert named(Plan.next_calls(plans, noted(calls[0][:2], [0.5] * 2), ())) == [named(calls)[0][2:], named(calls)[1]]

    # a method that has failed goes no further, and the others wait for nothing
    book = noted([*calls[0], *calls[1][1:]], [0.5] * 8)
    failed = list(calls[1][0].keys.values())
    second = Plan.next_calls(plans, book, failed)
    assert named(second) == [[(method, "tune", rate) for method in ("fedavg", "fedla") for rate in (0.0316, 0.001)]]
    book |= noted(second[0], [0.4] * 4)
    third = Plan.next_calls(plans, book, failed)  # two partitions of two seeds each are four runs
    assert named(third) == [[("fedavg", "run", 0.01)] * 2 + [("fedla", "run", 0.01)], [("fedla", "run", 0.01)]]
    book |= noted([job for call in third for job in call], [0.0] * 4)
    assert Plan.next_calls(plans, book, failed) == []


def test_a_run_that_two_methods_share_and_that_failed_keeps_no_other_waiting(tmp_path) -> None:
    own = "own = {method.local_step.mu = [0.5, 2.0]}"
    same = f'{{label = "mine", preset = "fedprox", local_step.mu = 0.1, {own}}}'
    arena = arena_of(tmp_path, TOGETHER.replace('"fedla"', same), only={"place": "few"})
    plans = [Plan(arena, entry) for entry in arena.entries]
    book: dict[str, dict[str, str]] = {}
    for call in Plan.next_calls(plans, book, ()):
        book |= noted(call, [0.5] * len(call))
    shared = [job for call in Plan.next_calls(plans, book, ()) for job in call if job.entry.method != "fedavg"]
    assert len(shared) == 2  # of mu = 0.5 and 2.0, for both methods
    failed = {key for job in shared for key in job.keys.values()}
    for _ in range(2):
        calls = Plan.next_calls(plans, book, failed)
        assert {job.entry.method for call in calls for job in call} == {"fedavg"}
        for call in calls:
            book |= noted(call, [0.5] * len(call)) if call[0].stage == "tune" else {}
    assert calls[0][0].stage == "run"


def test_without_seeds_together_every_config_is_a_call(tmp_path) -> None:
    arena = arena_of(tmp_path, only={"place": "few"})
    calls = Plan.next_calls([Plan(arena, entry) for entry in arena.entries], {}, ())
    assert [len(call) for call in calls] == [1] * 6


def test_situations_come_one_after_another_and_a_choice_of_them_has_the_same_runs(tmp_path) -> None:
    arena = arena_of(tmp_path)
    assert [(one.situation["place"], one.method) for one in arena.entries] == [
        *itertools.product(["few"], ["fedavg", "fedprox"]),
        *itertools.product(["all"], ["fedavg", "fedprox"]),
    ]
    part = arena_of(tmp_path, only={"place": "all", "method": "fedprox|fedavg"})
    assert [one.config.hash for one in part.entries] == [one.config.hash for one in arena.entries[2:]]
    assert part.folder(tmp_path) == arena.folder(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budget = 5", "budget = 4", "own values of fedprox: 2 and 3 rates are more than arena.budget = 4"),
        ("budget = 5", "budgte = 5", "arena.budgte: no such key (did you mean 'budget'?)"),
        ("validation = 0.2", "validation = 0.0", "data.validation: is 0"),
        ("mu = [0.5, 2.0]", "nu = [0.5]", "own values of fedprox: method.local_step.nu"),
        ("own = {method.local_step.mu = [0.5, 2.0]}", "own = {}", "sweep.methods[1].own: expected one key"),
        ("rates = [0.01, 0.1, 1.0]", "rates = [0.1]", "a single rate leaves nothing to tune"),
        ("[arena]", "[arena]\nreference = 'fedvag'", "no method is labelled 'fedvag' (did you mean 'fedavg'?)"),
        ("budget = 5", "budget = 5\ntogether = 0", "arena.together: input should be greater than 0 (got 0)"),
        ("[arena]", "[areno]", "an arena needs a table [arena]"),
        ("partitions = [0, 1]", "partitions = [0, 0]", "expected different seeds"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arena_of(tmp_path, FILE.replace(old, new))
    assert message in str(caught.value)
    assert "small.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


DRAWN = """
name = "drawn"
seeds = [0]
data = {name = "digits"}
partition = {rule = "iid"}
model = {name = "logistic"}
training = {rounds = 2}
[arena.draw]
points = 6
seed = 3
[arena.draw.set]
training.lr = {low = 0.01, high = 1.0, log = true}
training.epochs = {low = 1, high = 3, whole = true}
partition = {one_of = [
    {rule = "iid", clients = {low = 2, high = 9, whole = true}},
    {rule = "quantity", clients = 10, labels_per_client = {low = 1, high = 2, whole = true}},
]}
[sweep]
methods = ["fedavg", "fedla"]
"""


def test_drawn_situations_stay_when_more_are_drawn(tmp_path) -> None:
    few = arena_of(tmp_path, DRAWN)
    more = arena_of(tmp_path, DRAWN, changes={"arena.draw.points": 24})
    assert [one.config.hash for one in few.entries] == [one.config.hash for one in more.entries[:12]]
    assert len({one.situation["point"] for one in more.entries}) == 24
    configs = [one.config for one in more.entries]
    assert all(0.01 <= config.training.lr <= 1 for config in configs)
    assert {config.training.epochs for config in configs} == {1, 2, 3}
    assert {config.partition.rule for config in configs} == {"iid", "quantity"}
    assert all(2 <= config.partition.clients <= 10 for config in configs)
    # evenly spread: half of the rates below the middle of their logarithms
    assert 10 <= sum(config.training.lr < 0.1 for config in configs[::2]) <= 14
    # nothing is tuned, so all runs can begin
    assert [job.stage for job in Plan(few, few.entries[0]).missing({})] == ["run"]


def test_a_method_with_a_finish_trains_once_more_for_as_many_rounds_fewer_as_that_costs(tmp_path) -> None:
    text = (
        FILE.replace(
            '"fedavg", {', '"fedavg", "ccvr", {label = "none", preset = "ccvr", set = {training.rounds = 0}}, {'
        )
        .replace("training = {rounds = 2}", "training = {rounds = 20}")
        .replace("partitions = [0, 1]", "partitions = [0]")
    )
    arena = arena_of(tmp_path, text, only={"place": "few"})
    plans = {entry.method: Plan(arena, entry) for entry in arena.entries}
    assert {method: plan.number for method, plan in plans.items()} == {"fedavg": 7, "ccvr": 9, "none": 4, "fedprox": 7}

    plan, book = plans["ccvr"], {}
    for scores in ([0.2, 0.7, 0.6], [0.1, 0.1]):
        book |= noted(plan.missing(book), scores)
    (compared,) = plan.missing(book)
    # rounds of 10 MB and a finish of 2.7: 5.4 of 20 rounds, and so 14 are left
    costs = {"finish_megabytes": "2.7", "megabytes": "12.7"}
    book |= {key: line | costs for key, line in noted([compared], [0.0]).items()}
    (paying,) = plan.missing(book)
    assert (paying.stage, paying.config.training.rounds, paying.config.training.lr) == ("traffic", 14, 0.1)
    book |= noted([paying], [0.0])
    assert plan.missing(book) == []
    assert plan.jobs(book)[-2:] == [compared, paying]

    (untrained,) = plans["none"].missing({})  # there is no rate to choose, and no round to save
    assert untrained.stage == "run"
    costs = {"finish_megabytes": "2.7", "megabytes": "2.7"}
    assert plans["none"].missing({key: line | costs for key, line in noted([untrained], [0.0]).items()}) == []


def test_situations_that_differ_in_the_scoring_alone_are_one_training(tmp_path) -> None:
    text = FILE + 'target = [{label = "even"}, {label = "first", mix = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]}]\n'
    trainings = arena_of(tmp_path, text).trainings
    assert set(trainings) == {(place, mix) for place in ("few", "all") for mix in ("even", "first")}
    assert trainings["few", "even"] == trainings["few", "first"] != trainings["all", "even"]
    assert len(set(trainings.values())) == 2
