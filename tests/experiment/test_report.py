"""The report page: what it says, and that it says it for every kind of run that there can be."""

from __future__ import annotations

import dataclasses
import html
import re
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from example_runs import example_run

from fedskew.drawing import Curve, legend_key, styled
from fedskew.errors import ArgumentError, RunError
from fedskew.report import SeedRun, effective_mix, write_report


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self._style = False
        self.feed(source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._style:
            self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value or "" for _, key, value in self.attributes if key == name]


def page_of(runs: list[SeedRun], tmp_path: Path, title: str = "A title") -> Page:
    return Page(write_report(runs, tmp_path / "report.html", title).read_text(encoding="utf-8"))


def with_summary(run: SeedRun, moment: str, **figures: float) -> SeedRun:
    return dataclasses.replace(run, summary=run.summary | {moment: {**(run.summary["final"]), **figures}})


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


def test_the_page_loads_nothing_and_runs_nothing(comparison):
    page = Page(comparison)
    assert page.tags["script"] == page.tags["iframe"] == 0
    for name in ("src", "href", "xlink:href", "action", "srcset"):
        for value in page.values(name):
            assert value.startswith(("#", "data:")), value
    assert "url(" not in comparison.replace("url(#", "")
    assert "@import" not in comparison


def test_the_same_runs_give_the_same_bytes_whatever_the_user_has_set_in_matplotlib(tmp_path):
    runs = [example_run(label, rounds=3) for label in ("a", "b")]
    first = write_report(runs, tmp_path / "one.html", "t").read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.hashsalt": "mine", "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        second = write_report(runs, tmp_path / "two.html", "t").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert first == second


def test_names_are_shown_as_they_are_and_never_interpreted(tmp_path):
    names = ("<script>1</script>", "a & b \"c\" 'd'", "$x_1$ 100%", "_hidden", "猫と犬", "{{ 7 * 7 }}", "&amp;", "a\nb")
    run = example_run(names[0], rounds=2, clients=8, classes=8, class_names=names)
    run = dataclasses.replace(run, client_names=names, config={"name": names[0]})
    page = page_of([run, *(dataclasses.replace(run, label=name) for name in names[1:])], tmp_path, title=names[0])
    assert page.tags["script"] == 0
    for name in names:
        assert page.words.count(name) >= 3, "headline, legend, table"
    for name in ("<script>1</sc…", "a & b \"c\" 'd'", "$x_1$ 100%", "_hidden", "猫と犬", "{{ 7 * 7 }}", "&amp;", "a b"):
        assert page.words.count(name) >= 4, "a class and a client in several pictures"


def test_ids_are_unique_and_every_reference_has_its_id(comparison):
    page = Page(comparison)
    ids = Counter(page.values("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    references = [value[1:] for name in ("href", "xlink:href") for value in page.values(name) if value.startswith("#")]
    assert references
    assert set(references) <= set(ids)


def test_every_picture_is_described_says_how_to_read_it_and_on_how_many_seeds_it_rests(comparison):
    figures = re.findall(r"<figure>.*?</figure>", comparison, flags=re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', figure)
        assert re.search(r"<figcaption>\s*<p>[^<]{20,}</p>", figure)
        assert re.search(r'<p class="basis">(2 seeds each|1 seed of 2 \(seed 0\))</p>', figure)


@pytest.mark.usefixtures("pages_without_figures")
def test_several_seeds_are_shown_as_mean_and_sample_standard_deviation(tmp_path):
    # 50 % and 70 %: mean 60, standard deviation with ddof 1 sqrt(2 * 10^2 / 1) = 14.14
    runs = [
        with_summary(example_run("a", seed, rounds=2), "last10", accuracy=value)
        for seed, value in enumerate((0.5, 0.7))
    ]
    page = page_of(runs, tmp_path)
    assert "60.0 ± 14.1" in page.words
    assert "60.0 ± 14.1 %" in page.words


def test_a_single_seed_has_no_spread(single):
    assert "50.0" in single.words
    assert "±" not in single.text
    assert "standard deviation" not in single.text


@pytest.mark.usefixtures("pages_without_figures")
def test_a_figure_that_some_seeds_lack_says_how_many_have_it(tmp_path):
    runs = [example_run("a", seed, rounds=2) for seed in (0, 1)]
    runs[0] = with_summary(runs[0], "best_by_validation", accuracy=0.625)
    assert "62.5 (1 of 2 seeds)" in page_of(runs, tmp_path).words


def test_the_best_round_on_the_test_set_is_named_as_what_it_is(single):
    assert "Max on the test set" in single.words
    assert "optimistic" in single.text


@pytest.mark.usefixtures("pages_without_figures")
def test_without_a_target_there_is_none_on_the_page(single, tmp_path):
    assert "target" in single.text
    assert "target" not in page_of([example_run(rounds=2, target=False)], tmp_path).text


@pytest.mark.usefixtures("pages_without_figures")
def test_runs_with_and_without_a_target_can_be_compared(tmp_path):
    page = page_of(
        [example_run("with", s, rounds=2) for s in (0, 1)] + [example_run("without", rounds=2, target=False)], tmp_path
    )
    assert "The label mix that trained the model: with" in page.words
    assert "The label mix that trained the model: without" in page.words
    assert "Seeds: with 2, without 1" in page.words


@pytest.mark.usefixtures("pages_without_figures")
def test_runs_of_different_data_sets_can_be_compared(tmp_path):
    page = page_of([example_run("cifar", rounds=2), example_run("other", rounds=2, classes=3)], tmp_path)
    assert "Accuracy by class: cifar" in page.words
    assert "Accuracy by class: other" in page.words
    assert "perfectly even mix" not in page.text, "it differs between them"


def test_a_line_goes_on_thin_when_some_seeds_have_stopped():
    curve = Curve.over_seeds(0, [{0: 1.0, 1: 2.0, 2: 3.0}, {0: 3.0, 1: 4.0}], most=200)
    assert curve.x.tolist() == [0, 1, 2]
    assert curve.mean.tolist() == [2.0, 3.0, 3.0]
    assert curve.complete.tolist() == [True, True, False]
    np.testing.assert_allclose(curve.std, [2**0.5, 2**0.5, np.nan])


def test_a_round_that_only_one_of_the_running_seeds_evaluated_makes_no_jump():
    # the first seed stops at 7, between two evaluations of the second
    curve = Curve.over_seeds(0, [{0: 0.0, 5: 0.5, 7: 0.9}, {0: 0.0, 5: 0.7, 10: 0.8}], most=200)
    assert curve.x.tolist() == [0, 5, 10]
    np.testing.assert_allclose(curve.mean, [0.0, 0.6, 0.8])


@pytest.mark.usefixtures("pages_without_figures")
def test_a_long_curve_becomes_means_of_blocks_of_rounds(tmp_path):
    curve = Curve.over_seeds(0, [{number: float(number) for number in range(6)}], most=2)
    assert curve.block == 3
    assert curve.x.tolist() == [1, 4]
    assert curve.mean.tolist() == [1, 4]
    assert curve.std is None
    assert "Each point is the mean of up to 2 recorded rounds" in page_of([example_run(rounds=250)], tmp_path).text


def test_the_effective_mix_is_weights_times_label_shares():
    run = example_run(rounds=2, clients=2, classes=2, cohort=1)
    first, second = (
        dataclasses.replace(run.rounds[1], answered=[0, 1], weights=[0.25, 0.75]),
        dataclasses.replace(run.rounds[2], answered=[], weights=[]),
    )
    run = dataclasses.replace(run, counts=np.array([[10, 0], [10, 30]]), rounds=[run.rounds[0], first, second])
    # 0.25 * (1, 0) + 0.75 * (1/4, 3/4)
    np.testing.assert_allclose(effective_mix(run), [0.4375, 0.5625])


@pytest.mark.usefixtures("pages_without_figures")
def test_participation_is_the_share_of_rounds_after_the_untrained_one(tmp_path):
    run = example_run(rounds=4, clients=3, cohort=1)
    rounds = [run.rounds[0]] + [
        dataclasses.replace(record, cohort=cohort, answered=cohort, weights=[1.0 / len(cohort)] * len(cohort))
        for record, cohort in zip(run.rounds[1:], ([0], [0], [0, 1], [1]), strict=True)
    ]
    page = page_of([dataclasses.replace(run, rounds=rounds)], tmp_path)
    assert any("fedavg 0.0 % to 75.0 %" in alt for alt in page.values("aria-label"))


@pytest.mark.usefixtures("pages_without_figures")
def test_diverged_clients_are_shown(tmp_path):
    run = example_run(diverging=(1, 2), cohort=10)
    times = sum(len(record.diverged) for record in run.rounds)
    page = page_of([run], tmp_path)
    assert f"fedavg: 2 clients diverged, {times} times in all." in page.words
    assert str(times) in page.words, "in the table of costs"


def test_a_round_in_which_nobody_answered_is_no_obstacle(tmp_path):
    run = example_run(cohort=2, clients=4, diverging=(0, 1, 2, 3))
    assert all(record.answered == [] for record in run.rounds)
    page = page_of([run], tmp_path)
    assert "How much each client counts" not in page.text, "nobody ever did"


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
    assert not any(re.search(r"\bnan\b", value.lower()) for value in page.values("d"))
    assert "–" in page.words


@pytest.mark.usefixtures("pages_without_figures")
def test_the_worst_class_is_named_and_so_is_that_it_has_equals(tmp_path):
    run = example_run(rounds=1)
    run.rounds[-1].evaluation.per_class = [0.5, 0.25, 0.75, 0.25, *[0.5] * 6]
    assert "Worst class: automobile and 1 more (25.0 %)." in page_of([run], tmp_path).words


def test_classes_of_which_none_was_tested_have_no_worst(tmp_path):
    run = example_run(rounds=1)
    run.rounds[-1].evaluation.per_class = [None] * 10
    assert "Worst class: none was tested." in page_of([run], tmp_path).words


def test_a_run_that_has_just_begun_or_not_yet_has_a_page(tmp_path):
    run = dataclasses.replace(example_run(rounds=0), summary={})
    assert "not evaluated" in page_of([run], tmp_path).words
    assert "Who holds what" in page_of([dataclasses.replace(run, rounds=[])], tmp_path).words


@pytest.mark.usefixtures("pages_without_figures")
def test_clients_are_shown_by_the_classes_that_they_hold_where_that_was_recorded(single, tmp_path):
    page = page_of([example_run(rounds=2, client_evaluations=True)], tmp_path)
    for kind in ("majority", "minority", "vacant"):
        assert f"Accuracy on {kind} classes" in page.words
        assert f"Accuracy on {kind} classes" not in single.words


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (60, 2), (10, 20), (200, 100)])
def test_any_number_of_clients_and_classes_can_be_drawn(tmp_path, clients, classes):
    run = example_run(rounds=2, clients=clients, classes=classes, cohort=min(5, clients))
    page = page_of([run], tmp_path)
    assert (set(run.class_names) <= set(page.words)) == (classes <= 20), "few classes have their names in the pictures"


def test_clients_without_a_sample_can_be_drawn(tmp_path):
    run = example_run(rounds=1, clients=3, cohort=1, diverging=(0, 1, 2))
    page_of([dataclasses.replace(run, counts=np.zeros((3, 10), dtype=np.int64))], tmp_path)


def test_clients_with_names_of_their_own_are_shown_with_them(tmp_path):
    run = dataclasses.replace(example_run(clients=3, cohort=2), client_names=("Kiel", "Bonn", "Ulm"))
    assert {"Kiel", "Bonn", "Ulm"} <= set(page_of([run], tmp_path).words)


def test_more_labels_than_colours_still_differ():
    with styled():
        keys = [legend_key(style) for style in range(24)]
    looks = [re.sub(r'id="[^"]*"|#m\w+|url\([^)]*\)|aria-label="[^"]*"', "", key) for key in keys]
    assert len(set(looks)) == 24


@pytest.mark.usefixtures("pages_without_figures")
def test_the_full_configuration_is_toml_that_reads_back(tmp_path):
    run = example_run(rounds=1)
    source = write_report([run], tmp_path / "r.html", "t").read_text(encoding="utf-8")
    (text,) = re.findall(r"<pre>(.*?)</pre>", source, flags=re.DOTALL)
    assert tomllib.loads(html.unescape(text)) == run.config


@pytest.mark.usefixtures("pages_without_figures")
def test_a_comparison_says_where_the_configurations_differ(tmp_path):
    page = page_of([example_run("fedavg", rounds=1), example_run("fedla", rounds=1)], tmp_path)
    assert 'method.weighting.name = "fedavg"' in page.words
    assert 'method.weighting.name = "fedla"' in page.words
    assert "training.lr = 0.01" not in page.words


@pytest.mark.usefixtures("pages_without_figures")
def test_versions_and_machines_are_shown_once_for_runs_that_share_them(comparison, tmp_path):
    assert Page(comparison).words.count("an example") == 1
    one, two = example_run("one", rounds=1), example_run("two", rounds=1)
    two = dataclasses.replace(two, summary=two.summary | {"machine": {"processor": "another"}})
    page = page_of([one, two], tmp_path)
    assert page.words.count("an example") == page.words.count("another") == 1


@pytest.mark.slow
def test_six_methods_of_three_seeds_500_rounds_and_100_clients_stay_below_3_megabytes(tmp_path):
    runs = [example_run(f"method {i}", s, rounds=500, clients=100, cohort=10) for i in range(6) for s in range(3)]
    assert write_report(runs, tmp_path / "r.html", "t").stat().st_size < 3e6


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="at least one run"):
        write_report([], tmp_path / "r.html", "t")


def test_the_same_seed_twice_under_one_label_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="'a' has seed 1 twice"):
        write_report([example_run("a", 1), example_run("b", 1), example_run("a", 1)], tmp_path / "r.html", "t")


@pytest.mark.usefixtures("pages_without_figures")
def test_the_folder_is_made_and_a_place_that_can_not_be_written_is_named(tmp_path):
    path = tmp_path / "new" / "folder" / "r.html"
    assert write_report([example_run(rounds=1)], path, "t") == path
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        write_report([example_run(rounds=1)], tmp_path / "file" / "r.html", "t")
