"""Data sets in their authors' formats and a user's own, as tensors; augmentation of batches."""

from fedskew.data._dataset import SAMPLERS as SAMPLERS
from fedskew.data._dataset import ByteImages as ByteImages
from fedskew.data._dataset import Dataset as Dataset
from fedskew.data._dataset import Inputs as Inputs
from fedskew.data._dataset import Stored as Stored
from fedskew.data._dataset import in_own_units as in_own_units
from fedskew.data._dataset import take as take
from fedskew.data._folder import unlabelled as unlabelled
from fedskew.data._holdings import holdings as holdings
from fedskew.data._huggingface import from_huggingface as from_huggingface
from fedskew.data._load import INDEX as INDEX
from fedskew.data._load import OWN as OWN
from fedskew.data._load import load as load
from fedskew.data._objects import from_object as from_object
from fedskew.data._profile import Change as Change
from fedskew.data._profile import Profile as Profile
from fedskew.data._propose import Proposal as Proposal
from fedskew.data._schema import Encoder as Encoder
from fedskew.data._schema import TableSchema as TableSchema
from fedskew.data._schema import encoder_of as encoder_of
from fedskew.data.augmentation import AUGMENTATIONS as AUGMENTATIONS
from fedskew.data.augmentation import Augmentation as Augmentation
from fedskew.data.texts import Texts as Texts
