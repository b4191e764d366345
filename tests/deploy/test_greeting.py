"""What a site says of its server's clock and certificate, against a real TLS server whose clock is off."""

import base64
import datetime
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from federated import federate, tree
from flwr.app import ConfigRecord, Message
from flwr.common.config import parse_config_args

from fedskew import __version__
from fedskew.cli import app
from fedskew.deploy import LocalFederation, ServerCheck, run_supernode
from fedskew.deploy.keys import check_node_key, write_certificates, write_node_key
from fedskew.deploy.supernode import node_config
from fedskew.errors import ConfigError, RunError


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    write_certificates(folder, ["127.0.0.1"])
    return folder


@contextmanager
def server(keys: Path, off: float | None) -> Iterator[str]:
    """The address of a server whose clock is `off` seconds ahead of ours; None: it tells no time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(404)
            if off is not None:
                now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=off)
                self.send_header("date", format_datetime(now, usegmt=True))
            self.send_header("content-length", "0")
            self.end_headers()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            thread.join()


def site(folder: Path, keys: Path, address: str) -> Path:
    (folder / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    data = folder / "data.toml"
    data.write_text(f'server = "{address}"\n[data]\nname = "digits"\n')
    return data


@pytest.mark.parametrize("address", ["localhost", "[zz::1]:9092", "-\u00e4--.x:9092"])
def test_what_is_no_address_is_refused(keys: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="server: expected its address and port"):
        ServerCheck.of_site(site(tmp_path, keys, address))


@pytest.mark.parametrize(("off", "side"), [(-20.0, "ahead of"), (400.0, "behind")])
def test_a_clock_that_flower_would_refuse_is_told_before(keys: Path, tmp_path: Path, off: float, side: str) -> None:
    with server(keys, off) as address, pytest.raises(RunError, match="Flower refuses a site that is more than") as why:
        ServerCheck.of_site(site(tmp_path, keys, address))
    seconds = range(int(abs(off)) - 2, int(abs(off)) + 3)  # an answer tells whole seconds
    assert any(f"clock is {second} s {side} the server's" in str(why.value) for second in seconds)


@pytest.mark.parametrize(("off", "notes"), [(0.0, 0), (200.0, 1)])
def test_a_clock_that_is_off_is_said(keys: Path, tmp_path: Path, off: float, notes: int) -> None:
    with server(keys, off) as address:
        assert len(ServerCheck.of_site(site(tmp_path, keys, address))) == notes


@pytest.mark.parametrize(
    ("ahead", "unsure", "refused"),
    [(4.9, 0.0, False), (5.0, 0.0, True), (6.0, 1.5, False), (-304.9, 0.0, False), (-305.0, 0.0, True)],
)
def test_the_window_is_flowers(ahead: float, unsure: float, refused: bool) -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE) == (5, 300)
    assert (ServerCheck(ahead, unsure, 800.0).refusal() is not None) is refused


def test_a_certificate_that_ends_soon_is_said() -> None:
    assert ServerCheck(0.0, 1.0, 61.0).notes() == []
    (note,) = ServerCheck(0.0, 1.0, 59.0).notes()
    assert "expires in 59 days" in note
    assert "deploy renew" in note


def test_what_answers_but_is_not_the_server_is_refused(keys: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path / "other", ["127.0.0.1"])
    with server(keys, 0.0) as address, pytest.raises(RunError, match="this federation.*, and ask the server's"):
        ServerCheck.of_site(site(tmp_path, tmp_path / "other", address))
    with server(keys, None) as address, pytest.raises(RunError, match="tells no time"):
        ServerCheck.of_site(site(tmp_path, keys, address))
    data = site(tmp_path, keys, "127.0.0.1:1")
    (note,) = ServerCheck.of_site(data)  # it may not run yet
    assert "can't be reached" in note
    for damaged in ((keys / "ca.crt").read_bytes()[:100], b""):
        (tmp_path / "ca.crt").write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/ca\.crt: no certificates .*; put back .* sent last$"):
            ServerCheck.of_site(data)
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        ServerCheck.of_site(data)


def test_a_supernode_does_not_start_with_a_clock_that_is_refused(keys: Path, tmp_path: Path) -> None:
    with server(keys, -20.0) as address:
        data = site(tmp_path, keys, address)
        with pytest.raises(RunError, match="ahead of the server's, and Flower refuses"):
            app(["deploy", "supernode", str(data), "--port", "9094"], standalone_mode=False)


def test_a_site_that_is_started_twice_is_told_that_its_port_is_in_use(keys: Path, tmp_path: Path) -> None:
    data = site(tmp_path, keys, f"127.0.0.1:{LocalFederation.free_port()}")
    write_node_key(tmp_path / "key")
    with socket.create_server(("0.0.0.0", 0)) as other:
        words = [sys.executable, "-m", "fedskew", "deploy", "supernode", data, "--port", str(other.getsockname()[1])]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    *_, last = done.stderr.splitlines()
    assert (done.returncode, last.startswith(f"fedskew: {tmp_path}: the lines above say")) == (2, True)
    assert "address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("said", ["", 'server = "localhost"\n', 'server = "https://localhost:9092"\n'])
def test_a_file_that_names_no_server_is_one_line(tmp_path: Path, said: str) -> None:
    (tmp_path / "data.toml").write_text(f"{said}[data]\n")
    with pytest.raises(ConfigError, match='server = "fl.example.org:9092"'):
        run_supernode(tmp_path / "data.toml", [])
    with pytest.raises(ConfigError, match="can't be read"):
        run_supernode(tmp_path / "none.toml", [])


def test_a_site_without_its_key_is_one_line(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = site(tmp_path, keys, "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"key: is missing; .*put it back, or make another"):
        run_supernode(data, [])
    for damaged in ((keys / "server.key").read_bytes(), b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3", b""):
        (tmp_path / "key").write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/key: no ECDSA key .* can be read from it; put it back"):
            run_supernode(data, [])
    monkeypatch.setattr("fedskew.deploy.supernode.run_agreed_only", lambda _: 1 / 0)  # where Flower is about to start
    for elsewhere in (["--auth-supernode-private-key", "/srv/key"], ["--auth-supernode-private-key=/srv/key"]):
        with pytest.raises(ZeroDivisionError):
            run_supernode(data, elsewhere)


def test_a_key_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    write_node_key(key)
    first, *body, last = key.read_bytes().splitlines(keepends=True)
    damaged = base64.b64decode(b"".join(body)).replace(b"\0\0\0\x61\x04", b"\0\0\0\x61\x02")  # the form of its points
    key.write_bytes(first + base64.encodebytes(damaged) + last)
    with pytest.raises(ConfigError, match="no ECDSA key without a passphrase can be read from it"):
        check_node_key(key)
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))
    with pytest.raises(ConfigError, match="key: the user who starts the site may not read it"):
        check_node_key(key)


@pytest.mark.parametrize("folder", ["plain", "a b=c", "Föd 😀", "it's", 'say "hi"', "back\\slash", "\x7f"])
def test_flower_reads_the_place_of_the_data_whatever_the_folder_is_called(folder: str) -> None:
    data = Path("/srv") / folder / "data.toml"
    assert parse_config_args([node_config(data)]) == {"data": str(data)}


# One side is upgraded first: a site of another version is left out with a line on both sides, and comes back.


VERSION = "fedskew-version"


def test_every_question_tells_the_servers_version(tmp_path: Path) -> None:
    _, grid = federate(tmp_path, tree("fedavg", rounds=1)).played()
    assert {message.metadata.message_type for message in grid.asked} >= {"query", "train", "evaluate"}
    assert {dict(message.content["config"])[VERSION] for message in grid.asked} == {__version__}


@pytest.mark.slow
def test_a_site_of_another_version_is_left_out_and_both_sides_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def upgraded(name: str, question: Message) -> None:
        """As a site finds it whose own fedskew is older than the server's, in round 1."""
        config = question.content["config"]
        assert isinstance(config, ConfigRecord)
        if name == "birch" and config["server-round"] == 1:
            config[VERSION] = "99.0"

    federation = federate(tmp_path, tree("fedavg", rounds=2))
    grid = federation.grid()
    grid.mislead = upgraded
    records = federation.play(grid=grid)
    assert [sorted(record["answered"]) for record in records[1:]] == [[0, 2], [0, 1, 2]]
    assert f"another version: it runs fedskew {__version__}" in json.dumps(records[1]["deployment"])
    assert f"the server runs fedskew 99.0, and this site {__version__}; install the server's version" in caplog.text
