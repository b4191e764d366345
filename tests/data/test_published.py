"""Readers of published data sets, on the real files, and on files that are missing or damaged."""

import gzip
import importlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedskew
from common import refused
from fedskew import data
from fedskew.errors import DataError

pytestmark = pytest.mark.slow

FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion_mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "usps": "usps",
}
PARTS = {
    # training samples and test samples of each class, shape
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        (1, 28, 28),
    ),
    "fashion_mnist": ([6000] * 10, [1000] * 10, (1, 28, 28)),
    "cifar10": ([5000] * 10, [1000] * 10, (3, 32, 32)),
    "cifar100": ([500] * 100, [100] * 100, (3, 32, 32)),
    "usps": (
        [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644],
        [359, 264, 198, 166, 200, 160, 170, 147, 166, 177],
        (1, 16, 16),
    ),
}
FIRST = {
    # class names, then the classes of the first training images
    "mnist": (tuple("012"), ["5", "0", "4", "1", "9"]),
    "fashion_mnist": (("T-shirt/top",), ["Ankle boot"]),
    "cifar10": (("airplane", "automobile", "bird"), ["frog"]),
    "cifar100": (("apple", "aquarium_fish"), ["cattle"]),
    "usps": (tuple("012"), ["6", "5", "4"]),
}


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def published(request, data_root) -> data.Dataset:
    if not (data_root / FOLDERS[request.param]).is_dir():
        pytest.skip(f"no {FOLDERS[request.param]} in the data folder")
    return data.load(request.param, data_root)


def test_samples_are_as_many_and_as_large_as_published(published):
    counts, test_counts, shape = PARTS[published.name]
    assert published.targets.bincount().tolist() == counts
    assert published.test_targets.bincount().tolist() == test_counts
    assert published.inputs.shape == (sum(counts), *shape)
    assert published.test_inputs.shape == (sum(test_counts), *shape)
    names, first = FIRST[published.name]
    assert published.classes[: len(names)] == names
    assert [published.classes[label] for label in published.targets[: len(first)]] == first


def test_pixels_are_whole_levels_of_grey_normalised_once(published):
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (published.mean, published.std))
    steps = 2000 if published.name == "usps" else 255  # USPS: three decimals from -1 to 1
    levels = (published.test_inputs[:2000] * std + mean) * steps
    torch.testing.assert_close(levels, levels.round(), atol=1e-2, rtol=0)
    assert levels.min().round() == 0
    assert levels.max().round() == steps


def test_training_inputs_are_standardised(published):
    if published.name == "usps":
        pytest.skip("USPS stays as published, in [-1, 1]")
    # the constants are the training set's own mean and deviation, to four decimals
    pixels = published.inputs.flatten(2)
    mean = pixels.mean(2).mean(0)
    variance = pixels.norm(dim=2).square().mean(0) / pixels.shape[2] - mean**2
    assert mean.abs().max() < 5e-4
    assert (variance.sqrt() - 1).abs().max() < 5e-4


def test_an_image_lies_the_right_way_round(published, data_root):
    if published.name != "cifar10":
        pytest.skip("of the file formats, CIFAR's keeps colours apart")
    row = pickle.loads((data_root / "cifar-10-batches-py/test_batch").read_bytes(), encoding="latin1")["data"][17]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (published.mean, published.std))
    # a row is the red plane, then green, then blue, each row by row
    planes = torch.from_numpy(row.reshape(3, 32, 32).astype(np.float32))
    torch.testing.assert_close((published.test_inputs[17] * std + mean) * 255, planes, atol=1e-3, rtol=0)


def linked(data_root: Path, name: str, to: Path) -> Path:
    """A folder of links to the data set's files; one is taken away before it is written anew."""
    if not (data_root / FOLDERS[name]).is_dir():
        pytest.skip(f"no {FOLDERS[name]} in the data folder")
    (to / FOLDERS[name]).mkdir(parents=True)
    for path in (data_root / FOLDERS[name]).iterdir():
        (to / FOLDERS[name] / path.name).symlink_to(path)
    return to / FOLDERS[name]


def test_unpacked_idx_files_are_read_alike(published, data_root, tmp_path):
    if published.name != "fashion_mnist":
        pytest.skip("one data set of IDX files shows it")
    folder = linked(data_root, "fashion_mnist", tmp_path)
    for path in sorted(folder.glob("*.gz")):
        content = gzip.decompress(path.read_bytes())
        path.unlink()
        path.with_suffix("").unlink(missing_ok=True)  # never write through a link
        path.with_suffix("").write_bytes(content)
    unpacked = data.load("fashion_mnist", tmp_path)
    assert torch.equal(published.inputs, unpacked.inputs)
    assert torch.equal(published.test_targets, unpacked.test_targets)


FILES = [
    ("mnist", "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "yann.lecun.com"),
    ("mnist", "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", "yann.lecun.com"),
    ("fashion_mnist", "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", "zalandoresearch"),
    ("cifar10", "data_batch_3", "54ebc095f3ab1f0389bbae665268c751", "cs.toronto.edu"),
    ("cifar10", "batches.meta", "5ff9c542aee3614f3951f8cda6e48888", "cs.toronto.edu"),
    ("cifar100", "test", "f0ef6b0ae62326f3e7ffdfab6717acfc", "cs.toronto.edu"),
    ("usps", "zip.train.gz", "ce03cd1b0eaa9ebffefb68780ccc947e6fd4ac92e2271c084ef1f57678ac49d3", "hastie"),
]


@pytest.mark.parametrize(("name", "file", "checksum", "page"), FILES)
def test_a_missing_or_damaged_file_is_named_with_its_checksum_and_page(name, file, checksum, page, data_root, tmp_path):
    path = linked(data_root, name, tmp_path) / file
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    # The kinds of damage end in the same checksum: all of them where reading takes least.
    contents = (None, b"", whole[:-100], bytes(flipped)) if name in ("usps", "cifar100") else (None, bytes(flipped))
    for content in contents:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with refused(DataError, str(path), checksum, page, "is missing" if content is None else "is damaged"):
            data.load(name, tmp_path)


def test_usps_values_that_differ_in_the_last_place_are_refused_and_a_new_compression_is_not(data_root, tmp_path):
    path = linked(data_root, "usps", tmp_path) / "zip.test.gz"
    text = gzip.decompress(path.read_bytes())
    path.unlink()
    path.write_bytes(gzip.compress(text, compresslevel=1))
    assert torch.equal(data.load("usps", tmp_path).test_inputs, data.load("usps", data_root).test_inputs)
    path.write_bytes(gzip.compress(text.replace(b"-0.948", b"-0.949", 1), compresslevel=1))
    with pytest.raises(DataError, match="its values are not those published"):
        data.load("usps", tmp_path)
    path.write_bytes(gzip.compress(text.replace(b"-0.948", b"minus", 1), compresslevel=1))
    with pytest.raises(DataError, match=r"zip.test.gz is damaged"):
        data.load("usps", tmp_path)


def test_the_subset_of_ag_news_is_as_its_note_says(data_root):
    if not (data_root / "ag_news_csv").is_dir():
        pytest.skip("no ag_news_csv in the data folder")
    news = data.load("ag_news", data_root, subset=True)
    assert news.inputs.shape == (8815, 200)
    assert news.targets.bincount().tolist() == [3163, 1257, 1281, 3114]
    assert news.test_targets.bincount().tolist() == [1900] * 4
    assert news.classes == ("World", "Sports", "Business", "Sci/Tech")
    # the most frequent words of English news, and no text without words
    assert (news.inputs == 2).sum() > (news.inputs == 3).sum() > 10_000
    assert (news.inputs[:, 0] > 0).all()
    with pytest.raises(DataError, match="set subset = true"):
        data.load("ag_news", data_root)


class Malicious:
    def __reduce__(self):
        return (eval, ("1 + 1",))


def test_only_arrays_and_plain_values_are_unpickled(tmp_path):
    folder = tmp_path / FOLDERS["cifar10"]
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(DataError, match=r"batches\.meta .*no use for .*\.eval"):
        data.load("cifar10", tmp_path, verify=False)


@pytest.mark.slow  # scikit-learn is imported
def test_the_digits_of_a_scikit_learn_that_keeps_its_file_elsewhere_are_the_same(monkeypatch):
    found, read = data.load("digits"), np.loadtxt

    def moved(file, *words, **named):
        if isinstance(file, Path):
            raise FileNotFoundError(file)
        return read(file, *words, **named)

    monkeypatch.setattr(np, "loadtxt", moved)
    monkeypatch.setattr(fedskew, "data", data)
    for name in [name for name in sys.modules if name.startswith("fedskew.data")]:
        monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module("fedskew.data").load("digits")  # as in another process: what was read is kept
    assert torch.equal(again.inputs, found.inputs)
    assert torch.equal(again.test_targets, found.test_targets)


def test_digits_are_embedded_and_their_test_part_never_changes():
    digits = data.load("digits", rng=np.random.default_rng(0))
    again = data.load("digits", rng=np.random.default_rng(1))
    assert torch.equal(digits.test_inputs, again.test_inputs)
    assert digits.in_shape == (1, 8, 8)
    assert digits.num_classes == 10
    assert len(digits.targets) + len(digits.test_targets) == 1797
    counts, test_counts = digits.targets.bincount(), digits.test_targets.bincount()
    assert torch.equal(test_counts, (counts + test_counts) // 4)
    levels = torch.cat([digits.inputs, digits.test_inputs]).unique() * 16
    assert levels.tolist() == list(range(17))
    assert digits.mean == digits.std == ()

    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out = np.zeros(1797, dtype=bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[3::4]] = True
    for inputs, targets, rows in (
        (digits.inputs, digits.targets, ~held_out),
        (digits.test_inputs, digits.test_targets, held_out),
    ):
        np.testing.assert_array_equal(inputs.flatten(1).numpy(), images[rows] / 16)
        np.testing.assert_array_equal(targets.numpy(), labels[rows])
