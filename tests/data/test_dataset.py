"""What a Dataset refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.data import Dataset
from fedskew.errors import ArgumentError


def fields(**changes):
    return {
        "name": "own",
        "inputs": torch.zeros(4, 1, 3, 3),
        "targets": torch.tensor([0, 1, 2, 0]),
        "test_inputs": torch.zeros(2, 1, 3, 3),
        "test_targets": torch.tensor([0, 2]),
        "classes": ("a", "b", "c", "never seen"),
        "mean": (0.5,),
        "std": (0.5,),
        "clients": np.array([0, 0, 1, 1]),
        "client_names": ("north", "south"),
        "target": np.array([0.5, 0.5, 0.0, 0.0]),
        "domains": np.array([0, 0, 0, 1]),
        "test_domains": np.array([1, 1]),
        "domain_names": ("photo", "sketch"),
        "validation": np.array([3]),
    } | changes


def test_token_ids_are_inputs_too():
    tokens = torch.tensor([[1, 2, 0], [3, 0, 0]])
    labels = torch.tensor([0, 1])
    assert Dataset("text", tokens, labels, tokens, labels, ("a", "b")).in_shape == (3,)
    with pytest.raises(ArgumentError, match="inputs: token ids must not be negative; found -1"):
        Dataset("text", tokens - 1, labels, tokens, labels, ("a", "b"))


def test_only_samples_that_are_set_aside_may_be_nobody_s():
    dataset = Dataset(**fields(clients=np.array([0, 0, 1, -1])))
    assert (dataset.validation.tolist(), dataset.num_classes, dataset.in_shape) == ([3], 4, (1, 3, 3))
    with pytest.raises(ArgumentError, match="clients: .*found -1"):
        Dataset(**fields(clients=np.array([0, -1, 1, -1])))


BAD = [
    ("inputs", torch.zeros(4, 1, 3, 3).double(), "inputs: expected float32"),
    ("inputs", torch.zeros(0, 1, 3, 3), "inputs: expected float32 samples.* at least one"),
    ("inputs", torch.full((4, 1, 3, 3), float("nan")), "inputs: has a value that is NaN"),
    ("test_inputs", torch.full((2, 1, 3, 3), float("-inf")), "test_inputs: has a value that is NaN or inf"),
    ("test_inputs", torch.zeros(2, 1, 3, 4), r"test_inputs: samples are \(1, 3, 4\)"),
    ("targets", torch.tensor([0, 1, 2]), r"targets: expected int64, \(4,\)"),
    ("targets", torch.tensor([0, 1, 2, 4]), "targets: ids must lie in 0 to 3; found 4"),
    ("targets", torch.tensor([0, -1, 2, 3]), "found -1"),
    ("test_targets", torch.tensor([0.0, 1.0]), "test_targets: expected int64"),
    ("mean", (0.5, 0.5), "mean, std: expected 1 values"),
    ("clients", np.array([0, 0, 1]), "clients: expected int64"),
    ("clients", np.array([0, 0, 1, 2]), "clients: ids must lie in 0 to 1; found 2"),
    ("client_names", (), "client_names: there is none, but clients has ids; give the name of every client"),
    ("domain_names", (), "domain_names: there is none, but domains has ids"),
    ("domains", np.array([0, 0, 0, 2]), "domains: ids must lie in 0 to 1; found 2"),
    ("test_domains", np.array([0, 0, 1]), r"test_domains: expected int64, \(2,\)"),
    ("test_domains", None, "domains, test_domains: expected both"),
    ("validation", np.array([4]), "validation: ids must lie in 0 to 3; found 4"),
    ("validation", np.array([2, 2]), "validation: names a row twice"),
    ("target", np.array([0.5, 0.5]), "target: expected 4 shares"),
    ("target", np.array([0.5, -0.5, 1.0, 0.0]), "target: expected 4 shares"),
    ("target", np.array([np.nan, 0.5, 0.5, 0.0]), "target: expected 4 shares"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_a_field_that_does_not_fit_is_named(field, value, message):
    with pytest.raises(ArgumentError, match=message):
        Dataset(**fields(**{field: value}))
