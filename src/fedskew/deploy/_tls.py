"""TLS and node keys: a certificate authority for one federation, the server's certificate, and a key for every site.

Private keys are files that only their owner may read (0600) and that are never overwritten.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedskew.errors import ConfigError

DAYS = 825
"""Days for which certificates are valid: the longest time that common TLS clients accept for a server's."""


SOON = 60
"""Days before the end of a certificate at which servers and sites begin to say so."""


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt`, which every site gets, and the server's `server.crt` and `server.key`.

    The authority's private key signs only this certificate and is not stored, so a new server certificate needs a new
    authority.

    Args:
        folder: The folder to write to.
        hosts: Names and addresses for which the server's certificate is valid.

    Raises:
        ConfigError: A host is not a valid name or address, or there is a private key already.
    """
    authority = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedskew federation")])
    signed = (
        _certificate(name, name, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    server = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedskew server")])
    certificate = (
        _certificate(subject, name, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / "server.key", _pem(server, serialization.PrivateFormat.PKCS8))
    (folder / "ca.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


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


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks of sites may be a little behind
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


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


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
