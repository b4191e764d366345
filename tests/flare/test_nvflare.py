"""The aggregator and the workflow for NVIDIA FLARE: by themselves, and in FLARE's simulator."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedskew.errors import ArgumentError, ConfigError, MissingPackageError, RunError
from fedskew.randomness import Purpose, generator
from fedskew.selection import FedEntOpt, Uniform
from fedskew.weighting import fedla, fedpals

COUNTS = [[30, 0, 5], [2, 20, 0], [0, 4, 9]]


@pytest.fixture
def flare() -> Any:
    """FLARE's model and our aggregator."""
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra nvflare)")
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

    from fedskew.nvflare import SelectingFedAvg, WeightingAggregator

    class Flare:
        aggregator, workflow = WeightingAggregator, SelectingFedAvg

        @staticmethod
        def model(place: int, params: dict[str, Any], counts: Any, **others: Any) -> Any:
            meta = {"client_name": f"site-{place}"} | ({} if counts is None else {"label_counts": counts})
            return FLModel(params_type=ParamsType.FULL, params=params, meta=meta, **others)

    return Flare


def test_the_mean_is_weighed_by_label_counts_in_the_order_of_names(flare: Any) -> None:
    aggregator = flare.aggregator("fedla")
    for place in (2, 0, 1):  # as they happen to reply
        params = {"w": np.array([1.0, place], dtype=np.float32), "seen": np.array(10 * place)}
        metrics = {"loss": float(place), "accuracy": (0.5, 0.5, np.inf)[place]} | ({"own": 1.0} if place == 1 else {})
        aggregator.accept_model(flare.model(place, params, COUNTS[place], metrics=metrics))
    made = aggregator.aggregate_model()
    weights = fedla(COUNTS)
    np.testing.assert_allclose(made.params["w"], [1, weights @ [0, 1, 2]], rtol=1e-6)
    assert made.params["w"].dtype == np.float32
    assert made.params["seen"] == 20
    assert made.metrics == {"loss": pytest.approx(weights @ [0, 1, 2]), "accuracy": pytest.approx(0.5)}
    assert list(made.meta["weights"].values()) == pytest.approx(weights.tolist())
    with pytest.raises(ArgumentError, match="no client sent a model with its label counts"):
        aggregator.aggregate_model()  # the last round's are forgotten


def test_tensors_a_target_and_a_weight_limit(flare: Any) -> None:
    target = [0.0, 0.5, 0.5]
    aggregator = flare.aggregator("fedpals", target=target, parameters={"ess": 0.5})
    limited = flare.aggregator("fedavg", weight_limit=0.4)
    for place in range(3):
        for one in (aggregator, limited):
            one.accept_model(flare.model(place, {"w": torch.full((2,), float(place))}, COUNTS[place]))
    made = aggregator.aggregate_model()
    assert isinstance(made.params["w"], torch.Tensor)
    weights = list(made.meta["weights"].values())
    assert made.params["w"][0].item() == pytest.approx(weights[1] + 2 * weights[2])
    assert weights != pytest.approx(fedpals(COUNTS, target).tolist())  # its strength is that of half of the samples
    assert max(limited.aggregate_model().meta["weights"].values()) == pytest.approx(0.4)


def test_what_can_t_be_used_is_left_out_and_said(flare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator, said = flare.aggregator(), []
    monkeypatch.setattr(aggregator, "warning", said.append)  # FLARE's log needs a running job
    good, difference = {"w": np.zeros(2)}, flare.model(10, {"w": np.zeros(2)}, COUNTS[1])
    difference.params_type = "DIFF"
    for place, (params, counts) in enumerate([
        (good, None),
        (good, [1, -1, 0]),
        (good, [1e308, 1e308, 0]),
        ({"w": np.array([np.nan, 0])}, COUNTS[1]),
        ({"w": np.array(["a", "b"])}, COUNTS[1]), ({"w": [[1], [1, 2]]}, COUNTS[1]), ({}, COUNTS[1]),
        (good, [1, 2]),
        ({"w": np.zeros(3)}, COUNTS[1]),
        ({"w": np.full(2, 1000)}, COUNTS[1]),  # of whole numbers the largest would be taken
    ]):  # fmt: skip
        aggregator.accept_model(flare.model(place, params, counts))
    for model in (difference, flare.model(11, good, COUNTS[0]), flare.model(12, good, COUNTS[1])):
        aggregator.accept_model(model)
    made = aggregator.aggregate_model()
    unfit = ["no label_counts", "not negative", "1e+09 samples", *["no finite number"] * 2, "shape", "no arrays"]
    for place, (reason, line) in enumerate(zip([*unfit, *["most frequent"] * 4], said, strict=True)):
        assert line.startswith(f"left out the model of site-{place}: ")
        assert reason in line
    assert [*made.meta["weights"]] == ["site-11", "site-12"]
    np.testing.assert_array_equal(made.params["w"], [0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "fedpals"}, "target: fedpals weighs clients towards a target"),
        ({"weighting": "afl"}, "weighting: afl keeps something between rounds"),
        ({"weighting": "fedlaa"}, "unknown name 'fedlaa'.*fedla"),
        ({"parameters": {"x": 1}}, "fedla has no such parameter"),
        ({"weight_limit": 0}, "weight_limit: expected a share"),
    ],
)
def test_what_it_can_t_do_is_refused_at_once(flare: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flare.aggregator(**options)


CLIENT = """
import numpy as np
import nvflare.client as flare

flare.init()
name = flare.get_site_name()
place = int(name.removeprefix("site-"))
counts = [[30, 0, 5], [2, 20, 0], [0, 4, 9]][place - 1]
while flare.is_running():
    model = flare.receive()
    params = {key: np.asarray(value) + place for key, value in model.params.items()}
    flare.send(flare.FLModel(params_type="FULL", params=params, meta={"label_counts": counts}))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_job_in_flare_s_simulator(flare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = pytest.importorskip("nvflare.app_common.np.recipes")
    from nvflare.recipe import SimEnv

    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    monkeypatch.chdir(tmp_path)
    options = {"min_clients": 3, "num_rounds": 2, "model": [[0.0, 0.0]], "train_script": str(script)}
    recipe = recipes.NumpyFedAvgRecipe(name="weighed", aggregator=flare.aggregator("fedla"), **options)
    run = recipe.execute(SimEnv(num_clients=3, workspace_root=str(tmp_path / "work")))
    (saved,) = Path(run.get_result()).rglob("server.npy")
    np.testing.assert_allclose(np.load(saved).ravel(), 2 * (fedla(COUNTS) @ [1, 2, 3]), rtol=1e-5)


SITES = [[9, 0, 0], [8, 1, 0], [0, 9, 0], [0, 0, 9], [0, 3, 6]]


class Grid:
    """Sites as FLARE's engine names them, and what they send when they are asked for label counts."""

    def __init__(self, flare: Any, counts: list[Any]) -> None:
        self.replies = [flare.model(place, {}, row) for place, row in enumerate(counts)]
        self.names = [f"site-{place}" for place in range(len(counts))]
        self.asked: list[tuple[str, Any]] = []
        self.said: list[str] = []

    def get_clients(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.names]

    def send(self, task_name: str, data: Any, timeout: int) -> list[Any]:
        self.asked.append((task_name, data.params))
        return self.replies


def cohorts(
    flare: Any, grid: Grid, monkeypatch: pytest.MonkeyPatch, rounds: int = 3, **options: Any
) -> list[list[str]]:
    """What a workflow chooses, with FLARE's own loop of rounds cut down to the choices."""
    workflow = flare.workflow(num_rounds=rounds, **options)
    chosen: list[list[str]] = []

    def play(self: Any) -> None:
        for round in range(self.num_rounds):
            self.current_round = round
            chosen.append(self.sample_clients(self.num_clients))

    monkeypatch.setattr(flare.workflow.__base__, "run", play)
    monkeypatch.setattr(workflow, "send_model_and_wait", grid.send)
    for name in ("info", "warning"):  # FLARE's log needs a running job
        monkeypatch.setattr(workflow, name, grid.said.append)
    workflow.engine = grid
    workflow.run()
    return chosen


def simulated(selection: Any, counts: list[list[int]], size: int, rounds: int, seed: int) -> list[list[int]]:
    state, chosen = selection.init(counts), []
    for round in range(1, rounds + 1):
        ids, state = selection.select(state, counts, size, generator(seed, Purpose.SELECTION, round))
        chosen.append(ids.tolist())
    return chosen


def test_sites_are_chosen_as_in_a_simulation(flare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(flare, SITES)
    grid.replies.reverse()  # as they happen to reply
    made = cohorts(flare, grid, monkeypatch, num_clients=2, seed=3, parameters={"buffer": 0.4})
    expected = simulated(FedEntOpt(buffer=0.4), SITES, 2, 3, 3)
    assert made == [[f"site-{place}" for place in ids] for ids in expected]
    assert grid.asked == [("label_counts", {})]  # once, before the first round
    uniform = cohorts(flare, grid, monkeypatch, num_clients=3, selection="uniform")
    assert uniform == [[f"site-{place}" for place in ids] for ids in simulated(Uniform(), SITES, 3, 3, 0)]


def test_a_site_without_label_counts_is_left_out_and_one_that_is_offline_misses_the_round(
    flare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(flare, [*SITES, None, [1, -1, 0], [1, 2]])
    made = cohorts(flare, grid, monkeypatch, num_clients=2, selection="uniform", rounds=20)
    assert {name for names in made for name in names} == {f"site-{place}" for place in range(5)}
    left_out = [line for line in grid.said if line.startswith("left out")]
    for line, site, reason in zip(
        left_out, (5, 6, 7), ("has no label_counts", "not negative", "2 classes"), strict=True
    ):
        assert line.startswith(f"left out site-{site}: ")
        assert reason in line
    grid.names.remove("site-0")
    part = cohorts(flare, grid, monkeypatch, num_clients=2, selection="uniform", rounds=20)
    assert part == [[name for name in names if name != "site-0"] for names in made]
    assert any(line.endswith("chosen and offline: site-0") for line in grid.said)
    grid.names.clear()
    with pytest.raises(RunError, match="^round 1: all sites that were chosen are offline: site-"):
        cohorts(flare, grid, monkeypatch, num_clients=2)


def test_cohorts_that_can_t_be_chosen_are_refused_before_the_first_round(
    flare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match="^no site sent its label counts; in the task 'label_counts'"):
        cohorts(flare, Grid(flare, [None, None]), monkeypatch)
    with pytest.raises(ArgumentError, match="^size: must be a whole number from 1 to 5"):
        cohorts(flare, Grid(flare, SITES), monkeypatch, num_clients=6)
    with pytest.raises(ArgumentError, match="^buffer: 0.9 keeps 4 of 5 clients out"):
        cohorts(flare, Grid(flare, SITES), monkeypatch, num_clients=2, parameters={"buffer": 0.9})
    with pytest.raises(ConfigError, match="^selection: seol_kim says on how many samples"):
        flare.workflow(selection="seol_kim")
    with pytest.raises(ConfigError, match="unknown name 'fedentropt'.*fedentopt"):
        flare.workflow(selection="fedentropt")


SELECTED = """
import sys

import numpy as np
import nvflare.client as flare
from nvflare.client.api import get_task_name

COUNTS = [[9, 0, 0], [8, 1, 0], [0, 9, 0], [0, 0, 9], [0, 3, 6]]

flare.init()
place = int(flare.get_site_name().removeprefix("site-"))
while flare.is_running():
    model = flare.receive()
    meta = {"label_counts": COUNTS[place - 1]}
    if get_task_name() == "label_counts":
        flare.send(flare.FLModel(params={}, meta=meta))
        continue
    with open(sys.argv[1], "a") as file:
        file.write(f"{model.current_round} {place}\\n")
    params = {key: np.asarray(value) + place for key, value in model.params.items()}
    flare.send(flare.FLModel(params=params, meta=meta))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_workflow_in_flare_s_simulator(flare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.app_common.np.np_model_persistor import NPModelPersistor
    from nvflare.job_config.api import FedJob
    from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

    script, trained = tmp_path / "client.py", tmp_path / "trained.txt"
    script.write_text(SELECTED)
    monkeypatch.chdir(tmp_path)
    job = FedJob(name="selected", min_clients=5)
    job.to_server(NPModelPersistor(model=[[0.0, 0.0]]), id="persistor")
    options = {"parameters": {"buffer": 0.4}, "seed": 3, "num_clients": 2, "num_rounds": 3}
    job.to_server(flare.workflow(persistor_id="persistor", aggregator=flare.aggregator("fedla"), **options))
    job.to_clients(ScriptRunner(script=str(script), script_args=str(trained), framework=FrameworkType.NUMPY))
    job.simulator_run(str(tmp_path / "work"), n_clients=5)

    lines = [line.split() for line in trained.read_text().splitlines()]
    seen = [sorted(int(place) - 1 for round, place in lines if int(round) == which) for which in range(3)]
    expected = simulated(FedEntOpt(buffer=0.4), SITES, 2, 3, 3)
    assert seen == [sorted(ids) for ids in expected]
    (saved,) = (tmp_path / "work").rglob("server.npy")
    moved = sum(fedla([SITES[place] for place in ids]) @ [place + 1 for place in ids] for ids in expected)
    np.testing.assert_allclose(np.load(saved).ravel(), moved, rtol=1e-5)


@pytest.mark.parametrize("name", ["WeightingAggregator", "SelectingFedAvg"])
def test_without_flare_the_way_to_it_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == "nvflare"]:
        monkeypatch.delitem(sys.modules, module)
    for module in [module for module in sys.modules if module.startswith("fedskew.nvflare")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    ours = importlib.import_module("fedskew.nvflare")
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[nvflare\]'"):
        getattr(ours, name)
