"""No reply crashes the server or touches the model: whatever it holds, it is as agreed, or refused with a reason.

Here 100 random replies for each property; `make test-fuzz` takes 1,000.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedskew.deploy import ArraySpec, ExpectedReply, RefusedError, check_confusion, check_counts, check_only_samples

MODEL = {"weight": ArraySpec((2, 3), "float32"), "bias": ArraySpec((2,), "float32"), "seen": ArraySpec((), "int64")}
RETURNED = {"change": ArraySpec((8,), "float32")}
EXPECTED = ExpectedReply(client=1, round=4, arrays=MODEL, returned=RETURNED, idle={}, most_steps=10, max_bytes=2**21)
THOROUGHLY = settings(
    max_examples=int(os.environ.get("FUZZ", "100")), deadline=None, suppress_health_check=list(HealthCheck)
)


def honest() -> RecordDict:
    arrays = {name: Array(np.ones(spec.shape, spec.dtype)) for name, spec in MODEL.items()}
    figures = {"fedskew-client": 1, "server-round": 4, "fedskew-steps": 3, "train-loss": 0.5}
    return RecordDict(
        {
            "arrays": ArrayRecord(arrays),
            "metrics": MetricRecord(figures),
            "reply": ArrayRecord({"change": Array(np.zeros(8, np.float32))}),
        }
    )


def set_array(name: str, values: Any, record: str = "arrays") -> RecordDict:
    content = honest()
    content[record][name] = values if isinstance(values, Array) else Array(np.asarray(values))
    return content


def set_figure(name: str, value: Any) -> RecordDict:
    content = honest()
    content["metrics"][name] = value
    return content


def without(record: str, name: str | None = None) -> RecordDict:
    content = honest()
    if name is None:
        del content[record]
    else:
        del content[record][name]
    return content


def saved(values: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, **options)
    return buffer.getvalue()


def claiming(shape: tuple[int, ...]) -> bytes:
    """A header that promises this many floats, and no floats."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def raw(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array(dtype="float32", shape=(2, 3), stype=stype, data=data)


NAN, INF = float("nan"), float("inf")
BROKEN = {
    "NaN": (set_array("weight", np.full((2, 3), NAN, np.float32)), "NaN or infinite"),
    "Inf": (set_array("bias", np.array([1, INF], np.float32)), "NaN or infinite"),
    "Inf beside the model": (set_array("change", np.full(8, -INF, np.float32), "reply"), "NaN or infinite"),
    "wrong shape": (set_array("weight", np.ones((3, 2), np.float32)), r"expected float32 \(2, 3\)"),
    "wrong dtype": (set_array("weight", np.ones((2, 3), np.float64)), r"expected float32 \(2, 3\)"),
    "integers": (set_array("weight", np.ones((2, 3), np.int32)), r"expected float32 \(2, 3\)"),
    "other byte order": (set_array("weight", np.ones((2, 3), ">f4")), r"expected float32 \(2, 3\)"),
    "negative counter": (set_array("seen", np.int64(-1)), "counter below 0"),
    "missing array": (without("arrays", "bias"), "lacks 'bias'"),
    "extra array": (set_array("backdoor", np.ones(2)), "'backdoor', which is not expected"),
    "no arrays": (without("arrays"), "the records"),
    "no metrics": (without("metrics"), "no metrics"),
    "no returned": (without("reply"), "the records"),
    "a record too many": (RecordDict({**honest(), "more": ConfigRecord({"run": "me"})}), "the records"),
    "a pickle": (set_array("weight", raw(saved(np.array([{}], object), allow_pickle=True))), "expected float32"),
    "a pickle by name": (set_array("weight", raw(b"\x80\x04N.", stype="pickle")), "not as a numpy array"),
    "no array": (set_array("weight", raw(b"hello")), "is no numpy array"),
    "a giant's header": (set_array("weight", raw(claiming((10**15,)))), r"expected float32 \(2, 3\)"),
    "too few bytes": (set_array("weight", raw(saved(np.ones((2, 3), np.float32))[:-1])), "bytes of values"),
    "too many bytes": (set_array("weight", raw(saved(np.ones((2, 3), np.float32)) + b"x")), "bytes of values"),
    "a loss below 0": (set_figure("train-loss", -1e300), "training loss is -1e\\+300; expected a number from 0"),
    "somebody else's id": (set_figure("fedskew-client", 2), "fedskew-client 2, not 1"),
    "an earlier round": (set_figure("server-round", 3), "server-round 3, not 4"),
    "no round": (without("metrics", "server-round"), "server-round None, not 4"),
    "negative steps": (set_figure("fedskew-steps", -1), "its steps are -1"),
    "too many steps": (set_figure("fedskew-steps", 11), "from 0 to 10"),
    "half a step": (set_figure("fedskew-steps", 2.5), "its steps are 2.5"),
    "NaN loss": (set_figure("train-loss", NAN), "training loss is nan"),
    "a list of losses": (set_figure("train-loss", [0.5]), "training loss"),
}


def test_an_honest_reply_is_accepted() -> None:
    reply = EXPECTED.check(honest())
    assert reply.steps == 3
    assert reply.loss == 0.5
    np.testing.assert_array_equal(reply.arrays["weight"], np.ones((2, 3)))


def test_a_site_without_samples_returns_less() -> None:
    content = without("reply")
    content["metrics"]["fedskew-steps"] = 0
    assert EXPECTED.check(content).returned == {}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_reply_is_refused_with_the_reason(what: str) -> None:
    content, reason = BROKEN[what]
    with pytest.raises(RefusedError, match=reason) as refusal:
        EXPECTED.check(content)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_a_reply_over_the_agreed_size_is_refused_before_it_is_read() -> None:
    content = set_array("weight", np.zeros(2**20, np.float32))
    with pytest.raises(RefusedError, match="bytes; expected .* at most"):
        EXPECTED.check(content)


FIGURES = ["fedskew-client", "server-round", "fedskew-steps", "train-loss"]

numbers = st.one_of(st.integers(), st.floats())
anything = st.one_of(numbers, st.lists(st.integers(), max_size=12), st.lists(st.floats(), max_size=12))
dtypes = st.sampled_from(["float32", "float64", "float16", "int64", "int8", "bool", "complex64", "U3", "S2", ">f4"])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Array(np.zeros(draw(shapes), draw(dtypes)))
    if kind == 1:
        values = draw(st.lists(st.floats(width=32), min_size=6, max_size=6))
        return Array(np.array(values, np.float32).reshape(2, 3))
    data = saved(np.ones((2, 3), np.float32))
    if kind == 2:  # one byte of a good array is another
        place, byte = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 255))
        data = data[:place] + bytes([byte]) + data[place + 1 :]
    else:
        data = draw(st.one_of(st.binary(max_size=300), st.just(claiming(draw(shapes)))))
    stype = draw(st.sampled_from(["numpy.ndarray", "numpy.ndarray", "pickle", ""]))
    return Array(dtype=draw(st.text(max_size=8)), shape=draw(shapes), stype=stype, data=data)


names = st.one_of(st.sampled_from([*MODEL, "change"]), st.text(max_size=5))
records = st.one_of(
    st.dictionaries(names, arrays(), max_size=4).map(ArrayRecord),
    st.dictionaries(st.one_of(st.sampled_from(FIGURES), st.text(max_size=5)), anything, max_size=5).map(MetricRecord),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.binary()), max_size=3).map(ConfigRecord),
)


def accepted_or_refused(content: RecordDict) -> None:
    try:
        reply = EXPECTED.check(content)
    except RefusedError:
        return
    assert 0 <= reply.steps <= 10
    assert math.isfinite(reply.loss)
    for name, spec in MODEL.items():
        assert reply.arrays[name].shape == spec.shape
        assert reply.arrays[name].dtype == spec.dtype
        assert np.isfinite(reply.arrays[name]).all()


@pytest.mark.slow
@THOROUGHLY
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(["arrays", "metrics", "reply"]), st.text(max_size=5)), records, max_size=4
    )
)
def test_whatever_a_reply_holds_it_is_accepted_or_refused(parts: dict[str, Any]) -> None:
    accepted_or_refused(RecordDict(parts))


@pytest.mark.slow
@THOROUGHLY
@given(st.sampled_from(["arrays", "reply"]), names, arrays())
def test_an_honest_reply_with_one_array_changed_is_accepted_or_refused(record: str, name: str, array: Array) -> None:
    accepted_or_refused(set_array(name, array, record))


@pytest.mark.slow
@THOROUGHLY
@given(st.sampled_from([*FIGURES, "more"]), anything)
def test_an_honest_reply_with_one_figure_changed_is_accepted_or_refused(name: str, value: Any) -> None:
    accepted_or_refused(set_figure(name, value))


@pytest.mark.parametrize(
    "counts",
    [
        [1, -1, 2],
        [10**9, 10**9, 0],
        [1.0, NAN, 2.0],
        [1.0, INF, 2.0],
        [1, 2],
        [1, 2, 3, 4],
        [1, 10**13, 2],
        [0.5, 1.0, 2.0],
        [],
        3,
        None,
    ],
    ids=str,
)
def test_label_counts_that_cant_be_are_refused(counts: Any) -> None:
    metrics = MetricRecord() if counts is None else MetricRecord({"label-counts": counts})
    with pytest.raises(RefusedError, match="label counts"):
        check_counts(RecordDict({"metrics": metrics}), 3, whole=True)


def test_noisy_counts_may_be_fractions() -> None:
    content = RecordDict({"metrics": MetricRecord({"label-counts": [0.5, 0.0, 7.25]})})
    np.testing.assert_array_equal(check_counts(content, 3, whole=False), [0.5, 0.0, 7.25])


@pytest.mark.slow
@THOROUGHLY
@given(
    st.dictionaries(
        st.sampled_from(["label-counts", "num-examples", "confusion", "eval-loss", "server-round"]), anything
    )
)
def test_whatever_is_reported_of_labels_is_accepted_or_refused(figures: dict[str, Any]) -> None:
    content = RecordDict({"metrics": MetricRecord(figures)})
    for check in (
        lambda: check_counts(content, 3, whole=True),
        lambda: check_only_samples(content),
        lambda: check_confusion(content, 2, 1),
    ):
        with contextlib.suppress(RefusedError):
            check()
