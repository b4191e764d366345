"""Real processes on loopback: `fedskew deploy local` from beginning to end, and which nodes are refused."""

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from federated import until

import fedskew
from fedskew.deploy import Address, Agreement, LocalFederation, SiteReport, write_federation
from fedskew.deploy.keys import write_certificates, write_node_key
from fedskew.errors import RunError
from fedskew.experiment import read
from fedskew.papers import config_file

LOCAL = read(config_file("local"))
AGREED = {"sites": ["north", "south"], "classes": [str(digit) for digit in range(10)], "shape": [1, 8, 8]}


@contextmanager
def deploy_local(folder: Path, rounds: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The command, with two sites; interrupted where a test leaves it running."""
    words = ["deploy", "local", str(folder), "--sites", "2", "--set", f"training.rounds={rounds}", *more]
    with subprocess.Popen(
        [sys.executable, "-m", "fedskew", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)  # nothing to a process that has ended


def running(folder: Path) -> list[Any]:
    """Processes of this machine that were started for a federation's folder."""
    processes = psutil.process_iter(["environ", "cmdline"])
    return [one.info["cmdline"] for one in processes if str(folder) in str(one.info["environ"])]


def assert_ended(folder: Path, process: subprocess.Popen[str], said: str, status: int, words: str) -> None:
    assert (process.returncode, words in said, "Traceback" in said, running(folder)) == (status, True, False, []), said


@pytest.mark.faults  # test_real_federation.py is the one that always runs
def test_a_whole_federation_in_one_command(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    with deploy_local(folder, rounds=1) as process:
        said, _ = process.communicate(timeout=900)
    assert_ended(folder, process, said, 0, "accuracy on the sites' own test samples")
    (page,) = folder.glob("server/runs/*/report.html")
    assert str(page) in said
    record = json.loads((page.parent / "rounds.jsonl").read_text().split("\n")[1])
    assert record["answered"] == [0, 1]
    assert not any(record["deployment"][kind] for kind in ("refused", "failed", "offline", "silent", "out_of_line"))
    # Sites joined with their keys, over TLS: the registrations are of the two keys, and the port speaks nothing else.
    superlink = (folder / "logs" / "superlink.log").read_text()
    assert "https://127.0.0.1" in superlink
    assert "authentication is disabled" not in superlink


@pytest.mark.faults
def test_four_sites_report_on_themselves_after_the_last_round(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    with deploy_local(folder, 2, "--sites", "4", "--set", "method.personal.name=ditto") as process:
        said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said
    for place in sorted((folder / "sites").glob("*/data.toml")):
        made = SiteReport.write(place)
        assert [row.row for row in made.rows] == ["alone", "common", "personal"]
        assert made.model is not None
        assert fedskew.load(made.model).classes == tuple(map(str, range(10)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """A server at which the keys of two sites are registered, neither of which is connected."""
    folder, port = tmp_path_factory.mktemp("federation") / "fed", LocalFederation.free_port()
    table = {"name": "folder", "root": "images"}
    write_federation(folder, LOCAL, Agreement.resolve(AGREED), Address("127.0.0.1", port), table)
    federation = LocalFederation(folder, port, ("north", "south"))
    try:
        federation.start_server()
        federation.wait("register", federation.start("register", "server/register.sh"), 120.0)
        yield federation
    finally:
        federation.stop()


def join(federation: LocalFederation, name: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a SuperNode with these options."""
    script = federation.folder / f"{name}.sh"
    words = [
        "flower-supernode",
        "--superlink",
        f"127.0.0.1:{federation.port}",
        "--port",
        str(LocalFederation.free_port()),
        *options,
    ]
    home = federation.folder / name
    script.write_text(
        f"export FLWR_HOME={home} FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1\n" + " ".join(words)
    )
    return federation.start(name, script.name)


def _script(federation: LocalFederation, name: str, words: str) -> str:
    (federation.folder / f"{name}.sh").write_text(words + "\n")
    return f"{name}.sh"


def joined(federation: LocalFederation) -> int:
    """How often a node was accepted."""
    return federation.log("superlink").read_text().count("[Fleet.ActivateNode]")


@pytest.mark.faults
def test_a_registered_site_is_accepted_again_and_again(server: LocalFederation) -> None:
    for times in (1, 2):
        server.start_site("north")
        until(lambda: joined(server) == times, 200)  # noqa: B023
        time.sleep(2)  # the server logs it before the site knows, and a site that does not know does not sign off
        server.end(["north"])


@pytest.mark.faults
def test_a_revoked_site_is_out_and_says_why(server: LocalFederation) -> None:
    before = joined(server)
    process = server.start_site("south")
    until(lambda: joined(server) > before, 200)
    time.sleep(2)
    server.start("revoke", _script(server, "revoke", f"fedskew deploy revoke {server.folder} south")).wait(200)
    assert "south: revoked" in server.log("revoke").read_text()
    assert process.wait(200) == 2
    said = server.log("south").read_text()
    assert "no longer accepts this site's key" in said.splitlines()[-1]  # one line, and nothing after it
    assert "Traceback" not in said
    assert server.start("register", "server/register.sh").wait(200) == 2
    assert "its key was revoked" in server.last_message("register")
    assert server.start_site("south").wait(200) == 2
    said = server.log("south").read_text()
    assert "does not accept this site's key" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.faults
@pytest.mark.parametrize(
    ("authority", "key", "says"),
    [
        ("server", "stranger", "2004"),  # a key that is not registered
        ("server", None, "2001"),  # none
        ("impostor", "sites/south", "CERTIFICATE_VERIFY_FAILED"),  # a server whose certificate it does not know
    ],
)
def test_a_node_that_does_not_belong_is_refused(
    server: LocalFederation, authority: str, key: str | None, says: str
) -> None:
    if authority == "impostor":
        write_certificates(server.folder / "impostor", ["127.0.0.1"])
    if key == "stranger":
        write_node_key(server.folder / "stranger" / "key")
    before, name = joined(server), f"{authority}-{Path(key or 'keyless').name}"
    by = () if key is None else ("--auth-supernode-private-key", str(server.folder / key / "key"))
    process = join(server, name, "--root-certificates", str(server.folder / authority / "ca.crt"), *by)
    assert process.wait(200) != 0
    assert says in server.last_message(name)
    assert joined(server) == before


@pytest.mark.faults
def test_a_node_without_tls_never_gets_in(server: LocalFederation) -> None:
    before = joined(server)
    join(server, "plain", "--insecure", "--max-wait-time", "8")
    time.sleep(15)
    assert joined(server) == before
    server.end(["plain"])


@pytest.mark.faults
def test_commands_are_taken_from_the_servers_own_machine_only(server: LocalFederation) -> None:
    here = _own_address()

    def asked(path: str, source: str) -> int:
        context = ssl.create_default_context(cafile=server.folder / "server" / "ca.crt")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=10, context=context, source_address=(source, 0)
        )
        connection.request("POST", path, body=b"", headers={"X-Forwarded-For": "127.0.0.1"})
        status = connection.getresponse().status
        connection.close()
        return status

    for path in ("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
        assert asked(path, here) == 403
        assert asked(path, "127.0.0.1") != 403
    assert asked("/v1/fleet/register-node", here) != 403


@pytest.mark.faults
def test_half_a_gigabyte_without_a_key_is_not_taken(server: LocalFederation) -> None:
    process = psutil.Process(server.processes["superlink"].pid)
    before = process.memory_info().rss
    context = ssl.create_default_context(cafile=server.folder / "server" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    headers = {"content-type": "application/protobuf", "content-length": str(500_000_000)}
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", "/v1/fleet/push-messages", (bytes(10**6) for _ in range(500)), headers)
    with suppress(ConnectionResetError):
        assert connection.getresponse().status == 413
    connection.close()
    assert process.memory_info().rss - before < 20_000_000  # without the limit, 1.1 GB


@pytest.mark.faults
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_stops_it_stops_all_of_it(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "trial"
    with deploy_local(folder, rounds=50) as process:
        until(lambda: any(folder.glob("server/runs/*/rounds.jsonl")), 600)
        assert running(folder)
        process.send_signal(how)
        said, _ = process.communicate(timeout=200)
    assert_ended(folder, process, said, 130, "stopped, server and sites too")


@pytest.mark.faults
def test_a_run_that_stands_still_ends_it_with_status_4(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    with deploy_local(folder, 6, "--set", "training.lr=1000.0") as process:
        said, _ = process.communicate(timeout=900)
    assert_ended(folder, process, said, 4, "rounds 1 and 2 left the model as it was: ")


@pytest.mark.faults
def test_a_site_that_dies_ends_it_with_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    with deploy_local(folder, rounds=50) as process:
        until(lambda: any(folder.glob("server/runs/*/rounds.jsonl")), 600)
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words = " ".join(child.cmdline())
                if "deploy supernode" in words and "sites/site-1/" in words:
                    child.kill()
        said, _ = process.communicate(timeout=200)
    assert_ended(folder, process, said, 2, "site-1 ended by SIGKILL")


@pytest.mark.faults
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        table = {"name": "folder", "root": "images"}
        write_federation(folder, LOCAL, Agreement.resolve(AGREED), Address("127.0.0.1", port), table)
        with pytest.raises(RunError, match="the SuperLink did not start: .*address already in use"):
            LocalFederation(folder, port, ("north", "south")).__enter__()


def _own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by this
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address: str = one.getsockname()[0]
    return address
