"""Seeds of one config as one larger cohort, held against each seed alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedskew
from common import task
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment import resolve, simulate_together
from fedskew.local_steps import Gradient, StepSettings
from fedskew.objectives import Batch, Context

TASK = task(8, beta=0.2, width=12, rounds=2, participation=0.5, epochs=1, lr=0.05, momentum=0.5) | {
    "seeds": [0, 1],
    "data": {"name": "digits", "validation": 0.1},
    "method": "fedvls",
    "engine": {"backend": "cohort", "seeds_together": True},
}
FEW = TASK | {"training": {"rounds": 1, "participation": 0.5}, "seeds": [0], "model": "logistic"}
COHORT = {"backend": "cohort"}
STATES = {"objective": {"name": "fedlc", "terms": [{"name": "moon"}]}, "local_step": {"name": "scaffold"}}
BROADCAST = {"objective": {"name": "cross_entropy", "terms": [{"name": "fpl"}]}, "local_step": {"name": "fedgf"}}


def models(folder) -> list[dict[str, Tensor]]:
    return [load_file(path) for path in sorted(folder.glob("seed-*/model.safetensors"))]


def assert_same_model(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-3, atol=1e-5)


def assert_each_ends_as_alone(trees: Sequence[dict[str, Any]]) -> None:
    configs = [resolve(tree) for tree in trees]
    for config, together in zip(configs, simulate_together(configs), strict=True):
        assert isinstance(together, fedskew.Result)
        assert together.config == config
        alone = fedskew.simulate(config, engine=COHORT)
        assert_same_model(together.model.state_dict(), alone.model.state_dict())
        for ours, theirs in zip(together.runs, alone.runs, strict=True):
            assert [record.cohort for record in ours.rounds] == [record.cohort for record in theirs.rounds]
            losses = [[record.loss for record in run.rounds[1:]] for run in (ours, theirs)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fedvls", STATES, BROADCAST, "fedetf", "fedbabu"],
    ids=["teacher", "client states", "broadcast", "a drawn simplex", "a last layer as drawn"],
)
def test_seeds_together_end_as_each_of_them_alone(method, tmp_path):
    together = fedskew.simulate(TASK, method=method, out=tmp_path / "together")
    for place, seed in enumerate(TASK["seeds"]):
        alone = fedskew.simulate(TASK, method=method, seeds=seed, engine=COHORT)
        assert_same_model(models(together.folder)[place], alone.model.state_dict())
        for ours, theirs in zip(together.runs[place].rounds, alone.runs[0].rounds, strict=True):
            assert ours.cohort == theirs.cohort
            assert ours.steps == theirs.steps
            assert ours.loss == (theirs.loss if theirs.loss is None else pytest.approx(theirs.loss, rel=1e-3))
    assert together.runs[0].summary["backend"]["name"] == "cohort"


@pytest.mark.slow
def test_an_interrupted_run_of_seeds_together_ends_as_one_that_was_not(tmp_path):
    whole = fedskew.simulate(TASK, out=tmp_path / "whole")

    def interrupt(record):
        if (record["seed"], record["round"]) == (1, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(TASK, out=tmp_path / "stopped", progress=interrupt)
    resumed = fedskew.simulate(TASK, out=tmp_path / "stopped", resume=True)
    assert [[record.round for record in run.rounds] for run in resumed.runs] == [[0, 1, 2]] * 2
    for ours, theirs in zip(models(resumed.folder), models(whole.folder), strict=True):
        assert_same_model(ours, theirs)


@pytest.mark.slow
def test_federations_of_different_methods_rates_and_partitions_end_as_each_of_them_alone() -> None:
    trees: list[dict[str, Any]] = [
        {"method": "fedavg"},
        {"method": "fedla", "training": TASK["training"] | {"lr": 0.2}},
        {"method": "fedexp", "partition": TASK["partition"] | {"seed": 5}, "seeds": [3]},
        {"method": "feddyn", "training": TASK["training"] | {"participation": 1.0, "rounds": 3}},
        {"method": "scaffold", "model": {"name": "logistic"}},
        {"method": "scaffold", "training": TASK["training"] | {"lr": 0.2, "lr_decay": 0.5}},
        {"method": "scaffold", "training": TASK["training"] | {"lr": 0.1}},
    ]
    assert_each_ends_as_alone([TASK | tree for tree in trees])


@dataclass(frozen=True)
class Anchored:
    """A local step that begins with something of its own at every client, and counts its steps."""

    def init(self, settings: StepSettings) -> dict[str, Tensor]:
        return {"anchor": settings.start.clone() * settings.lr, "steps": torch.zeros((), dtype=torch.int64)}

    def step(self, parameters: Tensor, gradient: Gradient, carried: Any, settings: StepSettings) -> Any:
        pull = 0.1 / (1 + carried["steps"]) * carried["anchor"]
        return parameters - settings.lr * gradient(parameters) - pull, carried | {"steps": carried["steps"] + 1}


@pytest.mark.slow
def test_every_client_begins_with_its_own_state_of_the_local_step() -> None:
    trees = [{"training": TASK["training"] | {"lr": 0.1}}, {"training": TASK["training"] | {"lr": 0.5}, "seeds": [5]}]
    assert_each_ends_as_alone([TASK | {"method": {"local_step": Anchored}, "seeds": [0]} | tree for tree in trees])


@dataclass(frozen=True)
class Shrinking:
    """A local step with a parameter that its author left out of comparisons."""

    by: float = field(default=0.0, compare=False)

    def init(self, settings: StepSettings) -> None:
        return None

    def step(self, parameters: Tensor, gradient: Gradient, carried: None, settings: StepSettings) -> Any:
        return (1 - self.by) * parameters - settings.lr * gradient(parameters), None


@dataclass(frozen=True)
class Flattening:
    """A term with a parameter that its author left out of comparisons."""

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()
    power: float = field(default=2.0, compare=False)

    def value(self, batch: Batch, context: Context) -> Tensor:
        return batch.logits.abs().add(1).pow(self.power).mean()


SHRINKING = [{"local_step": Shrinking(by)} for by in (0.0, 0.5)]
FLATTENING = [{"objective": {"terms": [Flattening(power)]}} for power in (1.0, 3.0)]


@pytest.mark.parametrize("methods", [SHRINKING, FLATTENING], ids=["step", "term"])
def test_federations_do_not_train_as_one_another_where_components_compare_equal(methods: Any) -> None:
    assert_each_ends_as_alone([FEW | {"method": method} for method in methods])


def test_a_config_that_cannot_be_set_up_keeps_no_other_from_training() -> None:
    first, refused = simulate_together([resolve(FEW | {"method": method}) for method in ("fedavg", "fedpals")])
    assert isinstance(first, fedskew.Result)
    assert isinstance(refused, ArgumentError)
    assert "FedPALS goes towards a target label mix" in str(refused)
    (alone,) = simulate_together([resolve(FEW | {"method": "fedpals"})])
    assert str(alone) == str(refused)


def test_federations_train_together_only_as_cohorts() -> None:
    with pytest.raises(ConfigError, match="engine.seeds_together: is false"):
        simulate_together([resolve(TASK | {"engine": COHORT})])
