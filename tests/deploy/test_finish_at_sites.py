"""A finish at real sites: the same as in a simulation, by sums that the sites agreed to send."""

import json

import numpy as np
import pytest
import torch
from federated import NAMES, federate, on, silent_on, times, tree
from flwr.app import Array, ArrayRecord, ConfigRecord

import fedskew
from fedskew.deploy import Address, Disclosure, write_federation
from fedskew.errors import ConfigError, RunError
from fedskew.files import load_tensors

TARGET = [0.02] * 5 + [0.18] * 5


def finishing(method, **more):
    config = tree({"preset": "fedavg", "finish": method}, rounds=1)
    return {**config, "model": {"name": "mlp3", "width": 12}, "evaluation": {"every": 2}, **more}


def finished(folder, finish):
    """Sites that finished their model towards the target, the grid that asked them, and what the run ended with."""
    sites = federate(folder, finishing(finish, target={"mix": TARGET}))
    grid = sites.grid()
    return sites, grid, sites.run(grid).run(resume=True)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("adapted"), "adapt")


@pytest.mark.slow
@pytest.mark.parametrize("finish", [{"name": "ccvr", "target": True, "samples": 50}, "fedcof"])
def test_the_finished_model_is_that_of_the_simulation(finish, tmp_path):
    sites, grid, done = finished(tmp_path, finish)
    simulated = fedskew.simulate(sites.config, out=tmp_path / "simulated", progress=False)
    ours, theirs = (load_tensors(at / "finished.safetensors")[0] for at in (sites.run_folder, simulated.folder))
    # the trained models agree to rounding, and a minimum is found to a tolerance
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    said = done.summary["finished"]["evaluation"]
    assert said["accuracy"] == pytest.approx(simulated.summary["finished"]["evaluation"]["accuracy"], abs=0.01)
    assert done.summary["finished"]["clients"] == len(NAMES)
    for key in ("clients", "bytes_up", "bytes_down"):
        assert done.summary["finished"][key] == simulated.summary["finished"][key]
    assert len(grid.questions("query.finish")) == len(NAMES)
    again = sites.run(sites.grid()).run(resume=True)
    assert again.summary == json.loads((sites.run_folder / "summary.json").read_text())
    answer = asked_once_more(grid, sites, "ash", "held_out")  # about samples that it does not read
    assert not answer.has_content()
    assert "not agreed: finish" in answer.error.reason


@pytest.mark.slow
def test_adapt_calibrates_on_the_sites_test_samples_towards_a_mix_that_the_server_knows(adapted):
    *_, done = adapted
    said = done.summary["finished"]
    assert said["notes"]["mix"] == pytest.approx(TARGET)
    assert sum(said["notes"]["held_out"]) == sum(map(sum, said["evaluation"]["confusion"]))
    assert said["evaluation"]["target_accuracy"] > done.summary["final"]["target_accuracy"]


@pytest.mark.slow
def test_a_site_that_stops_answering_is_left_out_and_a_wrong_answer_refused(tmp_path, caplog):
    sites = federate(tmp_path, finishing("adapt", target={"mix": TARGET}))
    done = sites.run(sites.grid({"birch": silent_on("query.finish", first=2)})).run(resume=True)
    assert "begins anew without birch" in caplog.text
    whole = sum(map(sum, done.summary["finished"]["evaluation"]["confusion"]))
    assert sum(done.summary["finished"]["notes"]["held_out"]) < whole


def asked_once_more(grid, sites, name, source, names=(), offset=0.0):
    """What a site answers to a question that the server makes up, after an honest run: of a run's tensors, these."""
    questions = grid.questions("query.finish")
    given = {key: array for one in questions for key, array in one.content["broadcast"].items()}
    model = {key: Array(array.numpy() + np.float32(offset)) for key, array in questions[0].content["arrays"].items()}
    broadcast = ArrayRecord({key: given[key] for key in names})
    config = ConfigRecord({"fedskew-source": source})
    return sites.ask("query.finish", {"arrays": ArrayRecord(model), "broadcast": broadcast, "config": config}, name)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "names"), [("training", ()), ("held_out", ("slope", "weights"))])
def test_a_site_answers_no_question_that_its_finish_does_not_ask(source, names, adapted):
    sites, grid, _ = adapted
    answer = asked_once_more(grid, sites, "ash", source, names)
    assert not answer.has_content()
    assert "not agreed: finish" in answer.error.reason


@pytest.mark.slow
def test_a_site_answers_about_two_models_at_most(adapted):
    sites, grid, _ = adapted
    assert asked_once_more(grid, sites, "birch", "held_out", offset=1.0).has_content()
    assert "not agreed" in asked_once_more(grid, sites, "birch", "held_out", offset=2.0).error.reason


@pytest.mark.slow
def test_what_leaves_a_site_is_listed_and_within_the_agreed_bytes(tmp_path):
    sites = federate(tmp_path, finishing("ccvr"))
    listed = [thing for thing in Disclosure.all_of(sites.config, sites.agreement) if "for ccvr" in thing.what]
    assert [thing.bytes for thing in listed] == [8 * 10 * (1 + 12 + 12**2)]
    assert "sums over its training samples" in listed[0].what
    wide = federate(tmp_path / "wide", finishing("ccvr", model={"name": "mlp3", "width": 80}))
    played = write_federation(tmp_path / "fed", wide.config, wide.agreement, Address("localhost", 9092), {})
    assert played.plan.reply_bytes > 8 * 10 * 80**2  # more than its model has


@pytest.mark.parametrize(
    ("finish", "agreed", "says"),
    [
        ("adapt", {}, "method.finish: adapt needs a target"),
        ("adapt", {"evaluation": "none"}, "method.finish: adapt needs"),
        ("ccvr", {"label_counts": "withheld"}, "ccvr returns how many samples of each class"),
    ],
)
def test_what_can_not_be_is_said_before_the_first_round(finish, agreed, says, tmp_path):
    def begin():
        sites = federate(tmp_path, finishing(finish), **agreed)
        sites.agreement.check_config(sites.config)
        sites.run(sites.grid())

    with pytest.raises(ConfigError, match=says):
        begin()


@pytest.mark.slow
def test_no_site_answers(tmp_path):
    sites = federate(tmp_path, finishing("ccvr"))
    with pytest.raises(RunError, match="method.finish: CCVR: there are no samples"):
        sites.play(dict.fromkeys(NAMES, silent_on("query.finish")))
    assert (sites.run_folder / "model.safetensors").exists()
    sites.run(sites.grid()).run(resume=True)  # started again, only the finish is missing
    assert (sites.run_folder / "finished.safetensors").exists()


def telling(lie):
    """A site changes the tensors of its answers to a finish, by name, before it sends them."""

    def change(question, answer):
        if answer.has_content():
            honest = {key: array.numpy() for key, array in answer.content["reply"].items()}
            told = {key: Array(np.asarray(array, dtype=np.float64)) for key, array in (honest | lie(honest)).items()}
            answer.content["reply"] = ArrayRecord(told)

    return on("query.finish", change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finish", "lies"),
    [
        (
            "ccvr",
            {
                "no samples have such products": lambda one: {
                    "products": one["products"] - 1e9 * np.eye(12) * (one["sizes"] > 0)[:, None, None]
                },
                "above 1e+30": lambda one: {"sums": one["sums"] * 0 + 1e200},
                "no numbers of samples": lambda one: {"sizes": -one["sizes"]},
            },
        ),
        (
            "adapt",
            {
                "below 0": lambda one: {"squares": one["squares"] * 0 - 1e12} if "squares" in one else {},
                "not of as many samples": lambda one: {"sizes": 9 * one["sizes"]} if "sizes" in one else {},
                "which no loss has": lambda one: {"curvature": -one["curvature"]} if "curvature" in one else {},
            },
        ),
    ],
    ids=["ccvr", "adapt"],
)
def test_sites_whose_answers_can_not_be_are_left_out(finish, lies, tmp_path, caplog):
    liars = ("dogwood", "elm", "fir")
    sites = federate(tmp_path, finishing(finish, target={"mix": TARGET}), (*NAMES, *liars))
    tampers = dict(zip(liars, map(telling, lies.values()), strict=True))
    done = sites.run(sites.grid(tampers)).run(resume=True)
    for name, says in zip(liars, lies, strict=True):
        lines = [line for line in caplog.text.splitlines() if f"no answer of {name}: refused: " in line]
        assert {says in line for line in lines} == {True}
    assert "kept" not in done.summary["finished"]["notes"]


@pytest.mark.slow
def test_a_liar_does_not_use_up_the_questions_that_honest_sites_answer(tmp_path):
    sites = federate(tmp_path, finishing("adapt", target={"mix": TARGET}))
    losses = iter(range(100))
    grid = sites.grid({"ash": telling(lambda one: {"loss": [float(next(losses))]} if "loss" in one else {})})
    done = sites.run(grid).run(resume=True)
    assert len(grid.questions("query.finish")) <= 24 * len(NAMES)
    assert "kept" not in done.summary["finished"]["notes"]


@pytest.mark.slow
def test_a_site_that_is_left_out_has_no_part_in_the_finish_after_a_restart_either(tmp_path):
    config = finishing("ccvr", evaluation={"every": 1})
    config["training"]["rounds"] = 2
    sites = federate(tmp_path, config, norm_limit=1e300, norm_action="report")

    def ruin(question, answer):
        if question.metadata.message_type == "train" and answer.has_content():
            times(1e10, answer)
        return None if question.metadata.message_type == "query.finish" else answer

    with pytest.raises(RunError, match="no samples"):
        sites.play(dict.fromkeys(NAMES, silent_on("query.finish")) | {"birch": ruin})
    again = sites.grid()
    sites.run(again).run(resume=True)
    assert {again.name_of(question) for question in again.questions("query.finish")} == {"ash", "cedar"}


@pytest.mark.slow
def test_a_minority_finishes_no_model(tmp_path):
    sites = federate(tmp_path, finishing("ccvr", target={"mix": TARGET}))
    grid = sites.grid(dict.fromkeys(NAMES[1:], silent_on("query.finish")))
    done = sites.run(grid).run(resume=True)
    assert done.summary["finished"]["notes"]["kept"].startswith("1 of 3 sites answer")
    trained, finished = (load_tensors(sites.run_folder / f"{one}.safetensors")[0] for one in ("model", "finished"))
    torch.testing.assert_close(finished, trained, rtol=0, atol=0)


@pytest.mark.slow
def test_of_three_sites_none_counts_for_more_than_half(tmp_path):
    config = finishing("adapt", target={"mix": TARGET})
    sites = federate(tmp_path, config)
    tests = ("x_test", "y_test")
    sites.change_samples("ash", lambda own: {name: np.concatenate([own[name]] * 4) for name in tests})
    done = sites.run(sites.grid()).run(resume=True)
    whole = sum(map(sum, done.summary["finished"]["evaluation"]["confusion"]))
    assert sum(done.summary["finished"]["notes"]["held_out"]) == pytest.approx(whole, abs=10)  # both are rounded


@pytest.mark.slow
def test_answers_that_can_not_be_computed_with_together_are_one_line_and_nothing_is_lost(tmp_path):
    sites = federate(tmp_path, finishing("ccvr"))

    def lie(one):  # each is a covariance up to rounding; together they leave one below 0
        below = 500 * np.eye(12) * (one["sizes"] > 0)[:, None, None]
        sums, products = 1e6 * one["sizes"][:, None] * np.ones(12), one["sizes"][:, None, None] * 1e12 - below
        return {"sums": sums, "products": products}

    with pytest.raises(RunError, match="the sites' answers, added up, can't be computed with"):
        sites.play(dict.fromkeys(NAMES, telling(lie)))
    assert (sites.run_folder / "model.safetensors").exists()


@pytest.mark.slow
def test_a_silent_site_is_waited_for_once(tmp_path):
    sites = federate(tmp_path, finishing("adapt", target={"mix": TARGET}))
    grid = sites.grid({"ash": silent_on("query.finish"), "birch": silent_on("query.finish", first=1)})
    sites.run(grid).run(resume=True)
    assert grid.kinds("ash").count("query.finish") == 1


def test_an_answer_too_large_for_the_server_is_refused_before_the_first_round(tmp_path):
    with pytest.raises(ConfigError, match="CCVR asks each site for 147 MB, and a server takes 134 MB"):
        federate(tmp_path, finishing("ccvr", model={"name": "mlp3", "width": 1350}))
