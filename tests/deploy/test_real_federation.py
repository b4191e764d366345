"""Real processes on local, with TLS and node keys: they train what was simulated, and survive faults."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
from federated import FEDPALS, NAMES, check_models, federate, fedskew, tree, until

from fedskew.deploy import Address, LocalFederation, agree, write_federation
from fedskew.experiment import Config, make_training_loop, resolve

pytestmark = pytest.mark.slow

PATIENCE = 900.0
"""Seconds after which a real federation is taken to hang; a busy machine takes minutes for a round."""


@contextmanager
def real(samples: Path, config: dict[str, Any], *names: tuple[str, ...], **agreed: Any) -> Iterator[LocalFederation]:
    """SuperLink and SuperNodes of a federation of `federate`, in its folder, all ended afterwards."""
    agreed = {"start_timeout": 120.0, "round_timeout": 120.0, **agreed}  # a busy machine takes minutes
    federation, port = federate(samples, config, *names, **agreed), LocalFederation.free_port()
    folder, members = samples / "real", federation.agreement.members
    write_federation(folder, federation.config, federation.agreement, Address("127.0.0.1", port), {"name": "npz"})
    for name in members:
        own: dict[str, Any] = {"server": f"127.0.0.1:{port}", "state": "state"}
        if name in federation.names:
            own["data"] = {"name": "npz", "root": str(samples / name / "own.npz")}
        else:
            own["unlabelled"] = str(samples / "new.npz")
            np.savez(samples / "new.npz", x=np.load(samples / "whole.npz")["x"][:70])
        (folder / "sites" / name / "data.toml").write_text(tomli_w.dumps(own))
        if (key := samples / name / "mask.key").exists():
            shutil.copy(key, folder / "sites" / name)
        agree(folder / "sites" / name / "data.toml", folder / "app")
    os.environ["OMP_NUM_THREADS"] = "1"
    with LocalFederation(folder, port, members) as local:
        yield local


def rewrite(local: LocalFederation, config: dict[str, Any]) -> None:
    (local.folder / "app" / "run.toml").write_text(tomli_w.dumps(resolve(config).tree()))
    for name in local.sites:
        agree(local.folder / "sites" / name / "data.toml", local.folder / "app")


def run_folder(local: LocalFederation) -> Path | None:
    """The newest run's."""
    found = sorted((local.folder / "server" / "runs").glob("*"), key=lambda path: path.stat().st_ctime)
    return found[-1] if found else None


def rounds(local: LocalFederation) -> list[dict[str, Any]]:
    folder = run_folder(local)
    if folder is None or not (folder / "rounds.jsonl").exists():
        return []
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().split("\n")[:-1]]


def pooled(local: LocalFederation, config: dict[str, Any]) -> Config:
    """A config of the samples of all sites."""
    return resolve({**config, "data": {"name": "npz", "root": str(local.folder.parent / "whole.npz")}})


def assert_as_simulated(local: LocalFederation, config: dict[str, Any]) -> None:
    """Train it for real and in the simulator: the same cohorts, weights and model."""
    rewrite(local, config)
    local.wait("run", local.run(), PATIENCE)
    folder = run_folder(local)
    aside = local.folder.parent / f"simulated-{folder.name}"
    simulated = [record.to_dict() for record in make_training_loop(pooled(local, config), 3, aside).run().rounds]
    deployed = rounds(local)
    assert [record["round"] for record in deployed] == [record["round"] for record in simulated]
    for here, there in zip(simulated, deployed, strict=True):
        assert there["cohort"] == here["cohort"]
        assert there["answered"] == here["answered"]
        np.testing.assert_allclose(there["weights"], here["weights"], rtol=1e-6)
    check_models(aside, folder)
    assert (folder / "report.html").exists()


def config_of(method: Any, **training: Any) -> dict[str, Any]:
    return {**tree(method, **training), "target": {"mix": "uniform"}, "evaluation": {"every": 3}}


@pytest.mark.first
def test_scaffold_trains_for_real_what_was_simulated(tmp_path: Path) -> None:
    """The one real federation of `make test`; the next one goes on, in new processes, from what sites kept."""
    config = config_of("scaffold", rounds=1)
    with real(tmp_path, config, ("ash",), evaluation="none") as local:
        assert_as_simulated(local, config)


@pytest.mark.faults
def test_scaffold_trains_at_two_sites_in_turn_what_was_simulated(tmp_path: Path) -> None:
    """One of two sites in each of three rounds: one of them goes on from the state that it kept."""
    config = config_of("scaffold", participation=0.5)
    with real(tmp_path, config, ("ash", "birch"), evaluation="none") as local:
        assert_as_simulated(local, config)


@pytest.mark.faults
def test_other_methods_train_for_real_what_was_simulated(tmp_path: Path) -> None:
    with real(tmp_path, config_of("fedavg")) as local:
        assert_as_simulated(local, config_of("fedavg", rounds=1))
        assert_as_simulated(local, config_of("fedentopt+fedla", rounds=2, participation=0.67))
        assert_as_simulated(local, config_of(FEDPALS, rounds=2))
        assert_as_simulated(local, config_of("fedvls", rounds=2, participation=0.67))


def kill(local: LocalFederation, name: str, how: signal.Signals) -> None:
    """A signal to a site's SuperNode and to all that it started."""
    leader = psutil.Process(local.processes[name].pid)
    for process in [*leader.children(recursive=True), leader]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(how)


def is_back(local: LocalFederation) -> bool:
    """Start birch again until the SuperLink, which refuses its key while it counts as online, accepts it."""
    if local.processes["birch"].poll() is not None:
        local.start_site("birch")
        time.sleep(5)
    return 1 in rounds(local)[-1]["answered"]


@pytest.mark.faults
def test_a_site_killed_in_mid_round_costs_its_update_and_may_rejoin(tmp_path: Path) -> None:
    with real(tmp_path, config_of("scaffold", rounds=40)) as local:
        run = local.run()
        until(lambda: len(rounds(local)) >= 2, PATIENCE, local.log("run"))
        time.sleep(1.5)  # round 2 has been asked for
        kill(local, "birch", signal.SIGKILL)
        until(lambda: 1 not in rounds(local)[-1]["answered"], PATIENCE, local.log("run"))
        lost = rounds(local)[-1]
        assert sorted(lost["answered"]) == [0, 2]
        deployment = lost["deployment"]
        assert "birch" in {*deployment["failed"], *deployment["silent"], *deployment["offline"]}
        local.processes["birch"].wait(10)
        until(lambda: is_back(local), PATIENCE, local.log("run"))
        assert run.poll() is None


@pytest.mark.faults
def test_a_site_that_never_answers_is_waited_for_only_so_long(tmp_path: Path) -> None:
    with real(tmp_path, config_of("fedavg", rounds=40), start_timeout=300.0, round_timeout=40.0) as local:
        run = local.run()
        until(lambda: len(rounds(local)) >= 2, PATIENCE, local.log("run"))
        kill(local, "cedar", signal.SIGSTOP)
        try:
            until(lambda: rounds(local)[-1]["deployment"]["silent"] == ["cedar"], PATIENCE, local.log("run"))
            silent = next(record for record in rounds(local)[1:] if record["deployment"]["silent"] == ["cedar"])
            assert sorted(silent["answered"]) == [0, 1]
            assert 38 < silent["seconds"] < 80
        finally:
            kill(local, "cedar", signal.SIGCONT)
        until(lambda: 2 in rounds(local)[-1]["answered"], PATIENCE, local.log("run"))
        assert run.poll() is None


@pytest.mark.faults
def test_all_gone_leaves_the_model_waits_and_says_so(tmp_path: Path) -> None:
    with real(tmp_path, config_of("fedavg", rounds=5)) as local:
        run = local.run()
        until(lambda: len(rounds(local)) >= 2, PATIENCE, local.log("run"))
        local.end(list(NAMES))
        waits = "no site is connected; waiting after round"
        until(lambda: waits in local.log("run").read_text(), PATIENCE, local.log("run"))
        played = len(rounds(local))
        time.sleep(6)
        assert len(rounds(local)) == played
        for name in NAMES:
            local.start_site(name)
        assert run.wait(PATIENCE) in (0, 4)  # 4 where they went while a round was played, which then took no step
        assert [record["round"] for record in rounds(local)] == [0, 1, 2, 3, 4, 5]
        assert sorted(rounds(local)[-1]["answered"]) == [0, 1, 2]


@pytest.mark.faults
def test_superlink_and_serverapp_killed_and_started_again_go_on_at_their_round(tmp_path: Path) -> None:
    with real(tmp_path, config_of("scaffold", rounds=4)) as local:
        first = local.run()
        until(lambda: len(rounds(local)) >= 3, PATIENCE, local.log("run"))
        local.end(["superlink"], signal.SIGKILL)
        assert first.wait(PATIENCE) == 3  # cut short
        local.end(["run"])
        before = rounds(local)
        assert before[-1]["round"] < 4
        local.start_server()
        time.sleep(5)
        # The run is resumed, and agrees with one that never stopped.
        assert_as_simulated(local, config_of("scaffold", rounds=4))
        assert rounds(local)[: len(before)] == before
        queries = json.loads((run_folder(local) / "deployment.json").read_text())  # type: ignore[operator]
        assert set(queries["sites"]) == set(NAMES)


LIAR = """
from pathlib import Path

from flwr.app import Array
from flwr.clientapp import ClientApp

from fedskew.deploy import site_app
from fedskew.deploy._arrays import unpack

honest = site_app(Path(__file__).parents[1])
site = ClientApp()


@site.query()
@site.evaluate()
def answer(message, context):
    return honest(message, context)


@site.train()
def train(message, context):
    answer = honest(message, context)
    if "sites/birch" in str(context.node_config["data"]) and Path(LIES).exists():
        answer.content = unpack(answer.content)
        arrays = answer.content["arrays"]
        for name in list(arrays):
            arrays[name] = Array(1e30 * arrays[name].numpy())
    return answer
"""


@pytest.mark.faults
def test_a_ruined_model_is_undone_and_the_statuses_of_run_sh_are_true(tmp_path: Path) -> None:
    lenient = {"norm_action": "report", "norm_limit": 1e300, "undone_limit": 1}  # the watch alone stands in the way
    config = config_of("fedavg", rounds=2, steps=1) | {"evaluation": {"every": 1}}
    lies = tmp_path / "lies"
    lies.touch()
    with real(tmp_path, config, **lenient) as local:
        code = local.folder / "app" / "federation" / "site.py"
        code.write_text(f"LIES = {str(lies)!r}\n{LIAR}")
        rewrite(local, config)
        assert local.run().wait(PATIENCE) == 1
        undone = rounds(local)[1]["deployment"]["undone"]
        assert (undone["back_to"], undone["left_out"]) == (0, ["birch"])
        assert "the model was ruined in rounds 1, and is again that of round 0; left out: birch" in local.last_message(
            "run"
        )
        folder = run_folder(local)
        status, said = fedskew("deploy", "status", folder)
        assert (status, "since round 1" in said) == (0, True)

        lies.unlink()  # what the operator found, and had mended
        assert fedskew("deploy", "readmit", folder, "birch")[0] == 0
        assert local.run().wait(PATIENCE) == 0
        assert [sorted(record["answered"]) for record in rounds(local)[2:]] == [[0, 1, 2]]
        assert rounds(local)[2]["deployment"]["quarantine"] == {}

        with (local.folder / "app" / "run.toml").open("a") as file:
            file.write("\n[trainning]\n")
        assert local.run().wait(PATIENCE) == 2
        assert "trainning" in local.last_message("run")


@pytest.mark.faults
def test_a_target_site_without_labels_answers_and_does_not_train(tmp_path: Path) -> None:
    config = config_of("fedavg", rounds=2) | {"target": {"mix": "estimate", "warmup": 1, "every": 1}}
    told = {"target_site": "dogwood", "start_timeout": 300.0, "round_timeout": 300.0}
    with real(tmp_path, config, ("ash",), **told) as local:
        local.wait("run", local.run(), PATIENCE)
        records = rounds(local)
        status, said = fedskew("deploy", "status", local.folder / "server")
    assert [record["answered"] for record in records[1:]] == [[0], [0]]
    assert [record["target"]["samples"] for record in records[1:]] == [70, 70]
    assert status == 0
    assert "by 70 samples of the target site" in said


@pytest.mark.faults
def test_a_site_with_other_classes_than_agreed_is_left_out(tmp_path: Path) -> None:
    with real(tmp_path, config_of("fedavg", rounds=1), start_timeout=300.0, round_timeout=300.0) as local:
        own = dict(np.load(tmp_path / "cedar" / "own.npz"))
        own["y"] = np.where(own["y"] == 9, 42, own["y"])
        np.savez(tmp_path / "cedar" / "own.npz", **own)  # after it agreed
        local.wait("run", local.run(), PATIENCE)
        assert sorted(rounds(local)[1]["answered"]) == [0, 1]
        assert "label counts: no answer of cedar" in local.log("run").read_text()
        assert "class '42' is not one of the federation's classes" in local.log("cedar").read_text()


@pytest.mark.faults
def test_an_app_is_run_only_while_its_site_agrees(tmp_path: Path) -> None:
    with real(tmp_path, config_of("fedavg", rounds=40), evaluation="none", start_timeout=300.0) as local:
        code, ran = local.folder / "app" / "federation" / "site.py", tmp_path / "ran"
        code.write_text(f"open({str(ran)!r}, 'w').close()\n{code.read_text()}")
        run = local.run()
        until(lambda: "not agreed: app" in local.log("run").read_text(), PATIENCE, local.log("run"))
        assert "the server sent another app than this site agreed to; it is not run" in local.log("birch").read_text()
        offered = local.folder / "sites" / "birch" / "offered"
        assert (offered / "federation" / "site.py").read_text() == code.read_text()
        assert not ran.exists()
        for name in NAMES:
            agree(local.folder / "sites" / name / "data.toml", local.folder / "app")
        until(lambda: len(rounds(local)) >= 2, PATIENCE, local.log("run"))
        assert sorted(rounds(local)[1]["answered"]) == [0, 1, 2]
        assert ran.exists()
        assert not offered.exists()

        agreed = local.folder / "sites" / "birch" / "agreed.toml"
        agreed.rename(tmp_path / "withdrawn.toml")  # in the midst of the run, whose app its SuperNode has
        said = {"birch": "not agreed: app; its own log says more"}  # by its SuperNode: fedskew's code says "nothing"
        until(lambda: rounds(local)[-1]["deployment"]["failed"] == said, PATIENCE, local.log("run"))
        assert "this site has agreed to nothing yet" in local.log("birch").read_text()
        (tmp_path / "withdrawn.toml").rename(agreed)
        until(lambda: 1 in rounds(local)[-1]["answered"], PATIENCE, local.log("run"))
        assert run.poll() is None


@pytest.mark.faults
def test_a_server_restored_from_its_backup_goes_on(tmp_path: Path) -> None:
    """As docs/operations.md says: stop, copy; lose the machine; put the copy in its place, start."""
    with real(tmp_path, config_of("scaffold", rounds=4)) as local:
        first = local.run()
        until(lambda: len(rounds(local)) >= 3, PATIENCE, local.log("run"))
        local.end(["superlink"])
        first.wait(PATIENCE)
        local.end(["run"])
        server, backup = local.folder / "server", tmp_path / "backup.tar.gz"
        subprocess.run(["tar", "-C", local.folder, "-czpf", backup, "server", "app"], check=True)
        before = rounds(local)
        assert before[-1]["round"] < 4
        shutil.rmtree(server)
        shutil.rmtree(local.folder / "app")
        subprocess.run(["tar", "-C", local.folder, "-xzpf", backup], check=True)
        assert (server / "server.key").stat().st_mode & 0o077 == 0
        local.start_server()  # the sites are registered, and come back by themselves
        time.sleep(5)
        assert_as_simulated(local, config_of("scaffold", rounds=4))
        assert rounds(local)[: len(before)] == before
