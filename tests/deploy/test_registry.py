"""Keys at the SuperLink, registered, registered again and revoked, at Flower's own SuperLink in this process."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.superlink.main import create_app

from fedskew.cli import app
from fedskew.deploy import LocalFederation, Registry
from fedskew.deploy.keys import write_certificates, write_node_key
from fedskew.errors import ConfigError, RunError

SITES = ("north", "south")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlHttpClient]:
    """The command's client of a SuperLink that runs in a thread."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    port = LocalFederation.free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(), host="127.0.0.1", port=port, ws="none", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        with ControlHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, interceptors=[]) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    for name in SITES:
        write_node_key(folder / "sites" / name / "key")
    (folder / "server").mkdir()
    return folder


def registered(client: ControlHttpClient) -> dict[str, int]:
    nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {node.name: node.node_id for node in nodes if node.status != "unregistered"}


def new_key(folder: Path, name: str) -> None:
    for half in ("key", "key.pub"):
        (folder / "sites" / name / half).unlink()
    write_node_key(folder / "sites" / name / "key")


def test_registering_again_says_so_and_changes_nothing(client: ControlHttpClient, folder: Path) -> None:
    assert Registry(client, folder).register(SITES[:1]) == ["north: registered"]
    first = registered(client)
    assert Registry(client, folder).register(SITES) == ["north: registered already", "south: registered"]
    assert Registry(client, folder).register(SITES) == ["north: registered already", "south: registered already"]
    assert registered(client)["north"] == first["north"]
    assert set(registered(client)) == set(SITES)
    public = folder / "sites" / "north" / "key.pub"
    public.write_text(public.read_text().strip() + " admin@north\r\n")  # a comment, and another line's end
    assert Registry(client, folder).register(SITES)[0] == "north: registered already"


@pytest.mark.slow
def test_a_revoked_key_is_out_for_good_and_its_site_may_come_with_another(
    client: ControlHttpClient, folder: Path
) -> None:
    Registry(client, folder).register(SITES)
    said = Registry(client, folder).revoke("north")
    assert said.startswith("north: revoked")
    assert "\n" not in said
    assert set(registered(client)) == {"south"}
    with pytest.raises(ConfigError, match="north: its key was revoked; have the site make another"):
        Registry(client, folder).register(SITES)
    with pytest.raises(ConfigError, match="north: no key is registered for this site; registered are: south"):
        Registry(client, folder).revoke("north")
    new_key(folder, "north")
    assert Registry(client, folder).register(SITES) == ["north: registered", "south: registered already"]


def test_another_key_under_a_name_is_a_decision_of_the_operator(client: ControlHttpClient, folder: Path) -> None:
    Registry(client, folder).register(SITES)
    before = registered(client)
    new_key(folder, "north")
    with pytest.raises(ConfigError, match=r"another key is registered .* fedskew deploy revoke .* north"):
        Registry(client, folder).register(SITES)
    assert registered(client) == before
    Registry(client, folder).revoke("north")  # the old one
    assert Registry(client, folder).register(SITES)[0] == "north: registered"


@pytest.mark.parametrize("content", [None, b"", b"no key", b"\xff\xfe"])
def test_a_key_that_cannot_be_read_registers_nobody(
    client: ControlHttpClient, folder: Path, content: bytes | None
) -> None:
    public = folder / "sites" / "south" / "key.pub"
    public.unlink()
    if content is not None:
        public.write_bytes(content)
    with pytest.raises(ConfigError, match=r"south/key\.pub"):
        Registry(client, folder).register(SITES)
    assert registered(client) == {}


def test_without_a_server_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "deploy.toml").write_text('sites = ["north"]\nclasses = ["a", "b"]\nshape = [4]\n')
    monkeypatch.chdir(folder / "app")  # as register.sh does, so that ".." is elsewhere for who runs it
    with pytest.raises(ConfigError, match=f"start it: sh {folder}/server/superlink.sh"):
        app(["deploy", "register", ".."], standalone_mode=False)
    write_certificates(folder / "server", ["127.0.0.1"])
    settings = folder / "server" / "flower" / "config.toml"
    settings.parent.mkdir()
    port = LocalFederation.free_port()
    settings.write_text(
        f'[superlink.fedskew]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{folder}/server/ca.crt"\n'
    )
    with pytest.raises(RunError, match=r"can't be reached .* start it: sh .*superlink\.sh"):
        app(["deploy", "revoke", str(folder), "north"], standalone_mode=False)
