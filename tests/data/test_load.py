"""Data sets by name: where files are looked for, and which options there are."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew import data
from fedskew.errors import ArgumentError, DataError


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ArgumentError, match="did you mean 'fashion_mnist'"):
        data.load("fashionmnist")


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [("synthetic", "detla", "did you mean 'delta'"), ("digits", "size", "it has none"), ("csv", "rng_", "known: ")],
)
def test_an_unknown_option_is_answered_with_the_known(name, option, hint, tmp_path):
    with pytest.raises(ArgumentError, match=f"{option}: data set {name!r} has no such option.*{hint}"):
        data.load(name, tmp_path, **{option: 1})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synthetic", {"delta": "big"}),
        ("csv", {"test_share": None}),
        ("folder", {"client_level": 7}),
        ("folder", {"size": (2.5, 2)}),
        ("folder", {"size": (3, 4, 5)}),
    ],
)
def test_an_option_of_the_wrong_type_is_named(name, options, tmp_path):
    ((option, _),) = options.items()
    with pytest.raises(ArgumentError, match=f"^{option}: ") as raised:
        data.load(name, tmp_path, rng=np.random.default_rng(0), **options)
    assert "\n" not in str(raised.value)


def test_a_root_that_is_not_there_is_named_with_where_it_came_from(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    assert data.load("digits").name == "digits"  # which needs none
    with pytest.raises(DataError, match=r"root .*FEDSKEW_DATA"):
        data.load("mnist")
    with pytest.raises(DataError, match=r"root: .*gone does not exist"):
        data.load("mnist", tmp_path / "gone")
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "lost"))
    with pytest.raises(DataError, match=r"FEDSKEW_DATA: .*lost does not exist"):
        data.load("mnist")


def test_the_root_comes_from_the_argument_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSKEW_DATA", "/nowhere")
    (tmp_path / "t.csv").write_text("a,label\n" + "1,x\n2,y\n" * 10)
    assert data.load("csv", tmp_path / "t.csv", rng=np.random.default_rng(0)).classes == ("x", "y")
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "t.csv"))
    assert data.load("csv", rng=np.random.default_rng(0)).classes == ("x", "y")
