"""What every contestant is given, and how it is told to play. Needs numpy and PyTorch only, as pfl's and Flower's
environments have no fedskew.

A task is a folder: `settings.json`, `inputs.npy`, `targets.npy`, `clients.npz` (one index array per client),
`cohorts.json` (one list of clients per round) and `weights.npz` (the untrained network).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu


class LeNet5(nn.Module):
    """62,006 parameters on 3 x 32 x 32, written as PyTorch's tutorial writes it: pool(relu(conv))."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.head = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        outputs: Tensor = self.head(relu(self.fc2(relu(self.fc1(x.flatten(1))))))
        return outputs


class CNNW2(nn.Module):
    """1,626,442 parameters on 3 x 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.head = nn.Linear(12544, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv2(relu(self.conv1(x)))), 2)
        outputs: Tensor = self.head(self.drop2(relu(self.fc1(self.drop1(x).flatten(1)))))
        return outputs


class Head(nn.Module):
    """A linear layer on the frozen body of `pretrained.py`, which is in eval mode and knows no gradient."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (3, 32, 64, 128, 256), []
        for place in range(4):
            ins, outs = widths[place : place + 2]
            pool = nn.MaxPool2d(2) if place < 3 else nn.AvgPool2d(4)
            layers += [nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU(), pool]
        self.blocks, self.head = nn.Sequential(*layers).requires_grad_(False), nn.Linear(256, 50)

    def train(self, mode: bool = True) -> Head:
        super().train(mode)
        self.blocks.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.blocks(x).flatten(1)
        outputs: Tensor = self.head(features)
        return outputs


class Whole(Head):
    """The same network, of which everything trains."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)

    def train(self, mode: bool = True) -> Whole:
        nn.Module.train(self, mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.blocks(x).flatten(1))
        return outputs


NETWORKS: dict[str, type[nn.Module]] = {"lenet5": LeNet5, "cnn_w2": CNNW2, "head": Head, "whole": Whole}


@dataclass
class Task:
    """`settings`: model, epochs, batch_size, lr, momentum, weight_decay, seed."""

    folder: Path
    settings: dict[str, Any]
    inputs: Tensor
    targets: Tensor
    clients: list[NDArray[np.int64]]
    cohorts: list[list[int]]

    @classmethod
    def read(cls, folder: str | Path, device: str = "cpu") -> Task:
        folder = Path(folder)
        stored = np.load(folder / "clients.npz")
        return cls(
            folder,
            json.loads((folder / "settings.json").read_text()),
            # Mapped, so that many processes share one copy; "c", as PyTorch wants to be able to write.
            torch.from_numpy(np.load(folder / "inputs.npy", mmap_mode="c")).to(device),
            torch.from_numpy(np.load(folder / "targets.npy")).to(device),
            [stored[str(client)] for client in range(len(stored))],
            json.loads((folder / "cohorts.json").read_text()),
        )

    def network(self) -> nn.Module:
        """The untrained network, the same for every contestant."""
        network = NETWORKS[self.settings["model"]]()
        stored = np.load(self.folder / "weights.npz")
        network.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored})
        return network.to(self.inputs.device)

    def optimiser(self, network: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
        """A client's, fresh every round."""
        keys = ("lr", "momentum", "weight_decay")
        return torch.optim.SGD(network.parameters(), **{key: self.settings[key] for key in keys}, fused=fused)

    def save(self, network: nn.Module, name: str) -> None:
        """The trained model, to be compared with the other contestants'."""
        values = {key: value.detach().cpu().contiguous().numpy() for key, value in network.state_dict().items()}
        np.savez(self.folder / f"trained-{name}.npz", **values)


class Turns:
    """Rounds when the benchmark asks for them: it writes how many, and reads their seconds."""

    def __init__(self) -> None:
        self._left, self._began = 0, 0.0

    def wait(self) -> None:
        """Between two rounds: go on at once within a turn, else report the turn and wait for the next."""
        if self._began and not self._left:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            print("@", json.dumps({"seconds": time.perf_counter() - self._began}), flush=True)
        if not self._left:
            line = sys.stdin.readline()
            if not line:
                sys.exit(0)
            self._left, self._began = int(line), time.perf_counter()
        self._left -= 1

    def end(self) -> None:
        """After the last round: report its turn."""
        self._left = 0
        print("@", json.dumps({"seconds": time.perf_counter() - self._began}), flush=True)
