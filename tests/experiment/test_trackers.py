"""Trackers, each with its real package, offline: what was logged is read back from what lies on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from example_runs import example_run

from fedskew.errors import ConfigError, MissingPackageError
from fedskew.experiment import make_trackers, scalars

UNTRAINED = {"seconds", "diverged", "bytes_up", "bytes_down"}
PER_ROUND = UNTRAINED | {"loss", "entropy", "kl", "ess", "ess_share", "target_distance", "drift"}
PER_EVALUATION = {"accuracy", "balanced_accuracy", "macro_f1", "target_accuracy", "worst_class", "test_loss"}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the person who runs the tests has set points a tracker to a server."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def track(name: str, folder: Path, rounds: slice = slice(None)) -> None:
    run = example_run(rounds=3, evaluate_every=2)
    (tracker,) = make_trackers([name], folder)
    tracker.start(run.config)
    for record in run.rounds[rounds]:
        tracker.log(record)
    tracker.finish(run.summary)


def logged(name: str) -> list[tuple[int, float]]:
    """What `track` logs under this name, by round."""
    rounds = example_run(rounds=3, evaluate_every=2).rounds
    return [(record.round, scalars(record)[name]) for record in rounds if name in scalars(record)]


def test_the_scalars_of_a_round_are_its_own_figures_and_those_of_its_evaluation():
    untrained, first, second = example_run(rounds=3, evaluate_every=2).rounds[:3]
    assert set(scalars(second)) == PER_ROUND | PER_EVALUATION
    assert set(scalars(first)) == PER_ROUND, "not evaluated"
    assert set(scalars(untrained)) == UNTRAINED | PER_EVALUATION, "nobody trained"
    assert scalars(second)["worst_class"] == min(second.evaluation.per_class)
    second.validation = second.evaluation
    assert scalars(second)["validation_accuracy"] == second.evaluation.accuracy


def test_values_that_are_undefined_or_not_finite_are_not_tracked():
    record = example_run(rounds=1, target=False).rounds[1]
    record.loss, record.drift = float("nan"), float("inf")
    record.evaluation.per_class = [None, float("nan")]
    assert not {"loss", "drift", "worst_class", "target_accuracy"} & set(scalars(record))


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == PER_ROUND | PER_EVALUATION
    for name in ("loss", "accuracy"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in logged(name)]
        assert [value for _, value in found] == pytest.approx([value for _, value in logged(name)])
    texts = {
        name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "summary")
    }
    assert b'"lr": 0.01' in texts["config"]
    assert b'"macro_f1"' in texts["summary"]


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


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'tensorbord'.*did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy"), ("wandb", "wandb")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)  # what Python itself does for a package that can't be imported
    with pytest.raises(MissingPackageError, match=r"fedskew\[tracking\]"):
        make_trackers([name], tmp_path)
