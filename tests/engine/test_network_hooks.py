"""Hooks of a network, and of its parameters, are called in training, by whatever trains it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fedskew
from fedskew.errors import ArgumentError, BackendWarning, ConfigError
from fedskew.experiment import resolve
from fedskew.models import FlatModel

TASK = {
    "data": {"name": "digits", "rows": 100},
    "partition": {"rule": "iid", "clients": 3},
    "training": {"rounds": 1, "lr": 0.1, "batch_size": 100},
}


def tripled(gradient):
    return 3 * gradient


def after(layer, inputs, output):
    return 2 * output


def before(layer, inputs):
    return (2 * inputs[0],)


def backward(layer, inputs, outputs):
    return tuple(None if one is None else 3 * one for one in inputs)


class Net(nn.Sequential):
    """Two layers, one of which is hooked as asked; with convolutions the graph is rewritten where nothing is hooked."""

    def __init__(self, num_classes=10, in_shape=(1, 8, 8), kind="", width=16):
        layers = [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(36, width)]
        super().__init__(*layers, nn.Linear(width, num_classes))
        {
            "": lambda: None,
            "forward": lambda: self[0].register_forward_hook(after),
            "before": lambda: self[0].register_forward_pre_hook(before),
            "pool": lambda: self[1].register_forward_hook(after),
            "backward": lambda: self[5].register_full_backward_hook(backward),
            "parameter": lambda: self[0].weight.register_hook(tripled),
            "method": lambda: self[4].weight.register_hook(self.scaled),
        }[kind]()

    def scaled(self, gradient):
        return gradient * float(len(self))


def made(kind: str, **options) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(kind=kind, **options)


def vector(network: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def one_step(network: nn.Module) -> torch.Tensor:
    """PyTorch's own step of gradient descent on all samples, which calls every hook."""
    task = fedskew.experiment.make_task(resolve(TASK | {"model": "logistic"} | {"partition": ONE}), seed=0)
    rows = torch.from_numpy(task.partition.indices[0])
    loss = nn.functional.cross_entropy(network(task.dataset.inputs[rows]), task.dataset.targets[rows])
    loss.backward()
    torch.optim.SGD(network.parameters(), 0.1).step()
    return vector(network)


ONE = {"rule": "iid", "clients": 1}
KINDS = ["forward", "before", "pool", "backward", "parameter", "method"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_called_as_pytorch_calls_it(kind):
    trained = fedskew.simulate(TASK, partition=ONE, model=made(kind), engine={"backend": "sequential"})
    assert torch.allclose(vector(trained.model), one_step(made(kind)), atol=1e-6)
    assert not torch.allclose(vector(trained.model), one_step(made("")), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_with_hooks_trains_one_client_after_another_and_says_so(kind):
    with pytest.warns(BackendWarning, match=r"one after another, .* has a hook, which can't be mapped"):
        together = fedskew.simulate(TASK, model=made(kind), engine={"backend": "cohort"})
    alone = fedskew.simulate(TASK, model=made(kind), engine={"backend": "sequential"})
    assert torch.equal(vector(together.model), vector(alone.model))
    assert "has a hook" in together.summary["backend"]["not_mapped"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "parameter"])
def test_processes_call_hooks_too(kind):
    processes = {"backend": "processes", "processes": 1}
    results = [fedskew.simulate(TASK, model={"name": Net, "kind": kind}, engine=one) for one in ({}, processes)]
    assert torch.equal(*(vector(one.model) for one in results))


def test_a_hook_of_all_modules_is_called_by_every_backend():
    hook = nn.modules.module.register_module_forward_hook(
        lambda layer, inputs, output: 2 * output if isinstance(layer, nn.MaxPool2d) else None
    )
    try:
        expected = one_step(made(""))
        alone = fedskew.simulate(TASK, partition=ONE, model=made(""), engine={"backend": "sequential"})
        with pytest.warns(BackendWarning, match="PyTorch has a hook of all modules"):
            together = fedskew.simulate(TASK, partition=ONE, model=made(""), engine={"backend": "cohort"})
    finally:
        hook.remove()
    assert torch.allclose(vector(alone.model), expected, atol=1e-6)
    assert torch.equal(vector(together.model), vector(alone.model))


def test_a_forward_set_on_a_layer_is_not_mapped():
    network = made("")
    network[5].forward = partial(nn.functional.linear, weight=torch.ones(10, 16))
    with pytest.warns(BackendWarning, match=r"layer '5' has a forward of its own"):
        fedskew.simulate(TASK, model=network, engine={"backend": "cohort"})


def test_networks_that_differ_in_hooks_are_different_runs():
    names = {resolve(TASK | {"model": made(kind)}).model.name for kind in ["", *KINDS]}
    assert len(names) == len(KINDS) + 1


def test_what_a_copy_could_not_follow_is_refused():
    network = made("")
    layer = network[4]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    with pytest.raises(ConfigError, match=r"the forward of layer '4' .* give a function that makes it"):
        resolve(TASK | {"model": network})
    network = made("")
    network[4].weight.register_hook(lambda gradient: gradient * network[4].weight)
    with pytest.raises(ConfigError, match=r"parameter '4.weight' has a function that uses the network itself"):
        resolve(TASK | {"model": network})


def test_a_hook_that_training_never_calls_is_refused():
    network = made("")
    network[4].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ArgumentError, match=r"'4.weight' has a hook for accumulated gradients"):
        FlatModel(network)
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook"):
        resolve(TASK | {"model": network})
