"""Keys of sites, the secrets that two of them share, and the streams of masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from fedskew.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


@dataclass(frozen=True)
class Key:
    """A site's X25519 key pair.

        key = Key.generate()
        write(key.secret)            # stays at the site, mode 0600
        publish(key.public)          # goes to all sites by a way on which the server can't change it

    Attributes:
        secret: The private key, 32 bytes.

    Raises:
        ArgumentError: It is not 32 bytes.
        MissingPackageError: `cryptography` is not installed.
    """

    SEED: ClassVar[int] = 32
    """Bytes of a key, a seed and a commitment."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _is_seed("secret", self.secret)

    @classmethod
    def generate(cls) -> Key:
        """Make a new key from the system's randomness."""
        private: X25519PrivateKey = _x25519().X25519PrivateKey.generate()
        return cls(private.private_bytes_raw())

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    @cached_property
    def _private(self) -> X25519PrivateKey:
        private: X25519PrivateKey = _x25519().X25519PrivateKey.from_private_bytes(self.secret)
        return private

    def shared(self, peer: bytes, digest: bytes) -> bytes:
        """Derive the seed that this site and a peer share for one sum; the peer derives the same.

        Returns:
            The seed, 32 bytes: HKDF-SHA256 of the X25519 secret, whose `info` is the digest and both public keys.

        Raises:
            ArgumentError: The peer's key is not a valid key.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        _is_seed("peer's public key", peer)
        try:
            secret = self._private.exchange(_x25519().X25519PublicKey.from_public_bytes(peer))
        except ValueError:
            raise ArgumentError("peer's public key: is no key of X25519 that can be used") from None
        info = digest + min(self.public, peer) + max(self.public, peer)
        return HKDF(algorithm=SHA256(), length=Key.SEED, salt=None, info=info).derive(secret)


def commitment(seed: bytes) -> bytes:
    """Return a commitment to a seed that does not reveal it: its SHA-256; nobody can guess 256 random bits."""
    return hashlib.sha256(b"fedskew masked sums: commitment" + seed).digest()


def stream(seed: bytes) -> Callable[[int], bytes]:
    """Start the ChaCha20 stream of a seed that is used for one sum only."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    encryptor = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return lambda size: encryptor.update(bytes(size))


def _x25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError:
        raise MissingPackageError("cryptography is not installed; pip install 'fedskew[flower]'") from None
    return x25519


def _is_seed(name: str, value: object) -> None:
    if not isinstance(value, bytes) or len(value) != Key.SEED:
        raise ArgumentError(f"{name}: must be {Key.SEED} bytes")
