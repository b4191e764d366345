"""Labels as people write them: each mistake is refused or said before training, in one line with what to do."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from common import refused, rng, save_image
from fedskew import data
from fedskew.data import Dataset, from_object, holdings
from fedskew.errors import DataError, DataWarning


def table(folder, labels, **options) -> Dataset:
    """What the reader "csv" makes of a column of labels."""
    path = folder / "own.csv"
    path.write_text(
        "age,label\n" + "".join(f'{age * 1.5},"{label}"\n' for age, label in enumerate(labels)), encoding="utf-8"
    )
    return data.load("csv", path, rng=rng(), **options)


def sizes(dataset: Dataset) -> dict[str, int]:
    both = torch.cat([dataset.targets, dataset.test_targets]).bincount(minlength=dataset.num_classes)
    return dict(zip(dataset.classes, both.tolist(), strict=True))


SICK = ["sick", "well"] * 20

REFUSED = [
    ([*SICK, "nan"], "1 sample without a label ('nan', first in own.csv, line 42)"),
    ([*SICK, "NaN", "N/A"], "2 samples without a label"),
    (["", *SICK], "('', first in own.csv, line 2)"),
    ([*SICK, "null"], "give what they are a name"),
    ([*SICK, "?"], "without a label ('?'"),
    (["0", "1.0", "nan"] * 10, "10 samples without a label"),
    (
        ["0.2", "0.7", "1.5"] * 10,
        "the label '0.2' is a measurement; regression is not what fedskew does: write classes",
    ),
    (["1e-3", "2"] * 10, "measurement"),
    (
        [str(70 + at) for at in range(297)],
        "297 different labels (100, 101, 102, ...) of 297 samples are hardly classes",
    ),
    ([str(70 + at) for at in range(40)] * 2, "is it the right column? Are they measurements? Regression"),
    ([f"P-{at}" for at in range(30)], "30 different labels (P-0, P-1, P-10, ...) of 30 samples are hardly classes"),
    (["a", "b", "a|b"] * 10, "the label 'a|b' looks like several"),
    (["a;b", "b;c"] * 10, "the label 'a;b' looks like several; write it without ';' if it is one class"),
]


def test_a_class_that_data_name_is_one_also_where_its_name_says_nothing(tmp_path):
    columns = {"age": {"kind": "number"}, "label": {"kind": "label", "categories": ["NA", "K"]}}
    assert sizes(table(tmp_path, ["NA", "K"] * 20, schema={"columns": columns})) == {"NA": 20, "K": 20}


@pytest.mark.parametrize(("labels", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_is_no_class_is_refused_in_one_line_with_what_to_do(labels, words, tmp_path):
    with refused(DataError, words, "own.csv"):
        table(tmp_path, labels)
    with pytest.raises(DataError) as counted:
        holdings(tmp_path / "own.csv", "label")
    assert words in str(counted.value) or "empty" in str(counted.value)


@pytest.mark.parametrize(("cell", "more"), [("nan", {}), ("-999", {"missing": ["-999"]}), ("", {})])
def test_a_missing_label_of_a_schema_is_said_as_it_stands(cell, more, tmp_path):
    columns = {"age": {"kind": "number"}, "label": {"kind": "label", "categories": ["sick", "well"]}}
    schema = {"columns": columns, "missing": ["", "nan"]} | more
    with pytest.raises(DataError, match=rf"1 sample without a label \('{cell}', first in own.csv, line 42\)"):
        table(tmp_path, [*SICK, cell], schema=schema)
    with pytest.warns(DataWarning, match="1 sample without a label left out"):
        assert sizes(table(tmp_path, [*SICK, cell], schema=schema, missing_labels="drop")) == {"sick": 20, "well": 20}


SAID = [
    ([*SICK, *["unknown"] * 5], "'unknown', of 5 samples, is trained on as a class like the others", None),
    ([*SICK, *["None"] * 5], "leave these out if it says that nobody knows", None),
    (["1.0", "2.0"] * 10, "'1.0' and the like are taken for whole numbers, as '1'", {"1": 10, "2": 10}),
    (["1", "1.0", "2"] * 10, "'1.0' and the like", {"1": 20, "2": 10}),
    (["0", "1e1"] * 10, "'1e1' and the like are taken for whole numbers, as '10'", {"0": 10, "10": 10}),
    (["1", "01"] * 10, "names '01' and '1'; they are counted as 2 classes: rename them", {"01": 10, "1": 10}),
    (["Normal", "normal"] * 10, "'Normal' and 'normal'; they are counted as 2 classes", None),
    (["caf\u00e9", "cafe\u0301"] * 10, "encoded in two ways (NFC and NFD)", None),
    (["ductal", "lobular", "ductal, lobular"] * 10, "looks like several; it is trained on as one class", None),
    ([str(18 + age) for age in range(40)] * 20, "40 different numbers (18, 19, 20, ...) become as many classes", None),
]


@pytest.mark.parametrize(("labels", "words", "classes"), SAID, ids=[words[:30] for _, words, _ in SAID])
def test_what_may_be_a_class_by_accident_is_said(labels, words, classes, tmp_path):
    with pytest.warns(DataWarning) as said:
        read = table(tmp_path, labels)
    assert any(words in str(one.message) for one in said)
    assert sizes(read) == (classes or {name: labels.count(name) for name in set(labels)})


@pytest.mark.parametrize(
    "labels",
    [
        [str(at) for at in range(60)] * 3,  # numbers from 0 or 1 on are ids
        [str(at + 1) for at in range(25)] * 3,
        ["-1", "1"] * 10,
        ["Carcinoma, ductal", "Carcinoma in situ", "Sci/Tech"] * 10,
        ["left|right", "up"] * 10,  # no piece is known by itself
        ["True", "False"] * 10,
        ["20-30", "30-40", "40+"] * 10,
    ],
)
def test_ordinary_classes_are_taken_without_a_word(labels, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sizes(table(tmp_path, labels)) == {name: labels.count(name) for name in set(labels)}


def test_samples_without_a_label_are_left_out_where_asked(tmp_path):
    with pytest.warns(DataWarning, match="3 samples without a label left out"):
        read = table(tmp_path, ["nan", *SICK, "", "NA"], missing_labels="drop")
    assert sizes(read) == {"sick": 20, "well": 20}
    ages = torch.cat([read.inputs, read.test_inputs]) * read.std[0] + read.mean[0]
    assert sorted(ages.flatten().div(1.5).round().tolist()) == list(range(1, 41))  # those of rows with a label
    with pytest.raises(DataError, match="no sample has a label"):
        table(tmp_path, ["nan", ""], missing_labels="drop")


def test_arrays_and_objects_are_read_by_the_same_rules(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=np.arange(20.0)[:, None], y=np.array([1.0, 2.0] * 9 + [np.nan, 2.0]))
    with pytest.raises(DataError, match=r"own.npz: 1 sample without a label \('nan', first in sample 19\)"):
        data.load("npz", path, rng=rng())
    with pytest.warns(DataWarning) as said:
        assert sizes(data.load("npz", path, rng=rng(), missing_labels="drop")) == {"1": 9, "2": 10}
    assert "1 sample without a label left out" in str(said[0].message)
    np.savez(path, x=np.zeros((20, 4, 4)), y=np.zeros((20, 4, 4), dtype=int))
    with pytest.raises(DataError, match="'y' has a label for each pixel.*segmentation is not what fedskew does"):
        data.load("npz", path, rng=rng())

    def of(*labels):
        return from_object([(torch.tensor([float(at)]), label) for at, label in enumerate(labels)]).read(rng())

    with pytest.raises(DataError, match=r"data: the label '0.5' is a measurement"):
        of(*[0.5, 1.0] * 10)
    with pytest.raises(DataError, match=r"data: 1 sample without a label"):
        of(*[0, 1] * 10, None)
    for mask in (torch.zeros(4, 4), Image.new("L", (4, 4))):
        with pytest.raises(DataError, match="item 0 has a label for each pixel; segmentation"):
            of(mask, mask)


def test_tables_of_hugging_face_are_read_by_the_same_rules(tmp_path):
    datasets = pytest.importorskip("datasets")

    def of(labels, **options):
        return data.from_huggingface(
            datasets.Dataset.from_dict({"x": list(map(float, range(len(labels)))), "label": labels}),
            rng=rng(),
            **options,
        )

    with pytest.raises(DataError, match="table: 1 sample without a label .*first in sample 21"):
        of([0, 1] * 10 + [None])
    with pytest.warns(DataWarning, match="1 sample without a label left out"):
        assert sizes(of([0, 1] * 10 + [None], missing_labels="drop")) == {"0": 10, "1": 10}
    with pytest.raises(DataError, match="'0.5' is a measurement"):
        of([0.5, 1.0] * 10)
    with pytest.warns(DataWarning, match="taken for whole numbers"):
        assert sizes(of([0.0, 1.0] * 10)) == {"0": 10, "1": 10}


def test_a_folder_called_na_is_asked_about(tmp_path):
    for name in ("NA", "well"):
        for at in range(5):
            save_image(tmp_path / name / f"{at}.png", Image.new("L", (4, 4), at))
    with pytest.raises(DataError, match="5 samples without a label .*; take them out, or give what they are a name"):
        data.load("folder", tmp_path, rng=rng())


def test_a_missing_label_is_found_by_file_and_line_and_left_out_by_what_can_do_so(tmp_path):
    for name, labels in (("north", "xy"), ("south", ["x", "NA"])):
        (tmp_path / f"{name}.csv").write_text("age,label\n" + "".join(f"1.5,{one}\n" for one in labels))
    first = r"1 sample without a label \('NA', first in south.csv, line 3\); "
    with pytest.raises(DataError, match=rf"{first}take them out, or give what they are a name$"):
        holdings(tmp_path)
    with pytest.raises(DataError, match=rf"{first}leave them out \(data.missing_labels = 'drop'\), or give"):
        data.load("csv", tmp_path, rng=rng())
    (tmp_path / "south.csv").rename(tmp_path / "held.csv")
    with pytest.raises(DataError, match=r"north.csv: 1 sample .*first in held.csv, line 3"):
        data.load("csv", tmp_path / "north.csv", rng=rng(), test="held.csv")
