"""MNIST, Fashion-MNIST, EMNIST and CIFAR, published as arrays of bytes.

An IDX file (LeCun, Cortes, Burges) is a big-endian header (a magic number whose last byte is the number of dimensions,
then one 32-bit size each), then uint8 values in row order. Where a file `.gz` is read, the same without `.gz` will do.
CIFAR (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009) is read from the authors' Python
version: Python 2 pickles, read without executing anything in them.
"""

import io
import math
import pickle
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Arrays, Dataset, IntArray, names_clients
from fedskew.data._images import of_bytes
from fedskew.data.published import DIGITS, Source
from fedskew.errors import ArgumentError
from fedskew.parameters import Count, Positive

_CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
_MOST_TRIES = 10_000


def mnist(root: Path, verify: bool = True) -> Dataset:
    """Read MNIST (LeCun, Bottou, Bengio, Haffner 1998): 60,000 and 10,000 grey images of 28 x 28, digits 0 to 9.

    From `MNIST/raw/*-ubyte.gz`. Normalised by mean 0.1307 and deviation 0.3081, those of the training pixels.

    Args:
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source = Source.of("mnist", root, verify)
    return of_bytes("mnist", _idx(source), DIGITS, source.moments)


def mnist_arrays(root: Path, verify: bool = True) -> Arrays:
    """Return MNIST's images, `(samples, 1, 28, 28)` uint8, and labels as they are in its files."""
    return _idx(Source.of("mnist", root, verify))


def fashion_mnist(root: Path, verify: bool = True) -> Dataset:
    """Read Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 and 10,000 grey images of 28 x 28, ten garments.

    From `FashionMNIST/raw/*-ubyte.gz`. Normalised by mean 0.2860 and deviation 0.3530, those of the training pixels.

    Args:
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source = Source.of("fashion_mnist", root, verify)
    return of_bytes("fashion_mnist", _idx(source), source.classes, source.moments)


def mnist_and_fashion(root: Path, verify: bool = True) -> Dataset:
    """Read MNIST and Fashion-MNIST as one task of 20 classes: the ten digits, then the ten garments.

    120,000 and 20,000 grey images of 28 x 28. Normalised by mean and deviation of the files' training pixels.

    Args:
        verify: As in `mnist`.
    """
    fashion = Source.of("fashion_mnist", root, verify)
    digits, garments = mnist_arrays(root, verify), _idx(fashion)
    train, test = (torch.cat([digits[part], garments[part]]) for part in (0, 2))
    labels, test_labels = (torch.cat([digits[part], garments[part] + len(DIGITS)]) for part in (1, 3))
    return of_bytes("mnist_and_fashion", (train, labels, test, test_labels), DIGITS + fashion.classes)


def emnist_balanced(root: Path, verify: bool = True) -> Dataset:
    """Read EMNIST, balanced (Cohen, Afshar, Tapson, van Schaik 2017): 112,800 and 18,800 grey images of 28 x 28.

    From `EMNIST/raw/emnist-balanced-*-ubyte.gz`, as in the authors' gzip.zip. 47 classes of 2,400 and 400: digits,
    upper-case letters, and the eleven lower-case letters that don't look like them. The files store images column by
    column; they are transposed here so that characters stand upright (much public code leaves them lying). Normalised
    by mean and deviation of the training pixels, computed from the files.

    Args:
        verify: Check the files against the published sizes (single files have no published checksum).
    """
    source = Source.of("emnist_balanced", root, verify)
    train, labels, test, test_labels = _idx(source, "emnist-balanced-train", "emnist-balanced-test")
    for (part, each), found in zip(source.facts["each"].items(), (labels, test_labels), strict=True):
        if verify and found.bincount().tolist() != [each] * len(_CHARACTERS):
            what = f"it does not hold {each} labels of each of {len(_CHARACTERS)} classes"
            raise source.damaged(f"emnist-balanced-{part}-labels-idx1-ubyte", what)
    arrays = train.transpose(2, 3).contiguous(), labels, test.transpose(2, 3).contiguous(), test_labels
    return of_bytes("emnist_balanced", arrays, _CHARACTERS)


@names_clients
def fedvls_mnist(
    root: Path,
    beta: Positive = 0.05,
    clients: Count = 10,
    measured: Literal["training", "held-out"] = "training",
    smallest: int = 256,
    seed: int = 1,
    verify: bool = True,
) -> Dataset:
    """Read MNIST in the division of FedVLS's public code, which names the clients: partition rule "natural".

    As krumpguo/FedVLS, system/data/generate_mnist.py: all 70,000 images are pooled, and a quarter of them is set aside;
    each class of the rest is divided among the clients by Dir(beta), with the balance rule, until every client holds
    `smallest` images. All draws are NumPy's legacy ones, in the code's order, so that `seed` 1 gives its clients.
    Pixels are in [-1, 1] (mean and deviation 0.5).

    Args:
        beta: Concentration of the Dirichlet distribution.
        clients: Number of clients.
        measured: What the test part is: "training", all clients' own images, which the code hands to its test; or
            "held-out", the quarter that no client has.
        smallest: Images that every client must hold: 64 / 0.25 in the code.
        seed: Seed of the draws: 1 in the code.
        verify: As in `mnist`.
    """
    arrays = mnist_arrays(root, verify)
    pixels, labels = torch.cat(arrays[::2]), torch.cat(arrays[1::2])
    rng = np.random.RandomState(seed)
    order = rng.permutation(len(labels))  # scikit-learn's train_test_split(train_size=0.75)
    held_out, training = np.split(order, [len(labels) - int(0.75 * len(labels))])
    owner = _owners(labels.numpy()[training], beta, clients, smallest, rng)
    test = training if measured == "training" else held_out
    arrays = pixels[training], labels[training], pixels[test], labels[test]
    names = tuple(map(str, range(clients)))
    return of_bytes("fedvls_mnist", arrays, DIGITS, ((0.5,), (0.5,)), clients=owner, client_names=names)


def _owners(labels: IntArray, beta: float, clients: int, smallest: int, rng: np.random.RandomState) -> IntArray:
    """Return the client of each image, drawn as the code draws it."""
    fair = len(labels) / clients
    for _ in range(_MOST_TRIES):
        owner = np.empty(len(labels), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for label in range(len(DIGITS)):
            rows = np.flatnonzero(labels == label)
            rng.shuffle(rows)
            shares = rng.dirichlet(np.full(clients, beta)) * (held < fair)
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(np.int64)[:-1]
            for client, own in enumerate(np.split(rows, cuts)):
                owner[own] = client
                held[client] += len(own)
        if held.min() >= smallest:
            return owner
    raise ArgumentError(
        f"smallest: none of {_MOST_TRIES:,} draws gave {smallest} images to each of {clients} clients; lower it"
    )


def _idx(source: Source, *parts: str) -> Arrays:
    pairs: list[tuple[Tensor, Tensor]] = []
    for part in parts or ("train", "t10k"):
        file = f"{part}-labels-idx1-ubyte"
        images, labels = _values(source, f"{part}-images-idx3-ubyte"), _values(source, file)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise source.damaged(file, f"it holds labels {labels.shape}, and the images are {images.shape}")
        pairs.append((torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()))
    return *pairs[0], *pairs[1]


def _values(source: Source, name: str) -> np.ndarray:
    """Return the array in an IDX file of uint8, gzipped or not."""
    packed = f"{name}.gz"
    if (source.folder / name).exists() and not (source.folder / packed).exists():
        content = source.read(name)
    else:
        name, content = packed, source.unpacked(packed, "an IDX file")
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" else 0
    start = 4 + 4 * dimensions
    if not dimensions or len(content) < start:
        raise source.damaged(name, "it is no IDX file of uint8")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) != start + math.prod(shape):
        raise source.damaged(name, f"its header says {shape}, and {len(content) - start} values follow")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


def cifar10(root: Path, verify: bool = True) -> Dataset:
    """Read CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 in ten classes.

    From `cifar-10-batches-py/`. Normalised by channel with means 0.4914, 0.4822, 0.4465 and deviations 0.2470, 0.2435,
    0.2616, those of the training pixels.

    Args:
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source = Source.of("cifar10", root, verify)
    (names,) = _entries(source, "batches.meta", "label_names")
    return of_bytes("cifar10", _cifar(source, "labels"), tuple(names), source.moments)


def cifar100(root: Path, superclasses: bool = False, verify: bool = True) -> Dataset:
    """Read CIFAR-100: 50,000 and 10,000 colour images of 32 x 32 in 100 classes, or in 20 superclasses of five each.

    From `cifar-100-python/`. Normalised by channel with means 0.5071, 0.4865, 0.4409 and deviations 0.2673, 0.2564,
    0.2762, those of the training pixels.

    Args:
        superclasses: Use the 20 superclasses as classes.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source, level = Source.of("cifar100", root, verify), "coarse" if superclasses else "fine"
    (names,) = _entries(source, "meta", f"{level}_label_names")
    return of_bytes("cifar100", _cifar(source, f"{level}_labels"), tuple(names), source.moments)


def _cifar(source: Source, labels: str) -> Arrays:
    """Return images, `(samples, 3, 32, 32)` uint8, and labels: those of the last batch are the test part."""
    pixels, targets = [], []
    for name in source.facts["batches"]:
        data, given = _entries(source, name, "data", labels)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
            raise source.damaged(name, "its data is not uint8 (samples, 3072)")
        pixels.append(torch.from_numpy(data).view(-1, 3, 32, 32))
        try:
            targets.append(torch.tensor(given, dtype=torch.int64))
        except (TypeError, ValueError) as error:
            raise source.damaged(name, f"its {labels!r} are no whole numbers ({error})") from None
        if targets[-1].shape != (len(data),):
            raise source.damaged(name, f"has {len(data)} images and {len(targets[-1])} labels")
    return torch.cat(pixels[:-1]), torch.cat(targets[:-1]), pixels[-1], targets[-1]


def _entries(source: Source, name: str, *entries: str) -> list[Any]:
    """Return some entries of the dict in a file."""
    content = source.read(name)
    try:
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise source.damaged(name, f"no pickle of arrays and plain values ({error})") from None
    if not isinstance(found, dict):
        raise source.damaged(name, f"holds what is of type {type(found).__name__}, not a dict")
    for entry in entries:
        if entry not in found:
            raise source.damaged(name, f"has no {entry!r} (found: {', '.join(map(str, found))})")
    return [found[entry] for entry in entries]


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays and plain values only. The files name numpy's modules as of numpy 1."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise pickle.UnpicklingError(f"a CIFAR file has no use for {module}.{name}")


def _reconstruct(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], code: bytes) -> np.ndarray[Any, Any]:
    """Return an empty array, filled by the state that follows, as numpy's own function of this name does."""
    return kind.__new__(kind, shape, "b")


def _dtype(name: str, align: int, copy: int) -> np.dtype[Any]:
    """Convert the flags to bool: Python 2 wrote integers, which numpy no longer takes."""
    return np.dtype(name, bool(align), bool(copy))
