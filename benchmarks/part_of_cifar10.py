"""Write the first 6,000 training and 2,000 test images of CIFAR-10 as an .npz file, for networks.toml.

python benchmarks/part_of_cifar10.py FILE.npz [--data .data]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from fedskew.data import load
from fedskew.errors import FedskewError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--data", default=".data")
    arguments = parser.parse_args()
    try:
        whole = load("cifar10", arguments.data)
    except FedskewError as error:
        parser.exit(1, f"{error}\n")
    np.savez_compressed(
        arguments.file,
        x=whole.inputs.index_select(0, torch.arange(6_000)).numpy(),
        y=whole.targets[:6_000].numpy(),
        x_test=whole.test_inputs.index_select(0, torch.arange(2_000)).numpy(),
        y_test=whole.test_targets[:2_000].numpy(),
    )


if __name__ == "__main__":
    main()
