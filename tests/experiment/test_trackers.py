"""Trackers, each with its real package, offline: what was logged is read back from what lies on disk."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from example_runs import example_run

from fedskew.errors import MissingPackageError
from fedskew.experiment import TRACKERS
from fedskew.report import SeedRun

UNTRAINED = {"seconds", "diverged", "bytes_up", "bytes_down"}
PER_ROUND = UNTRAINED | {"loss", "entropy", "kl", "ess", "ess_share", "target_distance", "drift"}
FIGURES = ("accuracy", "balanced_accuracy", "macro_f1", "target_accuracy", "worst_class", "loss")
PER_EVALUATION = {f"evaluation.{name}" for name in FIGURES}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the person who runs the tests has set points a tracker to a server."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def track(name: str, folder: Path, rounds: slice = slice(None), run: SeedRun | None = None) -> None:
    run = run or example_run(rounds=3, evaluate_every=2)
    tracker = TRACKERS[name](folder)
    tracker.start(run.config)
    for record in run.rounds[rounds]:
        tracker.log(record)
    tracker.finish(run.summary)


def logged(name: str) -> list[tuple[int, float]]:
    """What `track` logs under this name, by round."""
    part, _, figure = name.rpartition(".")
    found = []
    for record in example_run(rounds=3, evaluate_every=2).rounds:
        value = getattr(getattr(record, part) if part else record, figure, None)
        value = len(value) if figure == "diverged" else value
        found += [] if value is None else [(record.round, value)]
    return found


def on_board(folder: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard(tmp_path):
    track("tensorboard", tmp_path)
    events = on_board(tmp_path)
    assert set(events.Tags()["scalars"]) == PER_ROUND | PER_EVALUATION
    for name in PER_ROUND | PER_EVALUATION:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in logged(name)]
        assert [value for _, value in found] == pytest.approx([value for _, value in logged(name)])
    assert {len(logged(name)) for name in UNTRAINED} == {4}
    assert {len(logged(name)) for name in PER_EVALUATION} == {3}, "round 1 is not evaluated"
    texts = {
        name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "summary")
    }
    assert b'"lr": 0.01' in texts["config"]
    assert b'"macro_f1"' in texts["summary"]


def test_values_that_are_undefined_or_not_finite_are_not_tracked_and_those_on_validation_samples_are(tmp_path):
    run = example_run(rounds=1, target=False)
    record = run.rounds[1]
    record.validation = replace(record.evaluation)
    record.loss, record.drift = float("nan"), float("inf")
    record.evaluation.per_class = [None, float("nan")]
    track("tensorboard", tmp_path, slice(1, 2), run)
    found = set(on_board(tmp_path).Tags()["scalars"])
    assert not {"loss", "drift", "evaluation.worst_class", "evaluation.target_accuracy"} & found
    assert {"validation.worst_class", "validation.accuracy"} <= found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("wandb", "wandb")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch, name, module):
    """It comes before MLflow's test: what MLflow finds when it is first imported holds for the whole process."""
    monkeypatch.setitem(sys.modules, module, None)  # what Python itself does for a package that can't be imported
    with pytest.raises(MissingPackageError, match=r"fedskew\[tracking\]"):
        TRACKERS[name](tmp_path)


@pytest.mark.slow
def test_mlflow_also_where_the_run_was_interrupted_and_went_on(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    track("mlflow", tmp_path, slice(0, 2))
    track("mlflow", tmp_path, slice(2, None))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedskew").experiment_id])
    assert run.info.run_name == "fedavg seed 0"
    assert run.info.status == "FINISHED"
    assert run.data.params["training.lr"] == "0.01"
    assert run.data.tags["summary.revision"] == "0123abc"
    assert run.data.metrics["summary.rounds"] == 3
    for name in PER_ROUND | PER_EVALUATION:
        assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] == logged(name)


@pytest.mark.slow
def test_wandb(tmp_path):
    wandb = pytest.importorskip("wandb")
    track("wandb", tmp_path)
    wandb.teardown()  # its writer is a process of its own: wait until that has written everything
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    records = wandb_records(path)
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert started.project == "fedskew"
    assert started.display_name == "fedavg seed 0"
    assert {item.key for item in started.config.update} >= {"data", "training", "seeds"}
    rows = [
        {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    for name in PER_ROUND | PER_EVALUATION:
        assert [(row["_step"], row[name]) for row in rows if name in row] == logged(name)


def wandb_records(path: Path) -> list:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format with one protobuf message each."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, messages, part = path.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the end of a block is too small for another header
            position += 32768 - position % 32768
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]  # 1 whole, 2 first, 3 middle, 4 last
        part += content[position + 7 : position + 7 + length]
        if kind in (1, 4):
            messages.append(Record.FromString(part))
            part = b""
        position += 7 + length
    return messages
