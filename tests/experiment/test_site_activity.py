"""What the report and `fedskew deploy status` say of each site of a real federation: asked, answered, why not, when."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from example_runs import example_run

from fedskew.cli.console import Console
from fedskew.cli.tables import sites_table
from fedskew.report import SeedRun, site_activity, site_rows, undone_rounds, write_report

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
    headings, rows = site_rows(site_activity(run))
    table = {row[0]: dict(zip(headings[1:], row[1:], strict=True)) for row in rows}
    shown = ["asked", "counted", "refused", "failed", "offline", "silent", "skipped", "out of line", "left out"]
    assert [table[TOKYO][key] for key in shown] == ["5", "3", "0", "0", "0", "0", "0", "1", "0"]
    assert [table[HOSTILE][key] for key in shown] == ["4", "2", "0", "1", "0", "1", "1", "0", "0"]
    assert [table["south"][key] for key in shown] == ["3", "1", "1", "0", "1", "0", "0", "0", "since round 4"]
    assert table["south"]["last counted (UTC)"] == "round 1, 2026-11-22T10:01:00"  # round 4 was undone
    assert (table[TOKYO]["own test accuracy"], table[TOKYO]["test samples"]) == ("50.0 %", "8")
    troubles = {site.name: str(site.trouble) for site in site_activity(run)}
    assert troubles[TOKYO].endswith("out of line: 12.5 times as large as is likely")
    assert troubles["south"].startswith("round 4, 2026-11-22T10:04:00+00:00: left out, as the round was undone")
    assert undone_rounds(run)[0].startswith("Round 4, 2026-11-22T10:04:00+00:00, was undone: the model's loss is 9.")


def test_page_and_terminal_show_what_sites_call_themselves_as_it_is(run: SeedRun, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "report.html", "sites").read_text(encoding="utf-8")
    section = page.partition("<h2>Sites</h2>")[2].partition("</section>")[0]
    out = io.StringIO()
    Console(file=out, width=250).print(sites_table(site_activity(run)))
    for text in (section, out.getvalue()):
        assert TOKYO in text
        assert r"\x1b[2Jnorth\u202egpj" in text
        assert not {"\x1b", "\u202e"} & set(text)
