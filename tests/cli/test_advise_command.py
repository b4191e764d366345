"""`fedskew advise` with a table of one's own, and the mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import Command

from fedskew.advice import Evidence, evidence_bytes, features

COUNTS = "client,a,b\none,50,10\ntwo,10,50\nthree,30,30\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Counts, and a table of federations that are like them: fedla gains where few take part, scaffold where all do."""
    (tmp_path / "counts.csv").write_text(COUNTS)
    counts = np.array([[50, 10], [10, 50], [30, 30]])
    shares = [0.4] * 12 + [1.0] * 12
    rows = [features(counts, None, share, 1) for share in shares]
    gains = np.array([[2.0 + at % 3, -1.0] if share < 1 else [-2.0, 3.0] for at, share in enumerate(shares)])
    evidence = Evidence(
        federations=tuple(f"digits, number {at}" for at in range(24)),
        tasks=("digits", "mnist") * 12,
        rules=("iid", "quantity", "shards") * 8,
        names=tuple(rows[0]),
        features=np.array([list(row.values()) for row in rows]),
        methods=("fedla", "scaffold"),
        gains=gains,
        worst=gains * 2,
    )
    (tmp_path / "evidence.csv.gz").write_bytes(evidence_bytes(evidence))
    return tmp_path


def test_advice_names_a_method_its_reason_and_what_was_gained_nearby(home: Path, command: Command) -> None:
    done = command("advise", "counts.csv", "--participation", "0.4", "--table", "evidence.csv.gz", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "Take fedla, by a fixed rule: where not all clients take part in a round" in done.stdout
    assert "fedskew methods NAME says what a method asks of clients and reveals" in " ".join(done.stdout.split())
    assert "digits, number" in done.stdout
    assert "Small networks, digits and clothes" in done.stdout
    everyone = command("advise", "counts.csv", "--table", "evidence.csv.gz", "--json", cwd=home)
    found = json.loads(everyone.stdout)
    assert (found["method"], found["supported"], found["table"]) == ("scaffold", True, 24)
    best = found["methods"][0]
    assert (best["method"], best["median"], best["gained"], best["worst_class"]) == ("scaffold", 3.0, 1.0, 6.0)
    left_out = command("advise", "counts.csv", "--table", "evidence.csv.gz", "--without", "scaffold", cwd=home)
    assert "Take FedAvg" in left_out.stdout
    assert "fedskew methods" not in left_out.stdout


@pytest.mark.slow
def test_advice_is_validated_by_leaving_tasks_and_rules_out(home: Path, command: Command) -> None:
    done = command("advise", "--validate", "--table", "evidence.csv.gz", cwd=home)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = lines.index(next(line for line in lines if line.startswith("left_out,predictor")))
    assert [line.split(",")[:3] for line in lines[start + 1 :]] == [
        [out, name, "24"] for out in ("task", "rule") for name in ("neighbours", "forest")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "SOURCE: give label counts"),
        (("counts.csv", "--validate"), "--validate: looks at the whole table"),
        (("counts.csv", "--participation", "0"), "participation: must be a share above 0"),
        (("counts.csv", "--epochs", "-1"), "epochs: must be above 0"),
        (("counts.csv", "--without", "fedlaa"), "the table has no method 'fedlaa' (did you mean 'fedla'?)"),
        (("nothing.csv",), "nothing.csv"),
    ],
)
def test_mistakes_are_one_line(home: Path, command: Command, words: tuple[str, ...], message: str) -> None:
    done = command("advise", *words, "--table", "evidence.csv.gz", cwd=home)
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_table_that_is_none_is_named(home: Path, command: Command) -> None:
    done = command("advise", "counts.csv", "--table", "counts.csv", cwd=home)
    assert "counts.csv: the table of evidence can't be read" in done.stderr
