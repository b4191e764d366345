"""Sites that keep something for themselves: layers that never leave them, and models of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import Federated, LocalGrid, federate, tree
from flwr.app import Message
from safetensors.torch import load_file

import fedskew
from fedskew.deploy import SiteData, SiteReport, _site_report, client_app
from fedskew.errors import ConfigError
from fedskew.experiment import RunFolder, make_task, make_training_loop, resolve
from fedskew.files import load_tensors
from fedskew.labels import calibrate
from fedskew.metrics import SiteRow

FEDPER = {"preset": "fedavg", "personal": {"name": "partial", "keep": "head"}}
HEAD = ("head.weight", "head.bias")


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
    ours = load_file(simulated(federation, tmp_path / "simulated") / "model.safetensors")
    federation.play(stop=1)  # the server is killed, and started again
    federation.play()
    theirs = load_file(federation.run_folder / "model.safetensors")
    for name, values in ours.items():
        torch.testing.assert_close(theirs[name], values, rtol=1e-4, atol=1e-5)


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
    terms = federation.folder / "ash" / "agreed.toml"
    assert "own_models = true" in terms.read_text()
    terms.write_text(terms.read_text().replace("own_models = true", "own_models = false"))
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
    "personal", [FEDPER["personal"], {"name": "ditto"}, {"name": "rod"}, {"name": "finetune", "epochs": 2}], ids=str
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
    assert "Sent to the server: 7 answers" in page
    assert "never asked" not in page
    samples = SiteData.load(federation.data_of("birch"), federation.agreement)
    said = fedskew.load(tmp_path / "birch" / "personal").predict(samples.test_inputs, normalised=True)
    assert float(-np.log(said[np.arange(len(said)), samples.test_targets]).mean()) == pytest.approx(
        found["personal"].loss, rel=1e-4
    )


@pytest.mark.slow
def test_sites_are_told_a_calibration_of_all_and_have_their_own_mix(tmp_path: Path) -> None:
    federation = partial(tmp_path, {"name": "prior"})
    terms = federation.folder / "ash" / "agreed.toml"
    terms.write_text(terms.read_text().replace("own_models = true", "own_models = false"))
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


FOUR = ("ash", "birch", "cedar", "dogwood")


def summed(folder: Path) -> Federated:
    """Four sites with masked updates, that add up what their models are worth to them."""
    method = {"preset": "fedavg", "personal": {"name": "finetune", "layers": "head"}}
    config = tree(method, rounds=2, weight_limit=0.5)
    return federate(folder, config, FOUR, updates="masked", evaluation="none", site_figures="summed", round_timeout=1.0)


@pytest.mark.slow
def test_sites_add_up_what_their_models_are_worth_and_none_is_seen(tmp_path: Path) -> None:
    federation = summed(tmp_path)
    terms = federation.folder / "birch" / "agreed.toml"
    assert "own_figures = true" in terms.read_text()
    terms.write_text(terms.read_text().replace("own_figures = true", "own_figures = false"))
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
            assert known["mean"] == pytest.approx(values.mean(), abs=1e-6)
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


def test_a_sum_that_no_honest_sites_have_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, real = summed(tmp_path), _site_report.figures_of
    monkeypatch.setattr(
        _site_report, "figures_of", lambda plan, terms, data: real(plan, terms, data) + 2 * (len(data.targets) == 210)
    )  # cedar lies
    federation.play()
    assert not (federation.run_folder / "site-figures.json").exists()


@pytest.mark.parametrize("personal", [{}, {"personal": {"name": "ditto"}}], ids=["none", "ditto"])
def test_figures_take_all_models_of_a_site(tmp_path: Path, personal: Any) -> None:
    config = tree({"preset": "fedavg", **personal}, rounds=1, weight_limit=0.5)
    federation = federate(tmp_path, config, FOUR, updates="masked", site_figures="summed", round_timeout=1.0)
    terms = federation.folder / "ash" / "agreed.toml"
    terms.write_text(terms.read_text().replace("own_models = true", "own_models = false"))
    federation.play()
    found = json.loads((federation.run_folder / "site-figures.json").read_text())
    assert found["sites"] == ["birch", "cedar", "dogwood"]
    with pytest.raises(ValueError, match="site_figures = 'summed' needs updates = 'masked'"):
        federate(tmp_path / "plain", tree("fedavg"), site_figures="summed")
