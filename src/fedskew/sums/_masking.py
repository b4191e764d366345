"""Masks that cancel: what a site sends, what it tells afterwards, and how the server opens the sum.

With members i, s_ij the seed that i and j share, b_i a fresh seed of i's own and PRG a ChaCha20 stream as integers,

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)        modulo 2**32 or 2**64

The sum is that of all y_i, minus PRG(b_i) for all i. (Bonawitz et al., CCS 2017, without secret sharing: a member that
masks and does not open costs the sum.)
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, SumsError, optional, placed
from fedskew.sums.fixed_point import IntArray, add_to, unsigned

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

Values = TypeVar("Values", NDArray[Any], Mapping[str, NDArray[Any]])


_PROTOCOL = "fedskew masked sums 1"
_BLOCK = 1 << 18


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
        """Derive the seed, 32 bytes, that this site and a peer share for one sum; the peer derives the same.

        It is HKDF-SHA256 of the X25519 secret, whose `info` is the digest and both public keys.
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


def _x25519() -> Any:
    missing = "cryptography is not installed; pip install 'fedskew[flower]'"
    return optional("cryptography.hazmat.primitives.asymmetric.x25519", missing)


def _is_seed(name: str, value: object) -> None:
    if not isinstance(value, bytes) or len(value) != Key.SEED:
        raise ArgumentError(f"{name}: must be {Key.SEED} bytes")


@dataclass(frozen=True)
class SumContext:
    """The identity of one masked sum, from which all of its masks are derived.

    Masks of two sites whose contexts differ in anything do not cancel, so nothing opens if a server tells sites, say,
    different members.

    Attributes:
        run: The run's id: no two runs of the same keys share one.
        round: Number of the round.
        attempt: Number of the attempt in this round, from 1.
        purpose: What is summed, such as "train" or "evaluate".
        members: Names of the sites that the sum is over; kept sorted.
        public: Anything else that all members must have been told alike, such as a hash of the model that was sent.

    Raises:
        ArgumentError: A member occurs twice, or a number is below 0.
    """

    LEAST: ClassVar[int] = 3
    """Fewest sites that a sum may be over: in a sum over two, each learns the other's part."""

    run: str
    round: int
    attempt: int
    purpose: str
    members: tuple[str, ...]
    public: str = ""

    def __post_init__(self) -> None:
        members = tuple(sorted(self.members))
        if len(set(members)) < len(members):
            raise ArgumentError(f"members: each may occur once, not {', '.join(members)}")
        if self.round < 0 or self.attempt < 0:
            raise ArgumentError(f"round and attempt: must be at least 0, not {self.round} and {self.attempt}")
        object.__setattr__(self, "members", members)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all attributes, 32 bytes."""
        said = [_PROTOCOL, self.run, self.round, self.attempt, self.purpose, list(self.members), self.public]
        return hashlib.sha256(json.dumps(said).encode()).digest()

    @property
    def name(self) -> str:
        """The sum's name in messages: purpose, round and attempt."""
        return f"{self.purpose}, round {self.round}, attempt {self.attempt}"

    def disagreements(self, masked: Mapping[str, Masked]) -> list[tuple[str, str]]:
        """Find pairs of sites whose masks do not cancel, because their keys differ or they were told different things.

        A site with commitments for too few or for unknown members is paired with itself. The server looks before it
        asks sites to open, since leaving a site out is free then.
        """
        there = sorted(masked)
        unfit = [name for name in there if set(masked[name].commitments) != set(self.members)]
        differing = [
            (one, other)
            for one, other in combinations([name for name in there if name not in unfit], 2)
            if masked[one].commitments[other] != masked[other].commitments[one]
        ]
        return sorted([(name, name) for name in unfit] + differing)

    def check_opening(self, site: str, masked: Masked, opening: bytes) -> None:
        """Raise SumsError where a site's opening is not what it committed to."""
        if commitment(opening) != masked.commitments[site]:
            raise SumsError(f"{self.name}: {site} opened another mask than the one that it committed to")


@dataclass(frozen=True)
class Masked:
    """What a site sends: its masked integers, and commitments that reveal a false opening.

    Attributes:
        values: The masked integers, in the form that they were given in: an array, or arrays by name. int32 or int64.
        commitments: For each other member, and under the site's own name for its own mask, a hash of the mask's seed,
            32 bytes. Two members whose hashes for each other differ were told different things (`disagreements`).
    """

    values: Any
    commitments: Mapping[str, bytes] = field(repr=False)


def mask(values: Values, key: Key, peers: Mapping[str, bytes], context: SumContext) -> tuple[Masked, bytes]:
    """Mask a site's integers, each time with a fresh mask of the site's own.

        masked, opening = mask(UPDATES.encode(update, weight), key, deploy_toml_keys, context)

    Args:
        values: An int32 or int64 array, or such arrays by name, which are then masked, sent and opened together. All
            members mask arrays of the same names, types and shapes. See `FixedPoint.encode`.
        peers: Public keys by site, of at least all members, the site itself among them: its name is the one that its
            own public key stands under. Take them from what the sites agreed on, never from the server's message.

    Returns:
        What to send; and what opens it, 32 bytes, to be sent once, when all members' masked integers have arrived.

    Raises:
        ArgumentError: The values are no such integers, the site's own key is not among the peers or stands there twice,
            the site is no member, there is no other member, or a member has no usable key.
        MissingPackageError: `cryptography` is not installed.
    """
    site = _own_name(key, peers)
    if site not in context.members:
        raise ArgumentError(f"context: {site} is not among the members {', '.join(context.members)}")
    if len(context.members) < 2:
        raise ArgumentError(f"context: {site} is the only member, so its sum would be its own values")
    if unknown := [name for name in context.members if name not in peers]:
        raise ArgumentError(f"peers: no public key of {', '.join(unknown)}")
    digest = context.digest
    pairs = {}
    for name in context.members:
        if name != site:
            with placed(f"peers: {name}: ", ArgumentError):
                pairs[name] = key.shared(peers[name], digest)
    own = secrets.token_bytes(Key.SEED)
    arrays = {name: _integers(name, array).copy() for name, array in _by_name(values).items()}
    _add(arrays, own, plus=True)
    for name, seed in pairs.items():
        _add(arrays, seed, plus=site < name)
    commitments = {name: commitment(seed) for name, seed in {**pairs, site: own}.items()}
    return Masked(_as_given(arrays, values), commitments), own


def unmask(masked: Mapping[str, Masked], openings: Mapping[str, bytes], context: SumContext) -> Any:
    """Open the sum over all members.

        total = UPDATES.decode(unmask(masked, openings, context), sum(weights[name] for name in masked))

    Args:
        masked: What each member sent, by site.
        openings: What opens it, by site.

    Returns:
        The exact sum of their integers modulo 2**32 or 2**64, signed, in the form that the sites masked: an array, or
        arrays by name.

    Raises:
        SumsError: A member is missing or has not opened, its opening is not what it committed to, two sites' masks do
            not cancel, or the sites' arrays differ in names, types or shapes.
        ArgumentError: A site is no member.
    """
    there, what = sorted(masked), context.name
    if strangers := sorted(set(there) - set(context.members)):
        raise ArgumentError(f"{what}: {', '.join(strangers)}: not asked for values")
    if away := sorted(set(context.members) - (set(there) & set(openings))):
        raise SumsError(f"{what}: {', '.join(away)} did not open its mask, so nothing opens")
    for one, other in context.disagreements(masked):
        raise SumsError(
            f"{what}: the masks of {one} and {other} do not cancel: they have other keys, or were told other members"
        )
    for name in there:
        context.check_opening(name, masked[name], openings[name])
    every = [{key: _integers(key, one) for key, one in _by_name(masked[name].values).items()} for name in there]
    total = {key: array.copy() for key, array in every[0].items()}
    for name, arrays in zip(there[1:], every[1:], strict=True):
        if _form(arrays) != _form(total):
            raise SumsError(f"{what}: {name} sent {_form(arrays)}, and {there[0]} {_form(total)}")
        for key, array in arrays.items():
            add_to(total[key], array)
    for name in there:
        _add(total, openings[name], plus=False)
    return _as_given(total, masked[there[0]].values)


def _form(arrays: Mapping[str, IntArray]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}".strip() for name, array in sorted(arrays.items()))


def _own_name(key: Key, peers: Mapping[str, bytes]) -> str:
    own = [name for name, public in peers.items() if public == key.public]
    if len(own) != 1:
        raise ArgumentError(
            f"peers: the site's own public key stands under {', '.join(sorted(own))}; each site needs its own key"
            if own
            else "peers: the site's own public key is not among them"
        )
    return own[0]


def _by_name(values: Any) -> Mapping[str, NDArray[Any]]:
    return values if isinstance(values, Mapping) else {"": values}


def _as_given(arrays: dict[str, IntArray], values: Any) -> Any:
    return arrays if isinstance(values, Mapping) else arrays[""]


def _integers(name: str, array: Any) -> IntArray:
    if not isinstance(array, np.ndarray) or array.dtype not in (np.int32, np.int64):
        said = getattr(array, "dtype", type(array).__name__)
        raise ArgumentError(f"values{f' of {name}' if name else ''}: must be an int32 or int64 array, not {said}")
    return np.ascontiguousarray(array).reshape(array.shape)


def _add(arrays: Mapping[str, IntArray], seed: bytes, *, plus: bool) -> None:
    """Add a seed's stream to arrays in the order of their names, or subtract it, in place."""
    following = stream(seed)
    change = np.add if plus else np.subtract
    for _, array in sorted(arrays.items()):
        words = unsigned(array).reshape(-1)
        for start in range(0, len(words), _BLOCK):
            part = words[start : start + _BLOCK]
            part_of_stream = np.frombuffer(following(part.nbytes), dtype=part.dtype.newbyteorder("<"))
            change(part, part_of_stream, out=part)
