"""What is chosen by rule: whether a cohort trains at once and is captured, how many are stacked, a convolution's form.

A rule reads shapes and the kind of device, never a clock: the same config gives the same bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedskew.engine._local_work import ClientSamples, LocalWork
from fedskew.hooks import Hooks
from fedskew.models import Concatenated, FlatModel

ConvolutionForm = Literal["each", "columns", "grouped"]

CPU_MEMORY = 2**30
GPU_SHARE = 0.5
COPIES = 8  # of a client's parameters at a time: sent, start, gradient, carried and what a step makes of them


def faster_together(model: FlatModel, work: LocalWork, clients: int) -> bool:
    """Whether a cohort of so many clients trains faster at once than one after another, as far as measured.

    Rounds of one epoch, SGD with momentum, on one thread of a Xeon with 2 MiB of second-level cache; the time one after
    another over the time at once:

        network                 parameters  batch    8 clients  16 clients  all (48; convolutions 24)
        logistic, 8 x 8                650     10          0.9           -        4.2
        mlp3, width 64, 8 x 8        9,000     10          1.0         1.7        3.4
        logistic, 28 x 28            7,850     10          0.9         1.6        2.9
                                               64          1.0         1.5        2.2
        mlp3, width 64, 28 x 28     55,050     10          1.1         1.6        1.6
                                               64          1.2         1.5        -
        mlp3, 28 x 28              199,210     10          1.0           -        1.1
                                               64          1.0           -        -
        lenet5, 3 x 32 x 32         62,006     10          1.1           -        1.3
                                               64          0.8           -        -
        cnn_w2, 3 x 32 x 32      1,626,442     10          0.4 (6 clients)

    A mapped step costs about 2 ms whatever it maps; beyond that, large stacks leave the cache that one client's
    parameters fit in. So on a CPU: 16 clients or more, of at most 60,000 parameters without convolutions, or 70,000
    with them and batches of at most 10. On a GPU nothing has been measured yet: two clients or more, of at most 2
    million parameters. Never where a network, loss, step or hook is not this package's own, since it may not be made to
    be mapped.
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
    """How many clients are stacked at a time, from the memory that a step of one of them takes.

    1 GiB on a CPU; on a GPU half of what it has. What a step saves for its backward pass is counted twice.
    """
    device = model.vector.device
    budget = CPU_MEMORY if device.type == "cpu" else GPU_SHARE * torch.cuda.get_device_properties(device).total_memory
    own, saved = model.vector.untyped_storage().data_ptr(), 0

    def count(tensor: Any) -> Any:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() != own:  # the parameters, which are counted below
            saved += tensor.numel() * tensor.element_size()
        return tensor

    inputs = work.data.of(0).inputs
    x = inputs.index_select(0, torch.arange(min(1, len(inputs)), device=device))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.module.eval()(x)
    each = 2 * work.training.batch_size * saved + COPIES * model.vector.numel() * model.vector.element_size()
    return max(1, int(budget / each))


def why_not_captured(work: LocalWork, samples: ClientSamples) -> str | None:
    """Why steps on such samples are not captured, in words for a run's record; None where they may be."""
    for hooks in work.hooks.values():
        if type(hooks).gather is not Hooks.gather:
            return f"{type(hooks).__name__} gathers something from every client's batch in turn"
    if not isinstance(samples.inputs, Tensor):
        return "the inputs are stored elsewhere, and read batch by batch"
    return None


def _is_ours(model: FlatModel, work: LocalWork) -> bool:
    losses = [work.objective.loss, *(term for _, term in work.objective.terms)]
    parts = [model.module, work.local_step, *losses, *work.hooks.values()]
    return all(type(part).__module__.startswith("fedskew.") for part in parts) and not isinstance(
        model.module, Concatenated
    )


def convolution_form(device: str, groups: int, padded_by_name: bool) -> ConvolutionForm:
    """How clients' convolutions, each with its own weights, are taken together.

    "each": one client's after another's; "columns": patches, and one batched matrix product; "grouped": one convolution
    with a group for each client, PyTorch's own rule.

    On a CPU always one after another: forward and backward passes took, in ms on one thread of a Xeon,

        layer, clients x batch     each    grouped    columns
        3->6 5x5, 10 x 10            9         22         11
        3->6 5x5, 10 x 64           49        137        271
        6->16 5x5, 10 x 10           5          9         10
        6->16 5x5, 10 x 64          34         64        136
        3->32 3x3, 10 x 10          13         22         17
        32->64 3x3, 10 x 10        158        197        418
        32->64 3x3, 50 x 10        532       1268       2458

    On a GPU nothing has been measured yet; columns are batched products of the sizes that GPUs like, and cuDNN's
    grouped convolutions are known to be slow with few channels a group.
    """
    if device == "cpu":
        return "each"
    return "columns" if groups == 1 and not padded_by_name else "grouped"
