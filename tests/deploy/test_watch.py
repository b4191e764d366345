"""The server's watch over its model: what ruins it is undone, and its sites are left out until the operator looked."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import CLASSES, FOUR, Federated, LocalGrid, Tamper, federate, fedskew, figures, on, scaled, served, tree
from flwr.app import Message
from safetensors.numpy import load_file

from fedskew.deploy import Draft
from fedskew.errors import DivergedError
from fedskew.experiment import RunFolder, resolve

LENIENT = {"norm_limit": 1e300, "norm_action": "report"}  # here the watch alone stands between a liar and the model


def evaluating(confusion: list[int], loss: float) -> Tamper:
    return on("evaluate", figures(confusion=confusion, eval_loss=loss))


def accuracy(line: dict[str, Any]) -> float:
    return float(line["evaluation"]["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("by", [1e30, -300.0])
def test_a_round_that_ruins_the_model_is_undone_and_its_liar_left_out(tmp_path: Path, caplog: Any, by: float) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=4), **LENIENT)
    records = federation.play({"birch": on("train", scaled(by), first=2)})
    undone = records[2]["deployment"]["undone"]
    assert undone["back_to"] == 1
    assert undone["left_out"] == ["birch"]  # all three took part: the one whose update is the longest
    assert "round 2 is undone: the model's loss is" in caplog.text
    for record in records[3:]:
        assert record["deployment"]["quarantine"] == {"birch": 2}
        assert record["deployment"]["left_out"] == ["birch"]
        assert record["answered"] == [client for client in record["cohort"] if client != 1]
        assert "birch" not in record["deployment"]["evaluations"]
    assert records[4]["evaluation"]["loss"] < records[1]["evaluation"]["loss"] * 1.5
    assert all(np.isfinite(values).all() for values in load_file(federation.run_folder / "model.safetensors").values())


@pytest.mark.slow
def test_a_site_goes_on_from_what_it_kept_before_the_undone_round(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("moon", rounds=4, steps=1), **LENIENT)
    _, grid = federation.played({"birch": on("train", scaled(1e30), first=2)})
    counted = [question.content["config"]["fedskew-counted"] for question in grid.questions("train", "ash")]
    assert counted == [0, 1, 1, 3]
    before = len(grid.asked)
    records = federation.play(grid=grid)  # what the watch keeps is in the checkpoint
    assert {message.metadata.message_type for message in grid.asked[before:]} <= {"query.keep"}
    assert records[-1]["deployment"]["quarantine"] == {"birch": 2}


def said_of(rounds: list[dict[int, float]], folder: Path, key: str, **agreed: Any) -> list[dict[str, Any]]:
    """The records of a run in which four sites tell these losses in each round; who is not named tells none.

    Whoever is left out takes part again at once.
    """
    short = tree("fedavg", rounds=len(rounds) - 1, steps=1, lr=1e-6)
    federation = federate(folder, short, FOUR, undone_limit=99, **LENIENT, **agreed)
    federation.run_folder.mkdir()
    readmitted = dict.fromkeys(FOUR, 99)
    (federation.run_folder / "operator.json").write_text(json.dumps({"looked": 0, "readmitted": readmitted}))

    def lie(client: int, question: Message, answer: Message) -> Message:
        losses = rounds[question.content["config"].get("server-round", 0)]
        metrics, loss = answer.content.get("metrics"), losses.get(client, 0.0)
        if question.metadata.message_type == key == "evaluate":
            metrics["eval-loss"], metrics["confusion"] = loss, [int(client in losses)] * 100
        elif question.metadata.message_type == key:
            metrics["train-loss"], metrics["fedskew-steps"] = loss, 1 if client in losses else -1
        return answer

    return federation.play({name: partial(lie, client) for client, name in enumerate(FOUR)})


@pytest.mark.slow
def test_a_run_that_is_ruined_again_and_again_stops_and_waits_for_the_operator(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=6), undone_limit=2, **LENIENT)
    grid = federation.grid(dict.fromkeys(federation.names, on("train", scaled(1e30), last=2)))
    for _ in range(2):  # started again, it stops at once
        with pytest.raises(
            DivergedError, match=r"ruined in rounds 1, 2, and is again that of round 0; left out: "
        ) as end:
            federation.run(grid).run(resume=True)
        assert end.value.exit_code == 1
        assert len(federation.records()) == 3
    out = federation.records()[-1]["deployment"]["quarantine"]
    assert len(out) == 2
    status, said = fedskew("deploy", "readmit", federation.run_folder, *out)
    assert status == 0
    assert " and ".join(out) in said.replace(", ", " and ")
    records = federation.play(grid=grid)
    assert [record["round"] for record in records] == [0, 1, 2, 3, 4, 5, 6]
    assert records[-1]["deployment"]["quarantine"] == {}
    assert sorted(records[-1]["answered"]) == [0, 1, 2]
    assert accuracy(records[-1]) > accuracy(records[2]) + 0.1


@pytest.mark.slow
def test_readmit_names_only_sites_that_are_left_out(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    federation.play()
    assert fedskew("deploy", "readmit", federation.run_folder, "birch") == (2, "birch: is not left out (nobody is)")
    status, said = fedskew("deploy", "readmit", federation.run_folder)
    assert (status, "--nobody" in said) == (2, True)
    status, said = fedskew("deploy", "status", tmp_path)
    assert (status, "expected a federation's folder in which a run has begun" in said) == (2, True)
    status, said = fedskew("sites", federation.run_folder)
    assert (status, "fedskew deploy site --report data.toml" in said) == (2, True)


@pytest.mark.slow
def test_without_evaluations_the_next_rounds_training_judges(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=4), evaluation="none", **LENIENT)
    records = federation.play({"birch": on("train", scaled(-1e4), first=2)})
    assert records[3]["deployment"]["undone"]["back_to"] == 1
    assert records[3]["deployment"]["undone"]["left_out"] == ["birch"]
    assert records[4]["loss"] < 3


def test_without_evaluations_one_sites_loss_undoes_no_round(tmp_path: Path) -> None:
    short = tree("fedavg", rounds=4, participation=0.34, steps=2)  # one site a round
    federation = federate(tmp_path, short, evaluation="none")
    records = federation.play({"birch": on("train", figures(train_loss=1e30))})
    assert any(1 in record["answered"] for record in records)
    assert [record["deployment"].get("undone") for record in records] == [None] * 5
    assert records[-1]["deployment"]["quarantine"] == {}


def test_without_evaluations_a_reply_of_nan_accuses_nobody(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1), evaluation="none", start_timeout=0.1)
    records = federation.play({"birch": on("train", scaled(float("nan")), first=2)}, away=("cedar",))
    assert [list(record["deployment"]["refused"]) for record in records[1:]] == [[], ["birch"], ["birch"]]
    assert not any("undone" in record["deployment"] for record in records)


@pytest.mark.slow
def test_one_sites_confusion_matrix_does_not_make_the_accuracy(tmp_path: Path) -> None:
    honest = accuracy(federate(tmp_path / "whole", tree("fedavg", rounds=1)).play()[1])

    def lied(folder: Path, each: int) -> list[dict[str, Any]]:
        perfect = (each * np.eye(10, dtype=np.int64)).ravel().tolist()
        return federate(folder, tree("fedavg", rounds=1)).play({"birch": evaluating(perfect, 0.0)})

    for record in lied(tmp_path / "giant", 10**8):  # not plausible: refused
        assert "are plausible" in record["deployment"]["unevaluated"]["birch"]
        assert set(record["deployment"]["evaluations"]) == {"ash", "cedar"}
    assert accuracy(record) == pytest.approx(honest, abs=0.1)
    record = lied(tmp_path / "large", 85)[1]  # plausible, yet more than all others have: half of the samples at most
    assert record["deployment"]["reduced"]["birch"] < 0.5
    others = [record["deployment"]["evaluations"][name]["accuracy"] for name in ("ash", "cedar")]
    assert accuracy(record) == pytest.approx((1 + np.mean(others)) / 2, abs=0.02)
    assert record["deployment"]["evaluations"]["birch"]["accuracy"] == 1.0  # as it said, for all to see


@pytest.mark.slow
def test_a_site_that_claims_a_ruined_model_can_not_undo_a_round_alone(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    records = federation.play({"cedar": evaluating([1] * 100, float("nan"))})
    assert [record["deployment"].get("undone") for record in records] == [None] * 3
    assert records[2]["deployment"]["evaluations"]["cedar"] == {"accuracy": 0.1, "loss": None, "samples": 100}


def test_a_loss_below_0_is_refused(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1, steps=1))
    said = federation.play({"birch": evaluating([1] * 100, -1e300)})[1]["deployment"]
    assert said["unevaluated"]["birch"] == "refused: its loss is -1e+300; expected a number from 0"


@pytest.mark.slow
def test_newcomers_with_other_labels_do_not_undo_a_round(tmp_path: Path) -> None:
    """Ash alone has a loss of 0.02 on its few classes; the model is bad at those of the others, and harms nobody."""
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1), start_timeout=0.1)
    grid = federation.grid(away=["birch", "cedar"])
    others = set(grid.offline)

    def then_connected(question: Message, answer: Message) -> Message:
        if question.content["config"].get("server-round") == 1:
            grid.offline.clear()
        return evaluating([1] * 100, 0.02)(question, answer)

    grid.tamper = {federation.node("ash"): then_connected}
    grid.tamper |= {node: evaluating([1] * 100, 4.0) for node in others}
    records = federation.play(grid=grid)
    assert set(records[2]["deployment"]["evaluations"]) == {"ash", "birch", "cedar"}
    assert [record["deployment"].get("undone") for record in records] == [None] * 4


@pytest.mark.slow
def test_each_site_compares_the_loss_with_its_own(tmp_path: Path) -> None:
    lowest = {0: 0.02, 1: 0.5}
    rounds: list[tuple[dict[int, float], int]] = [  # losses, and how many are left out where the round is undone
        ({0: 2.0, 1: 2.0}, 0),  # no worse than a model that knows nothing
        ({1: 4.9}, 0),
        ({1: 5.1}, 1),
        ({0: 9.0, 1: 0.4, 2: 5.0}, 1),  # half of those that know
        ({0: 0.1, 1: 0.4, 2: np.inf, 3: np.inf}, 1),
        ({0: 9.0, 1: 9.0}, 1),
        ({0: 0.1, 1: 0.4, 2: np.inf}, 0),
        ({0: 0.1, 2: 5.0, 3: 6.0}, 0),  # newcomers have nothing to compare with
    ]
    records = said_of([lowest, *(losses for losses, _ in rounds)], tmp_path, "evaluate")[1:]
    undone = [record["deployment"].get("undone") for record in records]
    assert [0 if one is None else len(one["left_out"]) for one in undone] == [number for _, number in rounds]
    assert undone[5]["reason"] == "the model's loss is 9; at 2 of 2 sites it is above 10 times their lowest so far"


@pytest.mark.slow
def test_training_judges_what_others_trained_by_two_sites_at_least(tmp_path: Path) -> None:
    rounds = [({0: 0.02, 1: 0.5}, False), ({0: 9.0, 1: 0.4}, False), ({0: 9.0, 1: 9.0}, True), ({0: 9.0}, False)]
    rounds += [({0: 9.0, 2: 5.0, 3: 5.0}, False)]
    losses = [{}, *(losses for losses, _ in rounds)]
    records = said_of(losses, tmp_path, "train", evaluation="none")[1:]
    assert ["undone" in record["deployment"] for record in records] == [undone for _, undone in rounds]


@pytest.mark.slow
def test_of_many_sites_all_that_took_part_are_left_out(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2, steps=1, participation=0.5), FOUR, **LENIENT)
    liars = {name: on("evaluate", figures(confusion=[1] * 100, eval_loss=1e9), first=2) for name in FOUR}
    record = federation.play(liars)[2]
    assert len(record["cohort"]) == 2
    assert record["deployment"]["undone"]["left_out"] == [FOUR[client] for client in sorted(record["cohort"])]


def test_records_say_when_in_utc_and_what_each_site_evaluated(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    for record in federation.play():
        began, ended = record["deployment"]["began"], record["deployment"]["ended"]
        assert began.endswith("Z")
        assert began <= ended
        sites = record["deployment"]["evaluations"]
        assert set(sites) == {"ash", "birch", "cedar"}
        right = sum(site["accuracy"] * site["samples"] for site in sites.values())
        assert accuracy(record) == pytest.approx(right / sum(site["samples"] for site in sites.values()))
    kept = json.loads((federation.run_folder / "deployment.json").read_text())
    assert kept["sites"]["ash"]["at"].endswith("Z")


# Rounds that move nothing are in status, report and exit status; two in a row stop a run, which can go on later.


def four(folder: Path, rounds: int, weight_limit: float | None, **agreed: Any) -> Federated:
    """Four sites, one with four samples: without `dogwood` two of the others have nearly all of the weight."""
    given = {"rounds": rounds, "steps": 1} | ({} if weight_limit is None else {"weight_limit": weight_limit})
    config = resolve({**tree("fedavg", **given), "engine": {"updates": "masked"}})
    config = Draft.of(config, FOUR, {"classes": CLASSES, "shape": [64]}).config
    agreed = {"updates": "masked", "evaluation": "none", "round_timeout": 0.3} | agreed
    federation = federate(folder, config.tree(), FOUR, **agreed)
    federation.change_samples("birch", lambda own: {name: values[:4] for name, values in own.items()})
    return federation


def lost_after_the_first_round(federation: Federated) -> LocalGrid:
    """A grid from which `dogwood` is gone once it has answered in the first round."""
    grid = federation.grid()

    def lose(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "query.unmask":
            grid.offline.add(federation.node("dogwood"))
        return answer

    grid.tamper[federation.node("ash")] = lose
    return grid


def steps(federation: Federated) -> list[bool]:
    (path,) = federation.folder.glob("server/runs/*/rounds.jsonl")
    return [bool(record.answered) for record in RunFolder.read_records(path)[1:]]


@pytest.mark.slow
def test_four_sites_that_lose_one_stop_after_two_rounds_and_go_on_once_it_is_back(tmp_path: Path) -> None:
    federation = four(tmp_path, 5, weight_limit=0.5)

    code, said = served(federation, lost_after_the_first_round(federation))

    assert code == 4
    assert said.startswith(
        "rounds 2 and 3 left the model as it was: with these weights a sum over 3 sites is in effect"
    )
    assert "lower training.weight_limit in run.toml to 0.4; dogwood (not connected). To do: bring back dogwood" in said
    assert steps(federation) == [True, False, False]
    (run,) = tmp_path.glob("server/runs/*")
    for folder in (tmp_path, tmp_path / "server", run):
        status, shown = fedskew("deploy", "status", folder)
        assert (status, "Rounds 2 and 3 left the model as it was: with these weights" in shown) == (0, True)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Rounds 2 and 3 left the model as it was: with these weights" in page

    code, said = served(federation, federation.grid())
    assert steps(federation) == [True, False, False, True, True]
    assert code == 4  # trained, and the exit status says that not every round was
    assert said.startswith("trained to its end, but for rounds without a step. Rounds 2 and 3 left the model as it was")
    assert (run / "summary.json").exists()


@pytest.mark.slow
def test_with_the_limit_that_a_new_federation_gets_the_others_go_on(tmp_path: Path) -> None:
    federation = four(tmp_path, 3, weight_limit=None)

    assert served(federation, lost_after_the_first_round(federation)) == (0, "")
    assert federation.config.training.weight_limit == 0.4
    assert steps(federation) == [True, True, True]


@pytest.mark.slow
def test_plain_rounds_that_refuse_everybody_stop_the_run_too(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=4, steps=1))
    grid = federation.grid()
    for node in grid.apps:
        grid.tamper[node] = lambda question, answer: answer if question.metadata.message_type == "query" else None

    code, said = served(federation, grid)

    assert code == 4
    assert "rounds 1 and 2 left the model as it was: ash (no reply in time)" in said
    assert "To do: bring back ash, birch, cedar; then start the run again" in said


@pytest.mark.slow
def test_a_single_round_without_a_step_is_no_reason_to_stop_and_is_said_at_the_end(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1))

    def only_round_two_fails(question: Message, answer: Message) -> Message | None:
        train = question.metadata.message_type == "train"
        return None if train and question.content["config"]["server-round"] == 2 else answer

    code, said = served(federation, federation.grid(dict.fromkeys(federation.names, only_round_two_fails)))

    assert steps(federation)[0] is True
    assert steps(federation).count(False) == 1
    assert (code, "Round 2 left the model as it was: ash (no reply in time)" in said) == (4, True)
