"""Tables of counts, written in every way that people write them or damaged at random: read right, or refused in a line.

Each seed makes its own cases; a failure names the seed and the case, which make the same file again.
"""

import csv
import io
import warnings
from pathlib import Path

import numpy as np
import pytest

from common import one_line
from fedskew.errors import DataWarning, FedskewError
from fedskew.labels import LabelCounts, describe, read_target

pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore::fedskew.errors.DataWarning")]

SEEDS = range(20)
CASES = 250
CLIENTS = ["north", "south", "Köln", "a b", "O'Hara", "7", "east,west", "x;y", 'the "new" one', "東京"]
CLASSES = ["cat", "dog", "Covid", "flu, mild", "0", "1", "naïve", "cold;old", "n/a", "猫"]
HEADERS = ["client", "Client", "hospital", "Site ID", "Klinik", ""]
TOTALS = ["total", "Total", "SUM", "Gesamt", "all"]


def written(rng: np.random.Generator, counts: np.ndarray, clients: list[str], classes: list[str]) -> bytes:
    """The counts as some spreadsheet, script or person would write them."""
    separator = str(rng.choice([",", ";", "\t", "|"]))
    decimal = str(rng.choice([".", ","]))
    thousands = str(rng.choice(["", "", {".": ",", ",": "."}[decimal], "'", " ", "\u202f"]))

    def number(value: float) -> str:
        whole, _, rest = (f"{value:,.2f}" if rng.random() < 0.2 or value % 1 else f"{value:,.0f}").partition(".")
        return whole.replace(",", thousands) + (decimal + rest if rest else "")

    cells = [[number(value) for value in row] for row in counts.tolist()]
    name = str(rng.choice(HEADERS))
    if rng.random() < 0.3:
        rows = [[name or "client", "class", str(rng.choice(["count", "n", "samples"]))]]
        rows += [
            [client, label, cell]
            for client, line in zip(clients, cells, strict=True)
            for label, cell in zip(classes, line, strict=True)
        ]
    else:
        rows = [[name, *classes], *([client, *line] for client, line in zip(clients, cells, strict=True))]
        if rng.random() < 0.3:
            rows[0].append(str(rng.choice(TOTALS)))
            for row, values in zip(rows[1:], counts, strict=True):
                row.append(number(values.sum()))
        if rng.random() < 0.3:
            sums = [*counts.sum(axis=0), *([counts.sum()] if len(rows[0]) > len(classes) + 1 else [])]
            rows.append([str(rng.choice(TOTALS)), *map(number, sums)])
    out = io.StringIO()
    quoting = int(rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=str(rng.choice(["\n", "\r\n"]))).writerows(
        rows
    )
    text = (f"sep={separator}\r\n" if rng.random() < 0.1 else "") + out.getvalue()
    return text.encode(str(rng.choice(["utf-8", "utf-8-sig", "utf-16"])))


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, list[str], list[str]]:
    """Counts of a few clients and classes, whole or with fractions, some of them thousands."""
    clients, classes = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    counts = rng.integers(0, 10 ** rng.integers(1, 7), (clients, classes)) * (rng.random((clients, classes)) < 0.8)
    values = counts + (np.round(rng.random((clients, classes)), 2) if rng.random() < 0.2 else 0.0)
    return (values, rng.permutation(CLIENTS)[:clients].tolist(), rng.permutation(CLASSES)[:classes].tolist())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_table_is_read_as_it_was_meant_or_asked_about(seed: int, tmp_path: Path) -> None:
    understood = 0
    for case in range(CASES):
        rng = np.random.default_rng([seed, case])
        counts, clients, classes = drawn(rng)
        path = tmp_path / "counts.csv"
        path.write_bytes(written(rng, counts, clients, classes))
        try:
            found = LabelCounts.read_csv(path)
        except FedskewError as error:
            one_line(error, (seed, case))
            continue
        understood += 1
        assert set(found.clients) == set(clients), (seed, case, path.read_bytes())
        assert set(found.classes) == set(classes), (seed, case, path.read_bytes())
        order = [found.clients.index(name) for name in clients], [found.classes.index(name) for name in classes]
        assert np.allclose(found.counts[np.ix_(*order)], counts, atol=0.006), (seed, case, path.read_bytes())
    assert understood > CASES / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_table_is_refused_in_one_line_or_gives_lawful_counts(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    for case in range(CASES):
        rng = np.random.default_rng([seed, case, 1])
        content = bytearray(written(rng, *drawn(rng)))
        for _ in range(int(rng.integers(1, 6))):
            damage(rng, content)
        path.write_bytes(content)
        for read in (
            lambda: describe(LabelCounts.read_csv(path)).to_dict(),
            lambda: read_target(path, ["cat", "dog"]),
            lambda: LabelCounts.read_csv(path, totals="drop", decimal=","),
        ):
            try:
                read()
            except FedskewError as error:
                one_line(error, (seed, case, bytes(content)))
            except Exception as error:
                raise AssertionError((seed, case, bytes(content))) from error


def damage(rng: np.random.Generator, content: bytearray) -> None:
    """Change, add, remove or repeat some bytes."""
    place = int(rng.integers(0, len(content) + 1))
    kind = rng.integers(0, 4)
    if kind == 0 and content:
        content[place - 1] = int(rng.integers(0, 256))
    elif kind == 1:
        tokens = [b'"', b"\n", b"\x00", b",", b";", b"nan", b"-1", b"1e999", b"total", b"\xff", b"1.234", "é".encode()]
        content[place:place] = tokens[int(rng.integers(len(tokens)))]
    elif kind == 2:
        del content[place : place + int(rng.integers(1, 9))]
    else:
        content += content[place : place + 20]


def test_what_the_fuzzer_writes_does_warn_of_totals(tmp_path: Path) -> None:
    said = 0
    for case in range(100):
        rng = np.random.default_rng([0, case])
        path = tmp_path / "counts.csv"
        path.write_bytes(written(rng, *drawn(rng)))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", DataWarning)
            try:
                LabelCounts.read_csv(path)
            except FedskewError:
                continue
        said += any("is a total, and was left out" in str(warning.message) for warning in found)
    assert said > 10
