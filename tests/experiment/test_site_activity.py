"""What the report and `fedskew deploy status` say of each site of a real federation: asked, answered, why not, when."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from example_runs import example_run

from fedskew.cli.operate import sites_table
from fedskew.cli.page import Console
from fedskew.report import SeedRun, SiteActivity, write_report

TOKYO, HOSTILE = "東京 Köln", "\x1b[2Jnorth\u202egpj"
NOTES = {
    1: {"out_of_line": {TOKYO: 12.5}},
    2: {"refused": {"south": "its training loss is nan\x1b[31m"}, "failed": {HOSTILE: "\u202eKeyError"}},
    3: {
        "offline": ["south"],
        "silent": [HOSTILE],
        "evaluations": {TOKYO: {"accuracy": 0.5, "loss": 1.0, "samples": 8}},
    },
    4: {"skipped": [HOSTILE], "undone": {"reason": "the model's loss is 9", "back_to": 3, "left_out": ["south"]}},
    5: {"left_out": ["south"], "quarantine": {"south": 4}},
}
ANSWERED = {1: [1, 2], 2: [0], 3: [0], 4: [0, 2], 5: [0, 1]}


@pytest.fixture
def run() -> SeedRun:
    made = example_run(rounds=5, clients=3, cohort=3)
    none = {"refused": {}, "failed": {}, "offline": [], "silent": [], "skipped": [], "left_out": [], "out_of_line": {}}
    for record in made.rounds[1:]:
        record.answered = ANSWERED[record.round]
        record.weights = [1 / len(record.answered)] * len(record.answered)
        record.steps = [1] * len(record.answered)
        record.deployment = none | {"ended": f"2026-11-22T10:0{record.round}:00+00:00"} | NOTES[record.round]
    return replace(made, client_names=(TOKYO, HOSTILE, "south"))


def test_each_sites_rounds_are_counted_by_what_came_of_them(run: SeedRun) -> None:
    headings, rows = SiteActivity.table(SiteActivity.of(run))
    table = {row[0]: dict(zip(headings[1:], row[1:], strict=True)) for row in rows}
    assert list(table[TOKYO].values()) == ["3 of 5", "1 out of line", "round 5, 2026-11-22 10:05", "50.0 % of 8"]
    assert list(table[HOSTILE].values())[:2] == ["2 of 4", "1 failed, 1 silent, 1 skipped"]
    assert table["south"]["counted"] == "1 of 3"
    assert table["south"]["not counted"] == "1 refused, 1 offline, left out since round 4"
    assert table["south"]["last counted (UTC)"] == "round 1, 2026-11-22 10:01"  # round 4 was undone
    troubles = {site.name: str(site.trouble) for site in SiteActivity.of(run)}
    assert troubles[TOKYO].endswith("out of line: 12.5 times as large as is likely")
    assert troubles["south"].startswith("round 4, 2026-11-22T10:04:00+00:00: left out, as the round was undone")
    assert SiteActivity.undone_rounds(run)[0].startswith(
        "Round 4, 2026-11-22T10:04:00+00:00, was undone: the model's loss is 9."
    )


def test_page_and_terminal_show_what_sites_call_themselves_as_it_is(run: SeedRun, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "report.html", "sites").read_text(encoding="utf-8")
    section = page.partition("<h2>Sites</h2>")[2].partition("</section>")[0]
    out = io.StringIO()
    Console(file=out, width=250).print(sites_table(SiteActivity.of(run)))
    for text in (section, out.getvalue()):
        assert TOKYO in text
        assert r"\x1b[2Jnorth\u202egpj" in text
        assert not {"\x1b", "\u202e"} & set(text)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_of_usual_width_shows_names_and_whole_headings(run: SeedRun, width: int) -> None:
    names = ("st-elisabeth", "charite-mitte", "south")
    out = io.StringIO()
    Console(file=out, width=width).print(sites_table(SiteActivity.of(rename(run, names))))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for name in names:
        assert sum(name in line for line in lines) == 1
    assert {"site", "counted", "accuracy"} <= set(" ".join(lines[:5]).split())
    assert all(word in out.getvalue() for word in ("3 of 5", "2026-11-22"))


def rename(run: SeedRun, names: tuple[str, ...]) -> SeedRun:
    """The run of sites with other names."""
    others = dict(zip(run.client_names, names, strict=True))
    for record in run.rounds:
        notes = record.deployment or {}
        for kind, sites in notes.items():
            if isinstance(sites, list):
                notes[kind] = [others[name] for name in sites]
            elif isinstance(sites, dict) and kind != "undone":
                notes[kind] = {others[name]: said for name, said in sites.items()}
    return replace(run, client_names=names)
