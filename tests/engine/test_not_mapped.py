"""Networks and components that can't be mapped over a cohort are trained one client after another, with a word."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fedskew
from fedskew.errors import BackendWarning, ConfigError, RunError

TASK = {
    "data": "digits",
    "partition": {"rule": "quantity", "clients": 10, "labels_per_client": 3},
    "training": {"rounds": 2, "participation": 0.3, "lr": 0.05},
}
COHORT = {"backend": "cohort"}


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
    with pytest.warns(BackendWarning, match=f"engine.backend: clients are trained one after another, .*: {why}"):
        result = fedskew.simulate(TASK, model=model, engine=COHORT)
    assert result.summary["backend"] == {"name": "cohort", "not_mapped": why}
    alone = fedskew.simulate(TASK, model=model, engine={"backend": "sequential"})
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name])


def test_seeds_that_train_together_fall_back_together():
    tables = {"seeds": [0, 1], "model": {"name": Branch}}
    with pytest.warns(BackendWarning, match="one after another"):
        together = fedskew.simulate(TASK | tables, engine=COHORT | {"seeds_together": True})
    apart = fedskew.simulate(TASK | tables, engine={"backend": "sequential"})
    assert [run.rounds[-1].loss for run in together.runs] == [run.rounds[-1].loss for run in apart.runs]


def test_a_transformer_is_mapped():
    model = {"name": Rows, "kind": "transformer"}
    result, alone = (fedskew.simulate(TASK, model=model, engine={"backend": one}) for one in ("cohort", "sequential"))
    assert "not_mapped" not in result.summary["backend"]
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_a_network_that_draws_from_the_global_generator_is_refused():
    with pytest.raises(ConfigError, match="draws from PyTorch's global generator, as functional.dropout does"):
        fedskew.simulate(TASK, model={"name": FunctionalDropout})


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
