"""USPS digits (Hull 1994; LeCun et al. 1989), as given with "The Elements of Statistical Learning"."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read, unpacked

_PAGE = "https://hastie.su.domains/ElemStatLearn/data.html"
_TRAIN = (
    "zip.train.gz",
    "ce03cd1b0eaa9ebffefb68780ccc947e6fd4ac92e2271c084ef1f57678ac49d3",
    "0a5472119740d8405dcdce0737f9bf57b1f04e315a50daa4cd7fb073538f0bf0",
)
_TEST = (
    "zip.test.gz",
    "0445c6fd1dc8f39a2db1a160228ba5855b891e862f89597bff97a3b9ff095bab",
    "90b61e7a2da087423377cb80e7feda5bfd2afca9de8534a24ee9983de428aa61",
)


def usps(root: Path, verify: bool = True) -> Dataset:
    """Read USPS: 7,291 and 2,007 grey images of 16 x 16, digits 0 to 9.

    Values are in [-1, 1] as published (mean and deviation 0.5).

    Args:
        root: Holds `usps/zip.train.gz` and `zip.test.gz`.
        verify: Check the values against those published (not the archives' checksums: copies are compressed
            differently); False accepts other files in this format too.
    """
    inputs, targets, test_inputs, test_targets = usps_arrays(root, verify)
    return Dataset(
        name="usps",
        inputs=inputs,
        targets=targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        classes=tuple("0123456789"),
        mean=(0.5,),
        std=(0.5,),
    )


def usps_arrays(root: Path, verify: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images, `(samples, 1, 16, 16)` float32 in [-1, 1], and int64 labels: training part, then test part."""
    return *_read(root / "usps", *_TRAIN, verify), *_read(root / "usps", *_TEST, verify)


def _read(folder: Path, file: str, sha256: str, digest: str, verify: bool) -> tuple[Tensor, Tensor]:
    """Read a file of one sample a line: the digit, then 256 values."""
    path, expected = folder / file, f"sha256 {sha256}, or the same values compressed anew"
    content = unpacked(path, read(path, expected, _PAGE), expected, _PAGE)
    try:
        table = np.loadtxt(io.BytesIO(content), dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise damaged(path, f"{error}; expected {expected}", _PAGE) from None
    if verify and hashlib.sha256(table.tobytes()).hexdigest() != digest:
        raise damaged(path, f"its values are not those published; expected {expected}", _PAGE)
    if table.shape[1] != 257:
        raise damaged(path, f"a line holds {table.shape[1]} values, not a digit and 256", _PAGE)
    return torch.from_numpy(table[:, 1:].copy()).view(-1, 1, 16, 16), torch.from_numpy(table[:, 0].astype(np.int64))
