"""Augmentation by key, against the same formulas image by image in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from fedskew.data import AUGMENTATIONS
from fedskew.errors import ArgumentError
from fedskew.randomness import mix
from hashing import hashed

CropFlip, JitterFlipGrey = AUGMENTATIONS["crop_flip"], AUGMENTATIONS["fedentopt"]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def keys(size: int, of: int = 7) -> torch.Tensor:
    return mix(torch.arange(size), of)


def images(size: int, channels: int = 3, side: int = 8) -> torch.Tensor:
    return torch.rand(size, channels, side, side, generator=torch.Generator().manual_seed(0))


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    channels = pixels.shape[1]
    return (pixels - torch.tensor(MEAN[:channels]).view(-1, 1, 1)) / torch.tensor(STD[:channels]).view(-1, 1, 1)


def apply(augmentation, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """On pixels in [0, 1], and back to them."""
    channels = pixels.shape[1]
    out = augmentation.apply(normalised(pixels), keys, MEAN[:channels], STD[:channels])
    return out * torch.tensor(STD[:channels]).view(-1, 1, 1) + torch.tensor(MEAN[:channels]).view(-1, 1, 1)


def jittered(image: np.ndarray, key: int, strengths: tuple[float, ...]) -> np.ndarray:
    """One image, (channels, height, width), in float64."""
    draws, (*most, flip, greyscale) = [hashed(key, index) for index in range(5)], strengths
    bright, contrast, saturation = (1 + s * (2 * draw - 1) for s, draw in zip(most, draws[1:4], strict=True))
    weights = np.array([0.299, 0.587, 0.114]) if len(image) == 3 else np.ones(1)

    def grey(x: np.ndarray) -> np.ndarray:
        return np.tensordot(weights, x, axes=1)

    x = image[:, :, ::-1] if draws[0] < flip else image
    x = np.clip(bright * x, 0, 1)
    x = np.clip(contrast * x + (1 - contrast) * grey(x).mean(), 0, 1)
    if draws[4] < greyscale:
        return np.broadcast_to(grey(x), x.shape)
    return np.clip(saturation * x + (1 - saturation) * grey(x), 0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strengths", [(), (0.4, 0.1, 0.3, 0.7, 0.3), (0.0,) * 5])
def test_fedentopts_augmentation_is_its_formulas_image_by_image(strengths, channels):
    batch, of = images(200, channels), keys(200)
    assert sum(hashed(int(key), 4) < 0.1 for key in of) > 5  # greyscale occurs
    own = strengths or (0.2, 0.2, 0.2, 0.5, 0.1)
    expected = np.stack([jittered(p.double().numpy(), int(k), own) for p, k in zip(batch, of, strict=True)])
    np.testing.assert_allclose(apply(JitterFlipGrey(*strengths), batch, of).numpy(), expected, atol=2e-6)


def cropped(image: np.ndarray, key: int, pad: int) -> np.ndarray:
    mirror, down, right = (hashed(key, index) for index in range(3))
    down, right = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
    _, height, width = image.shape
    x = image[:, :, ::-1] if mirror < 0.5 else image
    return np.pad(x, ((0, 0), (pad, pad), (pad, pad)))[:, down : down + height, right : right + width]


@pytest.mark.parametrize("pad", [0, 2, 4])
@pytest.mark.parametrize("channels", [1, 3])
def test_crop_and_flip_cut_the_padded_image(pad, channels):
    batch, of = torch.rand(60, channels, 6, 9, generator=torch.Generator().manual_seed(0)), keys(60)
    expected = np.stack([cropped(p.numpy(), int(k), pad) for p, k in zip(batch, of, strict=True)])
    np.testing.assert_allclose(apply(CropFlip(pad=pad), batch, of).numpy(), expected, atol=1e-6)


def test_a_flip_mirrors_left_to_right_exactly():
    batch = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
    assert CropFlip(pad=0, flip=1.0).apply(batch, keys(1), (), ()).tolist() == [[[[3.0, 2.0, 1.0], [6.0, 5.0, 4.0]]]]
    assert torch.equal(CropFlip(pad=0, flip=0.0).apply(batch, keys(1), (), ()), batch)


@pytest.fixture(params=sorted(AUGMENTATIONS))
def augment(request) -> Callable[..., torch.Tensor]:
    return partial(AUGMENTATIONS[request.param]().apply, mean=MEAN, std=STD)


def test_a_sample_does_not_depend_on_the_rest_of_the_batch(augment):
    batch, of = normalised(images(12)), keys(12)
    together = augment(batch, of)
    order = torch.tensor([7, 3, 11])
    torch.testing.assert_close(augment(batch[order], of[order]), together[order])
    for row in range(12):
        torch.testing.assert_close(augment(batch[row : row + 1], of[row : row + 1])[0], together[row])


def test_it_maps_over_clients(augment):
    batch = normalised(images(12)).view(3, 4, 3, 8, 8)
    of = keys(12).view(3, 4)
    mapped = torch.func.vmap(augment)(batch, of)
    torch.testing.assert_close(mapped, torch.stack([augment(b, k) for b, k in zip(batch, of, strict=True)]))


def test_the_batch_is_left_as_it_was_and_keys_decide(augment):
    batch = normalised(images(12))
    kept, state = batch.clone(), torch.get_rng_state()
    out = augment(batch, keys(12))
    assert torch.equal(batch, kept)
    assert out.shape == batch.shape
    assert torch.equal(out, augment(batch, keys(12)))
    assert not torch.allclose(out, augment(batch, keys(12, of=8)))
    assert torch.equal(state, torch.get_rng_state())


def test_layout_in_memory_changes_nothing(augment):
    batch = normalised(images(6))
    torch.testing.assert_close(
        augment(batch.contiguous(memory_format=torch.channels_last), keys(6)), augment(batch, keys(6))
    )


def test_wrong_shapes_are_refused(augment):
    with pytest.raises(ArgumentError, match="batch: .* takes images"):
        augment(torch.zeros(4, 10), keys(4))
    with pytest.raises(ArgumentError, match="batch: .* takes images"):
        augment(torch.zeros(4, 2, 8, 8), keys(4))
    with pytest.raises(ArgumentError, match="keys: expected one key per sample"):
        augment(torch.zeros(4, 3, 8, 8), keys(3))
    with pytest.raises(ArgumentError, match="batch: has 3 channels"):
        augment(torch.zeros(4, 3, 8, 8), keys(4), mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (JitterFlipGrey, "brightness", 1.5),
        (JitterFlipGrey, "flip", float("nan")),
        (CropFlip, "pad", -1),
        (CropFlip, "flip", 2.0),
    ],
)
def test_strengths_outside_their_range_are_refused(kind, field, value):
    with pytest.raises(ArgumentError, match=f"{field}:"):
        kind(**{field: value})
