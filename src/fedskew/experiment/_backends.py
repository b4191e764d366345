"""The backend that a config asks for."""

from __future__ import annotations

from fedskew.engine import Backend, LocalWork, Observer, Sequential
from fedskew.experiment._config import EngineSection
from fedskew.models import FlatModel


def make_backend(engine: EngineSection, model: FlatModel, work: LocalWork, observe: Observer | None) -> Backend:
    """Where cohorts train, on the device that the model is on."""
    return Sequential(model, work, observe)
