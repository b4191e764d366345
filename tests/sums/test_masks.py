"""Masked sums: exact, uniform to look at, and opened whole or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedskew.errors import ArgumentError, SumsError
from fedskew.sums import Key, Masked, SumContext, mask, unmask
from fedskew.sums.fixed_point import COUNTS, NUMBERS, UPDATES, FixedPoint, add

pytest.importorskip("cryptography")

SITES = ("ams", "ber", "cph", "dub", "edi")
KEYS = {name: Key(bytes([1 + at]) * 32) for at, name in enumerate(SITES)}
PEERS = {name: key.public for name, key in KEYS.items()}
CONTEXT = SumContext("run", 3, 1, "train", SITES)
VALUES = np.array([5, -7, 2**31 - 1, -(2**31)], dtype=np.int32)


def masks(
    context: SumContext = CONTEXT, values: Any = VALUES, sites: Sequence[str] = SITES
) -> tuple[dict[str, Masked], dict[str, bytes]]:
    both = {name: mask(values, KEYS[name], PEERS, context) for name in sites}
    return {name: masked for name, (masked, _) in both.items()}, {name: own for name, (_, own) in both.items()}


def without(parts: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: part for other, part in parts.items() if other != name}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_opened_sum_is_the_integer_sum(data: st.DataObject) -> None:
    members = SITES[: data.draw(st.integers(2, 5), "members")]
    bits = data.draw(st.sampled_from([32, 64]), "bits")
    whole = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rows = {name: data.draw(st.lists(whole, min_size=3, max_size=3), name) for name in members}
    context = replace(CONTEXT, members=members)
    masked, openings = {}, {}
    for name in members:
        masked[name], openings[name] = mask(np.array(rows[name], dtype=f"int{bits}"), KEYS[name], PEERS, context)
    opened = unmask(masked, openings, context)
    # Python's own integers, brought back into the type's range.
    totals = [sum(rows[name][at] for name in members) for at in range(3)]
    expected = [(total + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for total in totals]
    assert opened.tolist() == expected
    assert opened.dtype == f"int{bits}"


def test_arrays_of_both_types_open_together_under_their_names() -> None:
    def parts(at: int) -> dict[str, NDArray[Any]]:
        return {
            "update": np.full((2, 3), at, dtype=np.int32),
            "loss": np.array([10**12 * at], dtype=np.int64),
            "none": np.zeros(0, dtype=np.int32),
        }

    both = {name: mask(parts(at), KEYS[name], PEERS, CONTEXT) for at, name in enumerate(SITES)}
    opened = unmask({name: both[name][0] for name in SITES}, {name: both[name][1] for name in SITES}, CONTEXT)
    assert opened["update"].tolist() == [[10] * 3] * 2
    assert opened["loss"].tolist() == [10 * 10**12]
    assert opened["none"].shape == (0,)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_masked_bytes_are_uniform_and_never_the_same_twice(dtype: type) -> None:
    zeros = np.zeros(50_000, dtype=dtype)
    first, _ = mask(zeros, KEYS["ams"], PEERS, CONTEXT)
    again, _ = mask(zeros, KEYS["ams"], PEERS, CONTEXT)
    for seen in (first.values, again.values, first.values - again.values):
        bytes_seen = np.bincount(np.frombuffer(seen.tobytes(), dtype=np.uint8), minlength=256)
        assert stats.chisquare(bytes_seen).pvalue > 1e-7


def test_other_contexts_have_other_masks() -> None:
    changed = [
        replace(CONTEXT, run="other"),
        replace(CONTEXT, round=4),
        replace(CONTEXT, attempt=2),
        replace(CONTEXT, purpose="evaluate"),
        replace(CONTEXT, public="another model"),
        replace(CONTEXT, members=SITES[:4]),
    ]
    hashes = {mask(VALUES, KEYS["ams"], PEERS, one)[0].commitments["ber"] for one in (CONTEXT, *changed)}
    assert len(hashes) == 1 + len(changed)
    same, _ = mask(VALUES, KEYS["ams"], PEERS, replace(CONTEXT, members=SITES[::-1]))
    assert same.commitments["ber"] == mask(VALUES, KEYS["ber"], PEERS, CONTEXT)[0].commitments["ams"]


def test_masks_are_chacha20_streams_of_hkdf_of_x25519() -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    def stream(seed: bytes) -> NDArray[np.uint32]:
        return np.frombuffer(Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(16)), dtype="<u4")

    masked, own = mask(VALUES, KEYS["ber"], PEERS, CONTEXT)
    left = masked.values.view(np.uint32) - VALUES.view(np.uint32) - stream(own)
    for name, sign in (("ams", -1), ("cph", 1), ("dub", 1), ("edi", 1)):
        shared = X25519PrivateKey.from_private_bytes(KEYS["ber"].secret).exchange(
            X25519PublicKey.from_public_bytes(PEERS[name])
        )
        info = CONTEXT.digest + b"".join(sorted([PEERS["ber"], PEERS[name]]))
        part = stream(HKDF(SHA256(), 32, None, info).derive(shared))
        left = left - part if sign > 0 else left + part
    assert left.tolist() == [0, 0, 0, 0]


def test_keys_are_drawn_anew_and_not_shown() -> None:
    assert Key.generate() != Key.generate()
    assert KEYS["ams"].secret.hex() not in repr(KEYS["ams"])


def test_without_one_of_those_that_arrived_nothing_opens() -> None:
    masked, openings = masks()
    for there, opened in ((masked, without(openings, "dub")), (without(masked, "dub"), openings)):
        with pytest.raises(SumsError, match=r"train, round 3, attempt 1: dub did not open its mask"):
            unmask(there, opened, CONTEXT)


def test_a_false_opening_is_named() -> None:
    masked, openings = masks()
    with pytest.raises(SumsError, match="cph opened another mask than the one that it committed to"):
        unmask(masked, openings | {"cph": bytes(32)}, CONTEXT)


def test_sites_that_were_told_different_things_are_found_before_anything_opens() -> None:
    masked, openings = masks()
    assert CONTEXT.disagreements(masked) == []
    lied_to, told = mask(VALUES, KEYS["ber"], PEERS, replace(CONTEXT, public="another model"))
    seen = masked | {"ber": lied_to}
    pairs = [("ams", "ber"), *(("ber", name) for name in SITES[2:])]
    assert CONTEXT.disagreements(seen) == pairs
    assert CONTEXT.disagreements(without(seen, "ams")) == pairs[1:]
    with pytest.raises(SumsError, match="the masks of ams and ber do not cancel"):
        unmask(seen, openings | {"ber": told}, CONTEXT)
    fewer, _ = mask(VALUES, KEYS["ber"], PEERS, replace(CONTEXT, members=SITES[:3]))
    assert CONTEXT.disagreements(masked | {"ber": fewer}) == [("ber", "ber")]


def test_arrays_that_differ_in_form_are_refused_by_name() -> None:
    masked, openings = masks()
    longer, own = mask(np.zeros(9, dtype=np.int32), KEYS["dub"], PEERS, CONTEXT)
    with pytest.raises(SumsError, match=r"dub sent int32\[9\], and ams int32\[4\]"):
        unmask(masked | {"dub": longer}, openings | {"dub": own}, CONTEXT)
    none, own = mask({}, KEYS["ams"], PEERS, CONTEXT)
    with pytest.raises(SumsError, match=r"ber sent int32\[4\], and ams $"):
        unmask(masked | {"ams": none}, openings | {"ams": own}, CONTEXT)


@pytest.mark.parametrize(
    ("values", "key", "peers", "context", "why"),
    [
        (np.zeros(3), KEYS["ams"], PEERS, CONTEXT, "int32 or int64 array, not float64"),
        ({"a": [1]}, KEYS["ams"], PEERS, CONTEXT, "values of a: must be an int32 or int64 array, not list"),
        (VALUES, Key(bytes([9]) * 32), PEERS, CONTEXT, "own public key is not among them"),
        (
            VALUES,
            KEYS["ams"],
            {**PEERS, "fra": PEERS["ams"]},
            CONTEXT,
            "stands under ams, fra; each site needs its own",
        ),
        (VALUES, KEYS["ams"], PEERS, replace(CONTEXT, members=SITES[1:]), "ams is not among the members"),
        (VALUES, KEYS["ams"], PEERS, replace(CONTEXT, members=("ams",)), "ams is the only member"),
        (VALUES, KEYS["ams"], PEERS, replace(CONTEXT, members=("ams", "fra")), "no public key of fra"),
        (VALUES, KEYS["ams"], {**PEERS, "ber": bytes(32)}, CONTEXT, "peers: ber: .* no key of X25519"),
        (VALUES, KEYS["ams"], {**PEERS, "ber": b"short"}, CONTEXT, "peers: ber: .* must be 32 bytes"),
    ],
)
def test_what_can_not_be_masked_is_said_in_one_line(
    values: Any, key: Key, peers: dict[str, bytes], context: SumContext, why: str
) -> None:
    with pytest.raises(ArgumentError, match=why) as found:
        mask(values, key, peers, context)
    assert "\n" not in str(found.value)


def test_members_are_named_once_and_no_other_site_is_in_their_sum() -> None:
    masked, openings = masks()
    with pytest.raises(ArgumentError, match="each may occur once"):
        replace(CONTEXT, members=("ams", "ams"))
    with pytest.raises(ArgumentError, match="fra: not asked for values"):
        unmask(masked | {"fra": masked["ams"]}, openings, CONTEXT)


# Numbers as integers: exact where they can be, within the stated bound elsewhere.


def test_values_are_clipped_weighed_and_rounded_to_even() -> None:
    small = FixedPoint(32, 1, 3.0)  # halves
    # 0.25 and 0.75 are half way between two halves, and go to the even number of halves.
    assert small.encode([0.25, 0.75, -0.25, 1.5, 9.0, -9.0]).tolist() == [0, 2, 0, 3, 6, -6]
    assert small.encode([1.5, 9.0], weight=1 / 3).tolist() == [1, 2]
    assert UPDATES.encode([1.0, -8.5]).tolist() == [2**24, -(2**27)]
    assert NUMBERS.encode([1.0]).tolist() == [2**40]
    assert COUNTS.encode([[7, 0]]).tolist() == [[7, 0]]
    assert [one.encode([0.5]).dtype for one in (UPDATES, NUMBERS, COUNTS)] == [np.int32, np.int64, np.int64]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=9),
    seed=st.integers(0, 9),
    form=st.sampled_from([UPDATES, NUMBERS]),
)
def test_a_decoded_mean_is_within_its_bound(rows: list[list[float]], seed: int, form: FixedPoint) -> None:
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(rows)))
    whole = float(weights.sum())
    total = add(form.encode(row, weight) for row, weight in zip(rows, weights, strict=True))
    exact = weights @ np.clip(rows, -form.limit, form.limit) / whole
    assert np.abs(form.decode(total, whole) - exact).max() <= form.error(len(rows), whole) + 1e-14


def test_the_bounds_are_those_of_the_note() -> None:
    assert UPDATES.error(10) == pytest.approx(10 * 2**-25)  # 3e-7 at worst
    assert NUMBERS.error(100) == pytest.approx(100 * 2**-41)  # 5e-11 at worst
    assert (UPDATES.largest_weights, NUMBERS.largest_weights, COUNTS.largest_weights) == (15, 127, 2**23 - 1)


def test_nothing_overflows_up_to_the_largest_weights() -> None:
    for form in (UPDATES, NUMBERS, COUNTS):
        count = min(form.largest_weights, 127)
        total = add(form.encode([2 * form.limit, -2 * form.limit], form.largest_weights / count) for _ in range(count))
        assert form.decode(total, form.largest_weights) == pytest.approx([form.limit, -form.limit])


def test_a_sum_wraps_around_as_a_masked_one_does() -> None:
    high = np.array([2**31 - 1], dtype=np.int32)
    assert add([high, np.array([1], dtype=np.int32)]).tolist() == [-(2**31)]
    assert high.tolist() == [2**31 - 1]


def test_mistakes_are_said() -> None:
    for values in ([np.nan], [np.inf]):
        with pytest.raises(ArgumentError, match="values: must be finite"):
            UPDATES.encode(values)
    for weight in (-0.1, 16.0, np.nan):
        with pytest.raises(ArgumentError, match="weight: must be from 0 to 15"):
            UPDATES.encode([1.0], weight)
    with pytest.raises(ArgumentError, match="weight: must be above 0"):
        UPDATES.decode(np.array([1], dtype=np.int32), 0.0)
    with pytest.raises(ArgumentError, match="rows: there is none"):
        add([])
    with pytest.raises(ArgumentError, match=r"must be alike, not int32 \(1,\) and int64 \(1,\)"):
        add([np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)])
