"""TLS and node keys: a certificate authority for one federation, the server's certificate, and a key for every site.

Private keys are files that only their owner may read (0600). None is overwritten, but by a renewal, which keeps a copy.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedskew.errors import ConfigError
from fedskew.files import replacing

AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedskew federation")])

DAYS = 825
"""Days for which the server's certificate is valid: the longest time that common TLS clients accept."""

AUTHORITY_DAYS = 3650
"""Days for which the authority's certificate is valid, so that it outlives several of the server's."""

SOON = 60
"""Days before the end of a certificate at which servers and sites begin to say so."""


def write_certificates(folder: Path, hosts: Sequence[str], passphrase: bytes | None = None) -> None:
    """Write `ca.crt`, which every site gets, and the server's `server.crt` and `server.key`.

    Args:
        folder: The folder to write to.
        hosts: Names and addresses for which the server's certificate is valid.
        passphrase: Keeps the authority's private key, encrypted, in `ca.key`, so that `renew_certificate` can issue the
            next certificate. None: the key is not stored, and a new server certificate needs a new authority.

    Raises:
        ConfigError: A host is not a valid name or address, or there is a private key already.
    """
    names = [_host(host) for host in hosts]
    authority = ec.generate_private_key(ec.SECP384R1())
    signed = (
        _certificate(AUTHORITY, AUTHORITY, authority.public_key(), _in_days(AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = _server_certificate(authority, signed, names)
    write_secret(folder / "server.key", key)
    if passphrase is not None:
        encrypted = serialization.BestAvailableEncryption(passphrase)
        write_secret(folder / "ca.key", _pem(authority, serialization.PrivateFormat.PKCS8, encrypted))
    (folder / "ca.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate)


def renew_certificate(folder: Path, passphrase: bytes) -> None:
    """Issue the server a new key and certificate for the same names, by the authority that the sites know.

    Args:
        folder: The server's folder, with `ca.crt` and `ca.key`.
        passphrase: The passphrase of `ca.key`.

    Raises:
        ConfigError: A file is missing or damaged, the passphrase is wrong, or the authority has expired.
    """
    authority, names = _read_certificate(folder / "ca.crt"), _names(_read_certificate(folder / "server.crt"))
    try:
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), passphrase)
    except OSError:
        raise ConfigError(
            f"{folder / 'ca.key'}: is not there: the authority's key was not kept, so a new certificate needs a new "
            "authority, and a new ca.crt at every site: --new-authority"
        ) from None
    except (ValueError, TypeError):
        raise ConfigError(f"{folder / 'ca.key'}: the passphrase is wrong, or the file is damaged") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise ConfigError(f"{folder / 'ca.key'}: is not the key of ca.crt beside it")
    if days_left(folder / "ca.crt") <= 0:
        raise ConfigError(f"{folder / 'ca.crt'}: has expired; --new-authority makes another, which every site needs")
    secret, certificate = _server_certificate(key, authority, names)
    _replace(folder, {"server.key": secret, "server.crt": certificate})


def renew_authority(folder: Path, passphrase: bytes | None = None) -> None:
    """Make a new authority, and a server certificate for the same names. Every site needs the new `ca.crt`.

    Args:
        folder: The server's folder.
        passphrase: See `write_certificates`.

    Raises:
        ConfigError: `server.crt` can't be read.
    """
    names = _names(_read_certificate(folder / "server.crt"))
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        write_certificates(Path(aside), [str(name.value) for name in names], passphrase)
        _replace(folder, {path.name: path.read_bytes() for path in sorted(Path(aside).iterdir())})
    if passphrase is None:
        (folder / "ca.key").unlink(missing_ok=True)  # of the authority before


def days_left(path: Path) -> float:
    """Return the days for which a certificate is still valid; below 0: it has expired.

    Args:
        path: The certificate, in PEM.
    """
    end = _read_certificate(path).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def expires_soon(certificate: Path) -> str | None:
    """Say when a certificate expires, if that is within 60 days; None: later.

    Args:
        certificate: The certificate, in PEM.
    """
    days = days_left(certificate)
    if days >= SOON:
        return None
    when = f"expires in {days:.0f} days" if days > 0 else "has expired, and sites can't connect"
    return f"{certificate} {when}; renew it: fedskew deploy renew FOLDER"


def write_node_key(path: Path) -> None:
    """Write a site's key in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` does: `path`, and `path`.pub.

    Args:
        path: The file of the private key.

    Raises:
        ConfigError: There is a private key already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_secret(path, _pem(key, serialization.PrivateFormat.OpenSSH))
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner may read; raise ConfigError if the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already, and private keys are never overwritten; move it away") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _server_certificate(
    authority: ec.EllipticCurvePrivateKey, signed: x509.Certificate, names: Sequence[x509.GeneralName]
) -> tuple[bytes, bytes]:
    """Return a new private key for the server and its certificate, both as PEM."""
    server = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedskew server")])
    end = min(_in_days(DAYS), signed.not_valid_after_utc)
    certificate = (
        _certificate(subject, AUTHORITY, server.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    return _pem(server, serialization.PrivateFormat.PKCS8), certificate.public_bytes(serialization.Encoding.PEM)


def _in_days(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_in_days(-5 / 1440))  # clocks of sites may be a little behind
        .not_valid_after(end)
    )


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a certificate ({type(error).__name__})") from None


def _names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _replace(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files by new ones, of which keys are their owner's alone; keep the old ones in a folder `replaced`."""
    aside = folder / "replaced" / datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
    aside.mkdir(parents=True)
    for name in {*contents, "ca.key"}:
        if (folder / name).exists():
            shutil.copy2(folder / name, aside / name)
    for name, content in contents.items():
        with replacing(folder / name, private=name.endswith(".key")) as part:
            part.write_bytes(content)


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


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


def _pem(
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat,
    encryption: serialization.KeySerializationEncryption | None = None,
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, encryption or serialization.NoEncryption())
