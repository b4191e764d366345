"""Milliseconds of an SGD step of cnn_w2 at batch 10 on one thread.

With the gradient of its first linear layer as two thin matrices, and computed as a whole:

    python benchmarks/wide_linear.py --seconds 20

The two take turns, step by step; on a busy machine the least and the fifth percentile are what to compare.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.models import FlatModel, build


class Whole(nn.Linear):
    """Only layers of PyTorch's own class keep their gradient as two thin matrices."""


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=20)
seconds = parser.parse_args().seconds
torch.set_num_threads(1)
drawn = torch.Generator().manual_seed(0)
x, y = torch.randn(10, 3, 32, 32, generator=drawn), torch.randint(0, 10, (10,), generator=drawn)
wide, plain = (build("cnn_w2", 10, (3, 32, 32), generator=torch.Generator().manual_seed(0)) for _ in range(2))
layer = Whole(wide.fc1.in_features, wide.fc1.out_features)
layer.load_state_dict(wide.fc1.state_dict())
plain.fc1 = layer
models = {"whole gradient": FlatModel(plain), "two thin matrices": FlatModel(wide)}
times: dict[str, list[float]] = {name: [] for name in models}
end = time.monotonic() + seconds
while time.monotonic() < end:
    for name, model in models.items():
        began = time.perf_counter()
        model.descend(lambda model=model: cross_entropy(model.module(x), y), [], 0.01)
        times[name].append(1e3 * (time.perf_counter() - began))
for name, own in times.items():
    print(
        f"{name}: {len(own)} steps, least {min(own):.2f}, 5 % {np.percentile(own, 5):.2f}, median {np.median(own):.2f}"
    )
