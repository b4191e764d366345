"""Label counts that sites only ever have summed: each weighs itself, and nobody shows its own."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from federated import FOUR, TEN, Federated, LocalGrid, agreed_at, check_models, federate, fedskew, initiated, tree
from flwr.app import Array, ArrayRecord, ConfigRecord
from test_data_that_change import grow
from test_masked import agreement_of, silent_at

from fedskew.deploy import Agreement, Book, Disclosure
from fedskew.deploy.terms import CountsRequest
from fedskew.errors import ConfigError, EndedEarlyError
from fedskew.experiment import make_training_loop, read, resolve
from fedskew.parameters import component
from fedskew.weighting import INDEX, fedpals

FedLA = INDEX["fedla"]
FedPALS = INDEX["fedpals"]


@component
class OfFew(FedLA):
    """FedLA that asks four sites, too: a federation of ten would make these tests slower, and show no more."""

    least_clients: ClassVar[int] = 1


@component
class Told(FedPALS):
    """A weighting of one's own that asks several questions, and no noise."""

    reveals: ClassVar[str | None] = None


UNIFORM = {"mix": "uniform"}
OF_FEW = {"preset": "fedla", "weighting": {"name": "test_summed_counts_at_sites:OfFew"}}


def config(method: Any = OF_FEW, label_counts: str = "summed", **training: Any) -> dict[str, Any]:
    plain = tree(method, **{"rounds": 1, "weight_limit": 0.5, **training})
    return {**plain, "model": "logistic", "engine": {"updates": "masked", "label_counts": label_counts}}


def summed(folder: Path, given: dict[str, Any], names: tuple[str, ...] = FOUR, **agreed: Any) -> Federated:
    label_counts = given["engine"]["label_counts"].replace("reported", "exact")
    agreed = {"updates": "masked", "evaluation": "none", "label_counts": label_counts, "round_timeout": 0.5, **agreed}
    return federate(folder, given, names, **agreed)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, LocalGrid]:
    return summed(tmp_path_factory.mktemp("played"), config()).played()


def test_the_model_is_that_of_told_counts_and_of_the_simulation(
    played: tuple[Federated, LocalGrid], tmp_path: Path
) -> None:
    federation, grid = played
    told = summed(tmp_path / "told", config(label_counts="reported"))
    told.play()
    make_training_loop(federation.config, 3, tmp_path / "simulated").run()

    check_models(federation.run_folder, told.run_folder, rtol=0, atol=4e-7)
    check_models(federation.run_folder, tmp_path / "simulated", rtol=0, atol=1e-5)
    assert grid.kinds("ash") == ["query.counts", "query.unmask", "train", "query.unmask", "query.keep"]
    totals = json.loads((federation.run_folder / "announced.json").read_text())["totals"]
    assert sum(totals) == 150 + 90 + 210 + 120


def test_the_run_folder_and_the_messages_hold_no_site_s_counts_or_weight(played: tuple[Federated, LocalGrid]) -> None:
    federation, grid = played
    record = json.loads((federation.run_folder / "rounds.jsonl").read_text().splitlines()[-1])
    assert (sorted(record["answered"]), record["weights"], record["entropy"]) == ([0, 1, 2, 3], [], None)
    assert record["loss"] is not None
    assert json.loads((federation.run_folder / "deployment.json").read_text())["sites"] == {}
    assert "fedskew-weights" not in grid.last("train").content["config"]


@pytest.mark.slow
def test_a_run_that_goes_on_asks_for_no_sum_again(tmp_path: Path) -> None:
    federation = summed(tmp_path, config(rounds=2))
    federation.first_rounds()
    _, grid = federation.played()
    assert "query.counts" not in grid.kinds("ash")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["query.counts", "query.unmask"])
def test_a_site_that_is_silent_at_first_is_waited_for(tmp_path: Path, kind: str) -> None:
    federation = summed(tmp_path, config())
    grid = federation.grid({"birch": silent_at(kind, "counts")})
    assert sorted(federation.run(grid).run(resume=True).rounds[1].answered) == [0, 1, 2, 3]
    assert grid.kinds("ash").count("query.counts") == 2


def test_without_one_site_there_is_no_sum(tmp_path: Path) -> None:
    federation = summed(tmp_path, config(), start_timeout=0.1, idle_timeout=0.1)
    with pytest.raises(EndedEarlyError, match="label counts were not summed .* takes all of ash, birch, cedar"):
        federation.run(federation.grid(away=["cedar"]))


@pytest.mark.slow
def test_a_round_without_one_site_is_shared_by_the_others(tmp_path: Path) -> None:
    federation = summed(tmp_path, config())
    grid = federation.grid({"cedar": silent_at("train")})
    assert sorted(federation.run(grid).run(resume=True).rounds[1].answered) == [0, 1, 3]


def test_a_site_adds_its_counts_to_no_other_sum(played: tuple[Federated, LocalGrid]) -> None:
    federation, grid = played
    asked = grid.last("query.counts")
    later = {"fedskew-session": "other.1", "fedskew-purpose": "counts"}

    fewer = federation.refusal(asked, "query.counts", **later, **{"fedskew-members": list(FOUR[:3])})
    assert fewer == "not agreed: members; its own log says more"
    assert federation.refusal(asked, "query.counts", **later) == ""  # the same sum, over all
    config = ConfigRecord({**asked.content["config"], **later, "server-round": 2})
    answer = federation.ask("query.counts", {"config": config, "broadcast": grid.last("train").content["arrays"]})
    assert answer.error.reason == "not agreed: most_questions; its own log says more"
    answer = federation.ask("query", {"config": ConfigRecord({"server-round": 0})})
    assert answer.error.reason == "not agreed: label_counts; its own log says more"
    weights = {"fedskew-weights": [0.25] * 4, "fedskew-session": "other.2"}
    assert "not agreed: weights" in federation.refusal(grid.last("train"), "train", **weights)


@pytest.mark.slow
def test_several_questions_are_settled_by_ten_sites(tmp_path: Path) -> None:
    given = config({"weighting": {"name": f"{__name__}:Told", "strength": 20.0}}, participation=0.5)
    given["target"] = {"mix": [0.02] * 5 + [0.18] * 5}
    federation = summed(tmp_path, given, TEN, round_timeout=2.0)
    grid = federation.grid()
    _, (record,) = federation.first_rounds(grid)
    assert len(record.answered) == 5
    assert 3 <= grid.kinds("site-0").count("query.counts") <= 40

    simulated = make_training_loop(federation.config, 3, tmp_path / "simulated")
    _, there = simulated.runner.run_round(simulated.runner.start(simulated.untrained))
    assert there.answered == record.answered
    counts = simulated.runner.counts  # type: ignore[attr-defined]
    weights = fedpals(counts, given["target"]["mix"], 20.0)[there.answered]
    assert there.weights == pytest.approx(weights / weights.sum(), abs=1e-6)
    assert record.loss == pytest.approx(there.loss, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "agreed", "why"),
    [
        (config(), {"label_counts": "exact"}, r"engine\.label_counts: .* deploy init --label-counts summed"),
        (config(label_counts="reported"), {"label_counts": "summed"}, "the config says 'reported', and deploy.toml"),
        (
            {**config({"weighting": {"name": "fedpals", "strength": 9.0}}), "target": UNIFORM},
            {"label_counts": "summed"},
            "label_counts: fedpals takes noise in what is summed: its sums tell a server that .*deploy init "
            "--label-counts summed --epsilon 1",
        ),
        (config("uniform"), {"label_counts": "summed", "epsilon": 1.0}, "epsilon: uniform asks for no label counts"),
        (config("fedla"), {"label_counts": "summed"}, "sums over 4 sites would tell their counts to fedla, which"),
        (config("fedavg"), {"label_counts": "summed"}, "sums over 4 sites would tell their counts to fedavg, which"),
    ],
)
def test_what_sums_can_not_do_is_refused(given: dict[str, Any], agreed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agreement_of(**agreed).check_config(resolve({**given, "data": "digits"}))


@pytest.mark.slow
def test_a_site_adds_noise_once_to_counts_that_are_summed(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    federation = summed(tmp_path, config(rounds=2), epsilon=0.2)
    federation.play()
    (releases,) = zip(*(Book(federation.folder / name / "state").releases for name in FOUR), strict=True)
    assert {release.epsilon for release in releases} == {0.2}
    assert all(release.released != release.exact for release in releases)
    totals = json.loads((federation.run_folder / "announced.json").read_text())["totals"]
    assert totals == pytest.approx(np.sum([release.released for release in releases], axis=0), abs=1e-5)


def test_a_site_sums_no_release_with_less_noise_than_it_agreed_to(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("opendp")
    federation = summed(tmp_path, config(), epsilon=0.2, start_timeout=0.1, idle_timeout=0.1)
    classes = tuple(Agreement.read(federation.folder / "app" / "deploy.toml").classes)
    state, counts = federation.folder / "ash" / "state", np.array([150.0] + [0.0] * (len(classes) - 1))
    asked = CountsRequest("noisy", classes, 100.0)
    Book(state).release(asked, counts, asked.once)
    with pytest.raises(EndedEarlyError):
        federation.run(federation.grid())
    assert "epsilon: this site released its label counts with 100, and what is summed is to have 0.2" in caplog.text


@pytest.mark.slow
def test_a_site_takes_one_announcement_and_keeps_its_part_while_its_data_grow(tmp_path: Path) -> None:
    """Else a server could ask by announcements, and weights would no longer sum to 1, so that no round counts."""
    federation = summed(tmp_path, config(rounds=3))
    grid = federation.grid()
    federation.first_rounds(grid)

    asked = grid.last("train")
    arrays = asked.content["broadcast"]
    name = next(name for name in arrays if name.startswith("announced."))
    other = ArrayRecord({**arrays, name: Array(arrays[name].numpy() * 2)})
    config_of_next = ConfigRecord({**asked.content["config"], "server-round": 2})
    answer = federation.ask("train", {**asked.content, "config": config_of_next, "broadcast": other})
    assert answer.error.reason == "not agreed: label_counts; its own log says more"

    grow(federation, "ash")
    records = federation.play()
    answered = {record["round"]: sorted(record["answered"]) for record in records}
    assert answered[2] == [0, 1, 2, 3]  # the third is one more than was agreed on, after that message


def test_fedpals_takes_noise_in_what_is_summed() -> None:
    given = resolve(
        {**config({"weighting": {"name": "fedpals", "strength": 9.0}}), "data": "digits", "target": UNIFORM}
    )
    agreed = agreement_of(names=TEN, label_counts="summed", epsilon=1.0, classes=[str(digit) for digit in range(10)])
    agreed.check_config(given)
    said = " ".join(thing.what for thing in Disclosure.all_of(given, agreed))
    assert "with Laplace noise for epsilon 1.0 (add-remove), drawn once, or what follows from these; masked" in said
    assert "from several such sums it may work out what one site has, with its noise" in said


def test_a_site_is_told_that_several_sums_may_show_its_counts() -> None:
    agreed = agreement_of(names=TEN, label_counts="summed", classes=[str(digit) for digit in range(10)])
    for method, several in (("fedla", False), ({"weighting": {"name": f"{__name__}:Told", "strength": 9.0}}, True)):
        given = resolve({**config(method), "data": "digits", "target": UNIFORM})
        said = " ".join(thing.what for thing in Disclosure.all_of(given, agreed))
        assert ("from several such sums it may work out what one site has" in said) == several


def test_sums_of_counts_need_masked_updates() -> None:
    with pytest.raises(ConfigError, match="label_counts = 'summed' needs updates = 'masked'"):
        agreement_of(label_counts="summed", updates="plain", keys={})


@pytest.mark.slow
def test_init_and_the_site_s_check_say_that_counts_are_summed(tmp_path: Path) -> None:
    words = ("--sites", ",".join(TEN), "--label-counts", "summed")
    status, said = initiated(tmp_path, tree("fedla", rounds=1), *words)
    assert status == 0, said
    app = tmp_path / "clinics" / "app"
    agreed, written = Agreement.read(app / "deploy.toml"), read(app / "run.toml")
    assert (agreed.label_counts, agreed.updates, written.engine.label_counts) == ("summed", "masked", "summed")
    status, said = fedskew("deploy", "check", tmp_path / "clinics")
    assert status == 0, said

    assert "the server learns the sum over all 10 sites" in agreed_at(tmp_path, "site-0")[1]
    assert any("the weighting asks: 1 at most" in thing.when for thing in Disclosure.all_of(written, agreed))
    assert any("the site's own weight, that weight" in thing.what for thing in Disclosure.all_of(written, agreed))
