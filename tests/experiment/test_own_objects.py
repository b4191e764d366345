"""Data, networks and components that are given as objects, and what is said where they don't fit."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedskew
from common import refused, task, without_times
from fedskew import data
from fedskew.errors import ConfigError, DataWarning, FedskewError
from fedskew.experiment import resolve

TASK = task(10, labels=3, rounds=1, participation=0.5, lr=0.05)
DIGITS = data.load("digits")
ROWS = 400


def accuracy(**tables) -> float:
    return fedskew.simulate(TASK | tables).summary["final"]["accuracy"]


class Pictures(torch.utils.data.Dataset):
    """A map-style data set like torchvision's, with one mistake."""

    classes = tuple("zyxwvutsrq")

    def __init__(self, kind: str = "pictures"):
        self.kind = kind

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        x, y = DIGITS.inputs[row], int(DIGITS.targets[row])
        if self.kind == "random":
            x = x + torch.randn(())
        if self.kind == "shape" and row == 7:
            x = x[:, :4]
        if self.kind == "fails":
            raise KeyError("gone")
        if self.kind == "pictures":
            return Image.fromarray((x[0] * 40 + 100).byte().numpy()), y
        return {"x": x} if self.kind == "dict" else (x, 11 if self.kind == "label" else y)


class Stream(IterableDataset):
    """Has no items by number."""

    def __iter__(self):
        yield from ()


def test_a_data_set_of_ours_is_the_one_that_is_named():
    given, named = (fedskew.simulate(TASK, **data).rounds for data in ({"data": DIGITS}, {}))
    assert without_times(given) == without_times(named)


def test_tensors_are_read_as_they_are_and_a_share_is_held_out():
    pairs = TensorDataset(DIGITS.inputs[:ROWS], DIGITS.targets[:ROWS])
    held_out = fedskew.simulate(TASK, data={"name": pairs, "test_share": 0.25})
    confusion = np.array(held_out.rounds[0]["evaluation"]["confusion"])
    assert confusion.sum() == pytest.approx(ROWS / 4, abs=5)
    test = TensorDataset(DIGITS.test_inputs, DIGITS.test_targets)
    apart = fedskew.simulate(TASK, data={"name": pairs, "test": test})
    assert np.array(apart.rounds[0]["evaluation"]["confusion"]).sum() == len(test)
    assert apart.config.data.name != held_out.config.data.name
    assert fedskew.simulate(TASK, data={"name": pairs, "test": test}).config.hash == apart.config.hash


def test_pictures_with_classes_are_read_as_torchvisions_are():
    before = torch.get_rng_state()
    result = fedskew.simulate(TASK, data=Pictures())
    assert torch.equal(before, torch.get_rng_state())
    assert result.rounds[0]["evaluation"]["accuracy"] >= 0
    read = data.from_object(Pictures()).read(np.random.default_rng(0))
    assert read.classes == Pictures.classes
    assert read.in_shape == (1, 8, 8)
    assert read.inputs.mean() == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_tables_of_hugging_face_are_read_with_or_without_a_test_part():
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    columns = {"x": DIGITS.inputs[:ROWS].flatten(1).tolist(), "label": DIGITS.targets[:ROWS].tolist()}
    table = datasets.Dataset.from_dict(columns)
    test = table.select(range(100))
    for given, size in (
        (table, ROWS // 5),
        (datasets.DatasetDict({"train": table, "test": test}), 100),
        ({"name": table, "test": test}, 100),
    ):
        record = fedskew.simulate(TASK, data=given).rounds[0]
        assert np.array(record["evaluation"]["confusion"]).sum() == pytest.approx(size, abs=5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Pictures("random"), "its transform draws at random; leave that out, and set training.augmentation"),
        (Pictures("shape"), "data: item 7 is (1, 4, 8), item 0 is (1, 8, 8)"),
        (Pictures("dict"), "item 0 is of type dict; expected (input, label)"),
        (Pictures("fails"), "item 0 can't be read: KeyError: 'gone' (test_own_objects.py, line "),
        (Pictures("label"), "the label of item 0 is 11, and there are classes 0 to 9"),
        (DataLoader(Pictures()), "a DataLoader; give its .dataset"),
        (Stream(), "Stream has no items by number"),
        (5, "data.name: "),
        ({"name": [(torch.zeros(3), 1)], "testshare": 0.1}, "no such option (did you mean 'test_share'?)"),
        ({"name": DIGITS, "test": DIGITS}, "data.test: a fedskew.data.Dataset has a test part"),
        (lambda: 1 / 0, "failed: ZeroDivisionError: division by zero (test_own_objects.py, line "),
        (":x", "expected module:Class"),
    ],
)
def test_data_that_does_not_fit_is_one_line(given, says):
    with refused(FedskewError, says):
        fedskew.simulate(TASK, data=given)


class Net(nn.Module):
    """A network with one mistake."""

    def __init__(self, num_classes, in_shape, what="none"):
        super().__init__()
        self.what = what
        self.layer = nn.Linear(64, num_classes + (what == "more") - 4 * (what == "fewer"))
        if what == "undefined":
            nn.init.constant_(self.layer.bias, math.nan)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        if self.what == "misspelt" or (self.what == "large" and len(x) > 200):
            return self.leyer(x)
        return (out, x) if self.what == "tuple" else out[0] if self.what == "rows" else out


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_network_may_be_given_itself_and_is_not_changed():
    torch.manual_seed(5)
    network = small()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    first, again = (fedskew.simulate(TASK | {"seeds": [0, 1]}, model=network) for _ in range(2))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert first.config.hash == again.config.hash
    assert first.runs[0].rounds[0].evaluation == first.runs[1].rounds[0].evaluation  # every seed starts from it
    network[1].bias.data.add_(1)
    assert fedskew.simulate(TASK, model=network).config.model.name != first.config.model.name


class Widths:
    """Something that a function closes over, whose repr is its address."""

    def __init__(self, *widths):
        self.widths = set(widths)


def named(widths, other=None):
    return resolve(TASK | {"model": lambda: (widths, other, small())[2]}).model.name


def test_what_a_function_closes_over_is_named_by_its_content_alone():
    assert repr({0, 8}) != repr({8, 0})  # equal, in another order
    assert named({0, 8}) == named({8, 0}) != named({0, 9})
    assert named(Widths(0, 8)) == named(Widths(8, 0)) != named(Widths(0, 9))
    assert named([{"a": Widths(1)}]) == named([{"a": Widths(1)}]) != named([{"a": Widths(2)}])
    assert named(np.arange(5000)) != named(np.arange(5000) % 4999)  # their reprs are short, and the same
    round = Widths(3)
    round.itself = round
    assert named(round) == named(round)
    with pytest.warns(DataWarning, match="what <generator object.* holds can't be told"):
        first = named(one for one in ())
    with pytest.warns(DataWarning):
        assert named(one for one in ()) == first


def elsewhere(result, section: str) -> Path:
    """A run's config, whose object of a section no process has."""
    config = result.folder / "config.toml"
    config.write_text(config.read_text().replace(getattr(result.config, section).name, "given:Gone-00000000"))
    return config


def test_a_network_given_as_an_object_is_asked_for_where_its_run_is_repeated(tmp_path):
    config = elsewhere(fedskew.simulate(TASK, model=small(), out=tmp_path), "model")
    with pytest.raises(ConfigError, match="was given as an object from Python, which isn't here; give it again"):
        fedskew.simulate(config)


def test_a_model_is_read_back_without_the_data_that_it_was_given(tmp_path):
    config = elsewhere(fedskew.simulate(TASK, data=DIGITS, out=tmp_path), "data")
    assert fedskew.load(config.parent).predict(DIGITS.test_inputs[:3]).shape == (3, 10)


@pytest.mark.parametrize(
    "make",
    [small, lambda: small(), lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))],
    ids=["function", "lambda", "lambda with classes"],
)
def test_a_function_takes_what_it_wants_to_know(make):
    assert accuracy(model=make) > 0


def test_lazy_layers_get_their_weights_from_the_seed():
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    first, again = (fedskew.simulate(TASK, model=lazy).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"name": Net, "what": "tuple"}, "must return logits, a tensor (batch, classes), and nothing else"),
        ({"name": Net, "what": "rows"}, "it returns a tensor of shape (10,)"),
        ({"name": Net, "what": "more"}, "its logits are 11 wide, and the data has 10 classes"),
        ({"name": Net, "what": "fewer"}, "its logits are 6 wide, and the data has 10 classes"),
        ({"name": Net, "what": "undefined"}, "its logits are not finite"),
        ({"name": Net, "what": "misspelt"}, "it fails on samples of shape (1, 8, 8): AttributeError: 'Net' object"),
        ({"name": Net, "what": "large"}, "the network fails in evaluation, on samples of shape (445, 1, 8, 8)"),
        ({"name": Net, "waht": "none"}, "model.waht: test_own_objects:Net has no such option (did you mean 'what'?)"),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), *small()), "it writes to its samples: leave inplace=True out"),
        (lambda width: small(), "model.width: missing"),
        (lambda: 1 / 0, "failed: ZeroDivisionError"),
        (lambda: 3, "returned int, not an nn.Module"),
        (3, "model.name: int 3 is no network"),
        ({"name": dict}, "model.name"),
        (":x", "expected module:Class"),
    ],
)
def test_a_network_that_does_not_fit_is_one_line(model, says):
    with refused(FedskewError, says):
        fedskew.simulate(TASK, model=model)


class Bare:
    """A weighting without @dataclass."""

    def weigh(self, answered):
        return answered.sizes / answered.sizes.sum()


@pytest.mark.parametrize("given", [Bare(), Bare, f"{__name__}:Bare", {"name": f"{__name__}:Bare"}])
def test_a_class_without_dataclass_is_told_what_to_write(given):
    with refused(FedskewError, "write @dataclass(frozen=True) above class Bare"):
        fedskew.simulate(TASK, method={"weighting": given})


class Hidden(nn.Sequential):
    """A network whose graph can't be read."""

    def forward(self, x):
        return super().forward(x) if len(x) else x


def convolutional(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(96, 10)
    )


class Viewed(nn.Module):
    """As tutorials write it; with batch norm, so that it is computed as it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Linear(216, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().view(-1, 216))


PICTURES = {"training": TASK["training"] | {"batch_size": 32, "momentum": 0.9}}


def test_a_network_that_takes_views_of_convolutions_trains():
    result = fedskew.simulate(TASK, model=Viewed(), training=TASK["training"] | {"smallest_batch": 2})
    assert list(result.summary["backend"]["network"]) == ["chain"]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("cohort", nn.Sequential),
        ("sequential", Hidden),
        pytest.param("processes", nn.Sequential, marks=pytest.mark.slow),
    ],
)
def test_a_network_of_ones_own_is_made_faster_and_stays_the_same(backend, kind, tmp_path):
    given = fedskew.simulate(TASK, model=convolutional(), **PICTURES, out=tmp_path)
    done = {"chain": 3}
    assert given.summary["backend"] == {"name": "sequential", "network": done}
    assert list(given.model.state_dict()) == list(convolutional().state_dict())
    engine = {"backend": backend, "processes": 2} if backend == "processes" else {"backend": backend}
    other = fedskew.simulate(TASK, model=convolutional(kind), **PICTURES, engine=engine)
    if kind is Hidden:
        (why,) = other.summary["backend"]["network"].values()
        assert "'len' is not supported in symbolic tracing" in why
    if backend == "processes":
        assert other.summary["backend"] == {"name": "processes", "network": done}
    close = {"rtol": 0, "atol": 0} if backend == "processes" else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(other.model.state_dict(), given.model.state_dict(), **close)
