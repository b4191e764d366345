"""What a method's clients return beside the model: found by training one, briefly, on samples of zeros."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import Form, forms
from fedskew.deploy._site_data import SiteData
from fedskew.engine import Assignment, LocalWork, Sent, SequentialBackend
from fedskew.experiment._config import Config
from fedskew.experiment._work import make_network, make_work
from fedskew.methods import Method
from fedskew.models import FlatModel

Forms = dict[str, Form]


def returned_forms(config: Config, agreement: Agreement, method: Method) -> tuple[Forms, Forms]:
    """The arrays that components return beside the model, after steps and after none."""
    return _returned(config, agreement, method, 2), _returned(config, agreement, method, 0)


def _returned(config: Config, agreement: Agreement, method: Method, samples: int) -> Forms:
    seed, classes, shape = config.seeds[0], len(agreement.classes), tuple(agreement.shape)
    model = FlatModel(make_network(config, seed, method, classes, shape))
    inputs = torch.zeros(samples, *shape, dtype=torch.int64 if agreement.tokens else torch.float32)
    targets = torch.arange(samples) % classes
    data = SiteData(inputs, targets, inputs[:0], targets[:0], classes, Path())
    work = make_work(config, seed, method, data, tuple(agreement.mean), tuple(agreement.std))
    return trained_forms(model, work, len(agreement.sites))


def trained_forms(model: FlatModel, work: LocalWork, clients: int) -> Forms:
    """The arrays that one client returns beside the model."""
    start = model.read_state()
    sent: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for hooks in work.hooks.values():
        sent |= hooks.broadcast(hooks.init_server(start.parameters, clients))
        kept |= hooks.init_client(start.parameters)
    (update,) = SequentialBackend(model, work).train(1, [Assignment(0, 1, kept)], Sent(start, sent))
    return forms(update.reply)
