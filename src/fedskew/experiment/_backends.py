"""The backend that a config asks for."""

from __future__ import annotations

from fedskew import torchrun
from fedskew.engine import Backend, LocalWork, Observer, Processes, Ranks, Sequential
from fedskew.errors import ConfigError
from fedskew.experiment._config import EngineSection
from fedskew.models import FlatModel


def make_backend(engine: EngineSection, model: FlatModel, work: LocalWork, observe: Observer | None) -> Backend:
    """Where cohorts train, on the device that the model is on; under `torchrun`, over its ranks."""
    local = _local(engine, model, work, observe)
    return Ranks(local, work) if torchrun.launched() else local


def _local(engine: EngineSection, model: FlatModel, work: LocalWork, observe: Observer | None) -> Backend:
    if engine.backend == "processes":
        if model.vector.device.type != "cpu":
            raise ConfigError(
                "engine.backend: 'processes' trains on the CPU only; set engine.device to 'cpu', or engine.backend to "
                "'sequential'"
            )
        return Processes(model, work, engine.number_of_processes(), observe)
    return Sequential(model, work, observe)
