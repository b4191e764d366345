"""Figures as files: what is drawn stands in the file, and what can't be written is one line."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedskew.errors import ArgumentError
from fedskew.report import drawing

MIX = np.array([0.25, 0.75])
LONG = ["one", "a name that is much too long"]
FLAT = np.ones(2, dtype=bool)


def draw(kind: str, path: Path, *what: object, **more: object) -> str:
    with drawing.figure(path) as figure:
        getattr(drawing, kind)(figure.subplots(), *what, **more)
    return path.read_text()


@pytest.mark.parametrize(
    ("kind", "what", "says"),
    [
        ("curves", ([drawing.Curve(7, MIX, 99 * MIX, MIX, ~FLAT, "a$b_c")],), ["round"]),
        ("bars", ({"a": (MIX, None), "b": (np.array([np.nan, 1]), MIX)}, LONG), ["one", "a name that i…"]),
        ("bars", ({"a": (MIX, None)},), []),
        ("heat_map", (np.ma.masked_equal(np.eye(2), 0), ["猫", "dog"]), ["猫", "dog"]),
        ("heat_map", (np.eye(30), [str(at) for at in range(30)]), ["class"]),
        ("weights_against_fedavg", ([(0, "mine", MIX, MIX), (1, "", MIX[:0], MIX[:0])],), ["mean weight that FedAvg"]),
        ("mix_with_intervals", (MIX, np.array([[0.2, 0.3], [0.7, 0.8]]), MIX, LONG), ["one", "estimated (95 %)"]),
        ("differences", ({"a": 1.0, "b": -1.0}, [(0.5, 1.5), (-2, 2)], {"x": [2, 0]}), ["+1.0", "ahead", "be told"]),
        ("differences", ({"a": 1.0, "b": -1.0}, np.full((2, 2), np.nan), {}), ["+1.0", "−1"]),
    ],
)  # fmt: skip
def test_a_figure_is_drawn_with_its_words(tmp_path: Path, kind: str, what: tuple, says: list[str]) -> None:
    text = draw(kind, tmp_path / "figure.svg", *what)
    assert [words for words in says if words not in text] == []


@pytest.mark.parametrize("name", ["who.xyz", "none/who.png"])
def test_a_figure_that_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match="the figure can't be written") as caught:
        draw("bars", tmp_path / name, {"a": (MIX, None)})
    assert "\n" not in str(caught.value)


def test_a_difference_far_from_all_others_leaves_them_their_room() -> None:
    axes = Figure().subplots()
    means = {"a": 4.0, "b": -1.0, "alone": -40.0}
    drawing.differences(axes, means, [(1, 9), (-2, 2), (-60, -20)], {"x": [6.0, np.nan, -35.0]})
    low, high = axes.get_xlim()
    assert (-5 < low < -2, 9 < high < 12) == (True, True)
    assert "-40.0" in [text.get_text() for text in axes.texts]
    assert [mark.get_data() for mark in axes.lines if mark.get_marker() == "<"] == [([0], [2])]


@pytest.mark.parametrize("means", [{"alone": -40.0, "b": 0.0}, {"ccvr": 25.4, "fedexp": 4.6}, {"a": 3.0, "b": 0.0}])
def test_a_difference_that_hides_no_other_is_shown_itself(means: dict[str, float]) -> None:
    axes = Figure().subplots()
    drawing.differences(axes, means, [(mean - 2, mean + 2) for mean in means.values()], {})
    low, high = axes.get_xlim()
    assert (low < min(means.values()) and max(means.values()) < high) == ("alone" not in means)
    assert low < -1 < 1 < high
