"""Keys, registered and revoked at Flower's own SuperLink; the server's certificate and its authority, made anew."""

import datetime
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.control import ControlHttpClient
from flwr.superlink.main import create_app

from fedskew.cli import app
from fedskew.deploy import LocalFederation, Registry, expires_soon, run_superlink
from fedskew.deploy.keys import check_server_files, write_certificates, write_node_key
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


# The server's certificate and its authority, made anew.


HOSTS = ["fl.example.org", "127.0.0.1", "::1"]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def trusted(server: Path, authority: Path) -> bool:
    """Whether a TLS handshake with these files succeeds, for the server's own name."""
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority)
    ours.load_cert_chain(server / "server.crt", server / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    listener = ours.wrap_bio(there, back, server_side=True)
    caller = theirs.wrap_bio(back, there, server_hostname="fl.example.org")
    try:
        for _ in range(4):
            for side in (caller, listener):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError:
        return False
    return caller.version() is not None


def test_a_renewed_certificate_is_of_a_new_authority_that_no_site_trusts_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, site = tmp_path / "server", tmp_path / "ca.crt"
    write_certificates(server, HOSTS)
    site.write_bytes((server / "ca.crt").read_bytes())
    before, key = certificate(server / "server.crt"), (server / "server.key").read_bytes()
    assert trusted(server, site)

    app(["deploy", "renew", str(tmp_path)], standalone_mode=False)

    said = capsys.readouterr().out
    assert "valid for 3650 days" in said
    assert "ca.crt to every site" in said
    after, kind = certificate(server / "server.crt"), x509.SubjectAlternativeName
    assert after.public_key() != before.public_key()
    assert after.extensions.get_extension_for_class(kind) == before.extensions.get_extension_for_class(kind)
    assert not trusted(server, site)
    site.write_bytes((server / "ca.crt").read_bytes())
    assert trusted(server, site)
    assert stat.S_IMODE((server / "server.key").stat().st_mode) == 0o600
    (aside,) = (server / "replaced").iterdir()
    assert (aside / "server.key").read_bytes() == key
    assert {path.name for path in server.iterdir()} == {"ca.crt", "server.crt", "server.key", "replaced"}


def test_authority_and_certificate_end_together(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS)
    now = datetime.datetime.now(datetime.UTC)
    for name in ("server.crt", "ca.crt"):
        lasts = (certificate(tmp_path / name).not_valid_after_utc - now) / datetime.timedelta(days=1)
        assert lasts == pytest.approx(3650, abs=0.1)
    with pytest.raises(ConfigError, match="expected a certificate"):
        expires_soon(tmp_path / "server.key")


def test_a_damaged_file_of_the_server_is_named_before_it_starts(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS)
    write_certificates(tmp_path / "other", HOSTS)
    options = {"--ssl-keyfile": "server.key", "--ssl-certfile": "server.crt", "--ssl-ca-certfile": "ca.crt"}
    apart = [word for option, name in options.items() for word in (option, str(tmp_path / name))]
    joined = ["--ssl-keyfile", "none", *(f"{option}={tmp_path / name}" for option, name in options.items())]
    for name in options.values():
        whole = (tmp_path / name).read_bytes()
        other = (tmp_path / "other" / "server.key").read_bytes()
        for damaged, arguments in ((whole[:100], apart), (b"", joined), (other, apart)):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(
                ConfigError, match=rf"^{tmp_path}/{name}: expected (a certificate|the private key) .*put"
            ):
                run_superlink(arguments, 1000)
        (tmp_path / name).write_bytes(whole)
    files = [tmp_path / name for name in ("ca.crt", "server.crt", "server.key")]
    assert check_server_files(*files) is None
    files[1].write_bytes(files[1].read_bytes() + files[0].read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"the private key of server\.crt, both undamaged \(\w+\); put them back"):
        check_server_files(*files)


@pytest.mark.parametrize("form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL])
def test_a_servers_key_may_have_a_passphrase(tmp_path: Path, form: serialization.PrivateFormat) -> None:
    write_certificates(tmp_path, HOSTS)
    files = [tmp_path / name for name in ("ca.crt", "server.crt", "server.key")]
    key = serialization.load_pem_private_key(files[2].read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"it")
    files[2].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    assert check_server_files(*files) is None


@pytest.mark.parametrize(
    ("days", "says"),
    [(90, None), (30.2, "expires in 30 days; renew it: fedskew deploy renew FOLDER"), (-1, "has expired")],
)
def test_a_certificate_that_ends_soon_is_said(tmp_path: Path, days: float, says: str | None) -> None:
    now, name = datetime.datetime.now(datetime.UTC), x509.Name([])
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=400))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "server.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    said = expires_soon(tmp_path / "server.crt")
    assert said is None if says is None else says in said
