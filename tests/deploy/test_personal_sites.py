"""Sites that keep something for themselves: layers that never leave them, and models of their own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import FOUR, Federated, LocalGrid, check_models, federate, silent_on, times, tree
from flwr.app import Message
from safetensors.torch import load_file

import fedskew
from fedskew.deploy import SiteData, SiteReport, _site_report, client_app
from fedskew.deploy import _wire as wire
from fedskew.deploy._finish import TrainedModel
from fedskew.deploy._proposal import agree
from fedskew.deploy._sums import MaskedSums, Taken
from fedskew.errors import ConfigError
from fedskew.experiment import RunFolder, make_task, make_training_loop, resolve
from fedskew.files import load_tensors
from fedskew.labels import calibrate
from fedskew.metrics import SiteRow

FEDPER = {"preset": "fedavg", "personal": {"name": "partial", "keep": "head"}}
HEAD = ("head.weight", "head.bias")
LEFT = ("query.keep", "query.sites")
"""Questions that leave the trained model at a site."""


def partial(folder: Path, personal: Any = FEDPER["personal"], **agreed: Any) -> Federated:
    """Sites that keep their last layer."""
    return federate(folder, tree({"preset": "fedavg", "personal": personal}, rounds=2), **agreed)


def listening(federation: Federated) -> tuple[LocalGrid, list[tuple[Message, Message]]]:
    """A grid, and every question to a site with its answer."""
    heard: list[tuple[Message, Message]] = []

    def hear(question: Message, answer: Message) -> Message:
        heard.append((question, answer))
        return answer

    return federation.grid(dict.fromkeys(federation.names, hear)), heard


def test_no_layer_that_a_site_keeps_leaves_it(tmp_path: Path) -> None:
    grid, heard = listening(federation := partial(tmp_path))
    federation.first_rounds(grid)
    trained = [(asked, answer) for asked, answer in heard if asked.metadata.message_type == "train"]
    assert len(trained) == 3
    for asked, answer in trained:
        before, after = asked.content["arrays"], answer.content["arrays"]
        same = [name for name in before if np.array_equal(before[name].numpy(), after[name].numpy())]
        assert [name for name in before if name not in same], "it trains the others"
        assert sorted(same) == sorted(HEAD)
    kept = [load_file(path) for path in (federation.folder / "ash" / "state").glob("*/1.safetensors")]
    drawn = trained[0][0].content["arrays"][HEAD[0]].numpy()
    (state,) = kept
    assert not np.allclose(state["private.parameters"].numpy()[: drawn.size], drawn.ravel(), atol=1e-3)


def simulated(federation: Federated, folder: Path, baselines: Sequence[str] = ()) -> Path:
    """Divide the sites' samples as a simulation does, of which each client has test samples; simulate it."""
    tree = federation.config.tree()
    more = {"data": {**tree["data"], "client_test": 0.3}, "evaluation": {"baselines": list(baselines)}}
    config = resolve({**tree, **more})
    task, whole = make_task(config, 3), np.load(federation.folder / "whole.npz")
    for name, own, test in zip(federation.names, task.partition.indices, task.client_test, strict=True):
        parts = {"x": own, "y": own, "x_test": test, "y_test": test}
        np.savez(federation.folder / name / "own.npz", **{key: whole[key[0]][rows] for key, rows in parts.items()})
    make_training_loop(config, 3, folder, task).run()
    return folder


@pytest.mark.slow
def test_a_site_goes_on_with_its_own_layers_as_in_the_simulation(tmp_path: Path) -> None:
    federation = partial(tmp_path)
    folder = simulated(federation, tmp_path / "simulated")
    federation.play(stop=1)  # the server is killed, and started again
    federation.play()
    check_models(folder, federation.run_folder)


def test_a_flower_project_of_one_s_own_keeps_nothing_for_its_sites() -> None:
    with pytest.raises(ConfigError, match="method.personal: it needs fedskew's own sites"):
        client_app(torch.nn.Linear(2, 2), lambda context: None, FEDPER)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_a_site_trains_ditto_as_in_the_simulation_and_sends_nothing_of_it(tmp_path: Path) -> None:
    personal = {"name": "ditto", "strengths": [0.5]}
    federation = partial(tmp_path, personal)
    simulated(federation, tmp_path / "simulated")
    grid, heard = listening(federation)
    federation.run(grid).run(resume=True)
    theirs, _ = load_tensors(tmp_path / "simulated" / "checkpoint" / "own" / "0-2.safetensors")
    (path,) = (federation.folder / "ash" / "state").glob("*/2.safetensors")
    ours = load_file(path)
    torch.testing.assert_close(ours["own.personal.parameters"], theirs["personal.0.parameters"], rtol=1e-4, atol=1e-5)
    assert ours["own.rounds"].tolist() == [[1, 0], [2, 0]]
    assert {key for _, answer in heard for key in answer.content} == {"arrays", "metrics"}
    home = federation.kept("ash") / "home"
    _, notes = load_tensors(home / "common.safetensors")
    assert (notes["round"], notes["counted"], notes["client"]) == (2, 2, 0)


def test_a_site_that_allows_no_own_models_trains_none_and_takes_part(tmp_path: Path) -> None:
    federation = partial(tmp_path, {"name": "rod"})
    federation.amend("ash", "own_models = true", "own_models = false")
    _, (record,) = federation.first_rounds()
    assert sorted(record.answered) == [0, 1, 2]
    kept = {name: load_file(next((tmp_path / name / "state").glob("*/1.safetensors"))) for name in ("ash", "birch")}
    assert sorted(kept["ash"]) == ["own.rounds"]
    assert kept["birch"]["own.personal.parameters"].abs().sum() > 0


def rows_of(federation: Federated, name: str) -> dict[str, SiteRow]:
    """The rows of a site's report, written from the federation's app."""
    report = SiteReport.write(federation.data_of(name), federation.app)
    return {row.row: row for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "personal", [FEDPER["personal"], {"name": "ditto"}, {"name": "finetune", "epochs": 2}], ids=str
)
def test_a_site_reports_what_the_simulation_has_for_it(tmp_path: Path, personal: Any) -> None:
    federation = partial(tmp_path, personal)
    folder = simulated(federation, tmp_path / "simulated", baselines=["alone"])
    expected = [row for row in RunFolder.read_runs(folder)[0].sites if row.client == 1]
    federation.play()
    found = rows_of(federation, "birch")
    assert set(found) == {row.row for row in expected} == {"alone", "common", "personal"}
    for row in expected:
        assert found[row.row].samples == row.samples
        assert found[row.row].accuracy == pytest.approx(row.accuracy, abs=0.04)  # one sample of 27
        assert found[row.row].loss == pytest.approx(row.loss, rel=1e-3)
    page = (tmp_path / "birch" / "site-report.html").read_text()
    assert "Answers sent to the server: 7" in page
    assert "never asked" not in page
    samples = SiteData.load(federation.data_of("birch"), federation.agreement)
    assert fedskew.load(tmp_path / "birch" / "personal").profile().samples == len(samples.targets)
    said = fedskew.load(tmp_path / "birch" / "personal").predict(samples.test_inputs, normalised=True)
    assert float(-np.log(said[np.arange(len(said)), samples.test_targets]).mean()) == pytest.approx(
        found["personal"].loss, rel=1e-4
    )


@pytest.mark.slow
def test_sites_are_told_a_calibration_of_all_and_have_their_own_mix(tmp_path: Path) -> None:
    federation = partial(tmp_path, {"name": "prior"})
    federation.amend("ash", "own_models = true", "own_models = false")
    federation.play()
    found, model = rows_of(federation, "ash"), fedskew.load(federation.run_folder)
    assert set(found) == {"common", "personal"}  # it takes no training
    sites = [SiteData.load(federation.data_of(name), federation.agreement) for name in federation.names]
    logits = [model.logits(site.test_inputs, normalised=True) for site in sites]
    targets = np.concatenate([site.test_targets.numpy() for site in sites])
    calibration = calibrate(np.concatenate(logits), targets, 1 / np.bincount(targets, minlength=10)[targets])
    own = (sites[0].counts + 0.5) / (sites[0].counts + 0.5).sum()
    moved = logits[0] / calibration.temperature + calibration.biases + np.log(own)  # for an even mix
    here = sites[0].test_targets.numpy()
    loss = (np.logaddexp.reduce(moved, axis=1) - moved[np.arange(len(here)), here]).mean()
    assert found["personal"].loss == pytest.approx(loss, rel=1e-3)
    page = (tmp_path / "ash" / "site-report.html").read_text()
    assert "Alone: there is none; own_models = false in agreed.toml." in page
    said = fedskew.load(tmp_path / "ash" / "personal").predict(sites[0].test_inputs, normalised=True)
    np.testing.assert_allclose(said, np.exp(moved - np.logaddexp.reduce(moved, axis=1, keepdims=True)), atol=1e-3)


def test_a_site_without_a_calibration_says_so(tmp_path: Path) -> None:
    federation = partial(tmp_path, {"name": "prior"}, evaluation="none")
    federation.play()
    assert set(rows_of(federation, "birch")) == {"alone", "common"}
    assert "did not calibrate" in (tmp_path / "birch" / "site-report.html").read_text()


def test_what_a_report_lacks_is_one_line(tmp_path: Path) -> None:
    federation = partial(tmp_path)
    with pytest.raises(ConfigError, match="leaves the trained model here after the last round"):
        SiteReport.write(federation.data_of("ash"), federation.app)
    with pytest.raises(ConfigError, match=r"method\.personal\.strengths: a site has no samples to choose one by"):
        partial(tmp_path / "ditto", {"name": "ditto", "strengths": [0.1, 1.0]})


def summed(folder: Path, rounds: int = 1) -> Federated:
    """Four sites with masked updates, that add up what their models are worth to them."""
    method = {"preset": "fedavg", "personal": {"name": "finetune", "layers": "head"}}
    config = tree(method, rounds=rounds, weight_limit=0.5)
    return federate(folder, config, FOUR, updates="masked", evaluation="none", site_figures="summed", round_timeout=1.0)


@pytest.mark.slow
def test_sites_add_up_what_their_models_are_worth_and_none_is_seen(tmp_path: Path) -> None:
    federation = summed(tmp_path, rounds=2)
    federation.amend("birch", "own_figures = true", "own_figures = false")
    grid, heard = listening(federation)
    federation.run(grid).run(resume=True)
    found = json.loads((federation.run_folder / "site-figures.json").read_text())
    assert found["sites"] == ["ash", "cedar", "dogwood"]
    rows = [rows_of(federation, name) for name in found["sites"]]
    assert list(found["models"]) == ["alone", "common", "personal"]
    for model, figures in found["models"].items():
        assert set(figures) == {"accuracy", "balanced_accuracy", "macro_f1", "ece", "loss"}
        for figure, known in figures.items():
            values = np.array([getattr(row[model], figure) for row in rows])
            alone = np.array([getattr(row["alone"], figure) for row in rows])
            assert known["mean"] == pytest.approx(values.mean(), abs=2**-11)  # as coarse as it is sent
            better = values < alone if figure in SiteRow.LOW else values > alone
            assert known["better"] == better.sum()
    answers = [answer for asked, answer in heard if asked.metadata.message_type in ("query.sites", "query.again")]
    assert {key for answer in answers if answer.has_content() for key in answer.content} <= {
        "sums",
        "commitments",
        "metrics",
    }

    grid.asked.clear()  # a server that is started again asks for nothing again
    federation.run(grid).run(resume=True)
    assert "query.sites" not in grid.kinds("ash")
    question = next(asked for asked, _ in heard if asked.metadata.message_type == "query.sites")
    others = federation.refusal(
        question, "query.sites", **{"server-round": 1, "fedskew-members": ["ash", "birch", "cedar"]}
    )
    assert others.startswith("not agreed")  # another round, another model and other sites: it would tell a difference
    agree(federation.data_of("ash"), federation.app)  # as to begin a run anew, in which what it trains alone is alike
    others = federation.refusal(question, "query.sites", **{"fedskew-members": ["ash", "birch", "cedar"]})
    assert others.startswith("not agreed: members")


def test_a_sum_that_no_honest_sites_have_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = (federation := summed(tmp_path)).run(federation.grid()).at_sites
    assert isinstance(trained, TrainedModel)
    taken = Taken(weights=dict.fromkeys(range(4), 0.0))
    monkeypatch.setattr(MaskedSums, "take", lambda *_: taken)
    for place, of_four in (((0, 1, 0), 4.01), ((0, 0, 3), -0.01), ((0, 2, 4), 4 * 1024 + 1), ((1, 2, 4), 5), (..., 0)):
        values = np.zeros((2, 3, 5))
        values[place] = of_four
        taken.total = {wire.FIGURES: np.rint(values * 1024).astype(np.int64)}  # 1024 units are 1
        assert ("no honest sites" in trained.sites.figures_in_sums(2, {}).get("reason", "")) == (of_four != 0)


def test_figures_take_all_models_of_a_site(tmp_path: Path) -> None:
    config = tree({"preset": "fedavg", "personal": {"name": "ditto"}}, rounds=1, weight_limit=0.5)
    federation = federate(tmp_path, config, FOUR, updates="masked", site_figures="summed", round_timeout=1.0)
    federation.amend("ash", "own_models = true", "own_models = false")
    federation.play()
    found = json.loads((federation.run_folder / "site-figures.json").read_text())
    assert found["sites"] == ["birch", "cedar", "dogwood"]
    with pytest.raises(ValueError, match="site_figures = 'summed' needs updates = 'masked'"):
        federate(tmp_path / "plain", tree("fedavg"), site_figures="summed")


def test_a_site_makes_figures_once_however_often_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, real, made = summed(tmp_path, rounds=2), _site_report.figures_of, list[int]()

    def counted(plan: Any, terms: Any, data: SiteData) -> Any:
        made.append(len(data.targets))
        return real(plan, terms, data)

    monkeypatch.setattr(_site_report, "figures_of", counted)
    _, grid = federation.played({name: silent_on("query.sites") for name in FOUR})
    assert not (federation.run_folder / "site-figures.json").exists()  # no server gets what they make
    grid.tamper.clear()
    question = grid.last("query.sites")
    assert len(made) == 4
    assert [federation.refusal(question, "query.sites", **{"fedskew-attempt": number}) for number in (2, 3)] == ["", ""]
    refused = federation.refusal(question, "query.sites", **{"server-round": 1})
    assert refused.startswith("not agreed: own_figures")  # of another model
    federation.run(grid).run(resume=True)  # who was too slow answers a server that is started again at once
    assert (federation.run_folder / "site-figures.json").exists()
    assert len(made) == 4

    federation.amend("ash", "own_figures = true", "own_figures = false")  # what it masked before stays where it is
    for kind in ("query.again", "query.unmask", "query.sites"):
        said = federation.refusal(question, kind, **{"fedskew-purpose": "sites", "fedskew-attempt": 4})
        assert said.startswith("not agreed: own_figures")


def test_sites_that_were_left_different_models_are_in_no_sum(tmp_path: Path) -> None:
    def lie(name: str, question: Message) -> None:
        """Leave a model of zeros, whose loss is ln 10 on any samples, at all but ash: the sum's rest is ash's loss."""
        if question.metadata.message_type in LEFT and name != "ash" and "arrays" in question.content:
            times(0, question)

    federation = summed(tmp_path)
    grid = federation.grid()
    grid.mislead = lie
    federation.run(grid).run(resume=True)
    path = federation.run_folder / "site-figures.json"
    assert not path.exists() or "ash" not in json.loads(path.read_text())["sites"]


def test_a_model_that_is_not_finite_tells_not_whose_samples_make_it_so(tmp_path: Path) -> None:
    def overflow(name: str, question: Message) -> None:
        if question.metadata.message_type in LEFT and "arrays" in question.content:
            times(1e38, question)

    federation = summed(tmp_path)
    grid = federation.grid({name: silent_on("query.sites") for name in FOUR})
    grid.mislead = overflow
    federation.run(grid).run(resume=True)
    assert federation.refusal(grid.last("query.sites"), "query.sites") == ""


def test_figures_of_few_samples_are_too_coarse_to_tell_them_apart_in_a_sum() -> None:
    sizes = (37, 41, 43)  # without a common divisor, so that of exact shares each sum is of one triple alone
    parts = [wire.FIGURES_FORM.encode(np.arange(size + 1) / size) for size in sizes]
    sums = parts[0][:, None, None] + parts[1][:, None] + parts[2]
    assert len(np.unique(sums)) < sums.size / 20


def test_where_figures_can_t_be_summed_is_said_before_a_round(tmp_path: Path) -> None:
    prior = tree({"preset": "fedavg", "personal": {"name": "prior"}}, weight_limit=0.5)
    noise = {"clip": 0.5, "noise": 4.0, "epsilon": 8.0, "delta": 1e-3}
    private = {**tree("fedavg", weight_limit=0.5), "engine": {"updates": "masked"}, "privacy": noise}
    for config, reason in ((prior, "no site would have all models"), (private, "sums of figures have no noise")):
        with pytest.raises(ConfigError, match=f"site_figures: {reason}"):
            federate(tmp_path / reason, config, FOUR, updates="masked", evaluation="none", site_figures="summed")
