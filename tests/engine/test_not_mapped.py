"""Networks that cannot be mapped over a cohort, or have hooks, train one after another; every hook is called."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

import fedskew
from common import same, task
from fedskew.errors import ArgumentError, BackendWarning, ConfigError, RunError
from fedskew.experiment import make_task, resolve
from fedskew.models import FlatModel

TASK = task(10, labels=3, rounds=2, participation=0.3, lr=0.05)


def trained(tree, backend: str, **tables) -> fedskew.Result:
    return fedskew.simulate(tree | tables, engine={"backend": backend})


def trained_as_alone(why: str, tree, **tables) -> fedskew.Result:
    """A cohort that falls back with a word, and has the bits of one client after another."""
    with pytest.warns(BackendWarning, match=f"engine.backend: clients are trained one after another, .*: .*{why}"):
        together = trained(tree, "cohort", **tables)
    assert same(together.model, trained(tree, "sequential", **tables).model)
    return together


class Rows(nn.Module):
    """Reads a picture row by row."""

    def __init__(self, num_classes, in_shape, kind):
        super().__init__()
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.reader = nn.TransformerEncoder(layer, 1)
        else:
            self.reader = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](8, 8, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        read = self.reader(x.squeeze(1))
        return self.head(read[0][:, -1] if isinstance(read, tuple) else read.mean(1))


class Branch(nn.Module):
    """Branches on values."""

    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        return out if out.sum() > 0 else 2 * out


class FunctionalDropout(Branch):
    """Drops by a function, which draws from the global generator."""

    def forward(self, x):
        return self.layer(nn.functional.dropout(x.flatten(1), 0.5, self.training))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"name": Rows, "kind": "lstm"}, "PyTorch can't map lstm over clients"),
        ({"name": Rows, "kind": "gru"}, "PyTorch can't map gru over clients"),
        ({"name": Branch}, "a Python branch on values can't be mapped over clients"),
    ],
)
def test_what_cannot_be_mapped_is_trained_one_client_after_another_with_a_word(model, why):
    summary = trained_as_alone(why, TASK, model=model).summary
    assert summary["backend"] == {"name": "cohort", "not_mapped": why}


def test_seeds_that_train_together_fall_back_together():
    tree = TASK | {"seeds": [0, 1], "model": {"name": Branch}}
    with pytest.warns(BackendWarning, match="one after another"):
        together = fedskew.simulate(tree, engine={"backend": "cohort", "seeds_together": True})
    apart = trained(tree, "sequential")
    assert [run.rounds[-1].loss for run in together.runs] == [run.rounds[-1].loss for run in apart.runs]


def test_a_transformer_is_mapped():
    result, alone = (
        trained(TASK, one, model={"name": Rows, "kind": "transformer"}) for one in ("cohort", "sequential")
    )
    assert "not_mapped" not in result.summary["backend"]
    torch.testing.assert_close(dict(result.model.state_dict()), dict(alone.model.state_dict()), rtol=1e-3, atol=1e-4)


def test_a_network_that_draws_by_calls_of_pytorch_s_is_trained_alone_and_its_bits_are_the_seed_s():
    why = "the network draws by calls such as functional.dropout, which can't be mapped over clients"
    first = trained_as_alone(why, TASK, model={"name": FunctionalDropout})
    torch.manual_seed(5)
    assert same(trained(TASK, "sequential", model={"name": FunctionalDropout}).model, first.model)


@pytest.mark.slow
def test_such_a_network_has_the_same_bits_in_any_number_of_processes():
    alone, two = (trained(TASK, one, model={"name": FunctionalDropout}) for one in ("sequential", "processes"))
    assert same(alone.model, two.model)


NOTEBOOK = """
class Net(nn.Module):
    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


@pytest.mark.slow
def test_a_class_of_a_notebook_is_refused_by_processes_in_one_line(monkeypatch, capfd):
    cell = {"__name__": "__main__", "nn": nn}
    exec(NOTEBOOK, cell)
    monkeypatch.setattr(sys.modules["__main__"], "Net", cell["Net"], raising=False)
    with pytest.raises(RunError) as raised:
        fedskew.simulate(TASK, model=cell["Net"], engine={"backend": "processes", "processes": 1})
    said = str(raised.value)
    assert said.startswith("engine.backend: other processes can't import what this run uses (")
    assert "put classes of a notebook into a file and import them" in said
    assert "\n" not in said
    assert "Traceback" not in capfd.readouterr().err


# Hooks.

HOOKED = task(3, rounds=1, lr=0.1, batch_size=100) | {"data": {"name": "digits", "rows": 100}}
ONE = {"rule": "iid", "clients": 1}


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
    found = make_task(resolve(HOOKED | {"partition": ONE}), seed=0)
    inputs, targets = (of[found.partition.indices[0]] for of in (found.dataset.inputs, found.dataset.targets))
    nn.functional.cross_entropy(network(inputs), targets).backward()
    torch.optim.SGD(network.parameters(), 0.1).step()
    return vector(network)


KINDS = ["forward", "before", "pool", "backward", "parameter", "method"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_is_called_as_pytorch_calls_it_and_a_cohort_with_it_trains_one_client_after_another(kind):
    together = trained_as_alone("has a hook, which can't be mapped", HOOKED, model=made(kind))
    assert "has a hook" in together.summary["backend"]["not_mapped"]
    result = trained(HOOKED, "sequential", partition=ONE, model=made(kind))
    assert torch.allclose(vector(result.model), one_step(made(kind)), atol=1e-6)
    assert not torch.allclose(vector(result.model), one_step(made("")), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pool", "parameter"])
def test_processes_call_hooks_too(kind):
    processes = {"backend": "processes", "processes": 1}
    assert same(
        *(fedskew.simulate(HOOKED, model={"name": Net, "kind": kind}, engine=one).model for one in ({}, processes))
    )


def test_a_hook_of_all_modules_is_called_by_every_backend():
    hook = nn.modules.module.register_module_forward_hook(
        lambda layer, inputs, output: 2 * output if isinstance(layer, nn.MaxPool2d) else None
    )
    try:
        expected = one_step(made(""))
        together = trained_as_alone("PyTorch has a hook of all modules", HOOKED, partition=ONE, model=made(""))
    finally:
        hook.remove()
    assert torch.allclose(vector(together.model), expected, atol=1e-6)


def test_a_forward_set_on_a_layer_is_not_mapped():
    network = made("")
    network[5].forward = partial(nn.functional.linear, weight=torch.ones(10, 16))
    trained_as_alone("layer '5' has a forward of its own", HOOKED, model=network)


def test_networks_that_differ_in_hooks_are_different_runs():
    names = {resolve(HOOKED | {"model": made(kind)}).model.name for kind in ["", *KINDS]}
    assert len(names) == len(KINDS) + 1


def test_what_a_copy_could_not_follow_and_a_hook_that_training_never_calls_are_refused():
    network = made("")
    layer = network[4]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    with pytest.raises(ConfigError, match=r"the forward of layer '4' .* give a function that makes it"):
        resolve(HOOKED | {"model": network})
    network = made("")
    network[4].weight.register_hook(lambda gradient: gradient * network[4].weight)
    with pytest.raises(ConfigError, match=r"parameter '4.weight' has a function that uses the network itself"):
        resolve(HOOKED | {"model": network})
    network = made("")
    network[4].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ArgumentError, match=r"'4.weight' has a hook for accumulated gradients"):
        FlatModel(network)
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook"):
        resolve(HOOKED | {"model": network})
