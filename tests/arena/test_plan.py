"""What an arena trains next follows from what it has trained: rates, values of its own, then what is compared."""

import itertools
import runpy
from pathlib import Path

import pytest

from fedskew.arena import Arena, ArenaJob, ArenaState, Plan
from fedskew.arena._plan import further
from fedskew.arena._tables import choice_lines
from fedskew.errors import ConfigError, FedskewError
from fedskew.experiment import Config
from fedskew.tables import flatten

ROOT = Path(__file__).parents[2]
AGAIN = runpy.run_path(str(ROOT / "tools" / "recompute_arena.py"))

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
        found |= {key: {"validation": f"{score}", "failure": "", "diverged": "0"} for key in job.keys.values()}
    return found


def rates(jobs: list[ArenaJob]) -> list[float]:
    return [job.config.training.lr for job in jobs]


def test_runs_are_told_apart_where_eight_digits_do_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Config, "hash", "of 50,000 configs two have the same with a chance of a quarter")
    arena = arena_of(tmp_path)
    keys = [key for entry in arena.entries for job in Plan(arena, entry).missing({}) for key in job.keys.values()]
    assert len(keys) == len(set(keys)) == 4 * 3


def test_a_method_tries_rates_then_its_own_values_with_the_best_rate_then_all_partitions(tmp_path) -> None:
    arena = arena_of(tmp_path, changes={"arena.tuning.rounds": 1})
    plan = Plan(arena, next(one for one in arena.entries if one.method == "fedprox"))
    assert plan.left({}) == 5 + 2 * 2
    first = plan.missing({})
    assert rates(first) == [0.01, 0.1, 1.0]
    tuned = {(tuple(job.config.seeds), job.config.partition.seed, job.config.training.rounds) for job in first}
    assert tuned == {((1_000_003,), 1_000_003, 1)}
    assert {job.stage for job in first} == {"tune"}
    book = noted(first, [0.2, 0.7, 0.6])
    second = plan.missing(book)
    assert [(*rates([job]), job.config.method["local_step"]["mu"]) for job in second] == [(0.1, 0.5), (0.1, 2.0)]
    book |= noted(second, [0.8, 0.1])
    third = plan.missing(book)
    compared = [(job.stage, job.config.seeds, job.config.partition.seed) for job in third]
    assert compared == [("run", [0, 1], 0), ("run", [0, 1], 1)]
    assert {job.config.training.rounds for job in third} == {2}
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
    assert plan.left({}) == 9
    assert rates(plan.missing(noted(plan.missing({}), scores))) == beside


TOGETHER = FILE.replace('"fedavg", {', '"fedavg", "fedla", {').replace("budget = 5", "budget = 5\ntogether = 6")
TOGETHER = TOGETHER.replace("[arena]", "engine = {backend = 'cohort', seeds_together = true}\n[arena]")


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


def test_situations_come_one_after_another_and_a_choice_has_the_same_runs_and_looks_at_no_other(tmp_path) -> None:
    arena = arena_of(tmp_path)
    assert [(one.situation["place"], one.method) for one in arena.entries] == [
        *itertools.product(["few"], ["fedavg", "fedprox"]),
        *itertools.product(["all"], ["fedavg", "fedprox"]),
    ]
    part = arena_of(tmp_path, FILE.replace("= 0.5}", "= 5}"), only={"place": "all", "method": "fedprox|fedavg"})
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
        ("partitions = [0, 1]", f"partitions = [{2**64}]", "arena.partitions: input should be less than"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arena_of(tmp_path, FILE.replace(old, new), only={"method": "fedprox"})
    assert message in str(caught.value)
    assert "small.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_method_with_a_finish_trains_once_more_for_as_many_rounds_fewer_as_that_costs(tmp_path) -> None:
    untrained = '{label = "none", preset = "ccvr", set = {training.rounds = 0}}'
    text = FILE.replace('"fedavg", {', f'"fedavg", "ccvr", {untrained}, {{').replace("rounds = 2}", "rounds = 20}")
    text = text.replace("partitions = [0, 1]", "partitions = [0]")
    arena = arena_of(tmp_path, text, only={"place": "few"})
    plans = {entry.method: Plan(arena, entry) for entry in arena.entries}
    assert {method: plan.left({}) for method, plan in plans.items()} == {
        "fedavg": 7,
        "ccvr": 9,
        "none": 2,
        "fedprox": 7,
    }

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

    # where nothing is sent in a round, as all samples are in one place, no round pays for it
    book |= {key: line | {"megabytes": "0"} for key, line in book.items() if key in compared.keys.values()}
    assert [job.config.training.rounds for job in plan.steps(book)[-1]] == [20]

    (untrained,) = plans["none"].missing({})  # there is no rate to choose, and no round to save
    assert untrained.stage == "run"
    costs = {"finish_megabytes": "2.7", "megabytes": "2.7"}
    book = {key: line | costs for key, line in noted([untrained], [0.0]).items()}
    assert (plans["none"].missing(book), len(plans["none"].finished(book))) == ([], 2)


def test_situations_that_differ_in_the_scoring_alone_are_one_training(tmp_path) -> None:
    text = FILE + 'target = [{label = "even"}, {label = "first", mix = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]}]\n'
    trainings = arena_of(tmp_path, text).trainings
    assert set(trainings) == {(place, mix) for place in ("few", "all") for mix in ("even", "first")}
    assert trainings["few", "even"] == trainings["few", "first"] != trainings["all", "even"]
    assert len(set(trainings.values())) == 2


WIDE = FILE.replace("budget = 5", "budget = 7\nwiden = true\ntuning = {partitions = [8, 9], seeds = [5, 6, 7]}")


def tuned(plan: Plan, judge) -> list[tuple[float, float | None]]:
    """The values that a method tries, in order, and the one that is compared; `judge` gives score and divergence."""
    book: dict[str, dict[str, str]] = {}
    order: list[tuple[float, float | None]] = []
    while (jobs := plan.missing(book))[0].stage == "tune":
        assert plan.left(book) >= len({key for job in jobs for key in job.keys.values()}) + 4
        for job in jobs:
            value = job.config.training.lr, float(job.own.split("=")[1]) if job.own else None
            order += [] if value in order else [value]
            for seed, key in job.keys.items():
                score, diverged = judge(*value, job.config.partition.seed, seed)
                book[key] = {"validation": str(score), "failure": "", "diverged": str(int(diverged))}
    assert plan.left(book) == 4 == plan.left({}) - 7 * 6
    return [*order, (jobs[0].config.training.lr, float(jobs[0].own.split("=")[1]) if jobs[0].own else None)]


def test_grids_are_widened_while_the_best_is_at_an_end_within_the_budget_of_all(tmp_path) -> None:
    arena = arena_of(tmp_path, WIDE, only={"place": "few"})
    fedavg, fedprox = (Plan(arena, entry) for entry in arena.entries)
    # Rates rise until 30 is too large; what is left goes beside 10.
    rising = {0.01: 0.1, 0.1: 0.2, 1.0: 0.3, 10.0: 0.5, 100.0: 0.4}
    order = tuned(fedavg, lambda rate, own, *_: (rising.get(rate, 0.45), False))
    assert order == [(rate, None) for rate in (0.01, 0.1, 1.0, 10.0, 100.0, 31.6, 3.16, 10.0)]
    # The best rate is inside, and of the own values the smaller one is better and better until the budget is spent.
    order = tuned(fedprox, lambda rate, own, *_: ({0.1: 0.5}.get(rate, 0.1) + (0.1 / own if own else 0.0), False))
    own = [(0.1, value) for value in (0.5, 2.0, 0.125, 0.0312, 0.0312)]
    assert order == [(0.01, None), (0.1, None), (1.0, None), *own]


def test_beyond_the_budget_own_values_go_on_while_the_best_is_at_an_end(tmp_path) -> None:
    arena = arena_of(tmp_path, WIDE.replace("widen = true", "widen = true\nbeyond = 3"), only={"place": "few"})
    fedavg, fedprox = (Plan(arena, entry) for entry in arena.entries)
    assert len(tuned(fedavg, lambda rate, *_: (rate, False))) == 7 + 1  # without a parameter of its own: the budget
    # Larger and larger: two more within the budget of seven, then three, and no further.
    order = tuned(fedprox, lambda rate, own, *_: ({0.1: 0.5}.get(rate, 0.1) + (own or 0.0), False))
    within = [(0.01, None), (0.1, None), (1.0, None), *((0.1, own) for own in (0.5, 2.0, 8.0, 32.0))]
    assert order == [*within, (0.1, 128.0), (0.1, 512.0), (0.1, 2050.0), (0.1, 2050.0)]
    # The first one beyond is worse, and the search ends.
    order = tuned(fedprox, lambda rate, own, *_: ({0.1: 0.5}.get(rate, 0.1) + (own or 0.0) % 100, False))
    assert order == [*within, (0.1, 128.0), (0.1, 32.0)]
    # The default, 0.01, is best, and the smallest: beyond it is 0.0002, in the ratio of 0.01 and 0.5.
    order = tuned(fedprox, lambda rate, own, *_: ((rate == 0.1) - (own or 0.01) - rate / 100, False))
    assert order[7:] == [(0.1, 0.0002), (0.1, 4e-06), (0.1, 8e-08), (0.1, 8e-08)]
    with pytest.raises(ConfigError, match=r"arena.beyond: goes on where a grid is widened; set widen = true"):
        arena_of(tmp_path, FILE.replace("budget = 5", "budget = 5\nbeyond = 3"))


def test_a_value_is_judged_by_all_tuning_runs_and_the_rate_next_to_divergence_is_not_taken(tmp_path) -> None:
    arena = arena_of(tmp_path, WIDE, only={"place": "few"})
    # 0.1 is best but for one run of six, whose mean makes 0.01 the best; then rates below it are worse.
    scores, plan = {0.01: 0.5, 0.1: 0.55, 1.0: 0.2}, Plan(arena, arena.entries[0])
    unlucky = tuned(plan, lambda rate, own, *at: (scores.get(rate, 0.1) - 0.4 * ((rate, *at) == (0.1, 9, 7)), False))
    assert unlucky[-1] == (0.01, None)
    # 0.1 is the best on all, and 0.316, the next higher one, diverged on one: 0.0316 is taken, the best of those left.
    close = {0.1: 0.9, 0.0316: 0.6, 0.01: 0.5}
    assert tuned(plan, lambda rate, own, *at: (close.get(rate, 0.1), rate > 0.1 and at == (8, 5)))[-1] == (0.0316, None)
    # All but the lowest diverge: the highest is not taken for having none above it, and the search goes down.
    down = [rate for rate, _ in tuned(plan, lambda rate, *_: (0.9 - abs(rate - 0.01), rate > 0.01))[3:]]
    assert down == [0.001, 0.0001, 0.00316, 0.000316, 0.00316]
    # All diverge: the best of them, not the highest for having none above it.
    assert tuned(plan, lambda rate, *_: (0.9 - abs(rate - 0.1), True))[-1] == (0.1, None)


def test_what_is_refused_in_part_or_has_no_validation_score_is_compared_all_the_same(tmp_path) -> None:
    plan = Plan(arena := arena_of(tmp_path, WIDE, only={"place": "few"}), arena.entries[0])
    refused = {"validation": "", "failure": "refused: 20 draws have a client without samples", "diverged": ""}

    def ended(part, line: dict[str, str]) -> set[tuple[str, float]]:
        """The jobs of the last step, where all those of a part get this line, and the others the best score at 0.1."""
        book: dict[str, dict[str, str]] = {}
        while jobs := plan.missing(book):
            for job in jobs:
                score = {"validation": str(0.9 - abs(job.config.training.lr - 0.1)), "failure": "", "diverged": "0"}
                book |= dict.fromkeys(job.keys.values(), line if part(job) else score)
        return {(job.stage, job.config.training.lr) for job in plan.steps(book)[-1]}

    assert ended(lambda job: job.config.partition.seed == 8, refused) == {("run", 0.1)}
    assert ended(lambda job: True, {"validation": "", "failure": "", "diverged": "0"}) == {("run", 0.01)}
    assert {stage for stage, _ in ended(lambda job: True, refused)} == {"tune"}


def test_a_grid_of_tables_or_shares_ends_where_it_ends(tmp_path) -> None:
    shares = WIDE.replace("fedprox", "fedentopt").replace("local_step.mu = [0.5, 2.0]", "selection.buffer = [0.2, 0.4]")
    plan = Plan(arena := arena_of(tmp_path, shares, only={"place": "few"}), arena.entries[1])
    order = tuned(plan, lambda rate, own, *_: ((own or 0.1) + (rate == 0.1) + rate / 100, False))
    assert order[:5] == [(0.01, None), (0.1, None), (1.0, None), (0.1, 0.2), (0.1, 0.4)]
    assert [own for _, own in order[5:]] == [0.8, 0.8, 0.8]  # 1.6 is no share, so a rate beside, with the best one
    terms = "[[{name = 'fedntd', weight = 0.3}], [{name = 'fedntd', weight = 3.0}]]"
    tables = WIDE.replace("fedprox", "fedntd").replace("local_step.mu = [0.5, 2.0]", f"objective.terms = {terms}")
    plan = Plan(arena := arena_of(tmp_path, tables, only={"place": "few"}), arena.entries[1])
    first = plan.missing({})
    second = plan.missing(book := noted(first, [0.2, 0.2, 0.7, 0.7, 0.6, 0.6]))
    assert len({job.own for job in second}) == 2
    assert rates(plan.missing(book | noted(second, [0.8] * 4))) == [0.316, 0.316, 0.0316, 0.0316]


SHARES = FILE.replace(
    '"fedavg", ', '{label = "fedrs", preset = "fedrs", own = {method.objective.alpha = [0.2, 1.0]}}, "fedavg", '
)


@pytest.mark.parametrize(
    ("key", "value", "tried", "beyond"),
    [
        ("local_step.mu", 2.0, [0.5, 2.0], 8.0),
        ("local_step.mu", 0.5, [2.0, 0.5], 0.125),
        ("local_step.mu", 0.5, [0.01, 0.5, 2.0], None),  # inside
        ("local_step.mu", 0.0, [0.0, 0.5], None),  # no strength is less than none
        ("local_step.mu", 0.5, [0.0, 0.5], 1.0),
        ("local_step.mu", 0.5, [0.5], None),
        ("objective.alpha", 1.0, [0.2, 1.0], None),  # a share
        ("objective.alpha", 0.2, [0.2, 1.0], 0.04),
        ("objective.terms", [0.2], [[0.1], [0.2]], None),
    ],
)
def test_a_value_is_cut_off_at_an_end_beyond_which_there_is_one(tmp_path, key, value, tried, beyond) -> None:
    entry = arena_of(tmp_path, SHARES).entries[0 if "alpha" in key else 2]
    assert further(entry, f"method.{key}", value, tried) == beyond


def test_choices_say_what_is_cut_off_and_how_clearly_as_does_the_script(tmp_path) -> None:
    # By place and method: values with their validation scores on two tuning runs, the one that was chosen first.
    mu, alpha = "local_step.mu = ", "objective.alpha = "
    tried = {
        ("few", "fedavg"): {(1.0, ""): (0.5, 0.52), (0.1, ""): (0.4, 0.4)},  # by 11 points, one standard error is 1
        ("few", "fedprox"): {(0.1, f"{mu}2.0"): (0.5, 0.5), (0.1, f"{mu}0.5"): (0.48, 0.52), (0.1, ""): (0.1, 0.1)},
        ("few", "fedrs"): {(0.1, f"{alpha}1.0"): (0.5, 0.5), (0.1, f"{alpha}0.2"): (0.4, 0.4), (1.0, ""): (0.1, 0.1)},
        ("all", "fedprox"): {(0.1, ""): (0.5, 0.5), **{(rate, ""): (0.4, 0.4) for rate in (1.0, 0.01)}},
    }
    tried["all", "fedprox"][0.1, f"{mu}0.5"] = 0, 0
    runs = []
    for (place, method), options in tried.items():
        for at, ((rate, own), scores) in enumerate(options.items()):
            line = {"place": place, "method": method, "lr": f"{rate:g}", "own": own, "failure": "", "partition": "7"}
            runs += [line | {"stage": "tune", "seed": f"{seed}", "validation": f"{scores[seed]}"} for seed in (0, 1)]
            runs += [line | {"stage": "run", "seed": "0"}] * (not at)
    _, *lines = choice_lines(ArenaState(arena_of(tmp_path, SHARES), tuple(runs), {}))
    assert [tuple(line) for line in lines] == [
        ("few", "fedrs", "0.1", f"{alpha}1.0", "0.50000", True, False),
        ("few", "fedavg", "1", "", "0.51000", True, None),
        ("few", "fedprox", "0.1", f"{mu}2.0", "0.50000", None, True),
        ("all", "fedprox", "0.1", "", "0.50000", False, True),  # the default of 0.01 is one of those tried
    ]
    said = " ".join(AGAIN["tuned"](AGAIN["Table"](runs, 1, None, "fedavg")))
    # fedavg's rate and the last one's default are clear, 2.0 is on a plateau, and fedrs tried no rates alike
    assert "67% of 3 learning rates; 67% of 3 parameters" in said
    assert "Of the 3 at an end of which several tuning runs tell, 2 are better" in said


@pytest.mark.slow
def test_the_script_knows_defaults_and_limits_and_quick_arenas_can_be_read() -> None:
    files = [*(ROOT / "benchmarks").glob("*.toml"), ROOT / "recipes" / "arena.toml"]
    entries = [one for quick in (True, False) for file in files for one in Arena.read(file, quick=quick).entries]
    for method, entry in {
        one.method: one for one in entries if one.own and not isinstance(one.own[0][1], list)
    }.items():
        key, largest = entry.own[0][0], AGAIN["LARGEST"]
        assert AGAIN["DEFAULTS"].get(method) == flatten(entry.config.tree()).get(key), method
        for value in (0.999, 1.0, 1e6):
            if value <= largest.get(key.removeprefix("method."), 1e6):
                entry.config.with_value(key, value)
            else:
                with pytest.raises(FedskewError):
                    entry.config.with_value(key, value)
