"""Rules that choose whether a cohort trains in lock-step, how many clients are stacked, and a convolution's form.

A rule reads tensor shapes and the kind of device, never a clock, so that the same config gives the same bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from fedskew.engine._local_work import LocalWork
from fedskew.models import Concatenated, FlatModel

ConvolutionForm = Literal["each", "columns", "grouped"]

CPU_MEMORY = 2**30
GPU_SHARE = 0.5
COPIES = 8  # parameter vectors of a client that exist at a time: sent, start, gradient, carried, a step's results


def faster_together(model: FlatModel, work: LocalWork, clients: int) -> bool:
    """Estimate from measurements whether a cohort trains faster in lock-step than one client after another.

    On a CPU it does from 16 clients on, if the network has at most 60,000 parameters and no convolutions, or at most
    70,000 with convolutions and batches of at most 10. On a GPU nothing has been measured yet; the rule is two clients
    or more and at most 2 million parameters. The answer is always no if a network, loss, step or hook is not this
    package's own, since it may not support being mapped.

    Mapping a step costs about 2 ms, independent of its size; large stacks, in addition, exceed the cache that one
    client's parameters fit in. Measured: rounds of one epoch, SGD with momentum, on one thread of a Xeon with 2 MiB of
    second-level cache. The table shows the time one after another divided by the time in lock-step, for 8 clients, 16
    clients, and all 48 (24 with convolutions):

    | network | parameters | batch | 8 clients | 16 clients | all |
    | --- | ---: | ---: | ---: | ---: | ---: |
    | logistic, 8 x 8 | 650 | 10 | 0.9 | - | 4.2 |
    | mlp3, width 64, 8 x 8 | 9,000 | 10 | 1.0 | 1.7 | 3.4 |
    | logistic, 28 x 28 | 7,850 | 10 | 0.9 | 1.6 | 2.9 |
    | | | 64 | 1.0 | 1.5 | 2.2 |
    | mlp3, width 64, 28 x 28 | 55,050 | 10 | 1.1 | 1.6 | 1.6 |
    | | | 64 | 1.2 | 1.5 | - |
    | mlp3, 28 x 28 | 199,210 | 10 | 1.0 | - | 1.1 |
    | | | 64 | 1.0 | - | - |
    | lenet5, 3 x 32 x 32 | 62,006 | 10 | 1.1 | - | 1.3 |
    | | | 64 | 0.8 | - | - |
    | cnn_w2, 3 x 32 x 32 | 1,626,442 | 10 | 0.4 (6 clients) | - | - |

    Args:
        model: The network, on the device that trains.
    """
    if clients < 2 or not _is_ours(model, work):
        return False
    parameters = len(model.vector)
    if model.vector.device.type != "cpu":
        return parameters <= 2_000_000
    if any(isinstance(layer, nn.Conv2d) for layer in model.module.modules()):
        return clients >= 16 and parameters <= 70_000 and work.training.batch_size <= 10
    return clients >= 16 and parameters <= 60_000


def stack_size(model: FlatModel, work: LocalWork) -> int:
    """Compute how many clients fit into a stack, from the memory that one client's step takes."""
    device = model.vector.device
    budget = CPU_MEMORY if device.type == "cpu" else GPU_SHARE * torch.cuda.get_device_properties(device).total_memory
    own, saved = model.vector.untyped_storage().data_ptr(), 0

    def count(tensor: Any) -> Any:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() != own:  # not the parameters, which are counted below
            saved += tensor.numel() * tensor.element_size()
        return tensor

    inputs = work.data.of(0).inputs
    x = inputs.index_select(0, torch.arange(min(1, len(inputs)), device=device))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.module.eval()(x)
    each = 2 * work.training.batch_size * saved + COPIES * model.vector.numel() * model.vector.element_size()
    return max(1, int(budget / each))


def _is_ours(model: FlatModel, work: LocalWork) -> bool:
    """Return whether this package defines everything that is mapped over clients."""
    losses = [work.objective.loss, *(term for _, term in work.objective.terms)]
    parts = [model.module, work.local_step, *losses, *work.hooks.values()]
    return all(type(part).__module__.startswith("fedskew.") for part in parts) and not isinstance(
        model.module, Concatenated
    )


CONVOLUTION_FORMS: dict[str, ConvolutionForm] = {"cpu": "each"}
"""The form in which convolutions of several clients, each with its own weights, are computed, by the kind of device.

"each": one client's after another's; "columns": one batched matrix product of patches and weights; "grouped": one
convolution with a group for each client, PyTorch's own rule. Forward and backward passes on one thread of a Xeon, in
ms:

| layer, clients x batch | each | grouped | columns |
| --- | ---: | ---: | ---: |
| 3->6 5x5, 10 x 10 | 9 | 22 | 11 |
| 3->6 5x5, 10 x 64 | 49 | 137 | 271 |
| 6->16 5x5, 10 x 10 | 5 | 9 | 10 |
| 6->16 5x5, 10 x 64 | 34 | 64 | 136 |
| 3->32 3x3, 10 x 10 | 13 | 22 | 17 |
| 32->64 3x3, 10 x 10 | 158 | 197 | 418 |
| 32->64 3x3, 50 x 10 | 532 | 1268 | 2458 |

On other devices the form is "columns" where possible. Nothing has been measured on a GPU yet: columns give large
batched products, which suit GPUs, and cuDNN's grouped convolutions are known to be slow with few channels a group.
"""


def convolution_form(device: str, groups: int, padded_by_name: bool) -> ConvolutionForm:
    """Return the form of a convolution; "columns" supports neither groups nor padding given by name."""
    form = CONVOLUTION_FORMS.get(device, "columns")
    return "grouped" if form == "columns" and (groups != 1 or padded_by_name) else form
