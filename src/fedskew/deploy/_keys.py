"""TLS and node keys: one federation's authority, the server's certificate, a key for every site, and their register.

Private keys are files that only their owner may read (0600). None is overwritten, but by a renewal, which keeps a copy.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

from fedskew.errors import ConfigError, RunError
from fedskew.files import replacing

AUTHORITY, SERVER = (
    x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("fedskew federation", "fedskew server")
)
DAYS = 825
"""Days for which the server's certificate is valid: the longest time that common TLS clients accept."""

AUTHORITY_DAYS = 3650
"""Days for which the authority's certificate is valid, so that it outlives several of the server's."""

SOON = 60
"""Days before the end of a certificate at which servers and sites begin to say so."""

CONNECTION = "fedskew"
"""The SuperLink's name in Flower's own configuration."""

REVOKED = "revoked-keys"
"""File in the server's folder: a line for each revoked key, in OpenSSH's format, then its site and when."""


def write_certificates(folder: Path, hosts: Sequence[str], passphrase: bytes | None = None) -> None:
    """Write `ca.crt`, which every site gets, and the server's `server.crt` and `server.key`, valid for these hosts.

    With a passphrase the authority's private key is kept, encrypted, in `ca.key`, so that `renew` can issue the next
    certificate; without, a new server certificate needs a new authority. Raises ConfigError where a host is not a valid
    name or address, or there is a private key already.
    """
    names = [_host(host) for host in hosts]
    authority = ec.generate_private_key(ec.SECP384R1())
    end = _in_days(AUTHORITY_DAYS)
    signed = _sign(AUTHORITY, authority, authority, end)
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = _server_certificate(authority, end, names)
    write_secret(folder / "server.key", key)
    if passphrase is not None:
        encrypted = serialization.BestAvailableEncryption(passphrase)
        write_secret(folder / "ca.key", _private_pem(authority, serialization.PrivateFormat.PKCS8, encrypted))
    (folder / "ca.crt").write_bytes(signed)
    (folder / "server.crt").write_bytes(certificate)


def renew(folder: Path, passphrase: Callable[[], bytes] | None, new_authority: bool = False) -> float:
    """Issue the server a new key and certificate for the same names; return the days for which that is valid.

    Args:
        folder: The server's folder, whose old files are kept in `replaced`.
        passphrase: Asks for the passphrase of `ca.key`. None, with a new authority: its key is not kept.
        new_authority: Whether to make a new authority, too, so that every site needs the new `ca.crt`.

    Raises:
        ConfigError: A file is missing or damaged, the passphrase is wrong, or the authority has expired.
    """
    names, path = _names(folder), folder / "ca.key"
    if new_authority:
        secret = None if passphrase is None else passphrase()
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            write_certificates(Path(aside), [str(name.value) for name in names], secret)
            _replace(folder, {made.name: made.read_bytes() for made in sorted(Path(aside).iterdir())})
        if secret is None:
            path.unlink(missing_ok=True)  # of the authority before
        return _days_left(folder / "server.crt")
    if passphrase is None or not path.exists():
        raise ConfigError(
            f"{path}: is not there: the authority's key was not kept, so a new certificate needs a new authority, and "
            "a new ca.crt at every site: --new-authority"
        )
    authority = _read_certificate(folder / "ca.crt")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), passphrase())
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: the passphrase is wrong, or the file is damaged") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise ConfigError(f"{path}: is not the key of ca.crt beside it")
    if _days_left(folder / "ca.crt") <= 0:
        raise ConfigError(f"{folder / 'ca.crt'}: has expired; --new-authority makes another, which every site needs")
    private, certificate = _server_certificate(key, authority.not_valid_after_utc, names)
    _replace(folder, {"server.key": private, "server.crt": certificate})
    return _days_left(folder / "server.crt")


def expires_soon(certificate: Path) -> str | None:
    """Say when a certificate, in PEM, expires, if that is within 60 days; None: later."""
    days = _days_left(certificate)
    if days >= SOON:
        return None
    when = f"expires in {days:.0f} days" if days > 0 else "has expired, and sites can't connect"
    return f"{certificate} {when}; renew it: fedskew deploy renew FOLDER"


def write_node_key(path: Path) -> None:
    """Write a site's key in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` does: `path`, and `path`.pub.

    Raises ConfigError where there is a private key already.
    """
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


class _Node(NamedTuple):
    """A registration: Flower's node id, the site's name, and its public key in OpenSSH's format."""

    id: int
    name: str
    key: str


@dataclass(frozen=True)
class Registry:
    """The sites' keys at a SuperLink: registered, revoked.

    Attributes:
        client: Flower's client of the SuperLink.
        folder: The federation's folder, with `sites/NAME/key.pub`.
    """

    client: ControlHttpClient
    folder: Path

    @classmethod
    @contextmanager
    def of(cls, folder: Path) -> Iterator[Registry]:
        """Connect to the SuperLink of a federation on this machine, as `superlink.sh` has started it.

        Raises:
            ConfigError: The folder is no federation whose server has been started.
            RunError: The SuperLink can't be reached, or refuses.
        """
        path = folder / "server" / "flower" / "config.toml"
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"][CONNECTION]
            address, authority = settings["address"], Path(settings["root-certificates"]).read_bytes()
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"{folder}: expected a federation's folder whose server runs; start it: sh {folder}/server/superlink.sh"
            ) from None
        version = RuntimeVersionHttpInterceptor(component_name="CLI")
        try:
            with ControlHttpClient.from_server_address(address, False, authority, interceptors=[version]) as client:
                yield cls(client, folder)
        except httpx.HTTPStatusError as error:
            details = FlowerError.from_json(error.response.text)
            raise RunError(f"the SuperLink refuses: {details.message if details else error}") from None
        except httpx.HTTPError as error:
            raise RunError(
                f"the SuperLink at {address} can't be reached ({error}); start it: sh {folder}/server/superlink.sh"
            ) from None

    def register(self, names: tuple[str, ...]) -> list[str]:
        """Register the keys of sites that are not registered yet; say of each site what was done.

        Raises:
            ConfigError: A key can't be read, was revoked, or another one is registered for this site. The keys of all
                sites are looked at before any is registered.
        """
        registered = {node.name: node for node in self._nodes()}
        keys = {name: _read_key(self.folder / "sites" / name / "key.pub") for name in names}
        revoked = {line.rsplit(" ", 2)[0] for line in _lines(self.folder / "server" / REVOKED)}
        for name, key in keys.items():
            if key in revoked:
                raise ConfigError(
                    f"{name}: its key was revoked; have the site make another (ssh-keygen -t ecdsa -b 384 -N '' -f "
                    f"key), and put its key.pub into {self.folder}/sites/{name}"
                )
            if name in registered and registered[name].key != key:
                raise ConfigError(
                    f"{name}: another key is registered for this site than {self.folder}/sites/{name}/key.pub; if "
                    f"that is the new one, revoke the old one first: fedskew deploy revoke {self.folder} {name}"
                )
        lines = []
        for name, key in keys.items():
            if name in registered:
                lines.append(f"{name}: registered already")
                continue
            public = serialization.load_ssh_public_key(key.encode())
            self.client.RegisterNode(RegisterNodeRequest(public_key=_pem(public), name=name))
            lines.append(f"{name}: registered")
        return lines

    def revoke(self, name: str) -> str:
        """Remove a site's key from the SuperLink for good; it can't join any more. Say what happens next.

        Raises ConfigError where no key is registered for this site.
        """
        nodes = self._nodes()
        own = [node for node in nodes if node.name == name]
        if not own:
            registered = ", ".join(sorted(node.name for node in nodes)) or "none"
            raise ConfigError(f"{name}: no key is registered for this site; registered are: {registered}")
        path = self.folder / "server" / REVOKED
        now = _now().isoformat(timespec="seconds")
        with path.open("a", encoding="utf-8") as file:  # before it is removed, so that it can't be registered again
            file.writelines(f"{node.key} {name} {now}\n" for node in own)
            file.flush()
            os.fsync(file.fileno())
        for node in own:
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.id))
        return (
            f"{name}: revoked; its SuperNode is refused from its next request on, and rounds go on without it. Its "
            "updates that were aggregated before stay in the model"
        )

    def _nodes(self) -> list[_Node]:
        found = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [
            _Node(node.node_id, node.name, _openssh(serialization.load_pem_public_key(node.public_key)))
            for node in found
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


def _pem(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _server_certificate(
    authority: ec.EllipticCurvePrivateKey, end: datetime.datetime, names: Sequence[x509.GeneralName]
) -> tuple[bytes, bytes]:
    """Return a new private key for the server and its certificate, both as PEM."""
    server = ec.generate_private_key(ec.SECP384R1())
    certificate = _sign(SERVER, server, authority, min(_in_days(DAYS), end), names)
    return _private_pem(server, serialization.PrivateFormat.PKCS8), certificate


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    end: datetime.datetime,
    names: Sequence[x509.GeneralName] = (),
) -> bytes:
    """Return a certificate as PEM: with names the server's, without the authority's own."""
    public, is_authority = authority.public_key(), not names
    usage = _usage(digital_signature=bool(names), key_cert_sign=is_authority, crl_sign=is_authority)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(AUTHORITY)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_in_days(-5 / 1440))  # clocks of sites may be a little behind
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
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


def _in_days(days: float) -> datetime.datetime:
    return _now() + datetime.timedelta(days=days)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a certificate ({type(error).__name__})") from None


def _days_left(path: Path) -> float:
    """Return the days for which a certificate, in PEM, is still valid; below 0: it has expired."""
    return (_read_certificate(path).not_valid_after_utc - _now()) / datetime.timedelta(days=1)


def _names(folder: Path) -> list[x509.GeneralName]:
    """Return the names for which a server's certificate is valid."""
    extensions = _read_certificate(folder / "server.crt").extensions
    return list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files by new ones, of which keys are their owner's alone; keep the old ones in a folder `replaced`."""
    aside = folder / "replaced" / _now().strftime("%Y%m%dT%H%M%S.%f")
    aside.mkdir(parents=True)
    for name in {*contents, "ca.key"}:
        if (folder / name).exists():
            shutil.copy2(folder / name, aside / name)
    for name, content in contents.items():
        with replacing(folder / name, private=name.endswith(".key")) as part:
            part.write_bytes(content)


def _usage(**allowed: bool) -> x509.KeyUsage:
    kinds = "digital_signature key_cert_sign crl_sign content_commitment key_encipherment data_encipherment"
    none = dict.fromkeys(f"{kinds} key_agreement encipher_only decipher_only".split(), False)
    return x509.KeyUsage(**none | allowed)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(
            f"{host!r}: not a host name or address; use plain ASCII, such as server.example.org"
        ) from None


def _private_pem(
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat,
    encryption: serialization.KeySerializationEncryption | None = None,
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, encryption or serialization.NoEncryption())
