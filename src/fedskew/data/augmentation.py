"""Random changes of training images: the protocol, CIFAR-10's crop and flip, FedEntOpt's colour jitter, AutoAugment.

Cubuk, Zoph, Mane, Vasudevan, Le, "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019, table 7: 25
sub-policies of two operations, each with its probability and a level from 0 to 9. One sub-policy is drawn for each
image. FedVLS trains with it on CIFAR, after `CropFlip`, and on Tiny ImageNet, alone.

What a level means is not in the paper, and public code differs. Here it is as in torchvision: the level picks one of
ten equal steps from nothing to a shear of 0.3, a translation by 150/331 of the side, a rotation by 30 degrees, an
enhancement by 1 +- 0.9, posterising to 4 bits, and solarising from 0 on; shears, translations, rotations and
enhancements take either sign equally often; pixels are the nearest ones, and black from outside. Each operation is
Pillow's, on whole grey levels. (FedVLS' repository imports its AutoAugment from a file that it does not hold. If that
is FedDecorr's, whose data code it ports, a level is an interval of the range from minus to plus, drawn from uniformly,
so that it also gives the sign; and shears, translations and rotations interpolate by splines.)
"""

import csv
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import hardtanh_

from fedskew.errors import ArgumentError
from fedskew.parameters import Share, Size, component
from fedskew.randomness import uniform

_GREY = (0.299, 0.587, 0.114)

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""From a normalised batch, `(batch, channels, height, width)`, and int64 keys, `(batch,)`, to a new batch."""

POLICY = tuple(
    tuple((row[at], float(row[at + 1]), int(row[at + 2])) for at in (0, 3))
    for row in csv.reader(Path(__file__).with_name("autoaugment.csv").read_text(encoding="utf-8").splitlines()[1:])
)
"""The 25 sub-policies; operations without a strength have level 0 (the paper prints one, which means nothing)."""

_FIRST_DRAW = 3  # CropFlip takes 0, 1 and 2 of the same key

# An operation is a row of numbers, most of which have no effect in a given row:
#   numbers of either sign: shear, translation (shares of the side), angle, offset of the enhancement factor from 1;
#   flags: enhance from grey (colour), from the mean (contrast), from the smooth image (sharpness; brightness: none);
#   flags: stretch (auto-contrast), equalise; step of levels (posterise); first level that is inverted.
_SIGNED = ("shear_y", "translate_x", "translate_y", "rotate", "enhance")
_COLUMNS = (*_SIGNED, "color", "contrast", "sharpness", "auto_contrast", "equalize", "posterize", "invert")
_NOTHING = dict.fromkeys(_COLUMNS, 0.0) | {"posterize": 1.0, "invert": 256.0}


class Augmenter(Protocol):
    """A random change of training images: a frozen dataclass of strengths.

    What happens to a sample is a function of its key alone, not of its position in the batch or of the other samples.
    No Python branch and no shape depends on values, so that it can be mapped over a cohort.
    """

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch, by one int64 key a sample.

        The batch, `(batch, channels, height, width)`, was normalised with these means and deviations by channel; they
        are empty if it was not.
        """


@component
class CropFlip:
    """Random horizontal flip and crop of the padded image: the usual augmentation of CIFAR-10.

    `pad` black pixels are added on each side, and the original size is cut, uniformly over the (2 pad + 1)^2 positions.
    """

    pad: Size = 4
    flip: Share = 0.5

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
        check(batch, keys, "crop_flip")
        size, channels, height, width = batch.shape
        black = -per_channel(mean, batch, 0.0) / per_channel(std, batch, 1.0)
        draws = uniform(keys.unsqueeze(1), torch.arange(3, device=keys.device))
        down, right = (draws[:, 1:] * (2 * self.pad + 1)).long().unbind(1)
        unflipped = (draws[:, 0] >= self.flip).to(batch.dtype).view(-1, 1, 1, 1)

        tall, wide = height + 2 * self.pad, width + 2 * self.pad
        padded = batch.new_empty(size, channels, tall, wide).copy_(black)
        x = torch.lerp(batch.flip(-1), batch, unflipped)
        padded[..., self.pad : self.pad + height, self.pad : self.pad + width] = x
        # Every row of the result is `width` values in a row of memory. Picking such windows by where they start copies
        # rows; indexing by row and column would look up each pixel, and takes over twice the time.
        rows = torch.arange(size * channels, device=batch.device).view(size, channels, 1) * tall
        rows = rows + down.view(-1, 1, 1) + torch.arange(height, device=batch.device)
        starts = rows * wide + right.view(-1, 1, 1)
        windows = padded.flatten().unfold(0, width, 1)
        return windows.index_select(0, starts.flatten()).view(batch.shape)


@component
class JitterFlipGrey:
    """Colour jitter, horizontal flip and random greyscale (Lutz et al., "Boosting Federated Learning with FedEntOpt").

    Each strength s draws a factor f uniformly from [1 - s, 1 + s]; pixels in [0, 1] are clamped after each step.
    Brightness: f x; contrast: f x + (1 - f) m, m the image's mean grey; saturation: f x + (1 - f) grey(x), with
    grey = 0.299 R + 0.587 G + 0.114 B. On grey images saturation does nothing.

    The paper gives the probabilities of flip (0.5) and greyscale (0.1), and no strengths of the jitter. Chosen here:
    0.2 each for brightness, contrast and saturation, in this order, and no shift of hue (torchvision's default; its
    order is random).
    """

    brightness: Share = 0.2
    contrast: Share = 0.2
    saturation: Share = 0.2
    flip: Share = 0.5
    greyscale: Share = 0.1

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
        check(batch, keys, "fedentopt")
        shift, scale = per_channel(mean, batch, 0.0), per_channel(std, batch, 1.0)
        draws = uniform(keys.unsqueeze(1), torch.arange(5, device=keys.device)).to(batch.dtype)
        unflipped = (draws[:, 0] >= self.flip).to(batch.dtype).view(-1, 1, 1, 1)
        brightness, contrast, saturation = (
            1 + strength * (2 * draw.view(-1, 1, 1, 1) - 1)
            for strength, draw in zip(
                (self.brightness, self.contrast, self.saturation), draws[:, 1:4].unbind(1), strict=True
            )
        )
        saturation = saturation * (draws[:, 4] >= self.greyscale).view(-1, 1, 1, 1)

        # In place from here on: allocating each step's result anew would take twice the time.
        x = torch.lerp(batch.flip(-1), batch, unflipped)
        x.mul_(scale).add_(shift)
        hardtanh_(x.mul_(brightness), 0, 1)  # clamps; clamp_ itself has no batching rule
        grey = _grey(x.mean((-2, -1), keepdim=True))
        hardtanh_(x.mul_(contrast).add_(grey * (1 - contrast)), 0, 1)
        if batch.shape[1] == 3:
            grey = _grey(x)
            hardtanh_(x.mul_(saturation).add_(grey.mul_(1 - saturation)), 0, 1)
        return x.sub_(shift).div_(scale)


def _grey(x: Tensor) -> Tensor:
    """Convert images to grey levels, `(batch, 1, ...)`."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])


def per_channel(values: Sequence[float], batch: Tensor, default: float) -> Tensor:
    """Return one value per channel, `(channels, 1, 1)`, filled on the device: a copy would make every step wait."""
    channels = batch.shape[-3]
    if values and len(values) != channels:
        raise ArgumentError(f"batch: has {channels} channels, but the data set was normalised with {len(values)}")
    own = values or [default] * channels
    return torch.stack([torch.full((1, 1), value, dtype=batch.dtype, device=batch.device) for value in own])


def check(batch: Tensor, keys: Tensor, name: str) -> None:
    """Raise ArgumentError where augmentation `name` can't take these shapes or dtypes."""
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not batch.is_floating_point():
        raise ArgumentError(
            f"batch: {name} takes images, (batch, 1 or 3, height, width), of floats; "
            f"got {tuple(batch.shape)} {batch.dtype}"
        )
    if keys.shape != batch.shape[:1]:
        raise ArgumentError(f"keys: expected one key per sample, ({batch.shape[0]},), got shape {tuple(keys.shape)}")


def operation_row(name: str, level: int) -> list[float]:
    """Return the numbers of one operation, in the order of `_COLUMNS`."""
    share = level / 9
    strength = {
        "shear_y": {"shear_y": 0.3 * share},
        "translate_x": {"translate_x": 150 / 331 * share},
        "translate_y": {"translate_y": 150 / 331 * share},
        "rotate": {"rotate": math.radians(30 * share)},
        "brightness": {"enhance": 0.9 * share},
        "color": {"enhance": 0.9 * share, "color": 1.0},
        "contrast": {"enhance": 0.9 * share, "contrast": 1.0},
        "sharpness": {"enhance": 0.9 * share, "sharpness": 1.0},
        "auto_contrast": {"auto_contrast": 1.0},
        "equalize": {"equalize": 1.0},
        "posterize": {"posterize": 2.0 ** round(4 * share)},
        "solarize": {"invert": 255 * (1 - share)},
        "invert": {"invert": 0.0},
    }
    return list((_NOTHING | strength[name]).values())


ROWS = torch.tensor(
    [operation_row(name, level) for sub_policy in POLICY for name, _, level in sub_policy] + [list(_NOTHING.values())],
    dtype=torch.float64,
)
"""The rows of the policy's 50 operations, two per sub-policy, then a row that does nothing."""
PROBABILITIES = torch.tensor([[probability for _, probability, _ in sub_policy] for sub_policy in POLICY])
"""The probabilities of the operations, shape `(25, 2)`."""


@component
class AutoAugment:
    """The policy alone: two operations on each image, drawn by its key. Pixels are rounded to 256 levels."""

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
        check(batch, keys, "autoaugment")
        shift, scale = per_channel(mean, batch, 0.0), per_channel(std, batch, 1.0)
        rows, probabilities = _policy_on(batch.device)
        draws = uniform(keys.unsqueeze(1), _FIRST_DRAW + torch.arange(5, device=keys.device))
        policy = (draws[:, :1] * len(POLICY)).long()
        happens = draws[:, 1:3] < probabilities[policy.squeeze(1)]
        row = torch.where(happens, 2 * policy + torch.arange(2, device=policy.device), 2 * len(POLICY))
        sign = torch.where(draws[:, 3:] < 0.5, 1, -1)
        x = hardtanh_((batch * (255 * scale)).add_(255 * shift).round_(), 0, 255)
        for turn in (0, 1):
            x = operate(x, rows[row[:, turn]], sign[:, turn])
        return x.mul_(1 / 255).sub_(shift).div_(scale)


@component
class CropFlipAutoAugment(CropFlip):
    """`CropFlip`, then `AutoAugment`: what FedVLS trains with on CIFAR."""

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
        return AutoAugment().apply(super().apply(batch, keys, mean, std), keys, mean, std)


AUGMENTATIONS: dict[str, type[Augmenter]] = {
    "fedentopt": JitterFlipGrey,
    "crop_flip": CropFlip,
    "autoaugment": AutoAugment,
    "crop_flip_autoaugment": CropFlipAutoAugment,
}
"""Augmentations by the names that configs use."""


@functools.cache
def _policy_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and probabilities on a device, copied there once, because each copy waits for the device."""
    return ROWS.to(device), PROBABILITIES.to(device)


def operate(x: Tensor, rows: Tensor, sign: Tensor) -> Tensor:
    """Apply one operation to each image, with Pillow's result to the grey level.

    Every kind of operation is computed for every image, so that no shape depends on which one an image gets. Images are
    whole numbers from 0 to 255, as floats; rows are as `operation_row` gives them; signs are 1 or -1.
    """
    signed = rows[:, : len(_SIGNED)] * sign.unsqueeze(1)
    signed[:, -1] += 1  # before rounding to the image's precision, as Pillow
    values = torch.cat([signed, rows[:, len(_SIGNED) :]], dim=1).to(x.dtype)
    numbers = dict(zip(_COLUMNS, values.view(*values.shape, 1, 1, 1).unbind(1), strict=True))
    return _enhanced(_mapped(_moved(x, numbers), numbers), numbers)


def _moved(x: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Shear, translate or rotate images by nearest neighbour; pixels from outside the image are black."""
    size, channels, height, width = x.shape
    right = width / 2 + torch.trunc(width * numbers["translate_x"])
    down = height / 2 + torch.trunc(height * numbers["translate_y"])
    cosine, sine = torch.cos(numbers["rotate"]), torch.sin(numbers["rotate"])
    across = torch.arange(0.5 - width / 2, width / 2, dtype=x.dtype, device=x.device)
    along = torch.arange(0.5 - height / 2, height / 2, dtype=x.dtype, device=x.device).view(-1, 1)
    column = torch.floor(cosine * across + (sine * along + right))
    row = torch.floor(cosine * along + ((numbers["shear_y"] - sine) * across + (down + numbers["shear_y"] * width / 2)))
    nearest_column, nearest_row = column.clamp(0, width - 1), row.clamp(0, height - 1)
    inside = ((column == nearest_column) & (row == nearest_row)).to(x.dtype)
    pixel = (nearest_row * width + nearest_column).long().flatten(2).expand(-1, channels, -1)
    return x.flatten(2).gather(2, pixel).view(size, channels, height, width).mul_(inside)


def _mapped(x: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Auto-contrast, equalise, posterise, solarise and invert: a new level for each of 256, by channel."""
    pixels = x.flatten(2)
    levels = pixels.long()
    stretch, equalize, step, first = (
        numbers[name].flatten(2) for name in ("auto_contrast", "equalize", "posterize", "invert")
    )
    ones = pixels.new_ones(()).expand_as(levels)
    histogram = pixels.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, ones)
    low, high = pixels.amin(2, keepdim=True), pixels.amax(2, keepdim=True)

    # In double precision, where Pillow's rounding errors are the same: it maps the highest level to 254 at times.
    stretch = (stretch * (high > low)).double()
    all_levels = torch.full_like(stretch, 255)  # a number divided by a tensor is rounded twice
    per_level = all_levels / torch.where(stretch == 1, high.double() - low.double(), all_levels)
    level = torch.arange(256, dtype=torch.float64, device=x.device)
    table = hardtanh_((level * per_level - stretch * low * per_level).floor_(), 0, 255).to(x.dtype)

    most = levels.shape[2] - histogram.gather(2, high.long())
    share = torch.floor(most / 255)  # of the pixels, to each new level
    below = histogram.cumsum(2) - histogram
    equal = hardtanh_(((torch.floor(share / 2) + below) / share.clamp(min=1)).floor_(), 0, 255)
    table = torch.lerp(table, equal, equalize * (share > 0))

    table = (table / step).floor_() * step
    table = torch.where(table >= first, 255 - table, table)
    return table.gather(2, levels).view(x.shape)


def _enhanced(x: Tensor, numbers: dict[str, Tensor]) -> Tensor:
    """Colour, contrast, brightness and sharpness: away from a grey, flat, black or smooth image, or towards it."""
    grey = x
    if x.shape[1] == 3:
        red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
        grey = ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor_()
    flat = torch.floor(grey.mean((-2, -1), keepdim=True) + 0.5) * numbers["contrast"]
    plain = torch.lerp(flat.expand_as(grey), grey, numbers["color"]).expand_as(x)
    start = torch.lerp(plain, _smooth(x), numbers["sharpness"])
    return hardtanh_((x - start).mul_(numbers["enhance"]).add_(start), 0, 255).floor_()


def _smooth(x: Tensor) -> Tensor:
    """Return each pixel, five times, and its eight neighbours, by 13; the border stays."""
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[..., 1:-1, 1:-1]
    smooth = x.clone()
    smooth[..., 1:-1, 1:-1] = total.mul_(1 / 13).add_(0.5).floor_()
    return smooth
