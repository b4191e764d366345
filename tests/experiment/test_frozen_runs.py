"""Runs whose network has weights of a file and frozen parts: what travels and is stored, what a run is named by."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedskew
from common import alike, stop_at, task
from fedskew.data import load
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import make_training_loop, read, resolve
from fedskew.files import save_tensors


class Normed(nn.Module):
    """Batch norm in the frozen part and in the other."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.neck = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.neck(self.body(x.flatten(1))))


TRAINED = 8 + 8 + 8 * 10 + 10
STATE = 4 * (TRAINED + 8 + 8) + 8
"""Bytes of what travels: the trained parameters, statistics of one batch norm, and its counter."""


def config(method: Any = "fedavg", backend: str = "sequential", **model: Any) -> dict[str, Any]:
    made = task(4, rounds=2, batch_size=200, smallest_batch=2, lr=0.1, steps=2)
    return made | {"model": {"name": Normed, **model}, "method": method, "engine": {"backend": backend}}


def weights(folder: Path, classes: int = 10, seed: int = 5) -> Path:
    torch.manual_seed(seed)
    module = Normed(classes)
    module.body[1].running_mean += 0.5
    path = folder / f"weights-{seed}.safetensors"
    save_file(module.state_dict(), path)
    return path


def test_only_what_trains_travels_and_a_run_s_files_say_so(tmp_path):
    path = weights(tmp_path, 7)
    made = resolve(config(weights=str(path), freeze=["body.*"]))
    run = made.folder(tmp_path)
    result = fedskew.simulate(made, out=tmp_path)
    record = result.rounds[1]
    assert (record["bytes_up"], record["bytes_down"]) == (4 * STATE, 4 * STATE)
    held, model = load_file(path), load_file(run / "model.safetensors")
    assert model.keys() == held.keys()  # whole
    assert all(torch.equal(model[name], value) for name, value in held.items() if name.startswith("body."))
    assert not torch.equal(model["neck.weight"], held["neck.weight"])
    assert set(load_file(run / "frozen.safetensors")) == {name for name in held if name.startswith("body.")}
    stored = load_file(run / "checkpoint" / "state.safetensors")
    assert max(part.numel() for part in stored.values()) == TRAINED
    notes = " ".join(fedskew.experiment.RunFolder.notes(run, 0))
    assert "fc starts as it was drawn: weights-5.safetensors has no such layer of these classes." in notes
    assert f"Of 642 parameters {TRAINED} are trained, {4 * TRAINED} bytes of a model that travels." in notes
    path.unlink()  # a trained model, and its config, do without
    assert torch.equal(fedskew.load(run).network.fc.weight, model["fc.weight"])


def test_a_last_layer_that_would_stay_as_it_was_drawn_is_refused(tmp_path):
    path, lora = str(weights(tmp_path, 7)), {"kind": "lora", "rank": 1, "targets": ["body.0"]}
    said = "model.weights: it has no layer fc of these classes, and it is not trained; add "
    for model, more in (
        ({"freeze": ["fc.*"]}, r"'fc.\*' to train"),
        ({"train": ["body.*"]}, r"'fc.\*' to train"),
        ({"adapters": lora}, r"'fc' to adapters.modules_to_save"),
    ):
        with pytest.raises(ConfigError, match=said + more):
            make_training_loop(resolve(config(weights=path, **model)), 0)
    make_training_loop(resolve(config(weights=path, adapters=lora | {"modules_to_save": ["fc"]})), 0)


@pytest.mark.parametrize("backend", [pytest.param("processes", marks=pytest.mark.slow), "cohort"])
def test_every_backend_trains_the_same_and_moves_nothing_frozen(tmp_path, backend):
    path = weights(tmp_path)
    runs = [
        fedskew.simulate(config(backend=one, weights=str(path), train=["fc.*", "neck"])).model.state_dict()
        for one in ("sequential", backend)
    ]
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)
    still = {name for name in runs[0] if name.startswith("body.") or backend == "processes"}
    assert still <= alike(*runs)
    assert torch.equal(runs[0]["body.1.running_mean"], load_file(path)["body.1.running_mean"])


def test_a_chain_of_known_layers_keeps_its_frozen_first_layer(tmp_path):
    made = task(3, width=6, rounds=2, lr=0.1)
    made["model"]["freeze"] = ["fc1.*"]
    loop = make_training_loop(resolve(made), 0)
    before = {name: value.clone() for name, value in loop.model.frozen().items()}
    loop.run()
    assert "chain" in loop.model.network.rules
    assert all(torch.equal(loop.model.frozen()[name], value) for name, value in before.items())


@pytest.mark.parametrize("personal", [{"name": "partial", "keep": "norm"}, {"name": "ditto", "strengths": [0.1]}])
def test_personal_models_go_with_a_frozen_part(tmp_path, personal):
    made = config({"preset": "fedavg", "personal": personal}, freeze=["body"])
    made["data"] |= {"client_test": 0.3}
    result = fedskew.simulate(made)
    kept = 4 * (8 + 8 + 8 + 8) if personal["name"] == "partial" else 0  # the other batch norm stays at clients
    assert result.rounds[1]["bytes_up"] == 4 * (STATE - kept)
    assert {row["row"] for row in result.sites()} >= {"common", "personal"}


def test_a_run_goes_on_bit_for_bit_and_not_with_another_frozen_part(tmp_path):
    made = resolve(config(weights=str(weights(tmp_path)), freeze=["body"]))
    whole = make_training_loop(made, 0)
    whole.run()

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        make_training_loop(made, 0, folder).run(progress=stop_at(1))
    shutil.copytree(folder, tmp_path / "other")
    again = make_training_loop(made, 0, folder)
    again.run(resume=True)
    assert torch.equal(again.model.vector, whole.model.vector)
    held = load_file(tmp_path / "other" / "frozen.safetensors")
    save_tensors(tmp_path / "other" / "frozen.safetensors", {name: value + 1 for name, value in held.items()})
    with pytest.raises(RunError, match="frozen.safetensors: the network has frozen something else by now; start over"):
        make_training_loop(made, 0, tmp_path / "other").run(resume=True)


def test_a_run_is_named_by_the_weights_content_and_not_by_their_place(tmp_path):
    path = weights(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy(path, tmp_path / "elsewhere" / "w.safetensors"))
    first, second, other = (
        resolve(config(weights=str(one), freeze=["body"])) for one in (path, moved, weights(tmp_path, seed=6))
    )
    assert first.hash == second.hash != other.hash
    assert "weights" not in resolve(config()).tree()["model"]
    assert first.with_value("model.weights", str(moved)).hash == first.hash
    shutil.copy(weights(tmp_path, seed=6), path)
    with pytest.raises(ConfigError, match="model.weights: .*weights-5.safetensors is another file than that of"):
        make_training_loop(first, 0)


def test_weights_lie_beside_the_config_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    weights(tmp_path / "configs")
    text = """
        data.name = "digits"
        partition = {rule = "iid", clients = 3}
        model = {name = "logistic", weights = "weights-5.safetensors"}
        training.rounds = 1
    """
    (tmp_path / "configs" / "a.toml").write_text(text)
    assert read(tmp_path / "configs" / "a.toml").model.weights_hash is not None
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"a.toml.*: model.weights: .*weights-5.safetensors: No such file"):
        read(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"freeze": ["bodi"]}, r"model.freeze: no parameter of the network is called 'bodi' \(did you mean 'body'\?\)"),
        ({"freeze": ["*"]}, "model.freeze: nothing is left to train"),
        ({"freeze": ["body"], "train": ["fc"]}, "model: freeze, train and adapters each say what is trained"),
        ({"train": []}, "model.train"),
        ({"weights": "none.safetensors"}, "model.weights: none.safetensors: No such file"),
    ],
)
def test_what_can_not_be_frozen_is_one_line(model, message):
    with pytest.raises(ConfigError, match=message):
        make_training_loop(resolve(config(**model)), 0)


# Runs behind a frozen body: the same as without kept features, whatever trains, and off where it may not be.


PARTITION = {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.5, "min_size": 4}


class Frozen(nn.Module):
    """A convolution with batch norm below two linear layers; dropout where `p` is above 0."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(p), nn.MaxPool2d(2), nn.Flatten()
        )
        self.middle, self.head = nn.Linear(72, 16), nn.Linear(16, 10)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=drawn)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(self.body(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.fixture
def trained(tmp_path):
    return partial(train, tmp_path)


def train(folder: Path, keep: bool, *, network: nn.Module | None = None, **more):
    sections = {
        "data": {"name": "digits", "rows": 300},
        "partition": PARTITION,
        "model": {"name": network or Frozen(), "freeze": ["body.*"]},
        "training": {"rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 16, "lr": 0.1},
    }
    for name, keys in more.items():
        sections[name] = {**sections[name], **keys} if name in sections and isinstance(keys, dict) else keys
    sections["engine"] = {"backend": "sequential", "keep_features": keep, **sections.get("engine", {})}
    return fedskew.simulate(**sections, out=folder / f"{keep}-{sections['engine']['backend']}")


def state(result) -> dict[str, Tensor]:
    return result.model.state_dict()


@pytest.fixture
def notes(tmp_path):
    def read(keep: bool) -> str:
        (task,) = tmp_path.glob(f"{keep}-sequential/**/task.json")
        return " ".join(json.loads(task.read_text())["notes"])

    return read


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"method": "moon"},
        {"method": "fedvls"},
        {"method": {"preset": "fedavg", "finish": "ccvr"}},
        {
            "method": "fedpals",
            "data": {"held_out": 0.2, "validation": 0.2},
            "target": {"mix": "estimate", "truth": "uniform", "warmup": 1, "unlabelled": 40},
        },
        {"evaluation": {"clients": True}, "data": {"validation": 0.2}},
    ],
)
def test_a_run_is_the_same_but_for_rounding(more, trained, notes) -> None:
    kept, anew = trained(True, **more), trained(False, **more)
    assert "are computed once at each client" in notes(True)
    assert "engine.keep_features is off" in notes(False)
    torch.testing.assert_close(state(kept), state(anew), rtol=0, atol=2e-5)
    assert [one["bytes_up"] for one in kept.rounds] == [one["bytes_up"] for one in anew.rounds]


@pytest.mark.parametrize("personal", ["prior", "finetune", "ditto", "rod", "partial"])
def test_personal_models_are_the_same_but_for_rounding(personal: str, trained, notes) -> None:
    more = {"method": {"preset": "fedavg", "personal": personal}, "data": {"client_test": 0.3, "held_out": 0.1}}
    kept, anew = trained(True, **more), trained(False, **more)
    assert "are computed once at each client" in notes(True)
    both = list(zip(kept.sites(), anew.sites(), strict=True))
    assert {one["row"] for one, _ in both} == {"common", "personal"}
    for one, other in both:
        assert all(one[key] == other[key] for key in ("client", "row", "samples", "accuracy"))
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    torch.testing.assert_close(state(kept), state(anew), rtol=0, atol=2e-5)


def test_processes_have_the_same_bits(trained) -> None:
    one, several = trained(True), trained(True, engine={"backend": "processes", "processes": 2})
    torch.testing.assert_close(state(one), state(several), rtol=0, atol=0)


def test_samples_that_are_not_in_the_run_never_pass_the_body(trained, monkeypatch) -> None:
    passed, computed = [], nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda layer, x: passed.append(len(x)) or computed(layer, x))
    trained(True, data={"rows": 120, "validation": 0.2}, training={"participation": 1.0})
    tested = len(load("digits").test_targets)
    assert 120 + tested <= sum(passed) <= 120 + tested + 100  # those beside are to try the network out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"training": {"augmentation": "crop_flip"}}, "training.augmentation changes the samples"),
        ({"method": "fedconcat"}, "FedConcat trains a network for each cluster"),
        ({"network": Frozen(p=0.5), "model": {"freeze": ["head.*"]}}, "no frozen layer comes before all that train"),
    ],
)
def test_where_it_may_not_be_the_notes_say_why(more, reason: str, trained, notes) -> None:
    trained(True, **more)
    assert reason in notes(True)


def test_features_of_normalised_samples_are_in_no_units(trained, notes) -> None:
    raw = load("digits")
    trained(True, data=replace(raw, mean=(0.3,), std=(0.2,)))
    assert "are computed once" in notes(True)


def test_behind_dropout_features_are_those_before_it(trained, notes) -> None:
    trained(True, network=Frozen(p=0.5))
    assert "8 x 6 x 6 numbers a sample" in notes(True)


def test_a_body_of_ones_own_that_is_frozen_is_kept_too(trained, notes) -> None:
    network = Frozen()
    network.body.requires_grad_(False)
    trained(True, network=network, model={"freeze": ["middle.*"]})
    assert "16 numbers a sample" in notes(True)


def test_a_federation_on_a_frozen_body_is_one_pass_where_the_finish_needs_features_alone(trained) -> None:
    result = trained(True, method={"preset": "fedavg", "finish": "gaussian"}, training={"rounds": 0})
    assert result.summary["finished"]["evaluation"]["accuracy"] > result.summary["final"]["accuracy"] + 0.3
    assert np.isfinite(result.summary["finished"]["evaluation"]["loss"])
