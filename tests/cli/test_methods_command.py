"""`fedskew methods`: what there is, and one of them in a page."""

from __future__ import annotations

import json

import pytest

from fedskew.methods import COMBINATIONS, PLACES, PRESETS

NAMES = sorted({*PRESETS, *COMBINATIONS, *(name for index in PLACES.values() for name in index)})


def test_the_list_names_every_preset_and_component_and_what_does_not_go_together_within_80_columns(tmp_path, command):
    done = command("methods", cwd=tmp_path, COLUMNS="80")
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = set(done.stdout.replace(",", " ").split())
    assert set(NAMES) - set(COMBINATIONS) <= words
    flat = " ".join(done.stdout.split())
    for text in ("NeurIPS 2020", "buffer=0.5", "+1 forward, +1 backward", "C up once", "fedentopt+fedprox"):
        assert text in flat
    assert "server_update.fednova is refused with local_step.scaffold" in flat
    assert "selection.fedentopt conflicts with weighting.fedpals" in flat


def test_one_in_a_page(tmp_path, command):
    done = command("methods", "fedprox", cwd=tmp_path, COLUMNS="80")
    for text in ("MLSys 2020", "(mu / 2) ||theta - w||^2", "mu = 0.01", 'preset = "fedprox"', "Goes with", "square"):
        assert text in done.stdout


def test_json_is_for_programs(tmp_path, command):
    done = command("methods", "fedvls", "--json", cwd=tmp_path)
    tree = json.loads(done.stdout)
    assert [one["name"] for one in tree["components"]] == ["fedvls_calibration", "vacant_distillation", "suppression"]
    assert tree["preset"]["cost"]["forward"] == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fedproxx", "did you mean 'fedprox'"),
        ("fedlc+fedrs", "take 'fedlc' or 'fedrs'"),
    ],
)
def test_an_unknown_or_senseless_name_is_one_line_and_exit_status_2(tmp_path, command, name, says):
    done = command("methods", name, cwd=tmp_path, status=2)
    assert done.stdout == ""
    assert says in done.stderr


def test_the_help_shows_an_example(tmp_path, command):
    done = command("methods", "--help", cwd=tmp_path)
    assert "fedskew methods fedentopt+fedprox" in done.stdout
