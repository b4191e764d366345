"""What goes wrong at a site stays there: file names, keys and values of its data reach its own log only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
from federated import Federated, federate, tree
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from fedskew.deploy import SiteData, client_app

SECRET = "patient-17.png"


def raising(error: BaseException) -> Callable[[Context], Never]:
    def read(context: Context) -> Never:
        raise error

    return read


NAMED_AFTER_DATA = type(SECRET, (OSError,), {})


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError(SECRET), "KeyError in its own log"),
        (ValueError(f"/data/{SECRET}: 3.5"), "ValueError in its own log"),
        (NAMED_AFTER_DATA(SECRET), "OSError in its own log"),
        (MemoryError(SECRET), "MemoryError in its own log"),
        (SystemExit(SECRET), "SystemExit in its own log"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_readers_exception_leaves_as_its_type(error: BaseException, reason: str, kind: str, caplog: Any) -> None:
    assert asked(client_app(nn.Linear(2, 2), raising(error)), kind).error.reason == reason
    assert SECRET in caplog.text
    assert "Traceback" not in caplog.text


class Model(nn.Module):
    """A model whose forward pass fails with a value of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError(f"{SECRET}: {inputs[0]}")


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_models_exception_leaves_as_its_type(kind: str, tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))

    def data(context: Context) -> SiteData:
        return SiteData.load(federation.data_of("ash"), federation.agreement)

    answer = asked(client_app(Model, data), kind, ArrayRecord(Model().state_dict()))
    assert "in its own log" in answer.error.reason
    assert SECRET not in answer.error.reason
    assert SECRET in caplog.text


def test_a_damaged_data_file_stays_at_home(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    np.savez(tmp_path / "ash" / "own.npz", y=np.zeros(3))
    reason = error_of(federation, "ash")
    assert str(tmp_path) not in reason
    assert "own.npz" not in reason
    assert "own.npz" in caplog.text


def error_of(federation: Federated, name: str) -> str:
    """The reason that the server is given."""
    app = federation.grid().apps[federation.node(name)]
    return asked(app[1], "query", settings=app[2]).error.reason


def asked(app: Any, kind: str, arrays: ArrayRecord | None = None, settings: Any = None) -> Message:
    """A ClientApp's answer, in a context like Flower's."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    if arrays is not None:
        content["arrays"] = arrays
    return app(Message(content, 5, kind), Context(1, 5, settings or {}, RecordDict(), {}))
