"""A model's named arrays and its flat vectors are the same model, as a strategy sends it and takes it back."""

import json
from typing import Any

import numpy as np
import pytest
from federated import LocalGrid, arrays_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from fedskew.deploy import strategy
from fedskew.deploy._arrays import PACKED, RefusedError, pack, unpack


def network() -> nn.Module:
    """Convolutions (whose vector is not in canonical order), batch norm (floats and a counter), and a frozen layer."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    module[3].weight.requires_grad_(False)
    return module


def played(sent: ArrayRecord, trained: dict[str, Any], **options: Any) -> tuple[ArrayRecord, ArrayRecord]:
    """What the only client of a round is sent, and what becomes of the model that it returns."""
    chosen = strategy(min_nodes=1, **options)
    (asked,) = chosen.configure_train(1, sent, ConfigRecord({}), LocalGrid({10: ("a", None, {})}))
    asked.metadata.__dict__["_message_id"] = "message"
    reply = {"arrays": ArrayRecord({name: Array(value) for name, value in trained.items()})}
    reply["metrics"] = MetricRecord({"num-examples": 5, "train-loss": 0.5})
    arrays, _ = chosen.aggregate_train(1, [Message(RecordDict(reply), reply_to=asked)])
    return asked.content["arrays"], arrays


def test_a_model_comes_back_as_it_was_sent_and_a_frozen_layer_stays() -> None:
    module = network()
    before = arrays_of(module.state_dict())
    trained = {name: np.asarray(array.numpy() * 1.5 + 0.25, array.numpy().dtype) for name, array in before.items()}
    trained["1.num_batches_tracked"] = np.asarray(7)
    sent, came = played(before, trained, model=module)
    for name, array in before.items():
        np.testing.assert_array_equal(sent[name].numpy(), array.numpy())
        expected = array.numpy() if name == "3.weight" else trained[name]
        np.testing.assert_allclose(came[name].numpy(), expected, rtol=1e-6, atol=1e-6)
        assert came[name].numpy().dtype == array.numpy().dtype


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_of_an_unknown_model_keep_their_shapes_and_dtypes(dtype: str) -> None:
    values = {"w": np.arange(6, dtype=dtype).reshape(2, 3), "n": np.array(5, dtype=np.int64)}
    sent, came = played(ArrayRecord({name: Array(value) for name, value in values.items()}), values)
    for record in (sent, came):
        assert record["w"].dtype == dtype
        np.testing.assert_array_equal(record["w"].numpy(), values["w"])
        assert record["n"].numpy() == 5


def test_packed_arrays_are_one_array_and_come_back_as_they_were() -> None:
    before = arrays_of(network().state_dict())
    content = RecordDict({"arrays": before, "broadcast": ArrayRecord(), "config": ConfigRecord({"server-round": 1})})
    packed = pack(content)
    assert [len(packed[key]) for key in ("arrays", "broadcast", "config")] == [1, 1, 1]
    after = unpack(packed)
    assert after == content
    assert list(after["arrays"]) == list(before)
    assert unpack(content) == content  # as others send it


def packed_as(whole: bytes) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({PACKED: Array("uint8", (len(whole),), PACKED, whole)})})


@pytest.mark.parametrize(
    "entries",
    [
        [["a", "float32", [1], 4]],  # leaves bytes over
        [["a", "float32", [1], 8], ["b", "float32", [1], 8]],
        [["a", "float32", [1], 8], ["b", "float32", [1], -8], ["c", "float32", [1], 8]],  # the same bytes twice
        [["a", "float32", [1], 8.0]],
        [[1, "float32", [1], 8]],
        [["a", "float32", 1, 8]],
        [["a", 8]],
        {"a": 8},
        8,
    ],
)
def test_a_record_that_is_packed_in_another_way_is_refused(entries: object) -> None:
    head = json.dumps(entries).encode()
    with pytest.raises(RefusedError, match="not packed as fedskew packs them"):
        unpack(packed_as(len(head).to_bytes(8, "little") + head + b"12345678"))


def test_a_packed_record_without_a_head_is_refused() -> None:
    for whole in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"["):
        with pytest.raises(RefusedError):
            unpack(packed_as(whole))
