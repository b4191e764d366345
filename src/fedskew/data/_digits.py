"""Small data: scikit-learn's digits and FedPALS's synthetic task, which need no file; SVHN, SYN and USPS, and all of
these with MNIST as one data set of several domains.

SVHN and SYN are MATLAB files of one layout: `X`, (32, 32, 3, samples) uint8, and `y`, (samples, 1).
"""

import hashlib
import io
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from fedskew.data._arrays import mnist_arrays
from fedskew.data._dataset import Arrays, ByteImages, Dataset, names_clients
from fedskew.data._images import of_bytes
from fedskew.data.published import DIGITS, IMAGENET, Source
from fedskew.errors import ArgumentError
from fedskew.parameters import PositiveShare, Share

# FedPALS's synthetic task: means of its classes, what its two clients hold of each, and the size of its test part.
_MEANS = np.array([[6.0, 4.6], [1.2, -1.6], [4.6, -5.4]])
_COUNTS = np.array([[20, 20, 0], [9, 0, 9]])
_TEST = 2000


def svhn(root: Path, extra: bool = False, verify: bool = True) -> Dataset:
    """Read Street View House Numbers (Netzer et al. 2011), cropped digits: 73,257 and 26,032 colour images of 32 x 32.

    From `svhn/train_32x32.mat` and `test_32x32.mat`; their label 10 is digit 0. Kept as bytes in memory, and normalised
    by channel with mean and deviation of the training pixels, computed from the files.

    Args:
        extra: Add the 531,131 easier training samples of `extra_32x32.mat`.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    pixels, labels, *test = _svhn(root, verify)
    if extra:
        more = _matlab(Source.of("svhn", root, verify), "extra_32x32.mat")
        pixels, labels = torch.cat([pixels, more[0]]), torch.cat([labels, more[1]])
    return of_bytes("svhn", (pixels, labels, test[0], test[1]), DIGITS, held=ByteImages)


def syn_digits(root: Path, verify: bool = True) -> Dataset:
    """Read SYN digits (Ganin, Lempitsky 2015), drawn from fonts: 479,400 and 9,553 colour images of 32 x 32.

    From `syn/synth_train_32x32.mat` and `synth_test_32x32.mat`. Kept as bytes in memory (1.5 GB), and normalised by
    channel with mean and deviation of the training pixels, computed from the files.

    Args:
        verify: Check the files against the published sizes (there is no published checksum).
    """
    return of_bytes("syn_digits", _syn(root, verify), DIGITS, held=ByteImages)


def usps(root: Path, verify: bool = True) -> Dataset:
    """Read USPS (Hull 1994; LeCun et al. 1989): 7,291 and 2,007 grey images of 16 x 16, digits 0 to 9.

    From `usps/zip.train.gz` and `zip.test.gz`, as of "The Elements of Statistical Learning". Values are in [-1, 1] as
    published (mean and deviation 0.5).

    Args:
        verify: Check the values against those published (not the archives' checksums: copies are compressed
            differently); False accepts other files in this format too.
    """
    return Dataset("usps", *_usps(root, verify), DIGITS, (0.5,), (0.5,))


def digit_domains(
    root: Path,
    rng: np.random.Generator | None,
    domains: tuple[str, ...] = ("mnist", "usps", "svhn", "syn"),
    share: PositiveShare = 1.0,
    verify: bool = True,
) -> Dataset:
    """Read MNIST, USPS, SVHN and SYN digits as one data set of ten classes and several domains.

    As in FPL (Huang et al., "Rethinking Federated Learning with Domain Shift", CVPR 2023) and its code: all images
    become 3 x 32 x 32 bytes, resized (bilinear), grey in all three channels, normalised as ImageNet's are.

    Args:
        domains: Sources, in this order.
        share: Share of each source's training samples to use, drawn at random and rounded down (FPL's code gives a
            client 0.01); the test parts stay whole.
        verify: As in the four readers.
    """
    if not domains or len(set(domains)) != len(domains) or not set(domains) <= set(_SOURCES):
        raise ArgumentError(f"domains: expected some of {', '.join(_SOURCES)}, each once; got {list(domains)}")
    parts: list[Arrays] = []
    for name in domains:
        pixels, labels, test_pixels, test_labels = _SOURCES[name](root, verify)
        rows = _drawn(len(labels), share, rng)
        parts.append((_common(pixels[rows]), labels[rows], _common(test_pixels), test_labels))
    inputs, targets, test_inputs, test_targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    ids = np.arange(len(domains))
    return of_bytes(
        "digit_domains",
        (inputs, targets, test_inputs, test_targets),
        DIGITS,
        IMAGENET,
        ByteImages,
        domains=np.repeat(ids, [len(part[1]) for part in parts]),
        test_domains=np.repeat(ids, [len(part[3]) for part in parts]),
        domain_names=tuple(domains),
    )


def _drawn(samples: int, share: float, rng: np.random.Generator | None) -> Tensor:
    """Return ascending rows."""
    if share == 1.0:
        return torch.arange(samples)
    if rng is None:
        raise ArgumentError("rng: a share of the samples is drawn at random; pass a numpy Generator")
    return torch.from_numpy(np.sort(rng.permutation(samples)[: int(share * samples)]))


def _common(pixels: Tensor) -> Tensor:
    """Return uint8 images of any size and 1 or 3 channels as `(samples, 3, 32, 32)`."""
    if pixels.shape[2:] != (32, 32):
        parts = [interpolate(part, (32, 32), mode="bilinear", antialias=True) for part in torch.split(pixels, 10_000)]
        pixels = torch.cat(parts) if parts else pixels.new_empty(0, pixels.shape[1], 32, 32)
    return pixels.expand(-1, 3, -1, -1)


def _svhn(root: Path, verify: bool) -> Arrays:
    source = Source.of("svhn", root, verify)
    return *_matlab(source, "train_32x32.mat"), *_matlab(source, "test_32x32.mat")


def _syn(root: Path, verify: bool) -> Arrays:
    source = Source.of("syn_digits", root, verify)
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, expected in source.facts["samples"].items():
        pairs.append(_matlab(source, name))
        if verify and len(pairs[-1][1]) != expected:
            raise source.damaged(name, f"it holds {len(pairs[-1][1])} samples, expected {expected}")
    return *pairs[0], *pairs[1]


def _matlab(source: Source, name: str) -> tuple[Tensor, Tensor]:
    """Return images, `(samples, 3, 32, 32)` uint8, and int64 labels of a file of SVHN or SYN."""
    from scipy.io import loadmat

    content = source.read(name)
    try:
        found = loadmat(io.BytesIO(content), variable_names=("X", "y"))
    except Exception as error:  # a damaged file can raise almost anything
        raise source.damaged(name, f"it can't be read as a MATLAB file ({' '.join(str(error).split())})") from None
    pixels, labels = (np.asarray(found.get(part)) for part in ("X", "y"))
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise source.damaged(name, f"X is {pixels.dtype} {pixels.shape}, expected uint8 (32, 32, 3, samples)")
    if labels.size != pixels.shape[3] or labels.dtype.kind not in "iuf" or not np.isin(labels, range(11)).all():
        raise source.damaged(name, "y does not hold one label from 0 to 10 for each image")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return images, torch.from_numpy(labels.ravel().astype(np.int64) % 10)


def _usps(root: Path, verify: bool) -> Arrays:
    """Return images, `(samples, 1, 16, 16)` float32 in [-1, 1], and labels."""
    pairs: list[tuple[Tensor, Tensor]] = []
    source = Source.of("usps", root, verify)
    for file, archive in source.facts["archives"].items():
        expected = f"sha256 {archive['sha256']}, or the same values compressed anew"
        content = source.unpacked(file, expected)
        try:
            table = np.loadtxt(io.BytesIO(content), dtype=np.float32, ndmin=2)
        except ValueError as error:
            raise source.damaged(file, f"{error}; expected {expected}") from None
        if verify and hashlib.sha256(table.tobytes()).hexdigest() != archive["values"]:
            raise source.damaged(file, f"its values are not those published; expected {expected}")
        if table.shape[1] != 257:
            raise source.damaged(file, f"a line holds {table.shape[1]} values, not a digit and 256")
        pixels = torch.from_numpy(table[:, 1:].copy()).view(-1, 1, 16, 16)
        pairs.append((pixels, torch.from_numpy(table[:, 0].astype(np.int64))))
    return *pairs[0], *pairs[1]


def _usps_bytes(root: Path, verify: bool) -> Arrays:
    """Return values in [-1, 1] as levels from 0 to 255."""
    train, labels, test, test_labels = _usps(root, verify)
    first, last = (part.add(1).mul_(127.5).round_().to(torch.uint8) for part in (train, test))
    return first, labels, last, test_labels


_SOURCES: dict[str, Callable[[Path, bool], Arrays]] = {
    "mnist": mnist_arrays,
    "usps": _usps_bytes,
    "svhn": _svhn,
    "syn": _syn,
}


def digits() -> Dataset:
    """Load scikit-learn's digits: 1,797 grey images of 8 x 8, digits 0 to 9.

    Values are in [0, 1] (their 17 levels divided by 16), not normalised further. Every fourth sample of each class, in
    the order of the file, is the test part, the same for every seed.
    """
    table = torch.from_numpy(_digits_table())
    inputs = table[:, :64].float().div_(16).view(-1, 1, 8, 8)
    targets = table[:, 64].long()
    test = torch.zeros(len(targets), dtype=torch.bool)
    for label in range(10):
        test[torch.nonzero(targets == label).flatten()[3::4]] = True
    return Dataset("digits", inputs[~test], targets[~test], inputs[test], targets[test], DIGITS)


@cache
def _digits_table() -> NDArray[np.uint8]:
    """Read 64 levels and a label a row from scikit-learn's file, as to import its package takes seconds; from the
    package where the file is elsewhere."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except OSError:
        from sklearn.datasets import load_digits

        levels, labels = load_digits(return_X_y=True)
        return np.column_stack([levels, labels]).astype(np.uint8)


@names_clients
def synthetic(rng: np.random.Generator | None, delta: Share = 0.5) -> Dataset:
    """Draw FedPALS' synthetic task: three Gaussian classes in the plane, two clients, a target outside their hull.

    Classes have unit covariance. Client S1 holds 20 samples each of classes 0 and 1, S2 holds 9 each of 0 and 2 (the
    paper's shares, as exact counts). The target mix is (1 - delta)(1/2, 1/4, 1/4) + delta (0, 1/2, 1/2): its squared
    distance to the clients' hull is 0.375 delta^2. The test part is 2000 samples of that mix. Nothing is normalised.

    Args:
        delta: In [0, 1].
    """
    if rng is None:
        raise ArgumentError("rng: the synthetic task is drawn at random; pass a numpy Generator")
    target = (1 - delta) * np.array([0.5, 0.25, 0.25]) + delta * np.array([0.0, 0.5, 0.5])
    clients, labels = np.nonzero(_COUNTS)
    counts = _COUNTS[clients, labels]
    targets = np.repeat(labels, counts)
    test_targets = rng.choice(3, size=_TEST, p=target)
    return Dataset(
        "synthetic",
        _draw(targets, rng),
        torch.from_numpy(targets),
        _draw(test_targets, rng),
        torch.from_numpy(test_targets),
        classes=("0", "1", "2"),
        clients=np.repeat(clients, counts),
        client_names=("S1", "S2"),
        target=target,
    )


def _draw(labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy((_MEANS[labels] + rng.normal(size=(len(labels), 2))).astype(np.float32))
