"""Keys and certificates: one federation's authority, the server's certificate, sites' keys, and their register.

Private keys are files that only their owner may read (0600). None is overwritten, but by a renewal, which keeps a copy.

The keys of masked sums are apart from those by which sites connect, in the form that OpenSSL writes:

    openssl genpkey -algorithm X25519 -out mask.key                  (PEM, mode 0600; never leaves the site)
    openssl pkey -in mask.key -pubout                                (its middle line goes into deploy.toml)

Since `deploy.toml` is part of the app that each site agreed to, by a hash, the server can't exchange them.
"""

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import shlex
import shutil
import ssl
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

from fedskew.errors import ConfigError, RunError
from fedskew.sums import Key
from fedskew.tables import duration

AUTHORITY, SERVER = (
    x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("fedskew federation", "fedskew server")
)
DAYS = 3650
"""Days for which certificates are valid. Of the authority's key only `ca.crt` is left, so both end together."""

SOON = 60
"""Days before the end of a certificate at which servers and sites begin to say so."""

CONNECTION = "fedskew"
"""The SuperLink's name in Flower's own configuration."""

MASK_KEY = "mask.key"
REVOKED = "revoked-keys"
"""File in the server's folder: a line for each revoked key, in OpenSSH's format, then its site and when."""


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt`, which every site gets, and the server's `server.crt` and `server.key`, valid for these hosts. The
    authority's private key is not kept."""
    names = [_host(host) for host in hosts]
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / "server.key", _private_pem(server, serialization.PrivateFormat.PKCS8))
    (folder / "ca.crt").write_bytes(_sign(AUTHORITY, authority, authority))
    (folder / "server.crt").write_bytes(_sign(SERVER, server, authority, names))


def renew(folder: Path) -> float:
    """Make a new authority, and the server a new key and certificate for the same names; every site needs the `ca.crt`.
    Return the days for which they are valid. The old files are kept in `replaced`; ConfigError where there are none."""
    extensions = _read_certificate(folder / "server.crt").extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    before = folder / "replaced" / _now().strftime("%Y%m%dT%H%M%S.%f")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        write_certificates(Path(made), [str(name.value) for name in names])
        before.mkdir(parents=True)
        for new in sorted(Path(made).iterdir()):
            if (folder / new.name).exists():
                shutil.copy2(folder / new.name, before / new.name)
            new.replace(folder / new.name)
    return _days_left(folder / "server.crt")


def expires_soon(certificate: Path) -> str | None:
    """Say when a certificate, in PEM, expires, if that is within 60 days; None: later."""
    days = _days_left(certificate)
    if days >= SOON:
        return None
    when = f"expires in {duration(86400 * days)}" if days > 0 else "has expired, and sites can't connect"
    return f"{certificate} {when}; renew it: fedskew deploy renew FOLDER"


def check_server_files(authority: Path, certificate: Path, key: Path) -> str | None:
    """Say if a server's certificate expires soon; ConfigError where a file is damaged, or the key another's."""
    _read_certificate(authority)
    said = expires_soon(certificate)
    try:
        if b"ENCRYPTED" not in key.read_bytes():  # else OpenSSL asks for its passphrase when the server starts
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")
    except OSError as error:
        why = f"both undamaged ({getattr(error, 'reason', None) or error.strerror})"
        cure = "put them back, or make all anew: fedskew deploy renew FOLDER"
        raise ConfigError(f"{key}: expected the private key of {certificate.name}, {why}; {cure}") from None
    return said


def check_node_key(path: Path) -> None:
    """Raise ConfigError where a site's key is missing, or none that Flower takes."""
    try:
        if not isinstance(serialization.load_ssh_private_key(path.read_bytes(), None), ec.EllipticCurvePrivateKey):
            raise TypeError("another kind of key")
    except PermissionError:
        raise ConfigError(f"{path}: the user who starts the site may not read it; give it to this user") from None
    except (OSError, ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "is missing" if missing else "no ECDSA key without a passphrase can be read from it"
        how = "(ssh-keygen -t ecdsa -b 384 -N '' -f key), of which the server's operator registers key.pub"
        raise ConfigError(f"{path}: {why}; put it back, or make another {how}") from None


def write_node_key(path: Path) -> None:
    """Write a site's key in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` does: `path`, and `path`.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_secret(path, _private_pem(key, serialization.PrivateFormat.OpenSSH))
    path.with_name(path.name + ".pub").write_text(f"{_openssh(key.public_key())}\n", encoding="ascii")


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read; raise ConfigError if the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already, and private keys are never overwritten; move it away") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def write_mask_key(folder: Path, key: Key) -> None:
    """Write a site's private key, which only its owner may read; ConfigError where there is one already."""
    private = X25519PrivateKey.from_private_bytes(key.secret)
    write_secret(folder / MASK_KEY, _private_pem(private, serialization.PrivateFormat.PKCS8))


def read_mask_key(data: Path, keys: Mapping[str, str]) -> tuple[str, Key]:
    """Read a site's private key, and find its name among the public ones; ConfigError where it is not there."""
    path = data.with_name(MASK_KEY)
    try:
        private = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(private, X25519PrivateKey)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); updates are masked with this key") from None
    except (ValueError, TypeError, AssertionError):
        raise ConfigError(f"{path}: expected a key as openssl genpkey -algorithm X25519 writes it") from None
    key = Key(private.private_bytes_raw())
    names = [name for name, public in public_keys(keys).items() if public == key.public]
    if not names:
        raise ConfigError(
            f"{path}: its public half is not in deploy.toml (keys), so this site's masks would cancel with nobody's; "
            f"it is {key_line(key.public)}"
        )
    return names[0], key


def key_fingerprint(keys: Mapping[str, str]) -> str:
    """Hash the sites' names and public keys, so that sites can compare by telephone whether all have the same ones."""
    digest = hashlib.sha256(json.dumps(sorted(keys.items())).encode()).hexdigest()[:32]
    return " ".join(digest[at : at + 4] for at in range(0, 32, 4))


def key_line(public: bytes) -> str:
    """Return a public key as in `deploy.toml`: the middle line of OpenSSL's PEM."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    content = X25519PublicKey.from_public_bytes(public).public_bytes(*form)
    return base64.b64encode(content).decode("ascii")


def public_keys(keys: Mapping[str, str]) -> dict[str, bytes]:
    """Read the public keys of `deploy.toml`; ConfigError where one is none, or two sites have the same."""
    found: dict[str, bytes] = {}
    for name, line in keys.items():
        try:
            public = serialization.load_der_public_key(base64.b64decode(line, validate=True))
            assert isinstance(public, X25519PublicKey)
        except (ValueError, TypeError, AssertionError):
            raise ConfigError(
                f"keys.{name}: expected the middle line of a public key as openssl pkey -in mask.key -pubout writes it"
            ) from None
        found[name] = public.public_bytes_raw()
        if len(set(found.values())) < len(found):
            raise ConfigError(f"keys.{name}: another site has the same key; each makes its own")
    return found


@dataclass(frozen=True)
class Registry:
    """The sites' keys at a SuperLink, by Flower's client of it: registered, revoked."""

    client: ControlHttpClient
    folder: Path

    @classmethod
    @contextmanager
    def of(cls, folder: Path) -> "Iterator[Registry]":
        """Connect to a federation's SuperLink on this machine; ConfigError where `superlink.sh` has not started it."""
        folder = folder.resolve()  # register.sh gives it as "..", which is elsewhere for who runs it
        path = folder / "server" / "flower" / "config.toml"
        start = f"start it: sh {shlex.quote(f'{folder}/server/superlink.sh')}"
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"][CONNECTION]
            address, authority = settings["address"], Path(settings["root-certificates"]).read_bytes()
        except (OSError, ValueError, KeyError):
            raise ConfigError(f"{folder}: expected a federation's folder whose server runs; {start}") from None
        version = RuntimeVersionHttpInterceptor(component_name="CLI")
        try:
            with ControlHttpClient.from_server_address(address, False, authority, interceptors=[version]) as client:
                yield cls(client, folder)
        except httpx.HTTPStatusError as error:
            details = FlowerError.from_json(error.response.text)
            raise RunError(f"the SuperLink refuses: {details.message if details else error}") from None
        except httpx.HTTPError as error:
            raise RunError(f"the SuperLink at {address} can't be reached ({error}); {start}") from None

    def register(self, names: tuple[str, ...]) -> list[str]:
        """Register keys of sites that aren't yet; ConfigError, before any is, where one can't be. Say what was done."""
        registered = {name: key for _, name, key in self._nodes()}
        keys = {name: _read_key(self.folder / "sites" / name / "key.pub") for name in names}
        revoked = {line.rsplit(" ", 2)[0] for line in _lines(self.folder / "server" / REVOKED)}
        for name, key in keys.items():
            if key in revoked:
                raise ConfigError(
                    f"{name}: its key was revoked; have the site make another (ssh-keygen -t ecdsa -b 384 -N '' -f "
                    f"key), and put its key.pub into {self.folder}/sites/{name}"
                )
            if registered.get(name, key) != key:
                raise ConfigError(
                    f"{name}: another key is registered for this site than {self.folder}/sites/{name}/key.pub; if "
                    f"that is the new one, revoke the old one first: fedskew deploy revoke {self.folder} {name}"
                )
        for name, key in keys.items():
            if name not in registered:
                public = serialization.load_ssh_public_key(key.encode())
                pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
                self.client.RegisterNode(RegisterNodeRequest(public_key=pem, name=name))
        return [f"{name}: registered{' already' if name in registered else ''}" for name in names]

    def revoke(self, name: str) -> str:
        """Remove a site's key from the SuperLink for good; it can't join any more. Say what happens next."""
        nodes = self._nodes()
        own = [(node, key) for node, of, key in nodes if of == name]
        if not own:
            registered = ", ".join(sorted(of for _, of, _ in nodes)) or "none"
            raise ConfigError(f"{name}: no key is registered for this site; registered are: {registered}")
        path = self.folder / "server" / REVOKED
        now = _now().isoformat(timespec="seconds")
        with path.open("a", encoding="utf-8") as file:  # before it is removed, so that it can't be registered again
            file.writelines(f"{key} {name} {now}\n" for _, key in own)
            file.flush()
            os.fsync(file.fileno())
        for node, _ in own:
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=node))
        return (
            f"{name}: revoked; its SuperNode is refused from its next request on, and rounds go on without it. Its "
            "updates that were aggregated before stay in the model"
        )

    def _nodes(self) -> list[tuple[int, str, str]]:
        """Return Flower's node id, the site's name and its public key, in OpenSSH's format, of each registration."""
        return [
            (node.node_id, node.name, _openssh(serialization.load_pem_public_key(node.public_key)))
            for node in self.client.ListNodes(ListNodesRequest()).nodes_info
            if node.status != "unregistered"
        ]


def _read_key(path: Path) -> str:
    try:
        return _openssh(serialization.load_ssh_public_key(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: expected a public key as ssh-keygen -t ecdsa -b 384 writes it") from None


def _openssh(key: PublicKeyTypes) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode("ascii")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName] = (),
) -> bytes:
    """Return a certificate as PEM: with names the server's, without the authority's own."""
    public, is_authority, now = authority.public_key(), not names, _now()
    kinds = "digital_signature key_cert_sign crl_sign content_commitment key_encipherment data_encipherment"
    allowed = {"key_cert_sign", "crl_sign"} if is_authority else {"digital_signature"}
    usage = {kind: kind in allowed for kind in f"{kinds} key_agreement encipher_only decipher_only".split()}
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(AUTHORITY)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks of sites may be a little behind
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    extensions: list[x509.ExtensionType] = [x509.SubjectKeyIdentifier.from_public_key(public)]
    if names:
        extensions = [
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.SubjectAlternativeName(names),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(public),
        ]
    for extension in extensions:
        certificate = certificate.add_extension(extension, critical=False)
    return certificate.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a certificate ({type(error).__name__}); put back a copy of it") from None


def _days_left(path: Path) -> float:
    """Return the days for which a certificate, in PEM, is still valid; below 0: it has expired."""
    return (_read_certificate(path).not_valid_after_utc - _now()) / datetime.timedelta(days=1)


def _host(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(
            f"{host!r}: not a host name or address; use plain ASCII, such as server.example.org"
        ) from None


def _private_pem(key: ec.EllipticCurvePrivateKey | X25519PrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
