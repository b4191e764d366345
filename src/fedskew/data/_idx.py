"""MNIST, Fashion-MNIST and EMNIST, in the IDX format (LeCun, Cortes, Burges).

An IDX file is a big-endian header (a magic number whose last byte is the number of dimensions, then one 32-bit size
each), then uint8 values in row order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read_checked, unpacked
from fedskew.data._images import normalised, statistics

# For each file: the MD5 of the gzip file as published, and that of its content, for files that were unpacked.
_MNIST = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
_FASHION_MNIST = {
    "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
}
# The authors publish one archive of all parts of EMNIST, and no checksums of single files.
_EMNIST = {
    f"emnist-balanced-{part}-{kind}-ubyte": (None, None)
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
}
_MNIST_PAGE = "http://yann.lecun.com/exdb/mnist/"
_EMNIST_PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
_DIGITS = tuple("0123456789")
_GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images, `(samples, 1, height, width)` uint8, and int64 labels, of the training part, then of the test part."""


def mnist(root: Path, verify: bool = True) -> Dataset:
    """Read MNIST (LeCun, Bottou, Bengio, Haffner 1998): 60,000 and 10,000 grey images of 28 x 28, digits 0 to 9.

    Normalised by mean 0.1307 and deviation 0.3081, those of the training pixels.

    Args:
        root: Holds `MNIST/raw/*-ubyte.gz`, or the same without `.gz`.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    return _dataset("mnist", mnist_arrays(root, verify), _DIGITS, (0.1307,), (0.3081,))


def mnist_arrays(root: Path, verify: bool = True) -> Arrays:
    """Return MNIST's images and labels as they are in its files."""
    return _read(root / "MNIST" / "raw", _MNIST, _MNIST_PAGE, verify)


def fashion_mnist(root: Path, verify: bool = True) -> Dataset:
    """Read Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 and 10,000 grey images of 28 x 28, ten garments.

    Normalised by mean 0.2860 and deviation 0.3530, those of the training pixels.

    Args:
        root: Holds `FashionMNIST/raw/*-ubyte.gz`, or the same without `.gz`.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    return _dataset("fashion_mnist", _fashion_mnist_arrays(root, verify), _GARMENTS, (0.2860,), (0.3530,))


def mnist_and_fashion(root: Path, verify: bool = True) -> Dataset:
    """Read MNIST and Fashion-MNIST as one task of 20 classes: the ten digits, then the ten garments.

    120,000 and 20,000 grey images of 28 x 28. Normalised by mean and deviation of all training pixels, computed from
    the files.

    Args:
        root: Holds the files of `mnist` and `fashion_mnist`.
        verify: As in these.
    """
    digits, garments = mnist_arrays(root, verify), _fashion_mnist_arrays(root, verify)
    shifted = garments[0], garments[1] + len(_DIGITS), garments[2], garments[3] + len(_DIGITS)
    train, train_labels, test, test_labels = (torch.cat(pair) for pair in zip(digits, shifted, strict=True))
    arrays = train, train_labels, test, test_labels
    return _dataset("mnist_and_fashion", arrays, _DIGITS + _GARMENTS, *statistics(train))


def emnist_balanced(root: Path, verify: bool = True) -> Dataset:
    """Read EMNIST, balanced (Cohen, Afshar, Tapson, van Schaik 2017): 112,800 and 18,800 grey images of 28 x 28.

    47 classes of 2,400 and 400: digits, upper-case letters, and the eleven lower-case letters that don't look like
    them. The files store images column by column; they are transposed here so that characters stand upright (much
    public code leaves them lying). Normalised by mean and deviation of the training pixels, computed from the files.

    Args:
        root: Holds `EMNIST/raw/emnist-balanced-*-ubyte.gz`, or the same without `.gz`, as in the authors' gzip.zip.
        verify: Check the files against the published sizes (single files have no published checksum).
    """
    folder = root / "EMNIST" / "raw"
    train, train_labels, test, test_labels = _read(folder, _EMNIST, _EMNIST_PAGE, verify)
    if verify:
        for part, labels, each in (("train", train_labels, 2400), ("test", test_labels, 400)):
            if labels.bincount().tolist() != [each] * len(_CHARACTERS):
                path = folder / f"emnist-balanced-{part}-labels-idx1-ubyte"
                raise damaged(
                    path, f"it does not hold {each} labels of each of {len(_CHARACTERS)} classes", _EMNIST_PAGE
                )
    arrays = train.transpose(2, 3).contiguous(), train_labels, test.transpose(2, 3).contiguous(), test_labels
    return _dataset("emnist_balanced", arrays, _CHARACTERS, *statistics(arrays[0]))


def _fashion_mnist_arrays(root: Path, verify: bool) -> Arrays:
    page = "https://github.com/zalandoresearch/fashion-mnist"
    return _read(root / "FashionMNIST" / "raw", _FASHION_MNIST, page, verify)


def _dataset(
    name: str, arrays: Arrays, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> Dataset:
    inputs, targets, test_inputs, test_targets = arrays
    return Dataset(
        name=name,
        inputs=normalised(inputs, mean, std),
        targets=targets,
        test_inputs=normalised(test_inputs, mean, std),
        test_targets=test_targets,
        classes=classes,
        mean=mean,
        std=std,
    )


def _read(folder: Path, files: Mapping[str, tuple[str | None, str | None]], page: str, verify: bool) -> Arrays:
    values = [_values(folder / file, *(md5s if verify else (None, None)), page) for file, md5s in files.items()]
    names = list(files)
    for file, images, labels in zip(names[1::2], values[::2], values[1::2], strict=True):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise damaged(folder / file, f"it holds labels {labels.shape}, and the images are {images.shape}", page)
    train, train_labels, test, test_labels = map(torch.from_numpy, values)
    return train.unsqueeze(1), train_labels.long(), test.unsqueeze(1), test_labels.long()


def _values(path: Path, packed_md5: str | None, plain_md5: str | None, page: str) -> np.ndarray:
    """Return the array in an IDX file of uint8, gzipped or not."""
    packed = path.with_name(path.name + ".gz")
    if path.exists() and not packed.exists():
        content = read_checked(path, plain_md5, page)
    else:
        path, expected = packed, "an IDX file" if packed_md5 is None else f"MD5 {packed_md5}"
        content = unpacked(packed, read_checked(packed, packed_md5, page), expected, page)
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" else 0
    start = 4 + 4 * dimensions
    if not dimensions or len(content) < start:
        raise damaged(path, "it is no IDX file of uint8", page)
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) != start + math.prod(shape):
        raise damaged(path, f"its header says {shape}, and {len(content) - start} values follow", page)
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
