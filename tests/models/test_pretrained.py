"""Pre-trained weights from files in torchvision's format."""

import pickle

import pytest
import safetensors.torch
import torch

from fedskew.errors import ArgumentError, DataError
from fedskew.models import build, note
from fedskew.models.weights import load_weights

X = torch.zeros(1, 3, 64, 64)
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_names() -> set[str]:
    """The state dict's names of torchvision.models.resnet50, written down here without it."""
    names = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{part}" for part in NORM)}
    for layer, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            for number in (1, 2, 3):
                names.add(f"layer{layer}.{block}.conv{number}.weight")
                names |= {f"layer{layer}.{block}.bn{number}.{part}" for part in NORM}
        names.add(f"layer{layer}.0.downsample.0.weight")
        names |= {f"layer{layer}.0.downsample.1.{part}" for part in NORM}
    return names


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    """A state dict as torchvision saves it, for 1000 classes, with values of its own."""
    model = build("resnet50", 1000, (3, 64, 64), generator=torch.Generator().manual_seed(5))
    model.bn1.running_mean += 0.5
    return {name.replace("head.", "fc."): value for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_resnet50_has_torchvisions_names_and_shapes(published):
    assert set(published) == torchvision_names()
    assert sum(value.numel() for name, value in published.items() if "running" not in name and "num_" not in name) == (
        25_557_032
    )
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.1.conv1.weight": (64, 256, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer2.0.downsample.0.weight": (512, 256, 1, 1),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(published[name].shape) for name in shapes} == shapes


@pytest.mark.slow
def test_a_file_for_other_classes_gives_all_but_the_head_and_one_of_the_same_the_head_too(published, tmp_path):
    # Files from before PyTorch 0.4.1 have no counters.
    torch.save({name: value for name, value in published.items() if "num_batches" not in name}, tmp_path / "r50.pth")
    of_seven = published | {"fc.weight": torch.ones(7, 2048), "fc.bias": torch.arange(7.0)}
    safetensors.torch.save_file(of_seven, tmp_path / "r50.safetensors")
    drawn = build("resnet50", 7, (3, 64, 64)).head.state_dict()
    for file, head in (("r50.pth", drawn), ("r50.safetensors", {"weight": torch.ones(7, 2048)})):
        model = build("resnet50", 7, (3, 64, 64))
        load_weights(model, tmp_path / file, X)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in published.items() if not name.startswith("fc."))
        assert all(torch.equal(state[f"head.{name}"], value) for name, value in head.items())
    assert torch.equal(model.head.bias, torch.arange(7.0))


def test_a_run_says_where_the_weights_come_from():
    assert note("resnet50", {}).startswith("resnet50 starts from random weights")
    said = note("resnet50", {"weights": "r50.pth"})
    assert said == "resnet50 starts from r50.pth; its head is drawn anew if the file has other classes"
    assert note("resnet18", {}) == note("module:own", {}) == ""


@pytest.mark.slow
def test_files_of_another_network_and_those_that_can_not_be_read_are_one_line(tmp_path):
    torch.save({"fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)}, tmp_path / "small.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    for name in ("damaged.pth", "damaged.safetensors"):
        (tmp_path / name).write_bytes(b"not weights at all")
    for file, error, message in (
        ("small.pth", ArgumentError, "weights: .*small.pth is of another network: it lacks 'bn1.bias' and 99 more"),
        ("none.safetensors", DataError, "no such weights file"),
        ("damaged.pth", DataError, "damaged.pth: is not a readable weights file"),
        ("damaged.safetensors", DataError, "damaged.safetensors: is not a readable weights file"),
        ("list.pth", DataError, "list.pth: does not hold a state dict"),
    ):
        with pytest.raises(error, match=message):
            load_weights(build("resnet18", 10, (3, 16, 16)), tmp_path / file, X)


class _Writes:
    """Unpickling this would write a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self):
        return (open, (self._path, "w"))


@pytest.mark.slow
def test_a_file_that_brings_code_is_refused_and_not_executed(tmp_path):
    path, trace = tmp_path / "evil.pth", tmp_path / "trace"
    path.write_bytes(pickle.dumps({"conv1.weight": _Writes(str(trace))}))
    with pytest.raises(DataError, match="evil.pth: is not a readable weights file"):
        load_weights(build("resnet18", 10, (3, 16, 16)), path, X)
    assert not trace.exists()
