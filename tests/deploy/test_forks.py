"""A site answers each message by a fork of a process that is ready, which Flower's SuperNode wakes."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec.executor import ExecutionSpec

from fedskew.deploy import _forks
from fedskew.deploy import supernode as site

SPEC = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", "secret", True, None, False, None, False, 1)


@pytest.fixture
def supernode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's module, which is as it was afterwards."""
    module: Any = importlib.import_module("flwr.supernode.start_client_internal")
    for name in ("_pull_and_store_message", "time", "subprocess"):
        monkeypatch.setattr(module, name, getattr(module, name))
    return module


def test_a_message_is_noticed_soon_and_one_byte_says_so(supernode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    now = iter([0.0, 0.0, 10.0, 100.0, 200.0, 300.0, 400.0])
    found = iter([None, None, None, 7, 8, 9, 10])
    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=pauses.append)
    monkeypatch.setattr(site, "time", clock)
    supernode._pull_and_store_message = lambda **_: next(found)
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process that ends after one byte, as if it were killed then."""
        assert command[0] == sys.executable
        assert command[-3:] == ["--insecure", "--runtime-api-address", "127.0.0.1:1"]
        started.append(subprocess.Popen(["head", "-c", "1"], stdout=subprocess.PIPE, **options))
        return started[-1]

    monkeypatch.setattr(site, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    site.answer_at_once({8: b"t"})
    supernode.subprocess.Popen(["flower-superexec", "--insecure", "--runtime-api-address", "127.0.0.1:1"])
    assert supernode._pull_and_store_message(state=None) == 7
    assert pauses == [0.1, 1.0, 3.0]  # of 0, 10 and 100 s since the last reply
    supernode.time.sleep(0.5)
    assert pauses[-1] == 0.1
    assert started[0].communicate(timeout=10)[0] == b"."
    assert supernode._pull_and_store_message(state=None) == 8
    assert started[1].communicate(timeout=10)[0] == b"t"  # as it was started again; the run's word
    supernode._pull_and_store_message(state=None)
    monkeypatch.setattr(site, "_installed", lambda: "an upgrade")
    supernode._pull_and_store_message(state=None)
    assert len(started) == 4
    assert started[3].communicate(timeout=10)[0] == b"."


def test_without_a_superexec_of_flower_s_nothing_is_started(supernode: Any) -> None:
    supernode._pull_and_store_message = lambda **_: 7
    site.answer_at_once({})
    assert supernode._pull_and_store_message() == 7


def test_a_message_is_answered_in_a_fork_that_has_nothing_of_its_parent_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(**told: Any) -> None:
        state = [
            os.read(0, 1) == b"",
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            exit_handler.registered_exit_handlers == [],
            told["token"] == "secret",
            told["parent_pid"] == parent,
        ]
        (tmp_path / "state").write_text(repr(state))
        sys.exit(3)

    parent, handler = os.getpid(), object()
    monkeypatch.setattr(_forks, "run_clientapp", run)
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [handler])
    _forks.Forks().launch(SPEC)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 3
    assert (tmp_path / "state").read_text() == "[True, True, True, True, True]"
    assert exit_handler.registered_exit_handlers == [handler]


@pytest.mark.parametrize(("model", "imported"), [("transformers:tiny", True), ("mlp3", False)])
def test_transformers_is_imported_before_it_forks_where_an_app_s_network_is_of_it(
    model: str, imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, found = site.wakes_by({"run.toml": f'name = "run"\n\n[model]\nname = "{model}"\n'.encode()}), []
    here = SimpleNamespace(waitpid=lambda *_: (0, 0), WNOHANG=os.WNOHANG, read=lambda *_: word)
    monkeypatch.setattr(_forks, "os", here)
    monkeypatch.setattr(_forks, "select", SimpleNamespace(select=lambda *_: ([0], [], [])))
    monkeypatch.setattr(_forks, "importlib", SimpleNamespace(import_module=found.append))
    _forks.Forks().reconcile()
    assert found == ["transformers.models.auto.modeling_auto"] * imported


def test_numba_is_loaded_before_it_forks_and_starts_no_thread() -> None:
    seen = "print('numba' in sys.modules, len(os.listdir('/proc/self/task')))"
    code = f"import os, sys; from fedskew.deploy import _forks as f; f.flower_superexec = lambda: {seen}; f.main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1"]


@pytest.mark.faults
def test_it_ends_with_the_supernode_that_holds_its_input() -> None:
    command = [sys.executable, "-P", "-c", "from fedskew.deploy._forks import main; main()"]
    flower = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [*command, "--insecure", "--runtime-api-address", "127.0.0.1:1"],
        input=b"",
        env={**os.environ, **flower},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0
