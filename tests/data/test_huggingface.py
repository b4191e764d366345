"""A user's own data in an object of Hugging Face's package."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from fedskew import data
from fedskew.errors import ArgumentError, DataError, MissingPackageError

RNG = np.random.default_rng(0)


def hf() -> ModuleType:
    """Their package, which takes seconds to import: only when a test needs it."""
    package: ModuleType = pytest.importorskip("datasets", reason="needs the extra hf")
    return package


def images(samples: int, mode: str = "RGB", side: int = 4):
    shape = (side, side, 3) if mode == "RGB" else (side, side)
    features = hf().Features({"image": hf().Image(), "label": hf().ClassLabel(names=["zebra", "ant", "never seen"])})
    rows = {
        "image": [RNG.integers(0, 256, shape, dtype=np.uint8) for _ in range(samples)],
        "label": [row % 2 for row in range(samples)],
    }
    return hf().Dataset.from_dict(rows, features=features)


@pytest.mark.slow
def test_images_with_class_labels_and_a_test_part():
    parts = hf().DatasetDict({"train": images(6), "test": images(4)})
    dataset = data.from_huggingface(parts)
    assert dataset.inputs.shape == (6, 3, 4, 4)
    assert dataset.test_inputs.shape == (4, 3, 4, 4)
    # ids as the ClassLabel has them, not in alphabetical order
    assert dataset.classes == ("zebra", "ant", "never seen")
    assert dataset.targets.tolist() == [0, 1, 0, 1, 0, 1]
    whole = np.stack([np.asarray(row["image"]) for row in parts["train"]]) / 255
    mean, std = whole.mean((0, 1, 2)), whole.std((0, 1, 2))
    expected = torch.from_numpy(((whole - mean) / std).transpose(0, 3, 1, 2)).float()
    torch.testing.assert_close(dataset.inputs, expected, atol=1e-5, rtol=1e-5)
    assert dataset.mean == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_grey_images_have_one_channel_and_are_resized_on_demand():
    parts = hf().DatasetDict({"train": images(6, "L"), "test": images(4, "L")})
    assert data.from_huggingface(parts, size=(6, 8)).in_shape == (1, 6, 8)
    mixed = hf().DatasetDict({"train": images(6), "test": images(4, side=5)})
    with pytest.raises(DataError, match=r"'image' in row 0: is 5 x 5 pixels.*set size"):
        data.from_huggingface(mixed)


def test_text_becomes_token_ids_of_the_training_part_s_words():
    features = hf().Features({"text": hf().Value("string"), "label": hf().Value("string")})
    train = hf().Dataset.from_dict({"text": ["b a a", "b c."], "label": ["x", "y"]}, features=features)
    test = hf().Dataset.from_dict({"text": ["d a", None], "label": ["y", "x"]}, features=features)
    dataset = data.from_huggingface(hf().DatasetDict({"train": train, "test": test}), length=4)
    # a and b occur twice, then . and c alphabetically: a 2, b 3, . 4, c 5; d is unknown
    assert dataset.inputs.tolist() == [[3, 2, 2, 0], [3, 5, 4, 0]]
    assert dataset.test_inputs.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    assert dataset.classes == ("x", "y")
    assert dataset.mean == ()


def numbers(samples: int):
    return hf().Dataset.from_dict(
        {
            "height": RNG.normal(3, 2, samples).tolist(),
            "age": list(range(samples)),
            "label": [("no", "yes")[row % 2] for row in range(samples)],
            "client": [("north", "south")[row < samples // 2] for row in range(samples)],
        }
    )


def test_columns_of_numbers_with_clients_and_a_test_part_that_is_drawn():
    dataset = data.from_huggingface(numbers(20), rng=np.random.default_rng(0), test_share=0.2)
    assert dataset.inputs.shape == (16, 2)
    assert dataset.test_targets.bincount().tolist() == [2, 2]
    assert dataset.client_names == ("north", "south")
    assert dataset.inputs.mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    again = data.from_huggingface(numbers(20), rng=np.random.default_rng(0), inputs="age")
    assert again.inputs.shape == (16, 1)
    with pytest.raises(ArgumentError, match="rng: this data has no test part"):
        data.from_huggingface(numbers(20))


def test_arrays_of_bytes_are_images():
    features = hf().Features({"x": hf().Array2D((4, 5), "uint8"), "label": hf().Value("int64")})
    values = RNG.integers(0, 256, (6, 4, 5), dtype=np.uint8)
    table = hf().Dataset.from_dict({"x": list(values), "label": [3, 10, 3, 10, 3, 10]}, features=features)
    dataset = data.from_huggingface(hf().DatasetDict({"train": table, "test": table}))
    assert dataset.in_shape == (1, 4, 5)
    assert dataset.classes == ("3", "10")
    assert dataset.mean == pytest.approx([values.mean() / 255], abs=1e-6)


def test_a_saved_folder_is_read_by_name(tmp_path):
    hf().DatasetDict({"train": images(6), "valid": images(4)}).save_to_disk(tmp_path / "mine")
    dataset = data.load("huggingface", tmp_path / "mine", test="valid")
    assert len(dataset.test_targets) == 4
    with pytest.raises(DataError, match="is no folder that save_to_disk of datasets wrote"):
        data.load("huggingface", tmp_path)


BAD = [
    ({"label": "lable"}, ArgumentError, "label: the table has no column 'lable'"),
    ({"client": "site"}, ArgumentError, "client: the table has no column 'site'"),
    ({"inputs": "heigth"}, ArgumentError, "inputs: .*did you mean 'height'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_a_column_that_does_not_exist_is_answered_with_the_nearest(options, error, message):
    with pytest.raises(error, match=message) as raised:
        data.from_huggingface(numbers(10), rng=np.random.default_rng(0), **options)
    assert "\n" not in str(raised.value)


def test_tables_that_do_not_fit_are_refused_in_one_line():
    rng = np.random.default_rng(0)
    two = hf().Dataset.from_dict({"a": ["x"] * 8, "b": ["y"] * 8, "label": [0, 1] * 4})
    with pytest.raises(ArgumentError, match="inputs: say which column to learn from: a, b all hold texts"):
        data.from_huggingface(two, rng=rng)
    empty = hf().Dataset.from_dict({"a": [1.0] * 4, "label": [0, None, 1, 1]})
    with pytest.raises(DataError, match="'label' is empty in row 1"):
        data.from_huggingface(empty, rng=rng)
    hole = hf().Dataset.from_dict({"a": [1.0, None, 2.0, 3.0] * 4, "label": [0, 0, 1, 1] * 4})
    with pytest.raises(DataError, match="a: has an empty value"):
        data.from_huggingface(hole, rng=rng)
    ragged = hf().Dataset.from_dict({"a": [[1.0], [1.0, 2.0]] * 8, "label": [0, 0, 1, 1] * 4})
    with pytest.raises(DataError, match="not all samples are numbers of one shape"):
        data.from_huggingface(ragged, rng=rng)
    with pytest.raises(ArgumentError, match="inputs: no column to learn from"):
        data.from_huggingface(hf().Dataset.from_dict({"label": [0, 1] * 4}), rng=rng)
    with pytest.raises(DataError, match="has no part 'train'"):
        data.from_huggingface(hf().DatasetDict({"all": numbers(4)}), rng=rng)
    with pytest.raises(DataError, match="train is a IterableDataset"):
        data.from_huggingface(numbers(8).to_iterable_dataset(), rng=rng)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[hf\]'"):
        data.load("huggingface", tmp_path)
