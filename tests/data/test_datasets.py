"""Data sets by name: where files are looked for, and which options there are."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common import refused, save_image
from fedskew import data
from fedskew.data import Dataset
from fedskew.errors import ArgumentError, DataError


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ArgumentError, match="did you mean 'fashion_mnist'"):
        data.load("fashionmnist")


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [("synthetic", "detla", "did you mean 'delta'"), ("digits", "size", "there are none"), ("csv", "rng_", "known: ")],
)
def test_an_unknown_option_is_answered_with_the_known(name, option, hint, tmp_path):
    with pytest.raises(ArgumentError, match=f"{option}: data set {name!r} has no such option.*{hint}"):
        data.load(name, tmp_path, **{option: 1})


@pytest.mark.parametrize(
    ("name", "options"),
    [("synthetic", {"delta": "big"}), ("csv", {"test_share": None}), ("folder", {"client_level": 7})],
)
def test_an_option_of_the_wrong_type_is_named(name, options, tmp_path):
    ((option, _),) = options.items()
    with refused(ArgumentError, match=f"^{option}: "):
        data.load(name, tmp_path, rng=np.random.default_rng(0), **options)


def test_a_root_that_is_not_there_is_named_with_where_it_came_from(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    assert data.load("digits").name == "digits"  # which needs none
    with pytest.raises(DataError, match=r"root .*FEDSKEW_DATA"):
        data.load("mnist")
    with pytest.raises(DataError, match=r"root: .*gone does not exist"):
        data.load("mnist", tmp_path / "gone")
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "lost"))
    with pytest.raises(DataError, match=r"FEDSKEW_DATA: .*lost does not exist"):
        data.load("mnist")


def test_the_root_comes_from_the_argument_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSKEW_DATA", "/nowhere")
    (tmp_path / "t.csv").write_text("a,label\n" + "1,x\n2,y\n" * 10)
    assert data.load("csv", tmp_path / "t.csv", rng=np.random.default_rng(0)).classes == ("x", "y")
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "t.csv"))
    assert data.load("csv", rng=np.random.default_rng(0)).classes == ("x", "y")


# FedPALS' synthetic task.


def draw(delta: float = 0.5, seed: int = 0) -> data.Dataset:
    return data.load("synthetic", rng=np.random.default_rng(seed), delta=delta)


def test_clients_hold_exactly_the_papers_shares():
    task = draw()
    counts = [np.bincount(task.targets.numpy()[task.clients == client], minlength=3).tolist() for client in (0, 1)]
    assert counts == [[20, 20, 0], [9, 0, 9]]
    assert task.client_names == ("S1", "S2")
    assert task.in_shape == (2,)


@pytest.mark.parametrize(
    ("delta", "target"), [(0.0, (0.5, 0.25, 0.25)), (0.5, (0.25, 0.375, 0.375)), (1.0, (0.0, 0.5, 0.5))]
)
def test_the_target_moves_away_from_the_clients_and_the_test_part_follows_it(delta, target):
    task = draw(delta)
    np.testing.assert_allclose(task.target, target)
    assert len(task.test_targets) == 2000
    shares = np.bincount(task.test_targets, minlength=3) / 2000
    np.testing.assert_allclose(shares, target, atol=0.045)
    # squared distance from the mixes alpha (.5, .5, 0) + (1 - alpha) (.5, 0, .5) is 0.375 delta^2
    mixes = [[0.5, a / 2, (1 - a) / 2] for a in np.linspace(0, 1, 1001)]
    assert min(np.square(np.subtract(mixes, target)).sum(1)) == pytest.approx(0.375 * delta**2, abs=1e-12)


def test_classes_are_unit_gaussians_around_the_papers_means():
    tasks = [draw(0.3, seed) for seed in range(5)]
    inputs = torch.cat([task.test_inputs for task in tasks]).numpy()
    targets = torch.cat([task.test_targets for task in tasks]).numpy()
    for label, mean in enumerate([(6, 4.6), (1.2, -1.6), (4.6, -5.4)]):
        rows = inputs[targets == label]
        np.testing.assert_allclose(rows.mean(0), mean, atol=4 / len(rows) ** 0.5)
        np.testing.assert_allclose(np.cov(rows.T), np.eye(2), atol=0.08)


def test_it_depends_on_its_generator_only():
    assert torch.equal(draw(seed=3).inputs, draw(seed=3).inputs)
    assert not torch.equal(draw(seed=3).inputs, draw(seed=4).inputs)


@pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan")])
def test_a_delta_outside_the_unit_interval_is_refused(delta):
    with pytest.raises(ArgumentError, match="delta:"):
        draw(delta)
    with pytest.raises(ArgumentError, match="rng:"):
        data.load("synthetic")


# Samples without labels: as the readers of labelled data would have read them.


def picture(path: Path, size: tuple[int, int] = (4, 6), seed: int = 0, mode: str = "RGB") -> Path:
    return save_image(path, np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8), mode)


def test_images_are_read_as_the_folder_reader_reads_them(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", seed=number)
    read = data.load("folder", tmp_path / "images", rng=np.random.default_rng(0))
    (found,) = data.unlabelled([tmp_path / "images"], read.in_shape)
    assert [Path(name).name for name in found.names] == [f"{number}.png" for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert found.resized == 0
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (read.mean, read.std))
    expected = torch.cat([read.inputs, read.test_inputs])
    assert sorted(((found.inputs - mean) / std).sum(dim=(1, 2, 3)).tolist()) == pytest.approx(
        sorted(expected.sum(dim=(1, 2, 3)).tolist()), abs=1e-4
    )


def test_files_and_folders_in_the_order_given_resized_and_made_grey_where_the_model_wants_that(tmp_path: Path) -> None:
    big = picture(tmp_path / "big.jpg", (8, 12))
    picture(tmp_path / "folder" / "deep" / "one.png", (4, 6))
    picture(tmp_path / "folder" / ".hidden" / "two.png")
    (tmp_path / "folder" / "notes.txt").write_text("no image")
    (found,) = data.unlabelled([big, tmp_path / "folder"], (1, 4, 6))
    assert [Path(name).name for name in found.names] == ["big.jpg", "one.png"]
    assert found.inputs.shape == (2, 1, 4, 6)
    assert found.resized == 1
    assert 0 <= found.inputs.min() < found.inputs.max() <= 1


def test_arrays_in_the_units_of_the_npz_reader_by_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(600 * 4, dtype=np.uint8).reshape(600, 2, 2))
    parts = list(data.unlabelled([tmp_path / "x.npz", picture(tmp_path / "a.png", (2, 2))], (1, 2, 2)))
    assert [len(part.inputs) for part in parts] == [256, 256, 88, 1]
    assert parts[1].names[0] == f"{tmp_path / 'x.npz'}[256]"
    assert parts[0].inputs[0].flatten().tolist() == pytest.approx([0, 1 / 255, 2 / 255, 3 / 255])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    image = picture(tmp_path / "a.png")
    for path, shape, words in (
        (tmp_path / "empty", (1, 2, 2), "empty: holds no images"),
        (tmp_path / "none.png", (1, 2, 2), "none.png: there is no such file or folder"),
        (tmp_path / "y.npz", (1, 2, 2), "y.npz: has no array 'x'"),
        (image, (5,), r"a.png: the model takes samples of shape \(5,\), no images"),
    ):
        with pytest.raises(DataError, match=words):
            list(data.unlabelled([path], shape))


# What a Dataset refuses.


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
    ("mean", (0.5, 0.5), "mean, std: expected one value per channel"),
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
