"""Samples of several labels, or none: read from columns, cells and arrays; and label counts of raw data."""

import numpy as np
import pytest
import torch

from common import as_bits, refused, rng
from fedskew import data, findings
from fedskew.data import Dataset, from_object, holdings
from fedskew.errors import ArgumentError, DataError, DataWarning

ROWS = [(1, 0, 0), (1, 1, 0), (0, 0, 0), (0, 1, 1)] * 10
NAMES = ("Edema", "Effusion", "Hernia")


def by_age(dataset: Dataset) -> list[int]:
    """The bits of every sample in the order of its only feature, its place in the file."""
    ages = torch.cat([dataset.inputs, dataset.test_inputs])[:, 0] * dataset.std[0]
    return torch.cat([dataset.targets, dataset.test_targets])[ages.argsort()].tolist()


def columns(folder, rows=ROWS, header=NAMES):
    path = folder / "own.csv"
    lines = [f"{at * 1.5},{','.join(map(str, row))}" for at, row in enumerate(rows)]
    path.write_text("\n".join([f"age,{','.join(header)}", *lines]) + "\n", encoding="utf-8")
    return path


EXPECTED = [1, 3, 0, 6] * 10  # the bits of Edema, Effusion and Hernia are 1, 2 and 4


def test_findings_are_read_alike_from_columns_separators_arrays_tables_and_objects(tmp_path):
    joined = ["|".join(name for name, has in zip(NAMES, row, strict=True) if has) or "No Finding" for row in ROWS]
    rows = (f"{at * 1.5},{cell}\n" for at, cell in enumerate(joined))
    (tmp_path / "joined.csv").write_text("age,label\n" + "".join(rows), encoding="utf-8")
    x = np.arange(40.0)[:, None]
    np.savez(tmp_path / "own.npz", x=x, y=np.array(ROWS, dtype=float), classes=np.array(NAMES))
    items = [(torch.tensor([float(at)]), torch.tensor(row)) for at, row in enumerate(ROWS)]
    read = [
        data.load("csv", columns(tmp_path), rng=rng(), label=list(NAMES)),
        data.load("csv", tmp_path / "joined.csv", rng=rng(), separator="|"),
        data.load("npz", tmp_path / "own.npz", rng=rng()),
        from_object(items).read(rng()),
    ]
    for made in read:
        assert (made.multi_label, made.in_shape, len(made.test_targets)) == (True, (1,), 8)
        assert by_age(made) == EXPECTED
    assert [made.classes for made in read] == [NAMES, NAMES, NAMES, ("0", "1", "2")]


def test_a_text_with_commas_is_a_list_of_columns_unless_a_column_is_called_so(tmp_path):
    for label in ("Edema,Effusion,Hernia", "Edema, Effusion, Hernia"):
        made = data.load("csv", columns(tmp_path), rng=rng(), label=label)
        assert (made.classes, made.multi_label, by_age(made)) == (NAMES, True, EXPECTED)
    with pytest.raises(DataError, match="no column 'Oedema'; set data.label to the column of labels .columns: age"):
        data.load("csv", columns(tmp_path), rng=rng(), label="Edema,Oedema")
    path = tmp_path / "comma.csv"
    path.write_text('age,"Edema,main",Edema,main\n' + "1,sick,1,0\n2,well,0,1\n" * 5)
    assert data.load("csv", path, rng=rng(), label="Edema,main").classes == ("sick", "well")
    path.write_text("age,Edema,main\n" + "1,1,0\n2,1,1\n" * 5)
    assert data.load("csv", path, rng=rng(), label="Edema,main").multi_label


def test_findings_of_a_table_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    flags = {name: [bool(row[at]) for row in ROWS] for at, name in enumerate(NAMES)}
    ids = [[at for at, has in enumerate(row) if has] for row in ROWS]
    listed = datasets.Features({
        "x": datasets.Value("float64"), "label": datasets.Sequence(datasets.ClassLabel(names=list(NAMES))),
    })  # fmt: skip
    x = list(map(float, range(40)))
    for table, options in (
        (datasets.Dataset.from_dict({"x": x, **flags}), {"label": NAMES}),
        (datasets.Dataset.from_dict({"x": x, **flags}), {"label": ",".join(NAMES)}),
        (datasets.Dataset.from_dict({"x": x, "label": ids}, features=listed), {}),
    ):
        made = data.from_huggingface(table, rng=rng(), **options)
        assert (made.classes, made.multi_label, by_age(made)) == (NAMES, True, EXPECTED)
        assert made.encoder.labelled == (NAMES if options else ("label",))


def test_what_is_held_out_has_a_share_of_the_rarest_finding_of_each_sample(tmp_path):
    made = data.load("csv", columns(tmp_path), rng=rng(), label=list(NAMES), test_share=0.2)
    # the rarest finding of the kinds: Edema (20 of 40, as Effusion, which comes later), Edema, none, Hernia
    held = [
        EXPECTED[at] for at in (made.test_inputs[:, 0] * made.std[0] + made.mean[0]).div(1.5).round().int().tolist()
    ]
    assert (held.count(1) + held.count(3), held.count(0), held.count(6)) == (4, 2, 2)


MISTAKES = [
    ([(1, 0, 2), *ROWS], "line 2 has '2' for 'Hernia'; several labels a sample are columns of 0 and 1"),
    ([(1, "", 0), *ROWS], "1 sample without a label ('', first in own.csv, line 2)"),
    ([*ROWS, (1, "N/A", 0)], "('N/A', first in own.csv, line 42)"),
    ([*ROWS, (1, "N/A", 0)], "or write 0 (flags), No Finding (cell) or an empty list"),
]


@pytest.mark.parametrize(("rows", "words"), MISTAKES)
def test_columns_of_something_else_are_refused(rows, words, tmp_path):
    with refused(DataError, words, "own.csv"):
        data.load("csv", columns(tmp_path, rows), rng=rng(), label=list(NAMES))


def test_more_mistakes_of_several_labels(tmp_path):
    path = columns(tmp_path, [("1", "nan", "0"), *ROWS])
    with pytest.warns(DataWarning, match="1 sample without a label left out"):
        made = data.load("csv", path, rng=rng(), label=list(NAMES), missing_labels="drop")
    assert by_age(made) == EXPECTED
    header = ("Edema", "age2", "age3")
    assert not data.load("csv", columns(tmp_path, header=header), rng=rng(), label=["Edema"]).multi_label
    one_hot = columns(tmp_path, [(1, 0, 0), (0, 1, 0), (0, 0, 1)] * 10)
    with pytest.warns(DataWarning, match="if they are one-hot columns of one label, write one column of names"):
        assert data.load("csv", one_hot, rng=rng(), label=list(NAMES)).multi_label
    odd = "of line 3 has an empty part, or says none beside another"
    for cell, words in (("Edema||Hernia", odd), ("Edema|No Finding", odd), ("", "No Finding .cell")):
        path.write_text(f"age,label\n1,Edema|Hernia\n2,{cell}\n", encoding="utf-8")
        with pytest.raises(DataError, match=words):
            data.load("csv", path, rng=rng(), separator="|")
    many = np.eye(63, dtype=int)
    np.savez(tmp_path / "many.npz", x=np.zeros((63, 1)), y=many | many[::-1])
    with pytest.raises(DataError, match="2 to 62 labels, not 63"):
        data.load("npz", tmp_path / "many.npz", rng=rng(), test_share=0.9)


def test_a_schema_names_columns_of_labels_or_the_classes_of_one(tmp_path):
    labels = {name: {"kind": "label"} for name in NAMES}
    schema = {"columns": {"age": {"kind": "number"}, **labels}}
    made = data.load("csv", columns(tmp_path), rng=rng(), schema=schema)
    assert (made.classes, made.multi_label, by_age(made)) == (NAMES, True, EXPECTED)
    path = tmp_path / "one.csv"
    path.write_text("age,label\n" + "1,0.0\n2,1\n3,1.0\n" * 5 + "4,na\n", encoding="utf-8")
    schema = {"columns": {"age": {"kind": "number"}, "label": {"kind": "label", "categories": ["0", "1", "2"]}}}
    with pytest.warns(DataWarning, match="1 sample without a label left out"):
        made = data.load("csv", path, rng=rng(), schema=schema, missing_labels="drop")
    assert torch.cat([made.targets, made.test_targets]).bincount(minlength=3).tolist() == [5, 10, 0]
    path.write_text("age,label\n" + "1,a|b\n2,a|c\n" * 5, encoding="utf-8")
    schema["columns"]["label"]["categories"] = ["a", "b"]
    with pytest.raises(DataError, match="the label 'c' is none of the classes"):
        data.load("csv", path, rng=rng(), schema=schema, separator="|")
    schema["columns"]["label"]["categories"] = ["a", "b", "caf\u00e9"]
    path.write_text("age,label\n" + "1,a|b\n2,a|cafe\u0301\n" * 5, encoding="utf-8")
    with pytest.raises(DataError, match="it is 'caf\u00e9' with letters encoded in another way, NFC or NFD"):
        data.load("csv", path, rng=rng(), schema=schema, separator="|")


def test_a_data_set_holds_each_samples_labels_as_bits():
    table = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    bits = as_bits(table)
    assert bits.tolist() == [1, 3, 0, 7]
    assert np.array_equal(findings.as_table(bits, 3), table)
    assert findings.rarest(table).tolist() == [0, 1, 3, 2]  # 3: none
    widest = np.ones((1, 62), dtype=int)
    assert np.array_equal(findings.as_table(as_bits(widest), 62), widest)

    def made(classes, targets):
        x, y = torch.zeros(len(targets), 1), torch.tensor(targets)
        return Dataset("own", x, y, x, y, classes, multi_label=True)

    whole = made(("a", "b", "c"), bits.tolist())
    assert np.array_equal(whole.labels, table)
    assert whole.strata.tolist() == [0, 1, 3, 2]
    with pytest.raises(ArgumentError, match="ids must lie in 0 to 7; found 8"):
        made(("a", "b", "c"), [8])
    with pytest.raises(ArgumentError, match="several of 62 at most, not 63"):
        made(tuple(map(str, range(63))), [0])


# Label counts of raw data: several labels a sample, tables of several files, and what is refused.


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
    with refused(DataError, words, "own.csv"):
        holdings(tmp_path / "own.csv", label, "site", separator)
