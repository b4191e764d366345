"""MNIST and Fashion-MNIST, in the IDX format (LeCun, Cortes, Burges).

An IDX file is a big-endian header (a magic number whose last byte is the number of dimensions, then one 32-bit size
each), then uint8 values in row order.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._files import read_checked, unpacked

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
_GARMENTS = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def mnist(root: Path) -> Dataset:
    """MNIST (LeCun, Bottou, Bengio, Haffner 1998): 60,000 and 10,000 grey pictures of 28 x 28, digits 0 to 9.

    Reads `root/MNIST/raw/*-ubyte.gz`, or the same without `.gz`. Normalised by mean 0.1307 and deviation 0.3081.
    """
    page = "http://yann.lecun.com/exdb/mnist/"
    return _read("mnist", root / "MNIST" / "raw", _MNIST, page, tuple("0123456789"), 0.1307, 0.3081)


def fashion_mnist(root: Path) -> Dataset:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 and 10,000 grey pictures of 28 x 28, ten garments.

    Reads `root/FashionMNIST/raw/*-ubyte.gz`, or the same without `.gz`. Normalised by mean 0.2860 and deviation 0.3530.
    """
    page = "https://github.com/zalandoresearch/fashion-mnist"
    return _read("fashion_mnist", root / "FashionMNIST" / "raw", _FASHION_MNIST, page, _GARMENTS, 0.2860, 0.3530)


def _read(
    name: str,
    folder: Path,
    files: dict[str, tuple[str, str]],
    page: str,
    classes: tuple[str, ...],
    mean: float,
    std: float,
) -> Dataset:
    arrays = [torch.from_numpy(_values(folder / file, *checksums, page)) for file, checksums in files.items()]

    def normalised(pixels: Tensor) -> Tensor:
        return pixels.unsqueeze(1).float().div_(255).sub_(mean).div_(std)

    inputs, targets, test_inputs, test_targets = arrays
    return Dataset(
        name=name,
        inputs=normalised(inputs),
        targets=targets.long(),
        test_inputs=normalised(test_inputs),
        test_targets=test_targets.long(),
        classes=classes,
        mean=(mean,),
        std=(std,),
    )


def _values(path: Path, packed_md5: str, plain_md5: str, page: str) -> np.ndarray:
    """The array in an IDX file of uint8, packed or not."""
    packed = path.with_name(path.name + ".gz")
    if path.exists() and not packed.exists():
        content = read_checked(path, plain_md5, page)
    else:
        content = unpacked(packed, read_checked(packed, packed_md5, page), f"MD5 {packed_md5}", page)
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
