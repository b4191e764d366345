"""Sites and what they send as text are shown as they are: nothing moves a cursor, adds a line or turns one around."""

import io
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from example_runs import example_run
from rich.table import Table
from rich.text import Text

from fedskew.cli.operate import sites_table
from fedskew.cli.page import Console
from fedskew.names import visible
from fedskew.report import SeedRun, SiteActivity, write_report

HOSTILE = "\x1b[2J\rnorth\x07\u202egpj.exe\u2066\n2026 INFO: all is well"
SHOWN = r"\x1b[2J\rnorth\x07\u202egpj.exe\u2066\n2026 INFO: all is well"
RAW = ("\x1b", "\r", "\x07", "\u202e", "\u2066")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, SHOWN),
        ("\x9b31m", r"\x9b31m"),  # the escape sequence's other beginning
        ("a\u2028b\u200bc\ufeff", r"a\u2028b\u200bc\ufeff"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),  # a tag: a letter that nobody sees
        ("Köln 東京 naïve 1\u202f000 \u00a0", "Köln 東京 naïve 1\u202f000 \u00a0"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # a joiner that Persian needs
        ("C:\\new", "C:\\new"),
    ],
)
def test_what_cannot_be_seen_is_written_as_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_what_is_kept_stays() -> None:
    assert visible("a\nb\tc\x1b", keep="\n\t") == "a\nb\tc\\x1b"


def test_a_log_line_of_a_federation_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("flwr")
    from fedskew import deploy

    assert deploy.server_app.__module__ in sys.modules  # which sets up the log
    with caplog.at_level(logging.WARNING, "flwr"):
        logging.getLogger("flwr.fedskew").warning("refused the reply of %s: %s", "north", HOSTILE)
    assert caplog.messages == [f"refused the reply of north: {SHOWN}"]


def shown(*things: object, **more: bool) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200).print(*things, **more)  # type: ignore[arg-type]
    return out.getvalue()


def test_on_the_terminal_only_our_own_colours_are_commands() -> None:
    table = Table("name")
    table.add_row(HOSTILE.replace("[", r"\["))
    table.add_row(Text(HOSTILE))
    for text in (shown(HOSTILE, markup=False, highlight=False), shown(Text(HOSTILE)), shown(table)):
        assert r"\x1b[2J" in text
        assert r"\u202egpj.exe\u2066" in text
        assert not any(mark in text.replace("\x1b[0m", "").replace("\x1b[1m", "") for mark in RAW)
    assert shown("[red]stop[/red]") == "\x1b[31mstop\x1b[0m\n"


def test_a_report_shows_names_of_clients_and_classes_as_they_are(tmp_path: Path) -> None:
    run = example_run(rounds=1)
    classes, clients = ("\u202e0", *run.class_names[1:]), (HOSTILE, *map(str, range(1, len(run.counts))))
    named = replace(run, class_names=classes, client_names=clients, label=HOSTILE)
    page = write_report([named], tmp_path / "report.html", HOSTILE).read_text()
    before, _, rest = page.partition('<script type="application/json" id="figures">')
    figures, _, _ = rest.partition("</script>")
    assert not any(
        mark in text for mark in RAW for text in (before, figures, json.dumps(json.loads(figures), ensure_ascii=False))
    )
    assert r"\u202e0" in json.dumps(json.loads(figures)).replace("\\\\", "\\")
    assert r"\x1b[2J\rnorth" in before


# What the report and `fedskew deploy status` say of each site: asked, answered, why not, when

TOKYO, STRANGE = "東京 Köln", "\x1b[2Jnorth\u202egpj"
NOTES = {
    1: {"out_of_line": {TOKYO: 12.5}},
    2: {"refused": {"south": "its training loss is nan\x1b[31m"}, "failed": {STRANGE: "\u202eKeyError"}},
    3: {
        "offline": ["south"],
        "silent": [STRANGE],
        "evaluations": {TOKYO: {"accuracy": 0.5, "loss": 1.0, "samples": 8}},
    },
    4: {"skipped": [STRANGE], "undone": {"reason": "the model's loss is 9", "back_to": 3, "left_out": ["south"]}},
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
    return replace(made, client_names=(TOKYO, STRANGE, "south"))


def test_each_sites_rounds_are_counted_by_what_came_of_them(run: SeedRun) -> None:
    headings, rows = SiteActivity.table(SiteActivity.of(run))
    table = {row[0]: dict(zip(headings[1:], row[1:], strict=True)) for row in rows}
    assert list(table[TOKYO].values()) == ["3 of 5", "1 out of line", "round 5, 2026-11-22 10:05", "50.0 % of 8"]
    assert list(table[STRANGE].values())[:2] == ["2 of 4", "1 failed, 1 silent, 1 skipped"]
    assert table["south"]["counted"] == "1 of 3"
    assert table["south"]["not counted"] == "1 refused, 1 offline, left out since round 4"
    assert table["south"]["last counted (UTC)"] == "round 1, 2026-11-22 10:01"  # round 4 was undone
    troubles = {site.name: str(site.trouble) for site in SiteActivity.of(run)}
    assert troubles[TOKYO].endswith("out of line: 12.5 times as large as is likely")
    assert troubles["south"].startswith("round 4, 2026-11-22T10:04:00+00:00: left out, as the round was undone")
    assert SiteActivity.undone_rounds(run)[0].startswith(
        "Round 4, 2026-11-22T10:04:00+00:00, was undone: the model's loss is 9."
    )
    run.rounds[5].deployment = {"failed": {"south": "KeyError in its own log"}}
    assert SiteActivity.of(run)[2].trouble == "round 5: failed: KeyError in its own log"


def test_page_and_terminal_show_what_sites_call_themselves_as_it_is(run: SeedRun, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "report.html", "sites").read_text(encoding="utf-8")
    section = page.partition("<h2>Sites</h2>")[2].partition("</section>")[0]
    out = io.StringIO()
    Console(file=out, width=250).print(sites_table(SiteActivity.of(run)))
    for text in (section, out.getvalue()):
        assert TOKYO in text
        assert r"\x1b[2Jnorth\u202egpj" in text
        assert not {"\x1b", "\u202e"} & set(text)


@pytest.mark.parametrize("label", ["\u202e\u202e", "東京 東京 aaaaa"])
def test_a_sentence_loses_nothing_to_characters_that_are_wide_or_shown_as_escapes(label: str) -> None:
    out = io.StringIO()
    Console(file=out, width=60).sentences("Labels", [f"{label} " * 9])
    assert "".join(out.getvalue().split()) == f"Labels•{visible(label) * 9}".replace(" ", "")


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
