"""Label counts of raw data: several labels a sample, tables of several files, and what is refused."""

import numpy as np
import pytest

from fedskew.data import holdings
from fedskew.errors import DataError

CELLS = "site,findings\nA,Edema|Hernia\nA,Edema\nB,No Finding\nB,Hernia\n"
COLUMNS = "site,Edema,Hernia\nA,1,1\nA,1,0\nB,0,0\nB,0,1\n"


@pytest.mark.parametrize(("text", "label", "separator"), [(CELLS, "findings", "|"), (COLUMNS, "Edema, Hernia", None)])
def test_findings_are_counted_each_and_samples_beside_them(text, label, separator, tmp_path):
    (tmp_path / "chests.csv").write_text(text)
    counts, clients, classes, sizes = holdings(tmp_path / "chests.csv", label, "site", separator)
    assert (clients, classes) == (("A", "B"), ("Edema", "Hernia"))
    assert counts.tolist() == [[2, 1], [0, 1]]
    assert sizes.tolist() == [2, 2]


def test_arrays_of_findings_name_them(tmp_path):
    found = {"x": np.zeros((3, 2)), "y": [[1, 1], [0, 1], [0, 0]], "client": ["a", "a", "b"], "classes": ["u", "v"]}
    np.savez(tmp_path / "own.npz", **found)
    counts, _, classes, sizes = holdings(tmp_path / "own.npz")
    assert (counts.tolist(), classes, sizes.tolist()) == ([[1, 2], [0, 0]], ("u", "v"), [2, 1])


def test_each_of_several_tables_is_a_client(tmp_path):
    for name, labels in (("north", "xxy"), ("south", "y")):
        (tmp_path / f"{name}.csv").write_text("age,label\n" + "".join(f"1,{one}\n" for one in labels))
    for place in (tmp_path, tmp_path / "*.csv"):
        counts, clients, classes, sizes = holdings(place)
        assert (counts.tolist(), clients, classes, sizes) == ([[2, 1], [0, 1]], ("north", "south"), ("x", "y"), None)


@pytest.mark.parametrize(
    ("label", "separator", "words"),
    [
        ("findings", None, "looks like several"),
        ("finding", "|", "no column 'finding' for label (did you mean 'findings'?)"),
        ("site,findings", "|", "separator is for one column of labels, and these are 2"),
        ("site,findings", None, "has 'A' for 'site'; several labels a sample are columns of 0 and 1"),
    ],
)
def test_mistakes_are_one_line(label, separator, words, tmp_path):
    (tmp_path / "own.csv").write_text(CELLS)
    with pytest.raises(DataError) as raised:
        holdings(tmp_path / "own.csv", label, "site", separator)
    assert words in str(raised.value)
    assert "own.csv" in str(raised.value)
