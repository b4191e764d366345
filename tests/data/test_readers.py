"""Inputs that stay stored deliver what a tensor would."""

import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import fedskew
from common import refused, task
from fedskew import data
from fedskew.data import ByteImages
from fedskew.data.published import ImageFiles, Source
from fedskew.errors import ArgumentError, DataError, DataWarning, MissingPackageError
from published_formats import image, write

MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 3, 4, 5), dtype=np.uint8)


def by_hand(pixels: np.ndarray) -> torch.Tensor:
    """(level / 255 - mean) / deviation."""
    shift, scale = (np.reshape(values, (3, 1, 1)) for values in (MEAN, STD))
    return torch.from_numpy((pixels / 255 - shift) / scale).float()


def make(kind: str, pixels: np.ndarray, tmp_path) -> data.Inputs:
    if kind == "bytes":
        return ByteImages(torch.from_numpy(pixels), MEAN, STD)
    names = tuple(f"{row}.png" for row in range(len(pixels)))
    for name, one in zip(names, pixels, strict=True):
        Image.fromarray(one.transpose(1, 2, 0)).save(tmp_path / name)
    images = ImageFiles(Source(tmp_path, "its page"), names, pixels.shape[2:], MEAN, STD)
    return images.pack("train") if kind == "mapped" else images


@pytest.fixture(params=["bytes", "mapped", "images"])
def inputs(request, pixels, tmp_path) -> data.Stored:
    return make(request.param, pixels, tmp_path)


def test_batches_are_the_normalised_images_in_the_order_asked_for(inputs, pixels):
    assert inputs.shape == (7, 3, 4, 5)
    assert len(inputs) == 7
    rows = torch.tensor([6, 0, 0, 3])
    batch = inputs.index_select(0, rows)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, by_hand(pixels[rows]))


def test_a_batch_is_the_caller_s_own(inputs):
    rows = torch.tensor([1, 2])
    before = inputs.index_select(0, rows)
    inputs.index_select(0, rows).zero_()
    assert torch.equal(inputs.index_select(0, rows), before)


def test_some_rows_of_stored_inputs_are_listed_and_not_read(inputs, pixels):
    some = data.take(inputs, torch.tensor([5, 2, 4]))
    assert not isinstance(some, torch.Tensor)
    assert some.shape == (3, 3, 4, 5)
    torch.testing.assert_close(some.index_select(0, torch.tensor([1, 0])), by_hand(pixels[[2, 5]]))


def test_they_deliver_to_another_device(inputs):
    moved = inputs.to("meta")
    assert moved.device == torch.device("meta")
    if type(moved) is not ByteImages:
        assert moved.index_select(0, torch.tensor([0])).device.type == "meta"
    assert inputs.device == torch.device("cpu")


def test_a_worker_gets_the_files_names_and_reads_the_same(inputs):
    rows = torch.tensor([0, 6])
    again = pickle.loads(pickle.dumps(inputs))
    assert torch.equal(again.index_select(0, rows), inputs.index_select(0, rows))


def test_what_lies_in_files_is_not_pickled(tmp_path):
    pixels = np.zeros((50, 3, 32, 32), dtype=np.uint8)
    for kind in ("mapped", "images"):
        assert len(pickle.dumps(make(kind, pixels, tmp_path))) < 3000


def test_images_are_the_same_whatever_the_threads(pixels, tmp_path):
    inputs, rows = make("images", pixels, tmp_path), torch.arange(7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = inputs.index_select(0, rows)
        torch.set_num_threads(4)
        assert torch.equal(inputs.index_select(0, rows), alone)
    finally:
        torch.set_num_threads(threads)


def test_images_of_another_size_are_resized_and_grey_ones_become_colour(tmp_path):
    Image.fromarray(np.full((8, 8), 51, dtype=np.uint8)).save(tmp_path / "grey.png")
    inputs = ImageFiles(Source(tmp_path, "its page"), ("grey.png",), (4, 6), (0.0,) * 3, (1.0,) * 3)
    batch = inputs.index_select(0, torch.tensor([0]))
    torch.testing.assert_close(batch, torch.full((1, 3, 4, 6), 0.2))


def test_a_missing_or_damaged_image_is_named_when_it_is_read(tmp_path):
    image(tmp_path / "a.png", np.random.default_rng(0), 4, 4)
    inputs = ImageFiles(Source(tmp_path, "its page"), ("a.png", "b.png"), (4, 4), MEAN, STD)
    with pytest.raises(DataError, match=r"b\.png is missing .*its page"):
        inputs.index_select(0, torch.tensor([1]))
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with refused(DataError, match=r"b\.png is damaged: it can't be read as an image"):
        inputs.index_select(0, torch.tensor([1]))


def test_packed_images_are_the_same_and_made_once(pixels, tmp_path):
    inputs = make("images", pixels, tmp_path)
    packed = inputs.pack("train")
    assert torch.equal(packed.index_select(0, torch.arange(7)), inputs.index_select(0, torch.arange(7)))
    (file,) = (tmp_path / ".packed").iterdir()
    made = file.stat().st_mtime_ns
    inputs.pack("train")
    assert file.stat().st_mtime_ns == made


def test_other_images_never_pass_for_those_that_were_packed(pixels, tmp_path):
    inputs = make("images", pixels, tmp_path)
    inputs.pack("train")
    Image.fromarray(np.full((40, 50, 3), 255, dtype=np.uint8)).save(tmp_path / "0.png")
    again = inputs.pack("train")
    torch.testing.assert_close(again.index_select(0, torch.tensor([0])), by_hand(np.full((1, 3, 4, 5), 255)))


def test_where_packed_images_go_can_be_said(pixels, tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    inputs = make("images", pixels, tmp_path / "images")
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "cache"))
    inputs.pack("train")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert not (tmp_path / "images" / ".packed").exists()
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FEDSKEW_CACHE", str(tmp_path / "a file"))
    with pytest.raises(DataError, match=r"can't be stored there .*; set FEDSKEW_CACHE .*, or packed = false"):
        inputs.pack("train")


def test_a_damaged_packed_file_says_what_to_do(pixels, tmp_path):
    inputs = make("images", pixels, tmp_path)
    inputs.pack("train")
    (file,) = (tmp_path / ".packed").iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match="delete it, and it is written again"):
        inputs.pack("train")


def test_what_can_t_be_packed_leaves_nothing_behind(pixels, tmp_path):
    inputs = make("images", pixels, tmp_path)
    (tmp_path / "6.png").write_text("no image")
    with pytest.raises(DataError, match=r"6\.png is damaged"):
        inputs.pack("train")
    assert list((tmp_path / ".packed").iterdir()) == []


def test_a_data_set_of_stored_inputs_is_checked_without_reading_them(tmp_path):
    inputs = ImageFiles(Source(tmp_path, "its page"), ("gone.png",) * 3, (4, 4), MEAN, STD)
    labels = torch.tensor([0, 1, 0])
    dataset = data.Dataset("own", inputs, labels, inputs, labels, ("a", "b"), MEAN, STD)
    assert dataset.in_shape == (3, 4, 4)
    with pytest.raises(ArgumentError, match=r"targets: expected int64, \(3,\)"):
        data.Dataset("own", inputs, labels[:2], inputs, labels, ("a", "b"))


@pytest.mark.slow
def test_what_a_data_set_sets_aside_is_validated_on_and_never_trained_on(tmp_path):
    write("pacs", tmp_path, train=2, test=1)
    options = {"name": "pacs", "root": str(tmp_path), "verify": False, "size": 32, "leave_out": ["giraffe"]}
    result = fedskew.simulate(
        data=options | {"validation": "own"},
        partition={"rule": "shards", "clients": 3, "per_client": 7},
        model="lenet5",
        method="fedpals",
        training={"rounds": 1},
    )
    # 3 images of each class and domain: two domains train; of the validation domain, six classes are left
    assert result.runs[0].counts.sum() == 2 * 7 * 3
    assert np.sum(result.rounds[0]["validation"]["confusion"]) == 6 * 3
    # the target is the test part's mix, which has no giraffe
    assert result.runs[0].target.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6])


def test_own_validation_samples_are_refused_where_there_are_none():
    with pytest.raises(fedskew.errors.ConfigError, match="data.validation: .* has no validation samples"):
        fedskew.simulate(task(10, rounds=0), data={"name": "digits", "validation": "own"})


# A user's own data in an object of Hugging Face's package.

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
    with pytest.raises(DataError, match=r"2 sizes: .*5 x 5 \(4, such as .*'image' in row 1\); set size"):
        data.from_huggingface(mixed)


def test_text_becomes_token_ids_of_the_training_part_s_words():
    features = hf().Features({"text": hf().Value("string"), "label": hf().Value("string")})
    train = hf().Dataset.from_dict({"text": ["b a a", "b c."], "label": ["x", "y"]}, features=features)
    test = hf().Dataset.from_dict({"text": ["d a", None], "label": ["y", "x"]}, features=features)
    with pytest.warns(DataWarning, match="its test part: 1 of 2 texts have not one of the 4 words of training"):
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
    assert data.from_huggingface(numbers(20), rng=np.random.default_rng(0), inputs="age").inputs.shape == (16, 1)
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
    assert len(data.load("huggingface", tmp_path / "mine", test="valid").test_targets) == 4
    with pytest.raises(DataError, match="is no folder that save_to_disk of datasets wrote"):
        data.load("huggingface", tmp_path)


BAD = [
    ({"label": "lable"}, ArgumentError, "label: the table has no column 'lable'"),
    ({"client": "site"}, ArgumentError, "client: the table has no column 'site'"),
    ({"inputs": "heigth"}, ArgumentError, "inputs: .*did you mean 'height'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_a_column_that_does_not_exist_is_answered_with_the_nearest(options, error, message):
    with refused(error, match=message):
        data.from_huggingface(numbers(10), rng=np.random.default_rng(0), **options)


def test_tables_that_do_not_fit_are_refused_in_one_line():
    rng = np.random.default_rng(0)
    two = hf().Dataset.from_dict({"a": ["x"] * 8, "b": ["y"] * 8, "label": [0, 1] * 4})
    with pytest.raises(ArgumentError, match="inputs: say which column to learn from: a, b all hold texts"):
        data.from_huggingface(two, rng=rng)
    hole = hf().Dataset.from_dict({"a": [1.0, None, 2.0, 3.0] * 4, "label": [0, 0, 1, 1] * 4})
    with pytest.raises(DataError, match="a has an empty value"):
        data.from_huggingface(hole, rng=rng)
    ragged = hf().Dataset.from_dict({"a": [[1.0], [1.0, 2.0]] * 8, "label": [0, 0, 1, 1] * 4})
    with pytest.raises(DataError, match="not all samples are numbers of one shape"):
        data.from_huggingface(ragged, rng=rng)
    with pytest.raises(ArgumentError, match="inputs: no column to learn from"):
        data.from_huggingface(hf().Dataset.from_dict({"label": [0, 1] * 4}), rng=rng)
    with pytest.raises(DataError, match="has no part 'train'"):
        data.from_huggingface(hf().DatasetDict({"all": numbers(4)}), rng=rng)
    with pytest.raises(DataError, match="train is of type IterableDataset"):
        data.from_huggingface(numbers(8).to_iterable_dataset(), rng=rng)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[hf\]'"):
        data.load("huggingface", tmp_path)
