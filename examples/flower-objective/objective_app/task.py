"""The network, and each node's part of scikit-learn's digits: node k of n holds the digits 10k/n to 10(k+1)/n."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10


def make_network() -> nn.Module:
    """A small network on 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def share(node: int, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels of one node for training, and for tests, which are of all digits."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:][node::nodes]
    held = train[labels[train] * nodes // CLASSES == node]
    return pixels[held], labels[held], pixels[test], labels[test]
