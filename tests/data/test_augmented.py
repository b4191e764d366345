"""Augmentation by key, against the same formulas image by image in numpy."""

import itertools
import math
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from fedskew.data import AUGMENTATIONS
from fedskew.data.augmentation import PROBABILITIES, ROWS, operate, operation_row
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


# AutoAugment's operations against Pillow's, its policy against the published table, and what a key draws.

AutoAugment = AUGMENTATIONS["autoaugment"]
CropFlipAutoAugment = AUGMENTATIONS["crop_flip_autoaugment"]

# Cubuk et al., table 7, with the levels that it prints for operations without a strength too.
PUBLISHED = """
Invert 0.1 7, Contrast 0.2 6
Rotate 0.7 2, TranslateX 0.3 9
Sharpness 0.8 1, Sharpness 0.9 3
ShearY 0.5 8, TranslateY 0.7 9
AutoContrast 0.5 8, Equalize 0.9 2
ShearY 0.2 7, Posterize 0.3 7
Color 0.4 3, Brightness 0.6 7
Sharpness 0.3 9, Brightness 0.7 9
Equalize 0.6 5, Equalize 0.5 1
Contrast 0.6 7, Sharpness 0.6 5
Color 0.7 7, TranslateX 0.5 8
Equalize 0.3 7, AutoContrast 0.4 8
TranslateY 0.4 3, Sharpness 0.2 6
Brightness 0.9 6, Color 0.2 8
Solarize 0.5 2, Invert 0.0 3
Equalize 0.2 0, AutoContrast 0.6 0
Equalize 0.2 8, Equalize 0.6 4
Color 0.9 9, Equalize 0.6 6
AutoContrast 0.8 4, Solarize 0.2 8
Brightness 0.1 3, Color 0.7 0
Solarize 0.4 5, AutoContrast 0.9 3
TranslateY 0.9 9, TranslateY 0.7 9
AutoContrast 0.9 2, Solarize 0.8 3
Equalize 0.8 8, Invert 0.1 3
TranslateY 0.7 9, AutoContrast 0.9 1
"""


def published() -> list[list[tuple[str, float, int]]]:
    text = re.sub(r"\B[A-Z]", r"_\g<0>", PUBLISHED.strip()).lower()  # as Python writes names
    parts = [[part.split() for part in line.split(", ")] for line in text.splitlines()]
    return [[(name, float(probability), int(level)) for name, probability, level in pair] for pair in parts]


NO_STRENGTH = ("invert", "auto_contrast", "equalize")
USED = sorted({(name, 0 if name in NO_STRENGTH else level) for pair in published() for name, _, level in pair})


def pillow(image: Image.Image, name: str, level: int, sign: int) -> Image.Image:
    """One operation as Pillow does it, at the strengths of torchvision."""
    width, height = image.size
    signed = sign * level / 9
    affine = {
        "shear_y": lambda: (1, 0, 0, 0.3 * signed, 1, 0),
        "translate_x": lambda: (1, 0, math.trunc(150 / 331 * width * signed), 0, 1, 0),
        "translate_y": lambda: (1, 0, 0, 0, 1, math.trunc(150 / 331 * height * signed)),
    }
    enhance = {
        "brightness": ImageEnhance.Brightness, "color": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast, "sharpness": ImageEnhance.Sharpness,
    }  # fmt: skip
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name](), Image.Resampling.NEAREST)
    if name in enhance:
        return enhance[name](image).enhance(1 + 0.9 * signed)
    if name == "rotate":
        return image.rotate(-30 * signed, Image.Resampling.NEAREST)
    if name == "posterize":
        return ImageOps.posterize(image, 8 - round(4 * level / 9))
    if name == "solarize":
        return ImageOps.solarize(image, 255 - 255 * level / 9)
    if name == "invert":
        return ImageOps.invert(image)
    return ImageOps.autocontrast(image) if name == "auto_contrast" else ImageOps.equalize(image)


def image(pixels: np.ndarray) -> Image.Image:
    """From (channels, height, width) in 0 to 255."""
    whole = pixels.round().astype(np.uint8)
    return Image.fromarray(whole[0] if len(whole) == 1 else whole.transpose(1, 2, 0))


def pixels(image: Image.Image) -> np.ndarray:
    array = np.asarray(image, dtype=np.float64)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def samples(channels: int, height: int, width: int) -> torch.Tensor:
    """Noise; smooth images, of full and of little contrast; few levels; a constant one; a black one with one dot."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (4, channels, height, width))
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = np.stack([np.sin(7 * x + 5 * y + shift) for shift in range(channels)])
    smooth = [127 + 127 * waves, 90 + 30 * waves, 200 + 3 * waves, 127 + 100 * np.sign(waves)]
    flat = [np.full((channels, height, width), 77.0), np.zeros((channels, height, width))]
    flat[1][:, height // 2, width // 2] = 200
    return torch.from_numpy(np.concatenate([noise, np.round(smooth), flat])).float()


def rows(name: str, level: int, size: int = 1) -> torch.Tensor:
    return torch.tensor([operation_row(name, level)] * size, dtype=torch.float64)


@pytest.mark.parametrize(("name", "level"), USED)
def test_an_operation_is_pillows_to_the_grey_level(name, level):
    for shape, sign in itertools.product([(3, 32, 32), (1, 32, 32), (3, 20, 36)], [1, -1]):
        batch = samples(*shape)
        out = operate(batch, rows(name, level, len(batch)), torch.full((len(batch),), float(sign)))
        expected = np.stack([pixels(pillow(image(one.numpy()), name, level, sign)) for one in batch])
        np.testing.assert_array_equal(out.numpy(), expected, err_msg=f"{shape}, sign {sign}")


def test_the_policy_is_the_published_one():
    # Operations by the numbers that stand for them, so that the levels that mean nothing don't count.
    pairs = published()
    assert len(pairs) == 25
    assert torch.equal(ROWS[:50], torch.cat([rows(name, level) for pair in pairs for name, _, level in pair]))
    assert torch.equal(PROBABILITIES, torch.tensor([[probability for _, probability, _ in pair] for pair in pairs]))


def by_pillow(array: np.ndarray, key: int) -> tuple[np.ndarray, int]:
    """The policy on one image, by the draws 3 to 7 of its key; and how many operations happened."""
    draws = [hashed(key, number) for number in range(3, 8)]
    pair, one, done = published()[int(draws[0] * 25)], image(array), 0
    for turn, (name, probability, level) in enumerate(pair):
        if draws[1 + turn] < probability:
            one, done = pillow(one, name, level, 1 if draws[3 + turn] < 0.5 else -1), done + 1
    return pixels(one), done


def levels(batch: torch.Tensor) -> torch.Tensor:
    return 255 * (batch * torch.tensor(STD).view(-1, 1, 1) + torch.tensor(MEAN).view(-1, 1, 1))


def test_a_key_draws_a_sub_policy_whether_each_operation_happens_and_its_sign():
    batch = samples(3, 32, 32)[:8].repeat(60, 1, 1, 1)
    keys = mix(torch.arange(len(batch)), 11)
    out = levels(AutoAugment().apply(normalised(batch / 255), keys, MEAN, STD)).numpy()
    assert np.abs(out - out.round()).max() < 1e-3
    same, happened = 0, []
    for place, key in enumerate(keys.tolist()):
        expected, done = by_pillow(batch[place].numpy(), key)
        happened.append(done)
        same += bool(np.abs(out[place] - expected).max() < 1e-3)
    assert {0, 1, 2} == set(happened)
    assert same == len(batch)


def test_crop_and_flip_come_first():
    batch, keys = normalised(samples(3, 32, 32) / 255), mix(torch.arange(10), 5)
    expected = AutoAugment().apply(CropFlip().apply(batch, keys, MEAN, STD), keys, MEAN, STD)
    assert torch.equal(CropFlipAutoAugment().apply(batch, keys, MEAN, STD), expected)
    with pytest.raises(ArgumentError, match="pad:"):
        CropFlipAutoAugment(pad=-1)


def test_pixels_that_are_not_normalised_are_taken_as_they_are():
    batch, keys = samples(1, 28, 28) / 255, mix(torch.arange(10), 5)
    out = 255 * AutoAugment().apply(batch, keys, (), ())
    for place, key in enumerate(keys.tolist()):
        expected, _ = by_pillow(255 * batch[place].numpy(), key)
        np.testing.assert_allclose(out[place].numpy(), expected, atol=1e-3)
