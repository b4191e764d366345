"""The papers' networks and a user's own: features and raw logits, parameters as one flat vector, dropout by key."""

from __future__ import annotations

from fedskew.models._build import INDEX, build, note
from fedskew.models._cnn_mnist import CNNMnist
from fedskew.models._cnn_w2 import CNNW2
from fedskew.models._concatenated import Concatenated
from fedskew.models._dropout import ChannelDropout, Dropout, dropout_keys, swap_dropout
from fedskew.models._fasttext import FastText
from fedskew.models._features import with_features
from fedskew.models._fedla_cifar import FedLACifar
from fedskew.models._flat import FlatModel, ModelState
from fedskew.models._lenet5 import LeNet5
from fedskew.models._logistic import Logistic
from fedskew.models._mlp3 import MLP3
from fedskew.models._mobilenetv2 import MobileNetV2
from fedskew.models._network import Network
from fedskew.models._outputs import Outputs
from fedskew.models._projected import Projected, with_projection
from fedskew.models._resnet import ResNet18, ResNet50
from fedskew.models._resnet32 import ResNet32
from fedskew.models._vgg11 import VGG11
from fedskew.models._wide_linear import WideLinear

__all__ = [
    "CNNW2",
    "INDEX",
    "MLP3",
    "VGG11",
    "CNNMnist",
    "ChannelDropout",
    "Concatenated",
    "Dropout",
    "FastText",
    "FedLACifar",
    "FlatModel",
    "LeNet5",
    "Logistic",
    "MobileNetV2",
    "ModelState",
    "Network",
    "Outputs",
    "Projected",
    "ResNet18",
    "ResNet32",
    "ResNet50",
    "WideLinear",
    "build",
    "dropout_keys",
    "note",
    "swap_dropout",
    "with_features",
    "with_projection",
]
