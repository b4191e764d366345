"""SVHN and SYN digits, in MATLAB files of one layout: `X`, (32, 32, 3, samples) uint8, and `y`, (samples, 1)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read_checked
from fedskew.data._images import statistics
from fedskew.data._stored import ByteImages

_SVHN_PAGE = "http://ufldl.stanford.edu/housenumbers/"
_SYN_PAGE = "http://yaroslav.ganin.net/"
_SVHN = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
}
_SYN = {"synth_train_32x32.mat": 479_400, "synth_test_32x32.mat": 9_553}

Part = tuple[Tensor, Tensor]
"""Images, `(samples, 3, 32, 32)` uint8, and int64 labels."""


def svhn(root: Path, extra: bool = False, verify: bool = True) -> Dataset:
    """Read Street View House Numbers (Netzer et al. 2011), cropped digits: 73,257 and 26,032 colour images of 32 x 32.

    The files' label 10 is digit 0. Kept as bytes in memory, and normalised by channel with mean and deviation of the
    training pixels, computed from the files.

    Args:
        root: Holds `svhn/train_32x32.mat` and `test_32x32.mat`.
        extra: Add the 531,131 easier training samples of `extra_32x32.mat`.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    return _dataset("svhn", *svhn_parts(root, verify, extra))


def svhn_parts(root: Path, verify: bool = True, extra: bool = False) -> tuple[Part, Part]:
    """Return SVHN with the training and test parts of its files."""
    read = {
        name: _read(root / "svhn" / name, md5 if verify else None, _SVHN_PAGE)
        for name, md5 in _SVHN.items()
        if extra or not name.startswith("extra")
    }
    train, test, *more = read.values()
    if more:
        train = torch.cat([train[0], more[0][0]]), torch.cat([train[1], more[0][1]])
    return train, test


def syn_digits(root: Path, verify: bool = True) -> Dataset:
    """Read SYN digits (Ganin, Lempitsky 2015), drawn from fonts: 479,400 and 9,553 colour images of 32 x 32.

    Kept as bytes in memory (1.5 GB), and normalised by channel with mean and deviation of the training pixels, computed
    from the files.

    Args:
        root: Holds `syn/synth_train_32x32.mat` and `synth_test_32x32.mat`.
        verify: Check the files against the published sizes (there is no published checksum).
    """
    return _dataset("syn_digits", *syn_parts(root, verify))


def syn_parts(root: Path, verify: bool = True) -> tuple[Part, Part]:
    """Return SYN digits as they are in their files: training part, test part."""
    parts = []
    for name, samples in _SYN.items():
        path = root / "syn" / name
        parts.append(_read(path, None, _SYN_PAGE))
        if verify and len(parts[-1][1]) != samples:
            raise damaged(path, f"it holds {len(parts[-1][1])} samples, expected {samples}", _SYN_PAGE)
    train, test = parts
    return train, test


def _dataset(name: str, train: Part, test: Part) -> Dataset:
    mean, std = statistics(train[0])
    return Dataset(
        name=name,
        inputs=ByteImages(train[0], mean, std),
        targets=train[1],
        test_inputs=ByteImages(test[0], mean, std),
        test_targets=test[1],
        classes=tuple("0123456789"),
        mean=mean,
        std=std,
    )


def _read(path: Path, md5: str | None, page: str) -> Part:
    from scipy.io import loadmat

    content = read_checked(path, md5, page)
    try:
        found = loadmat(io.BytesIO(content), variable_names=("X", "y"))
    except Exception as error:  # a damaged file can raise almost anything
        raise damaged(path, f"it can't be read as a MATLAB file ({' '.join(str(error).split())})", page) from None
    pixels, labels = (np.asarray(found.get(name)) for name in ("X", "y"))
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise damaged(path, f"X is {pixels.dtype} {pixels.shape}, expected uint8 (32, 32, 3, samples)", page)
    if labels.size != pixels.shape[3] or labels.dtype.kind not in "iuf" or not np.isin(labels, range(11)).all():
        raise damaged(path, "y does not hold one label from 0 to 10 for each image", page)
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return images, torch.from_numpy(labels.ravel().astype(np.int64) % 10)
