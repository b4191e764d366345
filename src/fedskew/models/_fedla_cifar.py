"""The residual network of FedLA on CIFAR-100 (its code's "CNNCifar100")."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fedskew.models._network import Network, picture


class FedLACifar(Network):
    """Five convolution blocks and three residual ones, 64 to 1028 channels; 30,441,528 parameters for 100 classes.

    A block is conv 3x3, batch norm, ReLU, and pooling from the second on; 1028 is the code's own number. The authors'
    code ends in log-softmax; this does not.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = picture("fedla_cifar", in_shape, 32)
        self.conv1 = _block(channels, 64)
        self.conv2 = _block(64, 128, pool=True)
        self.res1 = nn.Sequential(_block(128, 128), _block(128, 128))
        self.conv3 = _block(128, 256, pool=True)
        self.conv4 = _block(256, 512, pool=True)
        self.res2 = nn.Sequential(_block(512, 512), _block(512, 512))
        self.conv5 = _block(512, 1028, pool=True)
        self.res3 = nn.Sequential(_block(1028, 1028), _block(1028, 1028))
        self.head = nn.Linear(1028 * (height // 32) * (width // 32), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The last block after pooling, flattened: `(batch, 1028)` for 32 x 32 pictures."""
        x = self.conv2(self.conv1(x))
        x = self.conv4(self.conv3(self.res1(x) + x))
        x = self.conv5(self.res2(x) + x)
        return max_pool2d(self.res3(x) + x, 2).flatten(1)


def _block(channels: int, out: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
