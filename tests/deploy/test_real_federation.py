"""Real processes on loopback, with TLS and node keys: the federation that was simulated, and what befalls real ones."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
from federated import NAMES, Federated, federate, tree
from safetensors.numpy import load_file

from fedskew.deploy import Address, LocalFederation, free_port, write_federation
from fedskew.experiment import make_training_loop, resolve

FEDPALS = {"preset": "fedpals", "weighting": {"name": "fedpals", "ess": 0.5}}


@contextmanager
def real(federation: Federated) -> Iterator[LocalFederation]:
    """The federation's SuperLink and SuperNodes, all ended afterwards."""
    folder, port = federation.folder / "real", free_port()
    table = {"name": "npz"}
    write_federation(folder, federation.config, federation.agreement, Address("127.0.0.1", port), table)
    for name in NAMES:
        own = {"state": "state", "data": {"name": "npz", "root": str(federation.folder / name / "own.npz")}}
        (folder / "sites" / name / "data.toml").write_text(tomli_w.dumps(own))
    os.environ["OMP_NUM_THREADS"] = "1"
    with LocalFederation(folder, port, NAMES) as loopback:
        yield loopback


def rewrite(loopback: LocalFederation, config: dict[str, Any]) -> None:
    (loopback.folder / "app" / "run.toml").write_text(tomli_w.dumps(resolve(config).tree()))


def run_folder(loopback: LocalFederation) -> Path | None:
    """The newest run's."""
    found = sorted((loopback.folder / "server" / "runs").glob("*"), key=lambda path: path.stat().st_ctime)
    return found[-1] if found else None


def rounds(loopback: LocalFederation) -> list[dict[str, Any]]:
    folder = run_folder(loopback)
    if folder is None or not (folder / "rounds.jsonl").exists():
        return []
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().split("\n")[:-1]]


def until(done: Callable[[], Any], seconds: float, loopback: LocalFederation) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, loopback.log("run").read_text()[-3000:]
        time.sleep(0.2)


def agree(loopback: LocalFederation, federation: Federated, config: dict[str, Any]) -> None:
    """Train it for real and in the simulator: the same cohorts, weights and model."""
    whole = resolve({**config, "data": {"name": "npz", "root": str(federation.folder / "whole.npz")}})
    rewrite(loopback, config)
    loopback.wait("run", loopback.run(), 240)
    folder = run_folder(loopback)
    assert folder is not None
    aside = federation.folder / f"simulated-{folder.name}"
    simulated = make_training_loop(whole, 3, aside).run()
    deployed = rounds(loopback)
    assert [record["round"] for record in deployed] == [record["round"] for record in simulated.rounds]
    for here, there in zip(simulated.rounds, deployed, strict=True):
        assert there["cohort"] == here["cohort"]
        assert there["answered"] == here["answered"]
        np.testing.assert_allclose(there["weights"], here["weights"], rtol=1e-6)
    ours, theirs = load_file(aside / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-4, atol=1e-5)
    assert (folder / "report.html").exists()


def config_of(method: Any, **training: Any) -> dict[str, Any]:
    return {**tree(method, **training), "target": {"mix": "uniform"}, "evaluation": {"every": 3}}


def test_fedavg_and_scaffold_train_for_real_what_was_simulated(tmp_path: Path) -> None:
    patient = {"start_timeout": 120.0, "round_timeout": 120.0}
    federation = federate(tmp_path, config_of("fedavg"), evaluation="none", **patient)  # an exchange takes seconds
    with real(federation) as loopback:
        agree(loopback, federation, config_of("fedavg"))
        agree(loopback, federation, config_of("scaffold"))


@pytest.mark.faults
def test_other_methods_train_for_real_what_was_simulated(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("fedavg"), start_timeout=120.0, round_timeout=120.0)
    with real(federation) as loopback:
        agree(loopback, federation, config_of("fedentopt+fedla", participation=0.67))
        agree(loopback, federation, config_of(FEDPALS))
        agree(loopback, federation, config_of("fedvls", participation=0.67))


def kill(loopback: LocalFederation, name: str, how: signal.Signals) -> None:
    """A signal to a site's SuperNode and to all that it started."""
    leader = psutil.Process(loopback.processes[name].pid)
    for process in [*leader.children(recursive=True), leader]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(how)


@pytest.mark.faults
def test_a_site_killed_in_mid_round_costs_its_update_and_may_rejoin(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("scaffold", rounds=40), start_timeout=120.0, round_timeout=120.0)
    with real(federation) as loopback:
        run = loopback.run()
        until(lambda: len(rounds(loopback)) >= 2, 120, loopback)
        time.sleep(1.5)  # round 2 has been asked for
        kill(loopback, "birch", signal.SIGKILL)
        until(lambda: 1 not in rounds(loopback)[-1]["answered"], 180, loopback)
        lost = rounds(loopback)[-1]
        assert sorted(lost["answered"]) == [0, 2]
        deployment = lost["deployment"]
        assert "birch" in {*deployment["failed"], *deployment["silent"], *deployment["offline"]}

        def again() -> bool:
            """Until the SuperLink has forgotten the dead one, it refuses its key; whoever keeps it running retries."""
            if loopback.processes["birch"].poll() is not None:
                loopback.start_site("birch")
                time.sleep(5)
            return 1 in rounds(loopback)[-1]["answered"]

        loopback.processes["birch"].wait(10)
        until(again, 240, loopback)
        assert run.poll() is None


@pytest.mark.faults
def test_a_site_that_never_answers_is_waited_for_only_so_long(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("fedavg", rounds=40), start_timeout=120.0, round_timeout=20.0)
    with real(federation) as loopback:
        run = loopback.run()
        until(lambda: len(rounds(loopback)) >= 2, 120, loopback)
        kill(loopback, "cedar", signal.SIGSTOP)
        try:
            until(lambda: rounds(loopback)[-1]["deployment"]["silent"] == ["cedar"], 120, loopback)
            silent = next(record for record in rounds(loopback)[1:] if record["deployment"]["silent"])
            assert sorted(silent["answered"]) == [0, 1]
            assert 18 < silent["seconds"] < 40
        finally:
            kill(loopback, "cedar", signal.SIGCONT)
        until(lambda: 2 in rounds(loopback)[-1]["answered"], 120, loopback)
        assert run.poll() is None


@pytest.mark.faults
def test_all_gone_leaves_the_model_waits_and_says_so(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("fedavg", rounds=5), start_timeout=120.0, round_timeout=30.0)
    with real(federation) as loopback:
        run = loopback.run()
        until(lambda: len(rounds(loopback)) >= 2, 120, loopback)
        loopback.end(list(NAMES))
        waits = "no site is connected; the model stays as after round"
        until(lambda: waits in loopback.log("run").read_text(), 120, loopback)
        played = len(rounds(loopback))
        time.sleep(6)
        assert len(rounds(loopback)) == played
        for name in NAMES:
            loopback.start_site(name)
        loopback.wait("run", run, 240)
        assert [record["round"] for record in rounds(loopback)] == [0, 1, 2, 3, 4, 5]
        assert sorted(rounds(loopback)[-1]["answered"]) == [0, 1, 2]


@pytest.mark.faults
def test_superlink_and_serverapp_killed_and_started_again_go_on_at_their_round(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("scaffold", rounds=4), start_timeout=120.0, round_timeout=120.0)
    with real(federation) as loopback:
        first = loopback.run()
        until(lambda: len(rounds(loopback)) >= 3, 120, loopback)
        loopback.end(["superlink"], signal.SIGKILL)
        first.wait(120)
        loopback.end(["run"])
        before = rounds(loopback)
        assert before[-1]["round"] < 4
        loopback.start_server()
        time.sleep(5)
        # The same as `agree`, but the run is there already.
        agree(loopback, federation, config_of("scaffold", rounds=4))
        assert rounds(loopback)[: len(before)] == before
        queries = json.loads((run_folder(loopback) / "deployment.json").read_text())  # type: ignore[operator]
        assert set(queries["sites"]) == set(NAMES)


@pytest.mark.faults
def test_a_site_with_other_classes_than_agreed_is_told_apart(tmp_path: Path) -> None:
    federation = federate(tmp_path, config_of("fedavg", rounds=1), start_timeout=20.0, round_timeout=60.0)
    own = dict(np.load(tmp_path / "cedar" / "own.npz"))
    own["y"] = np.where(own["y"] == 9, 42, own["y"])
    np.savez(tmp_path / "cedar" / "own.npz", **own)
    with real(federation) as loopback:
        loopback.wait("run", loopback.run(), 180)
        assert sorted(rounds(loopback)[1]["answered"]) == [0, 1]
        assert "cedar did not report its label counts" in loopback.log("run").read_text()
        assert "class '42' is not one of the federation's classes" in loopback.log("cedar").read_text()
