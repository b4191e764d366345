"""Data sets in their authors' formats, and a user's own, as tensors; augmentation of batches."""

from __future__ import annotations

from fedskew.data._autoaugment import AutoAugment, CropFlipAutoAugment
from fedskew.data._crop_flip import CropFlip
from fedskew.data._dataset import Dataset
from fedskew.data._fedentopt import JitterFlipGrey
from fedskew.data._huggingface import from_huggingface
from fedskew.data._load import INDEX, Reader, load
from fedskew.data._protocol import Augmentation, Augmenter
from fedskew.data._stored import Inputs, Stored, take

AUGMENTATIONS: dict[str, type[Augmenter]] = {
    "fedentopt": JitterFlipGrey,
    "crop_flip": CropFlip,
    "autoaugment": AutoAugment,
    "crop_flip_autoaugment": CropFlipAutoAugment,
}
"""The augmentations by the name that a config gives them."""

__all__ = [
    "AUGMENTATIONS",
    "INDEX",
    "Augmentation",
    "Augmenter",
    "AutoAugment",
    "CropFlip",
    "CropFlipAutoAugment",
    "Dataset",
    "Inputs",
    "JitterFlipGrey",
    "Reader",
    "Stored",
    "from_huggingface",
    "load",
    "take",
]
