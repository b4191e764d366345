"""The keys of masked sums: each site's own in `mask.key`, the public halves of all in `deploy.toml`.

They are apart from the keys by which sites connect, in the form that OpenSSL writes:

    openssl genpkey -algorithm X25519 -out mask.key                  (PEM, mode 0600; never leaves the site)
    openssl pkey -in mask.key -pubout                                (its middle line goes into deploy.toml)

Since `deploy.toml` is part of the app that each site agreed to, by a hash, the server can't put other keys in their
place.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedskew.deploy._keys import write_secret
from fedskew.errors import ConfigError
from fedskew.sums import Key

FILE = "mask.key"


def write_mask_key(folder: Path, key: Key) -> None:
    """Write a site's private key, which only its owner may read.

    Raises:
        ConfigError: There is one already.
    """
    private = X25519PrivateKey.from_private_bytes(key.secret)
    content = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(folder / FILE, content)


def read_mask_key(data: Path, keys: Mapping[str, str]) -> tuple[str, Key]:
    """Read a site's private key, and find its name among the public ones.

    Raises:
        ConfigError: The key can't be read, or its public half is not among these.
    """
    path = data.with_name(FILE)
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
    said = json.dumps(sorted(keys.items()))
    digest = hashlib.sha256(said.encode()).hexdigest()[:32]
    return " ".join(digest[at : at + 4] for at in range(0, 32, 4))


def key_line(public: bytes) -> str:
    """Return a public key as in `deploy.toml`: the middle line of OpenSSL's PEM."""
    content = X25519PublicKey.from_public_bytes(public).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return base64.b64encode(content).decode("ascii")


def public_keys(keys: Mapping[str, str]) -> dict[str, bytes]:
    """Read the public keys of `deploy.toml`.

    Raises:
        ConfigError: One is no such key, or two sites have the same.
    """
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
