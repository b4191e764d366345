"""Digits from four sources, as in FPL (Huang et al., "Rethinking Federated Learning with Domain Shift", CVPR 2023)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedskew.data._dataset import Dataset
from fedskew.data._idx import mnist_arrays
from fedskew.data._mat import svhn_parts, syn_parts
from fedskew.data._stored import ByteImages
from fedskew.data._usps import usps_arrays
from fedskew.errors import ArgumentError

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]


def digit_domains(
    root: Path,
    rng: np.random.Generator | None,
    domains: tuple[str, ...] = ("mnist", "usps", "svhn", "syn"),
    share: float = 1.0,
    verify: bool = True,
) -> Dataset:
    """Read MNIST, USPS, SVHN and SYN digits as one data set of ten classes and several domains.

    All images become 3 x 32 x 32 bytes as in FPL's code: resized (bilinear), grey in all three channels, normalised by
    ImageNet's means 0.485, 0.456, 0.406 and deviations 0.229, 0.224, 0.225.

    Args:
        root: Holds the files of `mnist`, `usps`, `svhn` and `syn_digits`.
        rng: Draws the share of the samples.
        domains: Sources, in this order.
        share: Share of each source's training samples to use, rounded down (FPL's code gives a client 0.01); the test
            parts stay whole.
        verify: As in the four readers.
    """
    if not domains or len(set(domains)) != len(domains) or not set(domains) <= set(_SOURCES):
        raise ArgumentError(f"domains: expected some of {', '.join(_SOURCES)}, each once; got {list(domains)}")
    if not 0.0 < share <= 1.0:
        raise ArgumentError(f"share: must be above 0 and at most 1, got {share}")
    parts: list[list[Tensor]] = [[], [], [], []]
    for name in domains:
        pixels, targets, test_pixels, test_targets = _SOURCES[name](root, verify)
        rows = _drawn(len(targets), share, rng)
        found = _common(pixels[rows]), targets[rows], _common(test_pixels), test_targets
        for part, tensor in zip(parts, found, strict=True):
            part.append(tensor)
    inputs, targets, test_inputs, test_targets = map(torch.cat, parts)
    ids = np.arange(len(domains))
    return Dataset(
        name="digit_domains",
        inputs=ByteImages(inputs, _MEAN, _STD),
        targets=targets,
        test_inputs=ByteImages(test_inputs, _MEAN, _STD),
        test_targets=test_targets,
        classes=tuple("0123456789"),
        mean=_MEAN,
        std=_STD,
        domains=np.repeat(ids, [len(part) for part in parts[1]]),
        test_domains=np.repeat(ids, [len(part) for part in parts[3]]),
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


def _usps_bytes(root: Path, verify: bool) -> Arrays:
    """Return values in [-1, 1] as levels from 0 to 255."""
    inputs, targets, test_inputs, test_targets = usps_arrays(root, verify)
    levels = [part.add(1).mul_(127.5).round_().to(torch.uint8) for part in (inputs, test_inputs)]
    return levels[0], targets, levels[1], test_targets


def _svhn(root: Path, verify: bool) -> Arrays:
    train, test = svhn_parts(root, verify)
    return *train, *test


def _syn(root: Path, verify: bool) -> Arrays:
    train, test = syn_parts(root, verify)
    return *train, *test


_SOURCES: dict[str, Callable[[Path, bool], Arrays]] = {
    "mnist": mnist_arrays,
    "usps": _usps_bytes,
    "svhn": _svhn,
    "syn": _syn,
}
