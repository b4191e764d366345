"""Noise on updates at real sites: its size in the sum, what each site spends, and where it refuses."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from federated import FOUR, Federated, agreed_at, federate, fedskew, initiated, on, tree
from test_masked import agreement_of, silent_at
from test_one_opening import opened

from fedskew.deploy import Agreement, Book, Disclosure, Terms, agree
from fedskew.errors import ConfigError
from fedskew.experiment import make_training_loop, read, resolve
from fedskew.privacy import UpdateNoise, epsilon
from fedskew.sums.fixed_point import UPDATES

pytest.importorskip("dp_accounting")
pytest.importorskip("opendp")

PRIVACY: dict[str, Any] = {"clip": 0.5, "noise": 4.0, "epsilon": 8.0, "delta": 1e-3}
PARAMETERS = 65 * 10
DEVIATION = UpdateNoise(0.5, 4.0, 0.5).deviation(PARAMETERS) / 2**24


def config(rounds: int = 2, privacy: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    training = {"rounds": rounds, "weight_limit": 0.5, **others.pop("training", {})}
    whole = tree("fedavg", **training)
    return {**whole, "model": "logistic", "engine": {"updates": "masked"}, "privacy": {**PRIVACY, **(privacy or {})}}


def private(folder: Path, given: dict[str, Any], **agreed: Any) -> Federated:
    agreed = {"round_timeout": 0.3, "updates": "masked", "evaluation": "none", **agreed}
    return federate(folder, given, FOUR, **agreed)


def spending(federation: Federated, name: str) -> Book:
    return Book(federation.folder / name / "state")


def change(states: list[Any], at: int = 1) -> np.ndarray:
    return (states[at].model.parameters - states[at - 1].model.parameters).double().numpy()


@pytest.mark.slow
def test_a_run_spends_what_the_simulation_says(tmp_path: Path) -> None:
    federation = private(tmp_path, config(rounds=2))
    seen: list[set[str]] = []
    look = on("train", lambda question, answer: seen.append(set(answer.content["sums"])))
    deployed = federation.run(federation.grid(dict.fromkeys(FOUR, look))).run(resume=True)
    simulated = make_training_loop(federation.config, 3, tmp_path / "simulated").run()

    for here, there in zip(deployed.rounds[1:], simulated.rounds[1:], strict=True):
        assert here.privacy == there.privacy
        assert (here.answered, here.loss, here.steps_summed) == (there.answered, None, None)
    assert deployed.rounds[-1].privacy["rounds"] == 2
    assert deployed.summary["privacy"] == simulated.summary["privacy"]
    assert seen == [{"update"}] * 8
    for name in FOUR:
        assert spending(federation, name).noises == (4.0, 4.0)
        assert spending(federation, name).path.stat().st_mode & 0o777 == 0o600
        assert epsilon(4.0, 2, 1e-3) == pytest.approx(deployed.rounds[-1].privacy["epsilon"])


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["nobody", "birch"])
def test_the_sum_has_the_central_mechanism_s_noise_whoever_is_lost(tmp_path: Path, lost: str) -> None:
    federation = private(tmp_path, config(training={"lr": 1e-9}))  # nothing but noise
    lies = {} if lost == "nobody" else {lost: silent_at("train")}
    states, (record,) = federation.first_rounds(federation.grid(lies))

    assert len(record.answered) == (4 if lost == "nobody" else 3)
    assert change(states).std() == pytest.approx(DEVIATION, rel=5 / np.sqrt(2 * PARAMETERS))
    expected = {name: int(name != lost) for name in FOUR}
    assert {name: len(spending(federation, name).noises) for name in FOUR} == expected
    assert record.privacy["rounds"] == 1


def test_a_sum_that_one_does_not_open_is_paid_once_by_all_that_were_asked_to(tmp_path: Path) -> None:
    federation = private(tmp_path, config())
    grid = federation.grid({"birch": silent_at("query.unmask")})  # it opens, though nobody hears it

    _, (record,) = federation.first_rounds(grid)

    assert record.unmoved == "the round's sum is lost, as birch masked and did not open it"
    assert {name: len(spending(federation, name).noises) for name in FOUR} == dict.fromkeys(FOUR, 1)
    assert record.privacy["rounds"] == 1


def test_updates_are_clipped_at_the_site(tmp_path: Path) -> None:
    given = config(privacy={"noise": 0.01, "clip": 0.05, "epsilon": 1e6}, training={"lr": 0.5, "epochs": 5})
    states, _ = private(tmp_path, given).first_rounds()
    assert np.linalg.norm(change(states)) < 0.05 + 6 * 0.01 * 0.5 * 0.05 * np.sqrt(PARAMETERS)


@pytest.mark.slow
def test_a_site_whose_budget_is_spent_refuses_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = private(tmp_path, config())
    one = epsilon(4.0, 1, 1e-3)
    federation.amend("cedar", "updates_epsilon = 8.0", f"updates_epsilon = {one!r}")
    grid = federation.grid()

    with caplog.at_level(logging.ERROR):
        _, (first, second) = federation.first_rounds(grid, 2)

    assert sorted(first.answered) == [0, 1, 2, 3]
    assert sorted(second.answered) == [0, 1, 3]
    assert second.deployment["failed"] == {"cedar": "not agreed: updates_epsilon; its own log says more"}
    said = [record.getMessage() for record in caplog.records if "updates_epsilon" in record.getMessage()]
    assert said[-1].startswith("updates_epsilon: with one more sum of updates with noise 4 this site would have spent ")
    assert f"it agreed to {one:.4g} (delta 0.001); it has opened 1, for {one:.4g}" in said[-1]
    assert "\n" not in said[-1]
    assert len(spending(federation, "cedar").noises) == 1
    assert len(spending(federation, "ash").noises) == 2


def test_the_server_asks_nobody_whose_budget_is_spent(tmp_path: Path) -> None:
    federation = private(tmp_path, config(rounds=1, privacy={"epsilon": epsilon(4.0, 1, 1e-3) * 1.001}))
    _, (_, second) = federation.first_rounds(number=2)
    assert sorted(second.privacy["declined"]) == [0, 1, 2, 3]
    assert second.answered == []
    assert second.privacy["rounds"] == 1


@pytest.mark.slow
def test_a_budget_outlives_the_run_and_is_not_raised_by_agreeing_again(tmp_path: Path) -> None:
    federation = private(tmp_path, config())
    federation.first_rounds()
    data, app = federation.data_of("ash"), federation.app

    assert agree(data, app).updates_epsilon == 8.0
    assert agree(data, app).updates_delta == 1e-3
    (data.with_name("agreed.toml")).unlink()  # as for another federation on the same data
    most = 69  # rounds that an epsilon of 8 pays for
    assert agree(data, app).updates_epsilon == pytest.approx(epsilon(4.0, most + 1, 1e-3))


@pytest.mark.slow
def test_a_killed_server_counts_what_was_opened_before(tmp_path: Path) -> None:
    federation = private(tmp_path, config())
    (state, _), _ = federation.first_rounds()

    _, record = federation.run(federation.grid()).runner.run_round(state)  # a new process plays the round again

    assert record.answered == []
    assert record.privacy["rounds"] == len(spending(federation, "ash").noises) == 1


def test_a_damaged_ledger_lets_nothing_leave(tmp_path: Path) -> None:
    federation = private(tmp_path, config())
    grid = federation.grid()
    federation.first_rounds(grid)
    spending(federation, "ash").path.write_text('{"sums": [{"at": "x", "sum": "y", "noise": -1}]}')
    again = federation.refusal(grid.last("train"), "train", **{"server-round": 2})
    assert again == "RunError in its own log"


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_told_to_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = private(tmp_path, config(training={"lr": 1e38}))
    with caplog.at_level(logging.WARNING):
        states, (record,) = federation.first_rounds()
    assert "takes part with noise alone" in caplog.text
    assert sorted(record.answered) == [0, 1, 2, 3]
    assert np.isfinite(change(states)).all()
    simulated = make_training_loop(federation.config, 3, tmp_path / "simulated").run()
    assert (sorted(simulated.rounds[1].answered), simulated.rounds[1].diverged) == ([0, 1, 2, 3], [])


@pytest.mark.slow
def test_two_sums_of_one_model_are_paid_twice_and_differ_by_fresh_noise(tmp_path: Path) -> None:
    federation = private(tmp_path, config(training={"batch_size": 512, "lr": 1e-9}))
    grid = federation.grid()
    states, _ = federation.first_rounds(grid)

    another = opened(federation, grid, "train", FOUR, {"server-round": 2})

    assert not isinstance(another, str)
    apart = change(states) - UPDATES.decode(another["update"])
    assert apart.std() == pytest.approx(np.sqrt(2) * DEVIATION, rel=5 / np.sqrt(2 * PARAMETERS))
    assert {name: len(spending(federation, name).noises) for name in FOUR} == dict.fromkeys(FOUR, 2)


@pytest.mark.slow
def test_fewer_sites_than_the_noise_is_made_for_open_nothing(tmp_path: Path) -> None:
    federation = private(tmp_path, config(rounds=2, privacy={"answers": 4}))
    grid = federation.grid()
    _, (record,) = federation.first_rounds(grid)
    assert len(record.answered) == 4

    sent = grid.last("train")
    fewer = {"fedskew-members": list(FOUR[:3]), "fedskew-weights": [0.4, 0.3, 0.3], "server-round": 2}
    assert federation.refusal(sent, "train", **fewer) == "not agreed: members; its own log says more"
    grid.tamper[federation.node("dogwood")] = lambda question, answer: None
    _, (record,) = federation.first_rounds(grid)
    assert "a masked sum is over 4 sites at least, and" in str(record.unmoved)


def test_evaluations_without_noise_are_said_to_be_wanted() -> None:
    resolved = resolve({**config(), "data": "digits"})
    with pytest.raises(ConfigError, match="evaluation: with .privacy. in run.toml sites would send sums of confusion"):
        agreement_of().check_config(resolved)
    for evaluation in ("none", "confusion"):
        agreement_of(evaluation=evaluation).check_config(resolved)
    agreement_of(label_counts="noisy", epsilon=1.0).check_config(resolved)
    with pytest.raises(ConfigError, match=r"engine\.updates: the config is for masked updates"):
        agreement_of(updates="plain", keys={}).check_config(resolved)


def test_a_network_whose_statistics_would_have_no_noise_is_refused_before_a_folder_is_written(tmp_path: Path) -> None:
    given = config() | {"model": {"name": "common:Normalised"}}
    status, said = initiated(tmp_path, given, "--sites", "a,b,c", "--updates", "masked")
    assert (status, "Normalised has buffers" in said) == (2, True)
    assert not (tmp_path / "clinics").exists()


@pytest.mark.slow
def test_init_check_and_the_site_s_check_say_what_noise_costs(tmp_path: Path) -> None:
    status, said = initiated(tmp_path, config(rounds=3), "--sites", ",".join(FOUR), "--updates", "masked")

    assert status == 0, said
    assert "evaluation = 'none'" in " ".join(said.split())
    app = tmp_path / "clinics" / "app"
    assert (Agreement.read(app / "deploy.toml").evaluation, read(app / "run.toml").privacy.noise) == ("none", 4.0)  # type: ignore[union-attr]
    status, said = fedskew("deploy", "check", tmp_path / "clinics")
    assert status == 0, said
    three = epsilon(4.0, 3, 1e-3)
    assert f"privacy.noise = 4: a site that takes part in all rounds (3) spends epsilon {three:.3g} (delta" in said

    site, said = agreed_at(tmp_path, "ash")
    assert "clipped to length 0.5, times a weight, with its share of the sum's noise (4 times the most" in said
    one = epsilon(4.0, 1, 1e-3)
    assert f"with noise on updates so far: 0, with an epsilon of 0; one more makes it {one:.3g}." in said
    terms = Terms.read(site / "agreed.toml")
    assert (terms.updates_epsilon, terms.updates_delta) == (8.0, 1e-3)
    for delta, shown in ((None, "none: UPDATES WITHOUT NOISE"), (1e-4, "8 (delta 0.0001)")):
        other = shutil.copytree(app, tmp_path / f"app-{delta}")
        section = {"privacy": {**PRIVACY, "delta": delta}} if delta else {}
        changed = {key: value for key, value in read(app / "run.toml").tree().items() if key != "privacy"} | section
        (other / "run.toml").write_text(tomli_w.dumps(changed))
        _, said = fedskew("deploy", "site", "--check", site / "data.toml", "--agreement", other)
        row = next(line for line in said.splitlines() if "largest epsilon of its updates together" in line)
        assert shown in row
        assert "8 (delta 0.001)" in row
    things = Disclosure.all_of(read(app / "run.toml"), Agreement.read(app / "deploy.toml"))
    assert not any("confusion" in thing.what or "loss" in thing.what for thing in things)
