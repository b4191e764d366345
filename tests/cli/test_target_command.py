"""`fedskew target`: predictions made elsewhere in, a label mix with its intervals and a verdict out."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.labels import Outcomes, estimate_mix

NAMES = ("cat", "dog", "owl", "fox")
UNIFORM, SKEWED = [0.25] * 4, [0.6, 0.2, 0.15, 0.05]


def sample(mix: Sequence[float], size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes, and a model's probabilities."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(4, size, p=mix)
    logits = rng.normal(size=(size, 4))
    logits[np.arange(size), labels] += 2
    return labels, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def table(path: Path, columns: dict[str, Sequence[object]], separator: str = ",") -> None:
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    labels, held_out = sample(UNIFORM, 800, 0)
    _, unlabelled = sample(SKEWED, 500, 1)
    table(
        tmp_path / "held.csv",
        {"label": [NAMES[y] for y in labels], **dict(zip(NAMES, held_out.round(6).T, strict=True))},
    )
    table(tmp_path / "new.csv", {"id": range(500), **dict(zip(NAMES, unlabelled.round(6).T, strict=True))})
    return tmp_path


@pytest.mark.slow
def test_the_page_says_the_verdict_and_each_class_and_writes_a_mix_that_other_commands_take(home, command):
    done = command("target", "new.csv", "--tables", "held.csv", "--out", "mix.csv")
    assert "Label mix of 500 samples" in done.stdout
    assert "look like a mix of the held-out classes (p = " in done.stdout
    assert (home / "target-mix.png").stat().st_size > 5000
    (home / "counts.csv").write_text("client,cat,dog,owl,fox\na,5,1,0,2\nb,0,4,4,1\n")
    command("describe", "counts.csv", "--target", "mix.csv", "--no-picture")

    values = json.loads(command("target", "new.csv", "--tables", "held.csv", "--json").stdout)
    np.testing.assert_allclose(values["mix"], SKEWED, atol=0.08)
    assert values["misfit"] is False
    assert f"{values['mix'][0]:.1%}" in done.stdout
    shares = [float(line.split(",")[1]) for line in (home / "mix.csv").read_text().splitlines()[1:]]
    assert shares == values["mix"]


def test_probabilities_predictions_with_confidence_and_counts_are_the_same_samples(home):
    by_probability = Outcomes.read(home / "new.csv", home / "held.csv")
    labels, held_out = sample(UNIFORM, 800, 0)
    _, unlabelled = sample(SKEWED, 500, 1)
    columns = [
        {"Predicted": [NAMES[y] for y in each.argmax(axis=1)], "confidence": each.round(6).max(axis=1)}
        for each in (held_out, unlabelled)
    ]
    table(home / "held2.csv", {"label": [NAMES[y] for y in labels], **columns[0]}, ";")
    table(home / "new2.csv", columns[1])
    by_prediction = Outcomes.read(home / "new2.csv", home / "held2.csv")
    assert by_prediction.classes == tuple(sorted(NAMES))  # no column says their order
    order = [by_prediction.classes.index(name) for name in by_probability.classes]
    np.testing.assert_array_equal(
        by_prediction.tables.reshape(4, 4, 4)[np.ix_(order, order)].reshape(4, 16), by_probability.tables
    )
    assert (by_probability.tables.sum(), by_probability.cells.sum()) == (800, 500)

    written = {"file": range(800), "class": columns[0]["Predicted"]}  # as by `fedskew predict --csv`
    shares = dict(zip(NAMES, held_out.round(6).T, strict=True))
    table(home / "held4.csv", written | shares | {"label": [NAMES[y] for y in labels]})
    np.testing.assert_array_equal(Outcomes.read(home / "new.csv", home / "held4.csv").tables, by_probability.tables)
    table(home / "held4.csv", written | shares)
    with pytest.raises(ArgumentError, match="no column 'label' in the header: the true class of each held-out sample"):
        Outcomes.read(home / "new.csv", home / "held4.csv")

    names = [f"cell {at}" for at in range(16)]
    table(home / "held3.csv", {"class": NAMES, **dict(zip(names, by_probability.tables.T.astype(int), strict=True))})
    table(home / "new3.csv", {name: [int(count)] for name, count in zip(names, by_probability.cells, strict=True)})
    counted = Outcomes.read(home / "new3.csv", home / "held3.csv")
    np.testing.assert_array_equal(counted.tables, by_probability.tables)
    np.testing.assert_array_equal(counted.cells, by_probability.cells)
    np.testing.assert_allclose(counted.estimate().mix, estimate_mix(by_probability.tables, by_probability.cells).mix)


def test_without_confidence_there_is_an_estimate_and_nothing_to_test(home, command):
    labels, held_out = sample(UNIFORM, 800, 0)
    table(home / "h.csv", {"class": labels, "prediction": held_out.argmax(axis=1)})
    table(home / "n.csv", {"prediction": sample(SKEWED, 500, 1)[1].argmax(axis=1)})
    done = command("target", "n.csv", "--tables", "h.csv", "--no-picture")
    assert "can't be tested" in done.stdout
    assert "the predictions' confidence where the files lack it" in done.stdout


def test_em_takes_all_probabilities(home, command):
    done = command("target", "new.csv", "--tables", "held.csv", "--method", "em", "--json")
    np.testing.assert_allclose(json.loads(done.stdout)["mix"], SKEWED, atol=0.08)
    table(home / "h.csv", {"label": [0, 1], "predicted": [0, 1]})
    table(home / "n.csv", {"predicted": [0, 1]})
    refused = command("target", "n.csv", "--tables", "h.csv", "--method", "em", status=2)
    assert "em takes each sample's probability of every class" in refused.stderr


def test_samples_of_another_kind_are_not_trusted(home, command):
    _, unlabelled = sample(SKEWED, 500, 1)
    strange = 0.7 * unlabelled + 0.3 * np.roll(unlabelled, 1, axis=1)
    table(home / "new.csv", dict(zip(NAMES, strange.round(6).T, strict=True)))
    assert "Don't trust this mix" in command("target", "new.csv", "--tables", "held.csv", "--no-picture").stdout


@pytest.mark.parametrize(
    ("held_out", "new", "says"),
    [
        ("predicted\n1\n", "predicted\n1\n", "held.csv, line 1: no column 'label' in the header"),
        ("label,predicted\n1,1\n", "guess\n1\n", "new.csv, line 1: no column 'predicted'"),
        ("label,predicted,confidence\n1,1,0.5\n", "predicted\n1\n", "new.csv, line 1: no column 'confidence'"),
        ("label,predicted,confidence\n1,1,1.5\n", "predicted,confidence\n1,1\n", "1.5, expected a probability"),
        ("label,a,b\na,0.5,0.5\nc,0.5,0.5\n", "a,b\n0.5,0.5\n", "held.csv, line 3: the label 'c' has no column"),
        ("label,a,b\na,0.5,0.5\n", "a,b\n0.5,0.1\n", "new.csv, line 2: the probabilities sum to 0.6, not to 1"),
        ("label,a,b\na,0.5,0.5\n", "a\n1\n", "new.csv, line 1: no column 'b'"),
        ("label,a,b\na,0.5,0.2\na,0.5,0.5\n", "a,b\n1,0\n", "held.csv, line 2: the row sums to 0.7"),
        ("label,a,b\na,5,2\nb,1,4\n", "a,b\n1,2\n3,4\n", "new.csv, line 3: a second row"),
        ("label,a,b\n", "a,b\n1,2\n", "held.csv, line 1: nothing below the header"),
        ("label,a,b\na,0.5,nan\n", "a,b\n1,0\n", "held.csv, line 2, column 'b': nan"),
        ("label,a,b\n,0.5,0.5\n", "a,b\n1,0\n", "column 'label': empty"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(tmp_path, command, held_out, new, says):
    (tmp_path / "held.csv").write_text(held_out)
    (tmp_path / "new.csv").write_text(new)
    assert says in command("target", "new.csv", "--tables", "held.csv", status=2).stderr
