"""Text from sites and files is shown as it is: nothing in it moves a cursor, adds a line or turns one around."""

from __future__ import annotations

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

from fedskew.cli.page import Console
from fedskew.names import visible
from fedskew.report import write_report

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

    assert deploy.Registry.__module__ in sys.modules  # any module of it sets up the log
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
