"""The target's label mix, estimated from what sites count of the model's outcomes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from federated import FEDPALS, Federated, KilledError, Tamper, check_models, federate, fedskew, on, silent_on, tree
from flwr.app import ConfigRecord, Message

from fedskew.data import load
from fedskew.deploy import Agreement, SiteData, agree
from fedskew.errors import ConfigError, DataError, RunError
from fedskew.experiment import make_task, make_training_loop, resolve
from fedskew.labels import estimate_mix

TARGET = {"mix": "estimate", "warmup": 1, "every": 1}
LEARNT = {"target": {"warmup": 3}, "training": {"rounds": 4, "epochs": 5}}
"""After three rounds the model has learnt enough for an estimate that is used in the fourth."""
LONGER = {"training": {"rounds": 3, "epochs": 5}}
MIX = np.array([30, 30, 20, 20, 10, 10, 5, 5, 5, 5])
Edit = Callable[[list[int]], list[int]]


def config(method: Any = "fedavg", target: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    whole = tree(method, **{"rounds": 1, "epochs": 1, "lr": 1.0, "momentum": 0.0, **training})
    return {**whole, "model": {"name": "logistic"}, "target": TARGET | (target or {})}


def clinic(federation: Federated, name: str = "dogwood", labels: bool = False) -> Path:
    """The target site's folder, with samples without labels in a mix of their own; it agrees to the app."""
    folder = federation.folder / name
    folder.mkdir(exist_ok=True)
    digits = load("digits", rng=np.random.default_rng(0))
    targets = digits.targets.numpy()
    rows = np.concatenate([np.flatnonzero(targets == label)[-count:] for label, count in enumerate(MIX)])
    np.savez(folder / "new.npz", x=digits.inputs.numpy()[rows])
    table: dict[str, Any] = {"state": "state", "unlabelled": "new.npz"}
    if labels:
        table["data"] = {"name": "npz", "root": "own.npz"}
    (folder / "data.toml").write_text(tomli_w.dumps(table))
    agree(folder / "data.toml", federation.app)
    return folder


def estimating(folder: Path, method: Any = "fedavg", site: str = "dogwood", **given: Any) -> Federated:
    target, training = given.pop("target", None), given.pop("training", {})
    federation = federate(folder, config(method, target, **training), target_site=site, **given)
    clinic(federation, site, labels=site in federation.names)
    return federation


def edited(key: str, edit: Edit = list, seen: list[list[int]] | None = None) -> Tamper:
    """Edits the numbers that a site sends under a key."""

    def change(question: Message, answer: Message) -> None:
        if key in (metrics := answer.content["metrics"]):
            metrics[key] = edit(list(metrics[key]))
            if seen is not None:
                seen.append(list(metrics[key]))

    return on("evaluate", change)


@pytest.mark.slow
def test_sites_estimate_what_was_simulated(tmp_path: Path) -> None:
    federation = estimating(tmp_path, FEDPALS, **LEARNT)
    shared = federation.config.with_value("data.held_out", 0.4)
    whole = shared.with_value("target.unlabelled", str(tmp_path / "dogwood" / "new.npz"))
    task = make_task(whole, 3)
    held = dict(np.load(tmp_path / "whole.npz"))
    for place, name in enumerate(federation.names):  # what a client holds out is what its site tests with
        own, out = task.partition.indices[place], task.held_out[place]
        parts = {"x": held["x"][own], "y": held["y"][own], "x_test": held["x"][out], "y_test": held["y"][out]}
        np.savez(tmp_path / name / "own.npz", **parts)
    simulated = make_training_loop(whole, 3, tmp_path / "simulated", task).run()

    deployed = federation.run(federation.grid()).run(resume=True)

    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        np.testing.assert_allclose(there.weights, here.weights, rtol=1e-4)
        assert there.fallback == here.fallback
        assert (there.target is None) == (here.target is None)
        if here.target is not None and there.target is not None:
            np.testing.assert_allclose(there.target["mix"], here.target["mix"], atol=1e-6)
            np.testing.assert_allclose(there.target["se"], here.target["se"], atol=1e-6)
            assert there.target["sites"]["tested"] == here.target["sites"]["tested"]
            for key in ("held_out", "samples", "unseen", "misfit", "unused"):
                assert there.target[key] == here.target[key]
    assert [record.target is not None for record in deployed.rounds] == [False, False, False, True, True]
    assert [record.fallback is None for record in deployed.rounds[3:]] == [False, True]
    check_models(tmp_path / "simulated", federation.run_folder)


@pytest.mark.slow
def test_the_estimate_is_of_what_the_sites_counted_and_nothing_else_changes(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    federation = estimating(tmp_path / "a", target={"every": 2}, training={"rounds": 3})
    tables, cells = [[] for _ in federation.names], []
    lies = {name: edited("outcomes", seen=seen) for name, seen in zip(federation.names, tables, strict=True)}
    _, grid = federation.played({**lies, "dogwood": edited("cells", seen=cells)})
    plain = federate(tmp_path / "b", {**config(rounds=3), "target": {}}).play()

    records = federation.records()
    assert [record["round"] for record in records if "target" in record] == [1, 3]
    for place, record in enumerate((records[1], records[3])):
        found = estimate_mix(np.sum([np.reshape(one[place], (10, 40)) for one in tables], axis=0), cells[place])
        np.testing.assert_allclose(record["target"]["mix"], found.mix, atol=1e-12)
        assert record["target"]["samples"] == sum(cells[place]) == MIX.sum()
    for ours, theirs in zip(records, plain, strict=True):  # the same evaluations, from tables too
        assert ours["evaluation"]["confusion"] == theirs["evaluation"]["confusion"]
        assert ours["evaluation"]["loss"] == pytest.approx(theirs["evaluation"]["loss"], rel=1e-6)
        assert ours.get("weights") == theirs.get("weights")
    assert grid.kinds("dogwood") == ["evaluate", "evaluate"]
    assert any("by 140 samples of dogwood and" in entry.message for entry in caplog.records)


def test_a_target_site_that_trains_too(tmp_path: Path) -> None:
    federation = estimating(tmp_path, site="cedar")
    record = federation.play()[1]
    assert sorted(record["answered"]) == [0, 1, 2]
    assert record["target"]["samples"] == MIX.sum()
    assert list(record["deployment"]["evaluations"]) == ["ash", "birch", "cedar"]


@pytest.mark.slow
def test_cells_that_cannot_be_are_refused_and_the_target_site_is_told_so(tmp_path: Path, caplog: Any) -> None:
    lies = (
        lambda metrics: metrics["cells"][1:],
        lambda metrics: [-1, *metrics["cells"][1:]],
        lambda metrics: [10**12, *metrics["cells"][1:]],
        lambda metrics: [float(cell) for cell in metrics["cells"]],
    )
    federation = estimating(tmp_path, training={"rounds": len(lies) + 1}, target={"every": 1})

    def lie(question: Message, answer: Message) -> Message:
        metrics, round = answer.content["metrics"], question.content["config"]["server-round"]
        if round > len(lies):
            metrics["server-round"] = 1
        elif "cells" in metrics:
            metrics["cells"] = lies[round - 1](metrics)
        return answer

    said = [record["target"] for record in federation.play({"dogwood": lie})[1:]]
    assert [one["mix"] for one in said] == [None] * len(said)
    assert all("dogwood: refused: its count of its samples by outcome is" in one["skipped"] for one in said[:-1])
    assert "dogwood: refused: the reply is of server-round 1, not 5" in said[-1]["skipped"]
    assert any("the server refused what this site sent: evaluation of round 1" in one.message for one in caplog.records)


def test_a_table_that_cannot_be_is_refused_and_the_others_count(tmp_path: Path) -> None:
    federation = estimating(tmp_path)
    record = federation.play({"ash": edited("outcomes", lambda table: table[:-10])})[1]
    assert "its table of outcomes is" in record["deployment"]["unevaluated"]["ash"]
    assert list(record["deployment"]["evaluations"]) == ["birch", "cedar"]
    assert record["target"]["held_out"] == sum(one["samples"] for one in record["deployment"]["evaluations"].values())


def test_one_site_is_at_most_half_of_the_tables(tmp_path: Path) -> None:
    federation = estimating(tmp_path)
    record = federation.play({"ash": edited("outcomes", lambda table: [8 * count for count in table])})[1]
    samples = {name: one["samples"] for name, one in record["deployment"]["evaluations"].items()}
    others = samples["birch"] + samples["cedar"]
    assert samples["ash"] > others
    assert record["target"]["held_out"] == pytest.approx(2 * others, abs=20)  # cells are rounded


@pytest.mark.slow
def test_the_trained_model_is_adapted_to_the_target_sites_samples(tmp_path: Path) -> None:
    method = {"preset": "fedavg", "finish": "adapt"}
    federation = estimating(tmp_path, method, target={"warmup": 9}, training={"rounds": 3, "epochs": 5})
    grid = federation.grid()
    done = federation.run(grid).run(resume=True)
    said = done.summary["finished"]["notes"]
    assert np.abs(np.subtract(said["mix"], MIX / MIX.sum())).sum() < 0.4
    assert grid.kinds("dogwood") == ["query.finish"]


@pytest.mark.slow
def test_a_finish_takes_the_rounds_estimate_where_the_target_site_is_away(tmp_path: Path, caplog: Any) -> None:
    federation = estimating(tmp_path, {"preset": "fedavg", "finish": "adapt"}, target={"warmup": 2}, **LONGER)
    done = federation.run(federation.grid({"dogwood": silent_on("query.finish")})).run(resume=True)
    newest = [record["target"]["mix"] for record in federation.records() if record.get("target", {}).get("mix")][-1]
    assert done.summary["finished"]["notes"]["mix"] == pytest.approx(newest)
    assert "the target's mix is the newest estimate of the rounds" in caplog.text


@pytest.mark.slow
def test_one_sample_of_the_target_adapts_no_model(tmp_path: Path) -> None:
    federation = estimating(tmp_path, {"preset": "fedavg", "finish": "adapt"}, target={"warmup": 9}, **LONGER)
    path = tmp_path / "dogwood" / "new.npz"
    np.savez(path, x=np.load(path)["x"][:1])
    done = federation.run(federation.grid()).run(resume=True)
    assert "sure enough" in done.summary["finished"]["notes"]["kept"]


@pytest.mark.slow
def test_a_model_stays_as_it_was_trained_where_nothing_is_known_of_the_target(tmp_path: Path) -> None:
    method = {"preset": "fedavg", "finish": "adapt"}
    federation = estimating(tmp_path, method, target={"warmup": 9})
    done = federation.run(federation.grid({"dogwood": silent_on("query.finish")})).run(resume=True)
    assert done.summary["finished"]["notes"] == {"kept": "the target site dogwood does not answer"}


@pytest.mark.slow
def test_a_target_site_that_is_away_leaves_the_newest_good_estimate(tmp_path: Path, caplog: Any) -> None:
    federation = estimating(tmp_path, FEDPALS, **LEARNT)
    records = federation.play(after={3: lambda grid: grid.offline.add(federation.node("dogwood"))})
    assert records[3]["target"]["unused"] is None
    assert records[4]["target"] == {"mix": None, "skipped": "dogwood: not connected", "unused": None}
    assert "fallback" not in records[4]
    assert len(records[4]["answered"]) == 3
    assert any("is not estimated: dogwood: not connected" in entry.message for entry in caplog.records)


@pytest.mark.slow
def test_a_target_site_that_is_silent_is_asked_less_and_less(tmp_path: Path) -> None:
    federation = estimating(tmp_path, training={"rounds": 4}, round_timeout=0.3)
    records = federation.play({"dogwood": lambda question, answer: None})
    said = [record["target"]["skipped"].removeprefix("dogwood: ") for record in records[1:]]
    assert said == ["no reply in time", "not asked, as no reply came before"] * 2


@pytest.mark.slow
def test_an_estimate_that_is_due_between_evaluations_is_made(tmp_path: Path) -> None:
    federation = federate(tmp_path, config(rounds=2) | {"evaluation": {"every": 2}}, target_site="dogwood")
    clinic(federation)
    records = federation.play()
    assert [record["evaluation"] is not None for record in records] == [True, False, True]
    assert [record["target"]["samples"] for record in records[1:]] == [MIX.sum()] * 2


@pytest.mark.slow
def test_a_killed_server_goes_on_with_the_estimate_that_it_had(tmp_path: Path) -> None:
    whole, cut = (estimating(tmp_path / name, FEDPALS, **LEARNT) for name in ("whole", "cut"))
    whole.play()

    def die(question: Message, answer: Message) -> None:
        raise KilledError

    cut.play({"dogwood": on("evaluate", die, first=4)})
    for ours, theirs in zip(cut.play(), whole.records(), strict=True):
        for key in ("weights", "target", "fallback"):
            assert ours.get(key) == theirs.get(key)
    check_models(whole.run_folder, cut.run_folder, rtol=0, atol=0)


def unsure(cells: list[int]) -> list[int]:
    """Samples of which the model is never sure: no mix of the sites' classes looks like that."""
    counts = np.zeros((10, 4), dtype=int)
    counts[:, 0] = np.reshape(cells, (10, 4)).sum(axis=1) * 20
    return counts.reshape(-1).tolist()


@pytest.mark.slow
def test_a_target_that_looks_like_no_mix_is_not_weighed_towards(tmp_path: Path) -> None:
    federation = estimating(tmp_path / "a", FEDPALS, training={"rounds": 2})
    records = federation.play({"dogwood": edited("cells", unsure)})
    assert records[1]["target"]["misfit"]
    assert "label shift does not hold" in records[2]["fallback"]

    stopped = estimating(tmp_path / "b", FEDPALS, target={"on_misfit": "stop"})
    with pytest.raises(RunError, match=r"target\.on_misfit: label shift does not hold after round 1"):
        stopped.play({"dogwood": edited("cells", unsure)})


@pytest.mark.slow
def test_a_lying_target_site_moves_weights_up_to_the_limit(tmp_path: Path) -> None:
    """It says that the model takes all of its samples for 0, of which ash alone holds any."""
    training = LEARNT["training"] | {"weight_limit": 0.5}
    federation = estimating(tmp_path, "fedpals", target=LEARNT["target"], training=training)
    records = federation.play({"dogwood": edited("cells", lambda cells: [2 * count for count in cells[:4]] + [0] * 36)})
    assert records[3]["target"]["mix"][0] > 0.9
    assert records[3]["target"]["unused"] is None
    assert records[4]["weights"][records[4]["answered"].index(0)] == pytest.approx(0.5)
    assert records[4]["limited"] == [0]


@pytest.mark.parametrize(
    ("target", "agreed", "message"),
    [
        ({}, {}, r"target\.mix: 'estimate' needs a site whose samples without labels .* --target-site NAME"),
        ({}, {"target_site": "d", "evaluation": "none"}, r"target\.mix: .* evaluation = 'confusion' in deploy\.toml"),
        (
            {},
            {"target_site": "d", "label_counts": "withheld"},
            r"target\.mix: .* evaluation = 'confusion' in deploy\.toml",
        ),
        ({"estimator": "em"}, {"target_site": "d"}, r"target\.estimator: can't be deployed: 'em' needs"),
        ({"unlabelled": "here.npz"}, {"target_site": "d"}, r"target\.unlabelled: can't be deployed: it is a place on"),
        ({"mix": "uniform"}, {"target_site": "d"}, r"target_site: 'd' would answer .* set target\.mix = 'estimate'"),
    ],
    ids=str,
)
def test_what_cannot_be_estimated_is_one_line(target: dict[str, Any], agreed: dict[str, Any], message: str) -> None:
    agreement = Agreement(**{"sites": ["a", "b"], "classes": ["x", "y"], "shape": [2], **agreed})
    with pytest.raises(ConfigError, match=message):
        agreement.check_config(resolve(config(target=target)))


def test_a_mix_is_not_both_given_and_estimated() -> None:
    agreement = Agreement(sites=["a", "b"], classes=["x", "y"], shape=[2], target_site="d")
    with pytest.raises(ConfigError, match=r"target\.mix: the mix is estimated in the run, and mix\.csv gives it"):
        agreement.check_config(resolve(config()), Path("mix.csv"))


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [("ash", "cells", "cells"), ("dogwood", "confusion", "evaluation"), ("dogwood", "outcomes", "evaluation")],
)
def test_a_site_answers_with_what_it_agreed_to(tmp_path: Path, name: str, key: str, kind: str) -> None:
    federation, grid = estimating(tmp_path).played()
    asked = ConfigRecord({"server-round": 1, key: federation.config.target.bins})
    answer = federation.ask("evaluate", {**grid.last("evaluate", name).content, "config": asked}, name)
    assert answer.error.reason == f"not agreed: {kind}; its own log says more"


def test_a_site_without_labels_does_not_train_whatever_the_server_asks(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, config(), target_site="cedar", start_timeout=0.1)
    clinic(federation, "cedar")
    record = federation.play()[1]
    assert record["deployment"]["failed"] == {"cedar": "not agreed: data; its own log says more"}
    assert any("its data.toml has no table [data]" in entry.message for entry in caplog.records)


def test_unlabelled_samples_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    federation = estimating(tmp_path)
    path = tmp_path / "dogwood" / "data.toml"
    samples = SiteData.load(path, federation.agreement).unlabelled
    assert samples is not None
    assert samples().shape == (MIX.sum(), *federation.agreement.shape)
    np.savez(tmp_path / "dogwood" / "new.npz", x=np.zeros((4, 7), dtype=np.float32))
    with pytest.raises(DataError, match=r"data\.toml: unlabelled: .*new\.npz: the model takes samples of shape"):
        samples()
    path.write_text("unlabelled = 3\n")
    with pytest.raises(ConfigError, match=r"data\.toml: unlabelled: input should be a valid string \(got 3\)"):
        SiteData.load(path, federation.agreement)


@pytest.mark.slow
def test_the_folder_the_check_and_what_the_target_site_agrees_to(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps({**config(FEDPALS), "data": {"name": "digits"}}))
    words = ["--config", tmp_path / "run.toml", "--set", "partition.rule=dirichlet_by_class"]
    words += ["--set", "partition.clients=3", "--set", "partition.beta=0.5", "--sites", "north,south"]
    folder = tmp_path / "fed"
    assert fedskew("deploy", "init", folder, *words, "--target-site", "new") == (
        0,
        f"{folder}/README.md says who does what; send {folder}/sites/NAME to that site alone\n",
    )
    described = (folder / "sites" / "new" / "data.toml").read_text()
    assert 'unlabelled = "unlabelled"' in described
    assert "[data]" not in described
    status, said = fedskew("deploy", "check", folder)
    assert status == 0
    assert "target_site = new: after round 1 and every 1 round it sends how many of its samples" in said
    assert "it does not train" in said

    (folder / "sites" / "new" / "unlabelled").mkdir()
    digits = load("digits", rng=np.random.default_rng(0)).inputs.numpy()[:20]
    np.savez(folder / "sites" / "new" / "unlabelled.npz", x=digits)
    path = folder / "sites" / "new" / "data.toml"
    status, said = fedskew("deploy", "site", "--check", path, "--agree")
    assert "unlabelled: holds no images" in said
    path.write_text(described.replace('"unlabelled"', '"unlabelled.npz"'))
    status, said = fedskew("deploy", "site", "--check", path, "--agree")
    assert status == 0
    assert "20 samples without labels; it has no others, and does not train" in said
    assert "how many of its samples without labels are in each of 40 cells" in " ".join(said.split())
    assert "local training" not in said
    assert "the confusion matrix" not in said
