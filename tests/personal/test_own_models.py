"""Models of clients' own: what they are equal to at their limits, on every backend, and after a resume."""

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedskew
from common import same
from fedskew.engine.own import SENT, OwnStep
from fedskew.errors import CombinationError, ComponentError, ConfigError
from fedskew.local_steps import StepSettings
from fedskew.parameters import component
from fedskew.personal import INDEX, Names, OwnTraining, Personal


class Small(nn.Module):
    """Layers of every kind that a client may keep."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Linear(math.prod(in_shape), 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(x.flatten(1)))))


def federation(personal: Any = None, baselines: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Five clients of 48 samples, two rounds of two epochs."""
    tree: dict[str, Any] = {
        "data": {"name": "digits", "rows": 240, "client_test": 0.3},
        "partition": {"rule": "shards", "per_client": 2, "clients": 5},
        "model": "logistic",
        "method": {"preset": "fedavg"} | ({} if personal is None else {"personal": personal}),
        "training": {"rounds": 2, "epochs": 2, "batch_size": 16, "lr": 0.1, "momentum": 0.5, "smallest_batch": 2},
        "evaluation": {"every": 2, "baselines": list(baselines)},
        "engine": {"backend": "sequential"},
    }
    for section, values in more.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) else values
    return tree


def figures(result: fedskew.Result, row: str) -> list[tuple[float, ...]]:
    """Every client's accuracy and loss."""
    return [(one["accuracy"], one["loss"]) for one in result.sites() if one["row"] == row]


def test_a_client_that_keeps_nothing_is_one_of_fedavg() -> None:
    plain, kept = (fedskew.simulate(federation(one)) for one in (None, {"name": "partial", "keep": "none"}))
    assert same(plain.model, kept.model)
    assert figures(kept, "personal") == figures(plain, "common") == figures(kept, "common")


@pytest.mark.parametrize("personal", [{"name": "partial", "keep": "all"}, {"name": "ditto", "strengths": [0.0]}])
def test_a_client_that_keeps_all_trains_alone(personal: Any) -> None:
    result = fedskew.simulate(federation(personal, ("alone",)))
    assert figures(result, "personal") == figures(result, "alone")


def test_a_strong_pull_makes_a_clients_model_the_common_one() -> None:
    # With lr * strength = 1 and no momentum every step ends at w - lr * gradient.
    settings: dict[str, Any] = {"lr": 0.001, "momentum": 0.0}
    result = fedskew.simulate(federation({"name": "ditto", "strengths": [1000.0]}, training=settings))
    np.testing.assert_allclose(figures(result, "personal"), figures(result, "common"), atol=0.03)


def test_a_step_of_ditto_is_the_papers() -> None:
    # v = (1, 2), w = (0, 4), gradient (3, -1), strength 0.5, lr 0.1: v - 0.1 (3 + 0.5, -1 - 1) = (0.65, 2.2)
    settings = StepSettings(torch.zeros(2), 0.1, broadcast={SENT: torch.tensor([0.0, 4.0])})
    moved, _ = OwnStep(pull=0.5).step(torch.tensor([1.0, 2.0]), lambda _: torch.tensor([3.0, -1.0]), {}, settings)
    torch.testing.assert_close(moved, torch.tensor([0.65, 2.2]))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("head", {"head.weight", "head.bias"}),
        ("norm", {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}),
        (["body.*"], {"body.weight", "body.bias"}),
    ],
)
def test_layers_that_clients_keep_stay_as_they_were_drawn_and_do_not_travel(keep: Any, kept: set[str]) -> None:
    runs = [
        fedskew.simulate(federation({"name": "partial", "keep": keep}, model=Small, training={"rounds": rounds}))
        for rounds in (0, 2)
    ]
    first, last = (run.model.state_dict() for run in runs)
    same = {name for name, value in first.items() if value.is_floating_point() and torch.equal(value, last[name])}
    assert same == kept
    whole = fedskew.simulate(federation(model=Small)).rounds[-1]["bytes_up"]
    assert whole - runs[1].rounds[-1]["bytes_up"] == 5 * 4 * sum(first[name].numel() for name in kept)
    assert figures(runs[1], "personal") != figures(runs[1], "common")


def test_epochs_of_the_head_alone_leave_the_body_as_it_is() -> None:
    personal = {"name": "partial", "keep": "head", "head_epochs": 2}
    first, last = (
        fedskew.simulate(federation(personal, model=Small, training={"rounds": rounds})).model.state_dict()
        for rounds in (0, 2)
    )
    assert all(torch.equal(first[name], last[name]) for name in first if "running" not in name and "num" not in name)


def test_a_head_beside_the_common_one_begins_with_zeros_and_leaves_the_common_one_as_it_is() -> None:
    untrained = fedskew.simulate(federation({"name": "rod"}, training={"rounds": 0}))
    np.testing.assert_allclose(figures(untrained, "personal"), figures(untrained, "common"))
    plain, rod = (fedskew.simulate(federation(one, model=Small)) for one in (None, "rod"))
    assert all(torch.equal(value, rod.model.state_dict()[name]) for name, value in plain.model.state_dict().items())
    assert np.mean(figures(rod, "personal"), axis=0)[1] < np.mean(figures(rod, "common"), axis=0)[1]


def test_the_best_of_several_strengths_is_chosen_on_held_out_samples() -> None:
    # Learning from a federation of one label each, a strong pull is never the best.
    data = {"name": "digits", "rows": 240, "client_test": 0.3, "held_out": 0.2}
    several, one = (
        fedskew.simulate(federation({"name": "ditto", "strengths": strengths}, data=data, training={"lr": 0.02}))
        for strengths in ([40.0, 0.0], [0.0])
    )
    assert figures(several, "personal") == figures(one, "personal")


def test_who_never_took_part_is_trained_alone_for_as_many_rounds_as_others() -> None:
    result = fedskew.simulate(federation("ditto", ("alone", "pooled"), training={"participation": 0.4, "rounds": 1}))
    took = result.rounds[-1]["answered"]
    rows = {(one["row"], one["client"]): one["loss"] for one in result.sites()}
    plain = fedskew.simulate(federation(training={"participation": 0.4, "rounds": 1}))
    assert figures(result, "common") == figures(plain, "common")  # which own models leave as it is
    assert all(torch.equal(one, result.model.state_dict()[name]) for name, one in plain.model.state_dict().items())
    everyone = fedskew.simulate(federation(None, ("alone",), training={"rounds": 1}))
    assert [rows["alone", client] for client in range(5)] == [loss for _, loss in figures(everyone, "alone")]
    assert all((rows["personal", client] == rows["common", client]) == (client not in took) for client in range(5))


def test_pooled_trains_as_many_steps_as_a_client(tmp_path: Path) -> None:
    # One client that holds everything takes the same steps as the pooled model.
    one = {"partition": {"rule": "shards", "per_client": 10, "clients": 1}}
    result = fedskew.simulate(federation(None, ("alone", "pooled"), **one, training={"epochs": 1}))
    alone, pooled = figures(result, "alone"), figures(result, "pooled")
    assert alone != pooled  # other draws
    np.testing.assert_allclose(alone, pooled, rtol=0.2)


PERSONAL = [{"name": "partial"}, {"name": "ditto"}, {"name": "rod"}, {"name": "finetune", "epochs": 1}]


@pytest.mark.parametrize("personal", [*PERSONAL, {"name": "partial", "head_epochs": 1}], ids=str)
def test_a_cohort_trains_the_same_personal_models(personal: Any) -> None:
    one, other = (
        fedskew.simulate(federation(personal, ("alone",), engine={"backend": backend}))
        for backend in ("sequential", "cohort")
    )
    for row in ("alone", "common", "personal"):
        np.testing.assert_allclose(figures(one, row), figures(other, row), rtol=1e-3)


@pytest.mark.slow
def test_processes_train_the_same_bits() -> None:
    one, other = (
        fedskew.simulate(federation("ditto", ("alone",), engine=engine))
        for engine in ({"backend": "sequential"}, {"backend": "processes", "processes": 2})
    )
    assert one.sites() == other.sites()


@pytest.mark.parametrize("personal", PERSONAL[:3], ids=str)
def test_own_models_go_on_bit_for_bit(personal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"name": "digits", "rows": 240, "client_test": 0.3, "held_out": 0.2}
    tree = federation(personal, ("alone", "pooled"), data=data, training={"participation": 0.5, "rounds": 3})

    def killed(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedskew.simulate(tree, out=tmp_path / "killed", progress=killed)
    again = fedskew.simulate(tree, out=tmp_path / "killed", resume=True)
    whole = fedskew.simulate(tree, out=tmp_path / "whole")
    assert again.sites() == whole.sites()
    files = [(run.folder / "model.safetensors", run.folder / "sites.csv") for run in (again, whole)]
    assert files[0][1].read_bytes() == files[1][1].read_bytes()
    assert all(torch.equal(one, load_file(files[1][0])[name]) for name, one in load_file(files[0][0]).items())


@component
class Interrupted(Personal):
    """A model of the client's own; its second evaluation is interrupted, or its last training."""

    evaluations: ClassVar[int] = 0

    def trainings(self) -> tuple[OwnTraining, ...]:
        return (OwnTraining("rounds"),)

    def moved(self, logits: Any, held_out: Any, counts: Any) -> Any:
        Interrupted.evaluations -= 1
        if Interrupted.evaluations == 0:
            raise KeyboardInterrupt
        return logits


@pytest.mark.parametrize("evaluations", [5 + 2, 3 * 5 + 2], ids=["in a round", "at the end"])
def test_own_models_go_on_after_an_interrupt(evaluations: int, tmp_path: Path) -> None:
    whole = {"training": {"participation": 0.5}, "evaluation": {"sites": True, "every": 1}}
    tree = federation(Interrupted(), ("alone",), **whole)
    tree["evaluation"]["baselines"] = ["alone"]
    Interrupted.evaluations = evaluations
    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(tree, out=tmp_path / "run", progress=False)
    again = fedskew.simulate(tree, out=tmp_path / "run", resume=True, progress=False)
    assert again.sites() == fedskew.simulate(tree, progress=False).sites()


class Overflowing(nn.Module):
    """A network that diverges once it is trained."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits if self.training else logits / (self.head.bias == 0)


def test_a_model_that_has_diverged_does_not_end_the_run() -> None:
    data = {"name": "digits", "rows": 240, "client_test": 0.3, "held_out": 0.2}
    result = fedskew.simulate(federation("prior", model=Overflowing, data=data, training={"rounds": 1}))
    assert np.isnan([loss for _, loss in figures(result, "personal")]).all()


@pytest.mark.parametrize("name", ["prior", "finetune"])
def test_fedconcats_model_can_be_made_personal(name: str) -> None:
    data = {"name": "digits", "rows": 240, "client_test": 0.3, "held_out": 0.2}
    method = {"preset": "fedconcat", "pipeline": {"clusters": 2}, "personal": name}
    result = fedskew.simulate(federation(data=data, method=method, model="mlp3", training={"rounds": 4}))
    assert figures(result, "personal") != figures(result, "common")


@pytest.mark.parametrize("name", sorted(set(INDEX) - {"prior"}))
def test_they_go_with_other_slots(name: str) -> None:
    method = {"preset": "fedentopt+fedvls+fedla+fedprox+fedexp", "personal": name}
    result = fedskew.simulate(federation(training={"participation": 0.5}, method=method))
    assert np.isfinite(figures(result, "personal")).all()


def test_what_makes_no_sense_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"personal": "finetune", "data": {"client_test": 0.0}}, "method.personal: .*data.client_test"),
        ({"personal": "prior"}, "method.personal: .*data.held_out"),
        ({"personal": {"name": "partial", "keep": "norm"}}, "method.personal.keep: .*no trained normalisation"),
        ({"personal": {"name": "partial", "keep": ["none.*"]}}, "method.personal.keep: .*none"),
        ({"personal": {"name": "ditto", "strengths": []}}, "method.personal.strengths"),
        ({"baselines": ("alone",), "data": {"client_test": 0.0}}, "evaluation.baselines: .*data.client_test"),
    ]
    for tree, said in refused:
        with pytest.raises(ConfigError, match=said):
            fedskew.simulate(federation(**tree))
    with pytest.raises(CombinationError, match="scaffold"):
        fedskew.simulate(federation(method={"preset": "scaffold+partial"}))
    with pytest.raises(CombinationError, match="fedconcat"):
        fedskew.simulate(federation(method={"preset": "fedconcat+ditto"}))


def test_names_of_a_network() -> None:
    module = Small(3, (4,))
    held = tuple(name for name, _ in module.named_buffers())
    names = Names.of(module, tuple(name for name, _ in module.named_parameters()), held, 3)
    assert names.head == {"head.weight", "head.bias"}
    assert names.buffers == ("norm.running_mean", "norm.running_var")
    assert names.norm == {"norm.weight", "norm.bias", *names.buffers}
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert Names.of(tied, ("0.weight", "0.bias", "2.bias"), (), 4).head == {"0.weight", "2.bias"}
    backwards = nn.ModuleDict({"last": nn.Linear(4, 3), "body": nn.Linear(4, 4)})
    assert Names.of(backwards, tuple(dict(backwards.named_parameters())), (), 3).head == {"last.weight", "last.bias"}


def test_a_frozen_last_layer_is_tuned_by_one_beside_it() -> None:
    # FedBABU's personal model; FedAvg's with the same head, of as many steps, from a body that is as FedBABU left it.
    head = {"name": "finetune", "epochs": 1, "layers": "head"}
    babu, other = (
        fedskew.simulate(federation(method={"preset": preset, "personal": head}, model=Small, training={"rounds": 0}))
        for preset in ("fedbabu", "fedavg")
    )
    np.testing.assert_allclose(figures(babu, "personal"), figures(other, "personal"), rtol=1e-4)
    assert figures(babu, "personal") != figures(babu, "common")


@pytest.mark.parametrize("preset", ["fedbabu", "fedetf", "fednh"])
def test_a_head_that_the_server_sets_or_nobody_trains_is_not_kept(preset: str) -> None:
    with pytest.raises(ConfigError, match="method.personal.keep: .*no trained last linear layer"):
        fedskew.simulate(federation(method={"preset": preset, "personal": "partial"}, model="mlp3"))


@component
class Own(Personal):
    """Returns what it is given."""

    kept: Any = frozenset()
    wanted: Any = ()
    factor: Any = 1.0

    def private(self, names: Names) -> Any:
        return self.kept

    def trainings(self) -> Any:
        return self.wanted

    def moved(self, logits: Any, held_out: Any, counts: Any) -> Any:
        return logits * self.factor if self.factor else logits[:, :2]


def test_what_a_hook_sends_of_every_parameter_is_refused_where_layers_stay_at_the_client() -> None:
    method = {"preset": "scaffold", "personal": Own(kept={"head.weight"})}
    with pytest.raises(ComponentError, match="^local_step scaffold sends .*, a number for each parameter"):
        fedskew.simulate(federation(method=method, model="logistic", training={"rounds": 1}))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Own(kept={"head.wieght"}), r"private\(\) names head.wieght, which is no trained parameter"),
        (Own(kept="head"), r"private\(\) must return names"),
        (Own(wanted="end"), r"trainings\(\) must return a tuple of OwnTraining, not 'end'"),
        (Own(wanted=(OwnTraining("round"),)), r"when must be one of rounds, end, not 'round'"),  # type: ignore[arg-type]
        (Own(wanted=(OwnTraining("end", "heads"),)), r"layers must be one of .*, not 'heads'"),  # type: ignore[arg-type]
        (Own(wanted=(OwnTraining("rounds", epochs=2),)), "leave epochs out"),
        (Own(wanted=(OwnTraining("end"), OwnTraining("rounds"))), "stands alone"),
        (Own(factor=math.nan), r"client 0: .*moved\(\) must return logits of shape .*, not NaN"),
        (Own(factor=0), r"moved\(\) must return logits of shape"),
    ],
)
def test_what_an_own_component_returns_wrongly_is_said_in_a_line(own: Own, said: str) -> None:
    with pytest.raises(ComponentError, match=said):
        fedskew.simulate(federation(own, model="logistic", training={"rounds": 1}))


@pytest.mark.parametrize("function", ["private", "trainings", "moved", "local_step"])
def test_what_an_own_component_raises_is_said_in_a_line(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, function, lambda *given: given[99])
    with pytest.raises(ComponentError, match=rf"personal .*Own: {function}\(\) failed: IndexError: [^\n]*$"):
        fedskew.simulate(federation(Own(), model="logistic", training={"rounds": 1}))
