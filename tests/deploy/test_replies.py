"""No reply crashes the server or touches the model: whatever it holds, it is as agreed, or refused with a reason.

Here 100 random replies for each property; `make test-fuzz` takes 1,000.
"""

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federated import Federated, LocalGrid, federate, tree
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedskew.deploy import strategy
from fedskew.errors import EndedEarlyError
from fedskew.experiment import TrainingLoop

THOROUGHLY = settings(
    max_examples=int(os.environ.get("FUZZ", "100")), deadline=None, suppress_health_check=list(HealthCheck)
)


class Network(torch.nn.Linear):
    """Six weights, two biases, and a counter."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.tensor(1))


MODEL = {name: value.numpy().copy() for name, value in Network().state_dict().items()}
CHANGE = "scaffold.change"


def honest() -> RecordDict:
    arrays = {name: Array(values) for name, values in MODEL.items()}
    figures = {"fedskew-client": 1, "server-round": 4, "fedskew-steps": 3, "train-loss": 0.5, "num-examples": 7}
    return RecordDict(
        {
            "arrays": ArrayRecord(arrays),
            "metrics": MetricRecord(figures),
            "reply": ArrayRecord({CHANGE: Array(np.zeros(8, np.float32))}),
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
    "Inf beside the model": (set_array(CHANGE, np.full(8, -INF, np.float32), "reply"), "NaN or infinite"),
    "wrong shape": (set_array("weight", np.ones((3, 2), np.float32)), r"expected float32 \(2, 3\)"),
    "wrong dtype": (set_array("weight", np.ones((2, 3), np.float64)), r"expected float32 \(2, 3\)"),
    "integers": (set_array("weight", np.ones((2, 3), np.int32)), r"expected float32 \(2, 3\)"),
    "other byte order": (set_array("weight", np.ones((2, 3), ">f4")), r"expected float32 \(2, 3\)"),
    "negative counter": (set_array("seen", np.int64(-1)), "counter below 0"),
    "missing array": (without("arrays", "bias"), "lacks 'bias'"),
    "extra array": (set_array("backdoor", np.ones(2)), "'backdoor', which is not expected"),
    "no arrays": (without("arrays"), "the records"),
    "no metrics": (without("metrics"), "0 MetricRecords; expected one"),
    "too large": (set_array("weight", np.zeros(2**20, np.float32)), "bytes; expected .* at most"),
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
    "too many steps": (set_figure("fedskew-steps", 10**7 + 1), "from 0 to 10000000"),
    "half a step": (set_figure("fedskew-steps", 2.5), "its steps are 2.5"),
    "NaN loss": (set_figure("train-loss", NAN), "training loss is nan"),
    "a list of losses": (set_figure("train-loss", [0.5]), "training loss"),
}


@pytest.fixture(scope="module")
def accepts() -> Callable[[RecordDict], bool]:
    """Whether a server takes the reply of client 1 in round 4; the model that it then has is finite."""
    chosen = strategy("scaffold", model=Network(), max_reply=2**21)
    grid = LocalGrid({10: ("a", None, {}), 20: ("b", None, {})})
    sent = ArrayRecord({name: Array(values) for name, values in MODEL.items()})

    def accepts(content: RecordDict) -> bool:
        messages = [*chosen.configure_train(4, sent, ConfigRecord({"server-round": 4}), grid)]
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message-{number}"
        (asked,) = (message for message in messages if message.content["config"]["fedskew-client"] == 1)
        arrays, figures = chosen.aggregate_train(4, [Message(content, reply_to=asked)])
        assert arrays is not None
        assert figures is not None
        assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
        return figures["refused"] == 0

    return accepts


def test_an_honest_reply_is_accepted(accepts: Any) -> None:
    assert accepts(honest())


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_reply_is_refused_with_the_reason(accepts: Any, what: str, caplog: Any) -> None:
    content, reason = BROKEN[what]
    assert not accepts(content)
    (said,) = (entry.message for entry in caplog.records if "no answer of b: refused" in entry.message)
    assert re.search(reason, said)
    assert "\n" not in said
    assert len(said) < 350


FIGURES = ["fedskew-client", "server-round", "fedskew-steps", "train-loss", "num-examples"]

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


names = st.one_of(st.sampled_from([*MODEL, CHANGE]), st.text(max_size=5))
records = st.one_of(
    st.dictionaries(names, arrays(), max_size=4).map(ArrayRecord),
    st.dictionaries(st.one_of(st.sampled_from(FIGURES), st.text(max_size=5)), anything, max_size=5).map(MetricRecord),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.binary()), max_size=3).map(ConfigRecord),
)


@pytest.mark.slow
@THOROUGHLY
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(["arrays", "metrics", "reply"]), st.text(max_size=5)), records, max_size=4
    )
)
def test_whatever_a_reply_holds_it_is_accepted_or_refused(accepts: Any, parts: dict[str, Any]) -> None:
    accepts(RecordDict(parts))


@pytest.mark.slow
@THOROUGHLY
@given(st.sampled_from(["arrays", "reply"]), names, arrays())
def test_an_honest_reply_with_one_array_changed_is_accepted_or_refused(
    accepts: Any, record: str, name: str, array: Array
) -> None:
    accepts(set_array(name, array, record))


@pytest.mark.slow
@THOROUGHLY
@given(st.sampled_from([*FIGURES, "more"]), anything)
def test_an_honest_reply_with_one_figure_changed_is_accepted_or_refused(accepts: Any, name: str, value: Any) -> None:
    accepts(set_figure(name, value))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: Any) -> Federated:
    waits = {"start_timeout": 0.01, "idle_timeout": 0.01, "round_timeout": 0.1}
    return federate(tmp_path_factory.mktemp("sites"), tree("fedavg"), **waits)


def told_by(federation: Federated, sites: Mapping[str, RecordDict], **agreed: Any) -> TrainingLoop:
    """Begin a run of sites that answer with these."""

    def answers(content: RecordDict) -> Any:
        return lambda message, context: Message(content, reply_to=message)

    grid = federation.grid()
    grid.apps = {number: (name, answers(content), {}) for number, (name, content) in enumerate(sites.items())}
    agreed = {"sites": [*sites], "classes": ["a", "b", "c"], **agreed}
    shutil.rmtree(federation.run_folder, ignore_errors=True)
    return replace(federation, agreement=federation.agreement.model_copy(update=agreed)).run(grid)


def figures(**values: Any) -> RecordDict:
    named = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return RecordDict({"metrics": MetricRecord(named)})


IMPOSSIBLE = {
    "negative": [1, -1, 2],
    "all too many": [10**9, 10**9, 0],
    "nan": [1.0, NAN, 2.0],
    "inf": [1.0, INF, 2.0],
    "short": [1, 2],
    "long": [1, 2, 3, 4],
    "one too many": [1, 10**13, 2],
    "parts": [0.5, 1.0, 2.0],
    "none": [],
    "number": 3,
    "nothing": None,
}


def test_label_counts_that_cant_be_are_refused_and_noisy_ones_may_be_fractions(
    federation: Federated, caplog: Any
) -> None:
    sites = {name: figures(label_counts=counts) for name, counts in IMPOSSIBLE.items()}
    honest = {"z-honest": figures(label_counts=[5, 0, 7])}
    for kind, epsilon, refused in (("exact", None, {*sites}), ("noisy", 1.0, {*sites} - {"parts"})):
        caplog.clear()
        told_by(federation, sites | honest, label_counts=kind, epsilon=epsilon)
        said = [entry.message.split("no answer of ")[1] for entry in caplog.records if "refused: " in entry.message]
        assert {line.partition(": refused: ")[0] for line in said} == refused
        assert all("label counts" in line.partition(": refused: ")[2] for line in said)


@pytest.mark.slow
@THOROUGHLY
@given(
    st.dictionaries(st.sampled_from(["label-counts", "num-examples"]), anything), st.sampled_from(["exact", "withheld"])
)
def test_whatever_is_reported_of_labels_is_accepted_or_refused(
    federation: Federated, reported: dict[str, Any], kind: str
) -> None:
    with contextlib.suppress(EndedEarlyError):
        told_by(federation, {"a": RecordDict({"metrics": MetricRecord(reported)})}, label_counts=kind)


@pytest.mark.slow
@THOROUGHLY
@given(st.dictionaries(st.sampled_from(["confusion", "eval-loss", "server-round"]), anything))
def test_whatever_is_told_of_a_model_is_accepted_or_refused(federation: Federated, told: dict[str, Any]) -> None:
    metrics = {"label-counts": [5, 0, 7], "server-round": 1, "confusion": [1] * 9, "eval-loss": 0.5, **told}
    loop = told_by(federation, {"a": RecordDict({"metrics": MetricRecord(metrics)})})
    evaluation, _ = loop.evaluate(1, loop.untrained)
    assert evaluation is None or 0 <= evaluation.accuracy <= 1
