"""Networks, the papers' and a user's own: features and raw logits, parameters as one flat vector, keyed dropout."""

from __future__ import annotations

from fedskew.models._added import added_to, copied, hooks_of
from fedskew.models._build import INDEX, build, check_outputs, note
from fedskew.models._cnn import CNNW2, VGG11, CNNMnist, FedLACifar, LeNet5
from fedskew.models._cosine import CosineHead, OnPrototypes, OnSimplex, simplex
from fedskew.models._dense import MLP3, FastText, Logistic
from fedskew.models._dropout import ChannelDropout, Dropout, dropout_keys, swap_dropout
from fedskew.models._faster import Faster
from fedskew.models._flat import FlatModel, ModelState
from fedskew.models._mobilenetv2 import MobileNetV2
from fedskew.models._network import Network, Outputs, unit_rows
from fedskew.models._resnet import ResNet18, ResNet32, ResNet50
from fedskew.models._wrappers import (
    Concatenated,
    Projected,
    last_layer,
    with_features,
    with_fixed_head,
    with_projection,
)

__all__ = [
    "CNNW2",
    "INDEX",
    "MLP3",
    "VGG11",
    "CNNMnist",
    "ChannelDropout",
    "Concatenated",
    "CosineHead",
    "Dropout",
    "FastText",
    "Faster",
    "FedLACifar",
    "FlatModel",
    "LeNet5",
    "Logistic",
    "MobileNetV2",
    "ModelState",
    "Network",
    "OnPrototypes",
    "OnSimplex",
    "Outputs",
    "Projected",
    "ResNet18",
    "ResNet32",
    "ResNet50",
    "added_to",
    "build",
    "check_outputs",
    "copied",
    "dropout_keys",
    "hooks_of",
    "last_layer",
    "note",
    "simplex",
    "swap_dropout",
    "unit_rows",
    "with_features",
    "with_fixed_head",
    "with_projection",
]
