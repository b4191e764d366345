"""The report page: what it says, and that it says it for every kind of run that there can be."""

import base64
import dataclasses
import html
import json
import re
import tomllib
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_runs import CIFAR, example_run, rare_run

import fedskew
from fedskew.data import Dataset
from fedskew.errors import ArgumentError, RunError
from fedskew.report import SeedRun, paired_differences, write_report
from fedskew.report.drawing import Curve


class Page(HTMLParser):
    """The tags, attributes and text of a page, and what its script draws."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._in = ""
        self.feed(source)
        self.text = " ".join(" ".join(self.words).split())
        self.drawn = json.loads(self.scripts[0])
        titles = re.findall(
            r"<figure[^>]*>\s*<h3>([^<]*)</h3>(?:(?!</figure>).)*?data-chart=(\d+)", source, flags=re.DOTALL
        )
        self.charts: dict[str, dict[str, Any]] = {
            html.unescape(title): self.drawn["charts"][int(number)] for title, number in titles
        }

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)
        elif self._in != "style":
            self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value or "" for _, key, value in self.attributes if key == name]


def page_of(runs: list[SeedRun], tmp_path: Path, title: str = "A title", **more: Any) -> Page:
    return Page(write_report(runs, tmp_path / "report.html", title, **more).read_text(encoding="utf-8"))


def with_summary(run: SeedRun, moment: str, **figures: float) -> SeedRun:
    return dataclasses.replace(run, summary=run.summary | {moment: {**(run.summary["final"]), **figures}})


def with_cohorts(run: SeedRun, *cohorts: list[int], silent: tuple[int, ...] = (), **changes: Any) -> SeedRun:
    """The run with these clients in its trained rounds, of whom all but `silent` reply with equal weights."""
    rounds = run.rounds[:1]
    for record, cohort in zip(run.rounds[1:], cohorts, strict=True):
        answered = [client for client in cohort if client not in silent]
        weights = [1.0 / max(len(answered), 1)] * len(answered)
        rounds.append(dataclasses.replace(record, cohort=cohort, answered=answered, diverged=[], weights=weights))
    return dataclasses.replace(run, rounds=rounds, **changes)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """One seed of one label, with a target."""
    run = with_summary(example_run(), "final", accuracy=0.5)
    return page_of([run], tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of a page of two labels with two seeds each; one has too many clients for single bars."""
    folder = tmp_path_factory.mktemp("comparison")
    runs = [example_run(label, seed, clients=clients) for label, clients in (("a", 8), ("b", 70)) for seed in (0, 1)]
    return write_report(runs, folder / "r.html", "t").read_text(encoding="utf-8")


def test_the_page_loads_nothing(comparison):
    page = Page(comparison)
    assert page.tags["iframe"] == page.tags["link"] - 1 == 0, "an empty icon alone"
    for name in ("src", "href", "xlink:href", "action", "srcset"):
        for value in page.values(name):
            assert value.startswith(("#", "data:")), value
    assert "url(" not in comparison
    assert "@import" not in comparison
    (policy,) = [value for value in page.values("content") if "default-src" in value]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_the_library_that_draws_stands_in_the_page(comparison):
    assert b"Plotly" in zlib.decompress(base64.b64decode(Page(comparison).scripts[1]))
    assert len(comparison) < 2.5e6


def test_every_figure_is_one_that_plotly_knows(comparison):
    import plotly.graph_objects

    charts = Page(comparison).charts
    assert len(charts) >= 12
    for chart in charts.values():
        plotly.graph_objects.Figure(data=chart["data"], layout=chart["layout"])  # ValueError: no such property


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [example_run(label, rounds=3) for label in ("a", "b")]
    first = write_report(runs, tmp_path / "one.html", "t").read_bytes()
    assert write_report(runs, tmp_path / "two.html", "t").read_bytes() == first


def test_names_are_shown_as_they_are_and_never_interpreted(tmp_path):
    names = ("<script>1</script>", "a & b \"c\" 'd'", "$x_1$ 100%", "_hidden", "猫と犬", "{{ 7 * 7 }}", "&amp;", "a\nb")
    run = example_run(names[0], rounds=2, clients=8, classes=8, class_names=names)
    run = dataclasses.replace(run, client_names=names, config={"name": names[0]})
    page = page_of([run, *(dataclasses.replace(run, label=name) for name in names[1:])], tmp_path, title=names[0])
    assert page.tags["script"] == 3
    for name in names:
        assert page.words.count(name) >= 3, "table, legend, menu"
    holdings = page.charts["Who holds what"]["data"][0]
    # plotly reads a few tags in its texts: what could be one is escaped
    shown = [html.escape(name, quote=False).replace("\n", " ") for name in names]
    assert holdings["x"] == holdings["y"] == shown


def test_every_figure_is_described_says_how_to_read_it_and_on_how_many_seeds_it_rests(comparison):
    figures = re.findall(r"<figure[^>]*>.*?</figure>", comparison, flags=re.DOTALL)
    drawn = [figure for figure in figures if "data-chart" in figure]
    assert len(drawn) >= 12
    for figure in figures:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', figure)
        assert re.search(r"<figcaption>\s*<p>[^<]{20,}</p>", figure)
    for figure in drawn:
        assert re.search(r'<p class="basis">(2 seeds each|1 seed of 2 \(seed 0\)|Seeds: a 1, b 2)</p>', figure)


def test_several_seeds_are_shown_as_mean_and_sample_standard_deviation(tmp_path):
    # 50 % and 70 %: mean 60, standard deviation with ddof 1 sqrt(2 * 10^2 / 1) = 14.14
    runs = [
        with_summary(example_run("a", seed, rounds=2), "final", accuracy=value) for seed, value in enumerate((0.5, 0.7))
    ]
    page = page_of(runs, tmp_path)
    assert "60.0 ± 14.1" in page.words
    assert "60.0 ± 14.1 %" in page.words


def test_a_single_seed_has_no_spread(single):
    assert "50.0" in single.words
    assert "±" not in single.text
    assert "standard deviation" not in single.text


def test_a_figure_that_some_seeds_lack_says_how_many_have_it(tmp_path):
    runs = [example_run("a", seed, rounds=2) for seed in (0, 1)]
    runs[0] = with_summary(runs[0], "best_by_validation", accuracy=0.625)
    assert "62.5 (1 of 2 seeds)" in page_of(runs, tmp_path).words


def test_the_best_round_on_the_test_set_is_named_as_what_it_is(single):
    assert "Max on the test set" in single.words
    assert "optimistic" in single.text


def test_without_a_target_there_is_none_on_the_page(single, tmp_path):
    assert "target" in single.text
    assert "target" not in page_of([example_run(rounds=2, target=False)], tmp_path).text


def test_runs_with_and_without_a_target_can_be_compared(tmp_path):
    page = page_of(
        [example_run("with", s, rounds=2) for s in (0, 1)] + [example_run("without", rounds=2, target=False)], tmp_path
    )
    assert "The label mix that trained the model: with" in page.charts
    assert "The label mix that trained the model: without" in page.charts
    assert "Seeds: with 2, without 1" in page.words


@pytest.mark.slow
def test_runs_of_different_data_sets_can_be_compared(tmp_path):
    page = page_of([example_run("cifar", rounds=2), example_run("other", rounds=2, classes=3)], tmp_path)
    assert "Accuracy by class: cifar" in page.charts
    assert "Accuracy by class: other" in page.charts
    assert "perfectly even mix" not in page.text, "it differs between them"


@pytest.mark.parametrize(
    ("series", "x", "mean", "std"),
    [
        # a seed that stops makes the line thin; one point at which its deviation is unknown
        ([{0: 1.0, 1: 2.0, 2: 3.0}, {0: 3.0, 1: 4.0}], [0, 1, 2], [2, 3, 3], [2**0.5, 2**0.5, np.nan]),
        # the first seed stops at 7, between two evaluations of the second: that round makes no jump
        ([{0: 0, 5: 0.5, 7: 0.9}, {0: 0, 5: 0.7, 10: 0.8}], [0, 5, 10], [0, 0.6, 0.8], [0, 0.02**0.5, np.nan]),
    ],
)
def test_a_line_is_the_mean_over_the_seeds_that_run(series, x, mean, std):
    curve = Curve.over_seeds(0, series, most=200)
    assert (curve.x.tolist(), curve.complete.tolist()) == (x, [True, True, False])
    np.testing.assert_allclose(curve.mean, mean)
    np.testing.assert_allclose(curve.std, std)


def test_a_long_curve_becomes_means_of_blocks_of_rounds(tmp_path):
    curve = Curve.over_seeds(0, [{number: float(number) for number in range(6)}], most=2)
    assert (curve.block, curve.x.tolist(), curve.mean.tolist(), curve.std) == (3, [1, 4], [1, 4], None)
    assert "Each point is the mean of up to 2 recorded rounds" in page_of([example_run(rounds=250)], tmp_path).text


def test_the_effective_mix_is_weights_times_label_shares():
    run = with_cohorts(
        example_run(rounds=2, clients=2, classes=2, cohort=1), [0, 1], [], counts=np.array([[10, 0], [10, 30]])
    )
    run.rounds[1].weights = [0.25, 0.75]
    # 0.25 * (1, 0) + 0.75 * (1/4, 3/4)
    np.testing.assert_allclose(run.effective_mix(), [0.4375, 0.5625])


def test_participation_is_the_share_of_rounds_after_the_untrained_one(tmp_path):
    page = page_of([with_cohorts(example_run(rounds=4, clients=3, cohort=1), [0], [0], [0, 1], [1])], tmp_path)
    assert any("fedavg 0.0 % to 75.0 %" in alt for alt in page.values("aria-label"))


def test_diverged_clients_are_shown(tmp_path):
    run = example_run(diverging=(1, 2), cohort=10)
    times = sum(len(record.diverged) for record in run.rounds)
    page = page_of([run], tmp_path)
    assert f"fedavg: 2 clients diverged, {times} times in all." in page.words
    assert str(times) in page.words, "in the table of costs"


def test_a_round_in_which_nobody_answered_is_no_obstacle(tmp_path):
    run = example_run(cohort=2, clients=4, diverging=(0, 1, 2, 3))
    assert all(record.answered == [] for record in run.rounds)
    assert "How much each client counts" not in page_of([run], tmp_path).charts, "nobody ever did"


def test_undefined_and_diverged_values_are_left_out(tmp_path):
    runs = [example_run("a", seed, target=False) for seed in (0, 1)]
    for run in runs:
        run.rounds[3].loss, run.rounds[4].loss = float("inf"), float("nan")
        run.summary["final"]["loss"] = float("nan")
        for record in run.rounds:
            record.evaluation.per_class[0] = None
            record.evaluation.loss = float("nan")
    page = page_of(runs, tmp_path)
    assert not {"nan", "inf"} & set(re.findall(r"\w+", page.text.lower()))
    assert "–" in page.words


@pytest.mark.parametrize(
    ("per_class", "says"),
    [
        ([0.5, 0.25, 0.75, 0.25, *[0.5] * 6], "Worst class: automobile and 1 more (25.0 %)."),
        ([None] * 10, "Worst class: none was tested."),
    ],
)
def test_the_worst_class_is_named_and_so_is_that_it_has_equals(tmp_path, per_class, says):
    run = example_run(rounds=1)
    run.rounds[-1].evaluation.per_class = per_class
    assert says in page_of([run], tmp_path).words


def test_a_run_that_has_just_begun_or_not_yet_has_a_page(tmp_path):
    run = dataclasses.replace(example_run(rounds=0), summary={})
    assert "not evaluated" in page_of([run], tmp_path).words
    assert "Who holds what" in page_of([dataclasses.replace(run, rounds=[])], tmp_path).words


def test_clients_are_shown_by_the_classes_that_they_hold_where_that_was_recorded(single, tmp_path):
    page = page_of([example_run(rounds=2, client_evaluations=True)], tmp_path)
    for kind in ("majority", "minority", "vacant"):
        assert f"Accuracy on {kind} classes" in page.charts
        assert f"Accuracy on {kind} classes" not in single.charts


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (60, 2), (10, 20), (200, 100)])
def test_any_number_of_clients_and_classes_can_be_drawn(tmp_path, clients, classes):
    run = example_run(rounds=2, clients=clients, classes=classes, cohort=min(5, clients))
    page = page_of([run], tmp_path)
    assert len(page.charts["Accuracy by class"]["data"][0]["y" if classes <= 40 else "x"]) == classes
    assert len(page.charts["Who holds what"]["data"][0]["x"]) == clients


def test_clients_without_a_sample_can_be_drawn(tmp_path):
    run = example_run(rounds=1, clients=3, cohort=1, diverging=(0, 1, 2))
    page_of([dataclasses.replace(run, counts=np.zeros((3, 10), dtype=np.int64))], tmp_path)


def test_sites_have_their_names_and_bare_numbers_say_what_they_number(tmp_path):
    run = dataclasses.replace(example_run(clients=3, cohort=2), client_names=("Kiel", "Bonn", "7"))
    charts = page_of([run], tmp_path).charts
    assert charts["Who holds what"]["data"][0]["x"] == ["Kiel", "Bonn", "client 7"]
    assert charts["How often each client took part"]["data"][0]["x"] == ["Kiel", "Bonn", "client 7"]
    assert charts["How much each client counts"]["data"][0]["customdata"][0] == "Kiel"


def test_long_names_are_cut_and_still_differ(tmp_path):
    names = (
        "Universitätsklinikum Schleswig-Holstein, Kiel",
        "Universitätsklinikum Schleswig-Holstein, Lübeck",
        "中" * 40,
    )
    run = dataclasses.replace(example_run(clients=3, cohort=2, rounds=1), client_names=names)
    shown = page_of([run], tmp_path).charts["Who holds what"]["data"][0]["x"]
    assert len(set(shown)) == 3
    assert max(map(len, shown)) <= 34
    assert shown[2] == "中" * 14 + "…"


def test_more_labels_than_colours_still_differ(tmp_path):
    page = write_report([example_run(f"run {at}", rounds=1) for at in range(24)], tmp_path / "r.html", "t").read_text()
    keys = re.findall(r'<button class="chip".*?(<line.*?/>)', page)
    assert len(keys) == len(set(keys)) == 24


def test_the_full_configuration_is_toml_that_reads_back(tmp_path):
    run = example_run(rounds=1)
    source = write_report([run], tmp_path / "r.html", "t").read_text(encoding="utf-8")
    (text,) = re.findall(r"<pre>(.*?)</pre>", source, flags=re.DOTALL)
    assert tomllib.loads(html.unescape(text)) == run.config


def test_a_comparison_says_where_the_configurations_differ(tmp_path):
    page = page_of([example_run("fedavg", rounds=1), example_run("fedla", rounds=1)], tmp_path)
    assert 'method.weighting.name = "fedavg"' in page.words
    assert 'method.weighting.name = "fedla"' in page.words
    assert "training.lr = 0.01" not in page.words


def test_versions_and_machines_are_shown_once_for_runs_that_share_them(comparison, tmp_path):
    assert Page(comparison).words.count("an example") == 1
    one, two = example_run("one", rounds=1), example_run("two", rounds=1)
    two = dataclasses.replace(two, summary=two.summary | {"machine": {"processor": "another"}})
    page = page_of([one, two], tmp_path)
    assert page.words.count("an example") == page.words.count("another") == 1


@pytest.mark.slow
def test_a_page_of_5000_clients_and_300_classes_stays_below_4_megabytes(tmp_path):
    runs = [example_run(label, rounds=12, clients=5000, classes=300, cohort=20) for label in ("a", "b")]
    path = write_report(runs, tmp_path / "r.html", "t")
    assert path.stat().st_size < 4e6
    charts = Page(path.read_text(encoding="utf-8")).charts
    assert len(charts["Who holds what"]["data"][0]["x"]) <= 400
    assert len(charts["What is taken for what"]["data"][0]["x"]) == 60


@pytest.mark.slow
def test_six_methods_of_three_seeds_500_rounds_and_100_clients_stay_below_3_megabytes(tmp_path):
    seeds = [example_run(seed=seed, rounds=500, clients=100, cohort=10) for seed in range(3)]
    runs = [dataclasses.replace(run, label=f"method {at}") for at in range(6) for run in seeds]
    assert write_report(runs, tmp_path / "r.html", "t").stat().st_size < 3e6


@pytest.mark.parametrize(
    ("runs", "says"), [([], "at least one run"), ([("a", 1), ("b", 1), ("a", 1)], "'a' has seed 1 twice")]
)
def test_no_runs_and_a_seed_twice_under_one_label_are_refused(tmp_path, runs, says):
    with pytest.raises(ArgumentError, match=says):
        write_report([example_run(*run) for run in runs], tmp_path / "r.html", "t")


def test_the_folder_is_made_and_a_place_that_can_not_be_written_is_named(tmp_path):
    path = tmp_path / "new" / "folder" / "r.html"
    assert write_report([example_run(rounds=1)], path, "t") == path
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        write_report([example_run(rounds=1)], tmp_path / "file" / "r.html", "t")


# What label skew does


def evaluated(run: SeedRun, per_class: list[list[float | None]]) -> SeedRun:
    """The run with these accuracies by class in its rounds."""
    rounds = [
        dataclasses.replace(record, evaluation=dataclasses.replace(record.evaluation, per_class=values))
        for record, values in zip(run.rounds, per_class, strict=True)
    ]
    return dataclasses.replace(run, rounds=rounds)


def test_classes_by_rounds_are_the_mean_over_seeds(tmp_path):
    one, two = (example_run("a", seed, rounds=1, classes=2, clients=2, cohort=1) for seed in (0, 1))
    one, two = evaluated(one, [[0.0, 1.0], [0.5, None]]), evaluated(two, [[0.5, 0.0], [1.0, None]])
    (trace,) = page_of([one, two], tmp_path).charts["Every class, round by round"]["data"]
    assert trace["x"] == [0, 1]
    assert trace["y"] == ["class 0", "class 1"]
    assert trace["z"] == [[25.0, 75.0], [50.0, None]]


def test_long_runs_have_blocks_of_rounds_in_a_column(tmp_path):
    run = example_run(rounds=241, classes=1, clients=2, cohort=1)  # 242 evaluations: 81 blocks of up to 3
    run = evaluated(run, [[number / 242] for number in range(242)])
    (trace,) = page_of([run], tmp_path).charts["Every class, round by round"]["data"]
    assert trace["x"][:2] == [1.0, 4.0]
    assert trace["x"][-1] == 240.5
    assert trace["z"][0][0] == pytest.approx(100 / 242, abs=0.05)


def test_the_confusion_matrix_shares_out_every_true_class_over_all_seeds(tmp_path):
    def with_confusion(run: SeedRun, confusion: list[list[int]]) -> SeedRun:
        last = dataclasses.replace(run.rounds[-1].evaluation, confusion=confusion)
        return dataclasses.replace(run, rounds=[*run.rounds[:-1], dataclasses.replace(run.rounds[-1], evaluation=last)])

    runs = [
        example_run("a", seed, rounds=1, classes=2, clients=2, cohort=1, class_names=("cat", "dog")) for seed in (0, 1)
    ]
    page = page_of([with_confusion(runs[0], [[8, 2], [5, 5]]), with_confusion(runs[1], [[10, 0], [3, 7]])], tmp_path)
    (trace,) = page.charts["What is taken for what"]["data"]
    assert trace["z"] == [[90.0, 10.0], [40.0, 60.0]]
    assert "Most often mistaken: dog for cat (40.0 %); cat for dog (10.0 %)." in page.words


def test_classes_that_the_cohort_holds_stand_against_those_that_it_does_not(tmp_path):
    run = evaluated(
        example_run(rounds=2, clients=2, classes=3, cohort=1), [[0.1] * 3, [0.9, 0.3, 0.5], [0.2, 0.8, None]]
    )
    run = with_cohorts(run, [0], [1], counts=np.array([[5, 0, 0], [0, 3, 2]]))
    charts = page_of([run], tmp_path).charts
    held, vacant = charts["Classes that the round's clients hold, and those that they don't"]["data"]
    assert (held["x"], held["y"]) == ([1, 2], [90, 80])  # the untrained model has no cohort
    assert (vacant["x"], vacant["y"]) == ([1, 2], [40, 20])


def test_classes_that_clients_hardly_hold_together_are_drawn_by_their_samples(tmp_path):
    counts = np.array([[30, 10, 0], [0, 40, 5], [300, 300, 0]])
    run = dataclasses.replace(example_run(rounds=1, clients=3, classes=3, cohort=1), counts=counts)
    (trace,) = page_of([run], tmp_path).charts["Classes that clients hold together"]["data"]
    assert trace["z"] == [[None] * 3, [310, None, None], [0, 5, None]]
    even = dataclasses.replace(run, counts=np.full((3, 3), 300))
    assert "Classes that clients hold together" not in page_of([even], tmp_path).charts


def test_each_clients_own_classes_stand_against_its_vacant_ones(tmp_path):
    run = evaluated(example_run(rounds=0, clients=3, classes=3), [[0.9, 0.3, 0.5]])
    run = dataclasses.replace(
        run, counts=np.array([[5, 0, 0], [0, 3, 2], [1, 1, 1]]), client_names=("Ulm", "Bonn", "all")
    )
    (trace,) = page_of([run], tmp_path).charts["Each client's own classes, and those it never saw"]["data"]
    assert trace["customdata"] == ["Ulm, 1 class", "Bonn, 2 classes"], "the third lacks nothing"
    assert (trace["x"], trace["y"]) == ([90.0, 40.0], [40.0, 90.0])


def test_who_was_never_asked_is_named_with_what_nobody_else_holds(tmp_path):
    run = example_run(rounds=2, clients=3, classes=3, cohort=1, class_names=("cat", "dog", "ship"))
    counts = np.array([[6, 0, 0], [0, 2, 0], [0, 0, 2]])
    run = with_cohorts(run, [0], [1], silent=(1,), counts=counts, client_names=("Kiel", "Bonn", "Ulm"))
    words = page_of([run], tmp_path).words
    assert "Never asked in 2 rounds: Ulm (1 of 3 clients, 20.0 % of the samples; nobody else holds ship)." in words
    assert "Asked, but no update of theirs ever counted: Bonn." in words


def test_many_clients_are_counted_by_how_often_they_were_asked(tmp_path):
    page = page_of([with_cohorts(example_run(rounds=2, clients=300, cohort=1), [7], [7])], tmp_path)
    (trace,) = page.charts["How often each client took part"]["data"]
    assert (trace["x"], trace["y"]) == ([0, 100], [299, 1])


# What a page must not make of its numbers


def test_neither_what_rounding_makes_of_a_constant_nor_a_small_difference_is_magnified(tmp_path):
    run = example_run(rounds=6)
    for number, record in enumerate(run.rounds):
        record.ess_share = None if not number else 1 + (-1) ** number * 3e-16 * number
        record.drift = 2.0 + 1e-5 * number
    page = page_of([run], tmp_path)
    spans = [
        np.ptp(page.charts[title]["layout"]["yaxis"]["autorangeoptions"]["include"])
        for title in ("Effective sample size", "Drift diversity")
    ]
    assert spans[0] >= 1
    assert spans[1] == pytest.approx(0.02, rel=0.01)
    assert "100.0 % in every round." in page.words


def test_methods_with_the_same_cohorts_are_said_to_have_them_and_drawn_once(tmp_path):
    runs = [
        example_run(label, seed, rounds=3, skill=skill) for label, skill in (("a", 0.5), ("b", 0.7)) for seed in (0, 1)
    ]
    other = [example_run("c", seed, rounds=3, cohort=4) for seed in (0, 1)]
    page = page_of([*runs, *other], tmp_path)
    assert "The same clients in every round: a and b." in page.words
    assert "The same line: a and b." in page.words
    assert [trace["name"] for trace in page.charts["Label entropy of the cohort"]["data"]] == ["a = b", "c"]
    assert len(page.charts["Accuracy on the test set"]["data"]) == 3
    assert page.charts["How often each client took part"]["picks"] == ["a = b", "c"]
    for run in (*runs, *other):
        for record in run.rounds:
            record.drift = {"a": 2.0, "b": 2.0 + 1e-14, "c": 4.0}[run.label]
    drift = page_of([*runs, *other], tmp_path).charts["Drift diversity"]["data"]
    assert [(trace["name"], trace["y"][0]) for trace in drift] == [("a = b", 2.0), ("c", 4.0)]


def test_runs_of_different_data_are_warned_of_and_not_subtracted(tmp_path):
    one, two, three = (example_run(label, rounds=2) for label in "abc")
    three = dataclasses.replace(three, config=three.config | {"data": {"name": "mnist", "validation": 0.0}})
    page = page_of([one, two, three], tmp_path)
    (warning,) = [text for text in page.words if "not of the same data" in text]
    assert "a and b: cifar10, 10 classes" in warning
    assert "c: mnist" in warning
    tests = page.drawn["ranking"]["tests"]["a"]["accuracy"]
    assert [text for *_, text in tests] == ["reference", "equal (one seed)", "–"]
    assert not any("not of the same data" in text for text in page_of([one, two], tmp_path).words)


def test_runs_whose_clients_hold_other_samples_are_warned_of(tmp_path):
    one, two = example_run("a", rounds=1), example_run("b", rounds=1)
    two = dataclasses.replace(
        two, counts=two.counts[::-1].copy(), config=two.config | {"partition": {"rule": "shards", "per_client": 2}}
    )
    page = page_of([one, two], tmp_path)
    (warning,) = [text for text in page.words if "do not hold the same samples" in text]
    assert "b: 20 clients, shards per_client 2" in warning
    assert page.drawn["ranking"]["tests"]["a"]["accuracy"][1][3] == "–"


def test_a_note_stands_once_with_the_runs_that_it_is_about(tmp_path):
    def noted(label: str, seed: int, pairs: int) -> SeedRun:
        return dataclasses.replace(example_run(label, seed, rounds=1), notes=(f"Here {pairs} of 45 pairs are few.",))

    page = page_of([noted("a", 0, 5), noted("a", 1, 6), noted("b", 0, 5), noted("b", 1, 5)], tmp_path)
    found = [text for text in page.words if "45 pairs" in text]
    assert found == ["a (seed 0); b: Here 5 of 45 pairs are few.", "a (seed 1): Here 6 of 45 pairs are few."]
    assert "Here 5 of 45 pairs are few." in page_of([noted("a", seed, 5) for seed in (0, 1)], tmp_path).words


def test_notes_of_a_run_that_differ_by_seed_after_their_first_sentence_are_one(tmp_path):
    def noted(label: str, seed: int, pairs: int) -> SeedRun:
        note = f"It needs pairs. Here {pairs} are few."
        return dataclasses.replace(example_run(label, seed, rounds=1), notes=(note,))

    both = dataclasses.replace(noted("c", 0, 5), notes=("It needs pairs. Here 5 are few.", "It needs pairs. And more."))
    runs = [noted("a", 0, 5), noted("a", 1, 6), noted("a", 2, 5), noted("b", 0, 5), both]
    found = [text for text in page_of(runs, tmp_path).words if "needs pairs" in text]
    assert found == [
        "a (seeds 0, 2; seed 1 with other figures); b; c: It needs pairs. Here 5 are few.",
        "c: It needs pairs. And more.",
    ]


# The ranking


def ranked_runs(values: dict[str, list[float]]) -> list[SeedRun]:
    return [
        with_summary(example_run(label, seed, rounds=1, target=False), "final", accuracy=value)
        for label, row in values.items()
        for seed, value in enumerate(row)
    ]


def test_differences_are_those_of_the_paired_t_test_corrected_by_holm():
    import scipy.stats

    rng = np.random.default_rng(5)
    values = rng.normal([[60.0], [62.0], [60.2], [70.0]], 1.0, (4, 5))
    reference = np.tile(values[0], (4, 1))
    reference[0] = np.nan
    found = paired_differences(values, reference)
    tests = [scipy.stats.ttest_rel(row, values[0]) for row in values[1:]]
    order = np.argsort([test.pvalue for test in tests])
    # Holm: the smallest of three p-values times 3, the next times 2, the last as it is, never decreasing
    corrected = np.maximum.accumulate([tests[at].pvalue * (3 - rank) for rank, at in enumerate(order)]).clip(max=1)
    for rank, at in enumerate(order):
        interval = tests[at].confidence_interval(0.95)
        assert found[at + 1].p == pytest.approx(corrected[rank])
        assert (found[at + 1].low, found[at + 1].high) == pytest.approx((interval.low, interval.high))
    assert np.isnan(found[0].mean)


def test_seeds_that_one_of_two_lacks_are_left_out_and_one_seed_has_no_test():
    values = np.array([[1.0, 2.0, np.nan], [3.0, np.nan, 7.0], [np.nan, 5.0, 9.0]])
    found = paired_differences(values, np.tile(values[2], (3, 1)))
    assert (found[0].mean, found[0].seeds) == (-3.0, 1)
    assert np.isnan(found[0].p)
    assert (found[1].mean, found[1].seeds) == (-2.0, 1)


def test_the_table_of_a_comparison_is_ranked_and_compares_with_fedavg(tmp_path):
    # differences .02, .04, .06: mean 4, standard error 2 / sqrt 3, t 3.4641 at 2 degrees of freedom: p 0.0742
    runs = ranked_runs({"fedavg": [0.5, 0.6, 0.7], "mine": [0.52, 0.64, 0.76]})
    page = page_of(runs, tmp_path, accuracy=max(run.rounds[-1].evaluation.accuracy for run in runs))
    assert page.words.count("1.0 (1/3)") == 2, "rounds to an accuracy that one seed in three reached"
    rows = [word for word in page.words if word in ("fedavg", "mine")]
    assert rows[:5] == ["fedavg", "mine", "mine", "fedavg", "mine"], "the menu, then the table with the best first"
    assert "+4.0 (-1.0 to +9.0), p = 0.074" in page.words
    assert "Accuracy against fedavg" in page.words


def test_equal_runs_are_said_to_be_equal(tmp_path):
    page = page_of(ranked_runs({"fedavg": [0.5, 0.6], "same": [0.5, 0.6], "shifted": [0.51, 0.61]}), tmp_path)
    assert "equal (in every seed)" in page.words
    assert "+1.0 (in every seed)" in page.words, "without spread there is no test"


def test_cells_of_a_grid_are_compared_where_they_differ_in_one_key_alone(tmp_path):
    runs = ranked_runs({"a, 1": [0.5, 0.6], "b, 1": [0.6, 0.7], "a, 2": [0.7, 0.8], "b, 2": [0.9, 0.9]})
    axes = {
        label: dict(zip(("method", "lr"), label.split(", "), strict=True)) for label in ("a, 1", "b, 1", "a, 2", "b, 2")
    }
    page = page_of(runs, tmp_path, axes=axes, accuracy=0.1, notes=["Missing, as it failed: b, 2, seed 2."])
    tests = page.drawn["ranking"]["tests"]
    assert list(tests) == ["method = a", "method = b", "lr = 1", "lr = 2"]
    assert [row[0] for row in tests["method = a"]["accuracy"]] == [None, 10.0, None, 15.0]
    assert [row[0] for row in tests["lr = 2"]["accuracy"]] == [-20.0, -25.0, None, None]
    assert "Missing, as it failed: b, 2, seed 2." in page.words
    assert "Rounds to 10 %" in page.words
    assert page.values("data-axis") == ["method", "lr"]


def test_a_comparison_of_runs_that_have_not_ended_has_a_page(tmp_path):
    runs = [dataclasses.replace(example_run(label, rounds=0), summary={}) for label in ("a", "b")]
    assert "a" in page_of(runs, tmp_path).words


@pytest.mark.slow
def test_a_comparison_of_36_runs_has_a_row_each_and_no_cards(tmp_path):
    page = page_of([example_run(f"{CIFAR[at % 10]} {at}", rounds=1) for at in range(36)], tmp_path)
    assert page.values("data-run").count("35") == 2, "a row and a button"
    assert "headlines" not in page.values("class")
    assert len(page.drawn["shown"]) == 8


def test_a_test_part_of_nothing_but_classes_that_nobody_holds_has_a_page(tmp_path):
    def strangers():
        drawn, targets = torch.Generator().manual_seed(0), torch.arange(60) % 2
        inputs, tests = torch.randn(60, 4, generator=drawn), torch.randn(10, 4, generator=drawn)
        return Dataset("strangers", inputs, targets, tests, torch.full((10,), 2), ("a", "b", "c"))

    tree = {"data": strangers, "partition": {"rule": "iid", "clients": 3}, "model": "logistic"}
    done = fedskew.simulate(tree | {"training": {"rounds": 2}}, out=tmp_path)
    assert "vacant" in (done.folder / "report.html").read_text()


def test_where_one_class_is_rare_a_model_that_learned_nothing_is_not_the_best(tmp_path):
    runs = [rare_run("learned nothing", (941, 0)), rare_run("learned", (700, 45))]
    page = page_of(runs, tmp_path)
    rows = [word for word in page.words if word in ("learned nothing", "learned")]
    assert rows[2:4] == ["learned", "learned nothing"], "after the menu"
    assert [measure["key"] for measure in page.drawn["ranking"]["measures"]][:2] == ["balanced_accuracy", "accuracy"]
    trivial = "Always \u2018healthy\u2019, the most frequent class of the test set, gets an accuracy of 94.1 % and a"
    assert f"{trivial} balanced accuracy (the mean over classes) of 50.0 %." in page.words
    assert "Balanced accuracy on the test set" in page.charts


def test_where_one_class_is_rare_the_largest_number_of_the_page_is_balanced(tmp_path):
    page = page_of([rare_run("learned nothing", (941, 0))], tmp_path)
    assert "50.0 % balanced accuracy 94.1 % accuracy" in page.text
    assert "Always \u2018healthy\u2019" in page.text


def test_where_classes_are_even_accuracy_is_enough(single, comparison):
    assert "Always" not in single.text
    assert "balanced_accuracy" not in [measure["key"] for measure in Page(comparison).drawn["ranking"]["measures"]]
