"""The server's certificate, issued again by the authority that the sites know, or by a new one."""

from __future__ import annotations

import datetime
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedskew.cli import app
from fedskew.deploy import expires_soon, renew, write_certificates
from fedskew.errors import ConfigError

SECRET = b"a long passphrase"
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


def test_a_renewed_certificate_is_trusted_by_sites_as_they_are(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, SECRET)
    authority = (tmp_path / "ca.crt").read_bytes()
    before, key = certificate(tmp_path / "server.crt"), (tmp_path / "server.key").read_bytes()
    renew(tmp_path, lambda: SECRET)
    after = certificate(tmp_path / "server.crt")
    assert trusted(tmp_path, tmp_path / "ca.crt")
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert after.serial_number != before.serial_number
    assert after.public_key() != before.public_key()
    kind = x509.SubjectAlternativeName
    assert after.extensions.get_extension_for_class(kind) == before.extensions.get_extension_for_class(kind)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    (aside,) = (tmp_path / "replaced").iterdir()
    assert (aside / "server.key").read_bytes() == key


def test_the_authoritys_key_is_encrypted_and_its_owners_alone(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, SECRET)
    assert b"ENCRYPTED" in (tmp_path / "ca.key").read_bytes()
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    before = (tmp_path / "server.crt").read_bytes()
    with pytest.raises(ConfigError, match="the passphrase is wrong"):
        renew(tmp_path, lambda: b"another")
    assert (tmp_path / "server.crt").read_bytes() == before


def test_without_its_key_a_new_authority_is_needed_and_no_site_trusts_it_yet(tmp_path: Path) -> None:
    server, site = tmp_path / "fed" / "server", tmp_path / "ca.crt"
    write_certificates(server, HOSTS)
    site.write_bytes((server / "ca.crt").read_bytes())
    assert not (server / "ca.key").exists()
    with pytest.raises(ConfigError, match="--new-authority"):
        renew(server, lambda: SECRET)
    with pytest.raises(ConfigError, match="--new-authority"):
        app(["deploy", "renew", str(server.parent)], standalone_mode=False)
    renew(server, None, new_authority=True)
    assert not trusted(server, site)
    site.write_bytes((server / "ca.crt").read_bytes())
    assert trusted(server, site)


def test_an_old_key_does_not_stay_beside_a_new_authority(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, SECRET)
    renew(tmp_path, None, new_authority=True)
    assert not (tmp_path / "ca.key").exists()
    (aside,) = (tmp_path / "replaced").iterdir()
    assert (aside / "ca.key").exists()


@pytest.mark.slow
def test_the_command_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSKEW_PASSPHRASE", SECRET.decode())
    write_certificates(tmp_path / "server", HOSTS, SECRET)
    app(["deploy", "renew", str(tmp_path)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "valid for 825 days" in said
    assert "start" in said
    assert "send" not in said
    app(["deploy", "renew", str(tmp_path), "--new-authority", "--keep-authority"], standalone_mode=False)
    assert "ca.crt to every site" in capsys.readouterr().out
    app(["deploy", "renew", str(tmp_path)], standalone_mode=False)  # by the new one
    monkeypatch.setenv("FEDSKEW_PASSPHRASE", "")
    with pytest.raises(ConfigError, match="passphrase"):
        app(["deploy", "renew", str(tmp_path)], standalone_mode=False)


def test_the_authority_outlives_several_certificates(tmp_path: Path) -> None:
    write_certificates(tmp_path, HOSTS, SECRET)
    now = datetime.datetime.now(datetime.UTC)
    for name, days in (("server.crt", 825), ("ca.crt", 3650)):
        lasts = (certificate(tmp_path / name).not_valid_after_utc - now) / datetime.timedelta(days=1)
        assert lasts == pytest.approx(days, abs=0.1)
    assert renew(tmp_path, lambda: SECRET) == pytest.approx(825, abs=0.1)
    with pytest.raises(ConfigError, match="expected a certificate"):
        expires_soon(tmp_path / "server.key")


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
