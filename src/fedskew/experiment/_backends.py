"""The backend that a config names."""

from __future__ import annotations

from typing import Any

from fedskew import torchrun
from fedskew.engine import (
    Backend,
    CohortBackend,
    FedConcatRunner,
    LocalWork,
    Observer,
    ProcessBackend,
    RankBackend,
    RoundRunner,
    SequentialBackend,
    faster_together,
)
from fedskew.errors import ConfigError
from fedskew.experiment._sections import EngineSection
from fedskew.models import FlatModel


def make_backend(
    engine: EngineSection, model: FlatModel, work: LocalWork, observe: Observer | None, clients: int
) -> Backend:
    """Return the backend for cohorts of so many clients, on the model's device; under `torchrun`, over all ranks."""
    local = _local(engine, model, work, observe, -(-clients // torchrun.ranks()))
    return RankBackend(local, work) if torchrun.launched() else local


def _local(engine: EngineSection, model: FlatModel, work: LocalWork, observe: Observer | None, clients: int) -> Backend:
    if engine.backend == "cohort" or (engine.backend == "auto" and faster_together(model, work, clients)):
        return CohortBackend(model, work, observe, engine.chunk)
    if engine.backend == "processes":
        if model.vector.device.type != "cpu":
            raise ConfigError(
                "engine.backend: 'processes' trains on the CPU only; set engine.device to 'cpu', or engine.backend to "
                "'sequential'"
            )
        return ProcessBackend(model, work, engine.number_of_processes(), observe)
    return SequentialBackend(model, work, observe)


def describe_backend(runner: RoundRunner) -> dict[str, Any]:
    """Describe a run's backend for its summary.

    Args:
        runner: What plays the run's rounds.

    Returns:
        Its `name`; where clients are trained one after another, what was done to the `network` (see
        `models.Faster.said`); for a cohort how many clients are `stacked`, or why they are `not_mapped`, but trained
        one after another; under torchrun the number of `ranks`.
    """
    backend = runner.encoders.backend if isinstance(runner, FedConcatRunner) else getattr(runner, "backend", None)
    if isinstance(backend, RankBackend):
        return _named(backend.local) | {"ranks": torchrun.ranks()}
    return _named(backend)


def _named(backend: object) -> dict[str, Any]:
    record: dict[str, Any] = {"name": getattr(backend, "name", type(backend).__name__.lower())}
    if isinstance(backend, SequentialBackend | ProcessBackend):
        return record | {"network": dict(backend.model.network.said)}
    if isinstance(backend, CohortBackend):
        if backend.not_mapped is not None:
            return record | {"not_mapped": backend.not_mapped}
        record["stacked"] = backend.stack_size
    return record
