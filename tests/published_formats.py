"""Small files in exactly the formats of published data sets, with random content.

Not a test: tests of readers and of recipes write their data with it where the real files are absent. The readers take
such files with `verify = false`.
"""

import csv
import gzip
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from scipy.io import savemat

from common import save_image

CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
WORDS = ("the", "of", "match", "team", "goal", "stocks", "market", "oil", "war", "minister", "software", "web")


def write(name: str, root: Path, train: int = 4, test: int = 2, seed: int = 0) -> None:
    """What the reader `name` reads below `root`: `train` and `test` samples of each class (or domain and class)."""
    WRITERS[name](root, train, test, np.random.default_rng(seed))


def _labels(classes: int, each: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.repeat(np.arange(classes), each))


def _pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def idx(path: Path, array: np.ndarray) -> None:
    """A gzip file in LeCun's IDX format, of uint8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))


def _idx_set(
    folder: str, stems: Sequence[str], classes: int, root: Path, train: int, test: int, rng: np.random.Generator
) -> None:
    for stem, each in zip(stems, (train, test), strict=True):
        labels = _labels(classes, each, rng)
        idx(root / folder / f"{stem}-images-idx3-ubyte.gz", _pixels(rng, len(labels), 28, 28))
        idx(root / folder / f"{stem}-labels-idx1-ubyte.gz", labels)


def _usps(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    (root / "usps").mkdir(parents=True, exist_ok=True)
    for part, each in (("train", train), ("test", test)):
        rows = [
            " ".join([f"{label:.4f}", *(f"{value:.3f}" for value in rng.uniform(-1, 1, 256))]) + " "
            for label in _labels(10, each, rng)
        ]
        (root / "usps" / f"zip.{part}.gz").write_bytes(gzip.compress("\n".join(rows).encode() + b"\n", 1))


def python2_pickle(value: object) -> bytes:
    """Protocol 2 as Python 2 wrote it: byte strings, and numpy's modules by their old names."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: object) -> bytes:
    if isinstance(value, dict):
        items = b"".join(_opcodes(key) + _opcodes(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, str):
        return b"T" + struct.pack("<i", len(value)) + value.encode("latin1")
    assert isinstance(value, np.ndarray)
    shape = b"(" + b"".join(map(_opcodes, value.shape)) + b"t"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + _opcodes(0) + b"t" + _opcodes("b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + _opcodes("u1") + _opcodes(0) + _opcodes(1) + b"tR"
    # the state of a dtype that has no byte order: version 3, "|", no fields, no size, no alignment, no flags
    dtype += b"(" + _opcodes(3) + _opcodes("|") + b"NNN" + _opcodes(-1) + _opcodes(-1) + _opcodes(0) + b"tb"
    state = b"(" + _opcodes(1) + shape + dtype + b"\x89" + _opcodes(value.tobytes().decode("latin1")) + b"t"
    return empty + state + b"b"


def _cifar10(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    parts = dict(zip((f"data_batch_{n}" for n in range(1, 6)), np.array_split(_labels(10, train, rng), 5), strict=True))
    for name, labels in (parts | {"test_batch": _labels(10, test, rng)}).items():
        batch = {"batch_label": name, "labels": labels.tolist(), "data": _pixels(rng, len(labels), 3072)}
        (folder / name).write_bytes(python2_pickle(batch))
    names = {"num_cases_per_batch": 10_000, "label_names": list(CINIC_CLASSES), "num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2_pickle(names))


def _cifar100(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in (("train", train), ("test", test)):
        fine = _labels(100, each, rng)
        batch = {"data": _pixels(rng, len(fine), 3072), "fine_labels": fine.tolist()}
        (folder / name).write_bytes(python2_pickle(batch | {"coarse_labels": (fine // 5).tolist()}))
    names = {
        "fine_label_names": [f"fine {label}" for label in range(100)],
        "coarse_label_names": [f"coarse {label}" for label in range(20)],
    }
    (folder / "meta").write_bytes(python2_pickle(names))


def _mat_set(
    folder: str, stems: Sequence[str], zero: int, root: Path, train: int, test: int, rng: np.random.Generator
) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for stem, each in zip(stems, (train, test), strict=True):
        labels = _labels(10, each, rng).astype(np.uint8)
        labels[labels == 0] = zero
        arrays = {"X": _pixels(rng, 32, 32, 3, len(labels)), "y": labels[:, None]}
        savemat(root / folder / f"{stem}_32x32.mat", arrays, do_compression=True)


def _digit_domains(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    for name in ("mnist", "usps", "svhn", "syn_digits"):
        WRITERS[name](root, train, test, rng)


def _ag_news(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    folder = root / "ag_news_csv"
    folder.mkdir(parents=True, exist_ok=True)
    for file, each, columns in (("train.csv", train, 2), ("train-subset.csv", train, 1), ("test.csv", test, 2)):
        with (folder / file).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
            for label in _labels(4, each, rng):
                texts = [" ".join(rng.choice(WORDS, 12)).capitalize() + "." for _ in range(columns)]
                writer.writerow([label + 1, *texts])


def image(path: Path, rng: np.random.Generator, height: int, width: int) -> None:
    """A colour image in the format that the suffix names."""
    save_image(path, _pixels(rng, height, width, 3))


def _cinic10(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    for part, each in (("train", train), ("valid", train), ("test", test)):
        for label in CINIC_CLASSES:
            for number in range(each):
                image(root / "cinic-10" / part / label / f"cifar10-{part}-{number}.png", rng, 32, 32)


def _tiny_imagenet(root: Path, train: int, test: int, rng: np.random.Generator, classes: int = 200) -> None:
    folder = root / "tiny-imagenet-200"
    ids = [f"n{number:08d}" for number in rng.permutation(np.arange(1_000_000, 1_000_000 + classes))]
    lines = []
    for wnid in ids:
        for number in range(train):
            image(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", rng, 64, 64)
        for _ in range(test):
            name = f"val_{len(lines)}.JPEG"
            image(folder / "val" / "images" / name, rng, 64, 64)
            lines.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
    (folder / "wnids.txt").write_text("\n".join(ids) + "\n")
    (folder / "words.txt").write_text("".join(f"{wnid}\tthing {wnid}, object\n" for wnid in ids))
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def _pacs(root: Path, train: int, test: int, rng: np.random.Generator) -> None:
    """Also the files of folds: the first `train` images of each class train, the next `test` are for validation."""
    folder = root / "PACS"
    for domain in PACS_DOMAINS:
        lines: dict[str, list[str]] = {"train": [], "crossval": [], "test": []}
        for label, name in enumerate(PACS_CLASSES, start=1):
            for number in range(train + test):
                file = f"{domain}/{name}/pic_{number:03d}.{'png' if domain == 'sketch' else 'jpg'}"
                image(folder / file, rng, 227, 227)
                lines["train" if number < train else "crossval"].append(f"{file} {label}\n")
                lines["test"].append(f"{file} {label}\n")
        for fold, rows in lines.items():
            (folder / f"{domain}_{fold}_kfold.txt").write_text("".join(rows))


def _iwildcam(
    root: Path, train: int, test: int, rng: np.random.Generator, classes: int = 182, cameras: int = 12
) -> None:
    """`train` images of each class from `cameras` training cameras; every other split has other or the same ones."""
    folder = root / "iwildcam_v2.0"
    splits = {
        "train": (train, 0),
        "val": (test, cameras),
        "test": (test, 2 * cameras),
        "id_val": (1, 0),
        "id_test": (1, 0),
    }
    columns = ("", "split", "location_remapped", "location", "y", "category_id", "datetime", "filename", "image_id")
    (folder / "train").mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        line = 0
        for split, (each, first) in splits.items():
            for label in np.repeat(np.arange(classes), each):
                camera, file = first + int(rng.integers(cameras)), f"{line:08d}.jpg"
                image(folder / "train" / file, rng, 24, 32)
                writer.writerow([line, split, camera, 100 + camera, label, 300 + label, "2013-01-01", file, line])
                line += 1
    with (folder / "categories.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["y", "category_id", "name"])
        writer.writerows([[label, 300 + label, f"species {label}"] for label in range(classes)])
        writer.writerow([99999, 999, "never seen"])


WRITERS: dict[str, Callable[..., None]] = {
    "mnist": partial(_idx_set, "MNIST/raw", ("train", "t10k"), 10),
    "fashion_mnist": partial(_idx_set, "FashionMNIST/raw", ("train", "t10k"), 10),
    "emnist_balanced": partial(_idx_set, "EMNIST/raw", ("emnist-balanced-train", "emnist-balanced-test"), 47),
    "usps": _usps,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": partial(_mat_set, "svhn", ("train", "test"), 10),
    "syn_digits": partial(_mat_set, "syn", ("synth_train", "synth_test"), 0),
    "digit_domains": _digit_domains,
    "cinic10": _cinic10,
    "tiny_imagenet": _tiny_imagenet,
    "pacs": _pacs,
    "iwildcam": _iwildcam,
    "ag_news": _ag_news,
}
