"""Data sets in their authors' formats and a user's own, as tensors; augmentation of batches."""

from fedskew.data._dataset import SAMPLERS, ByteImages, Dataset, Inputs, Stored, in_own_units, take
from fedskew.data._folder import unlabelled
from fedskew.data._holdings import holdings
from fedskew.data._huggingface import from_huggingface
from fedskew.data._load import INDEX, OWN, load
from fedskew.data._objects import from_object
from fedskew.data._profile import Change, Profile
from fedskew.data._propose import Proposal
from fedskew.data._schema import Encoder, TableSchema, encoder_of
from fedskew.data.augmentation import AUGMENTATIONS, Augmentation
from fedskew.data.texts import Texts

__all__ = [
    "AUGMENTATIONS",
    "INDEX",
    "OWN",
    "SAMPLERS",
    "Augmentation",
    "ByteImages",
    "Change",
    "Dataset",
    "Encoder",
    "Inputs",
    "Profile",
    "Proposal",
    "Stored",
    "TableSchema",
    "Texts",
    "encoder_of",
    "from_huggingface",
    "from_object",
    "holdings",
    "in_own_units",
    "load",
    "take",
    "unlabelled",
]
