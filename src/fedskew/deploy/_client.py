"""A site: it trains, evaluates and tells its label counts, each in a process that Flower starts for one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from fedskew import methods, models
from fedskew.deploy._agreement import Agreement, check_config, read_agreement
from fedskew.deploy._arrays import decode, encode
from fedskew.deploy._check import CONFUSION, COUNTS, EVALUATION_LOSS, LOSS, SAMPLES
from fedskew.deploy._instruction import (
    ARRAYS,
    BROADCAST,
    CLIENT,
    CONFIG,
    METRICS,
    REPLY,
    ROUND,
    STEPS,
    TELL,
    Task,
    task_of,
)
from fedskew.deploy._layout import ModelLayout
from fedskew.deploy._site_data import SiteData, load_site
from fedskew.deploy._site_state import SiteStates, released_once
from fedskew.engine import LocalTraining, LocalWork, Sent, SequentialBackend, Update, hooked, predict
from fedskew.errors import ArgumentError, ConfigError, FedskewError, RunError
from fedskew.experiment._config import read
from fedskew.experiment._work import make_network, make_work
from fedskew.hooks import Hooks
from fedskew.labels import privatize
from fedskew.methods import Method
from fedskew.models import FlatModel

LOG = logging.getLogger("flwr")
STOCK = "stock"
Release = Literal["exact", "noisy", "withheld"]
Data = SiteData | Callable[[Context], SiteData]
Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Site:
    """What a site works with. `label_counts`, `epsilon`, `neighbours`, `confusion`: what it tells (see `Agreement`)."""

    model: FlatModel
    work: LocalWork
    data: SiteData
    epochs: int = 1
    label_counts: Release = "exact"
    epsilon: float | None = None
    neighbours: Literal["add-remove", "replace"] = "add-remove"
    confusion: bool = True

    def train(self, content: RecordDict, node: int) -> RecordDict:
        """The reply to a training instruction: the model's arrays after local training, and figures.

        A server that is not ours says neither which client this is nor which of its rounds it counted; then draws
        depend on the node's id, and the site goes on from its last round.
        """
        config = _config(content)
        given = task_of(config)
        round = int(config.get(ROUND, 0))  # type: ignore[arg-type]
        states = None if self.data.state is None else SiteStates(self.data.state, STOCK if given is None else given.run)
        counted = 0 if states is None else states.newest
        task = Task(STOCK, round, node, self.epochs, counted) if given is None else given
        layout = ModelLayout(self.model)
        sent = Sent(
            layout.flat(decode(_arrays(content, ARRAYS), layout.forms, "the server's array")), _tensors(content)
        )
        kept = {} if states is None else states.load(task.counted)
        for hooks in self.work.hooks.values():
            kept = dict(hooks.init_client(sent.model.parameters)) | kept

        backend = SequentialBackend(self.model, self.work, lambda *_: encode(self.model.state_dict()))
        (update,) = backend.train(task.round, [task.assignment(kept)], sent)

        if states is not None:
            states.keep(task.round, update.state)  # also where that is nothing, so that a loss is noticed
        elif update.state:
            raise ConfigError("data: this method keeps something between rounds; give the site a folder (state)")
        ours = given is not None
        return self._reply(update, task, ours, tells=not ours or (TELL in config and self.label_counts != "noisy"))

    def evaluate(self, content: RecordDict) -> RecordDict:
        """The reply to an evaluation: the confusion matrix of the test samples, or to a stock server the accuracy."""
        config, layout = _config(content), ModelLayout(self.model)
        self.model.write_state(layout.flat(decode(_arrays(content, ARRAYS), layout.forms, "the server's array")))
        confusion, loss = predict(
            self.model.module, self.data.test_inputs, self.data.test_targets, self.data.num_classes
        )
        figures: dict[str, Any]
        if CONFUSION not in config:
            right = float(np.trace(confusion) / max(confusion.sum(), 1))
            figures = {SAMPLES: int(confusion.sum()), EVALUATION_LOSS: loss, "accuracy": right}
        elif self.confusion:
            figures = {
                ROUND: int(config[ROUND]),  # type: ignore[arg-type]
                EVALUATION_LOSS: loss,
                CONFUSION: confusion.reshape(-1).tolist(),
            }
        else:
            raise ConfigError("evaluation: the server asks for a confusion matrix, which this site does not tell")
        return RecordDict({METRICS: MetricRecord(figures)})

    def tell(self) -> RecordDict:
        """The reply to a query: label counts, exact or noisy, or the number of samples only."""
        counts = self.data.counts
        if self.label_counts == "withheld":
            return RecordDict({METRICS: MetricRecord({SAMPLES: int(counts.sum())})})
        if self.label_counts == "noisy":
            if self.epsilon is None or self.data.state is None:
                raise ConfigError("label_counts: noisy counts need epsilon, and a folder where the release is kept")
            how = {"epsilon": self.epsilon, "neighbours": self.neighbours}
            told = released_once(self.data.state, counts, how, self._noisy).tolist()
            return RecordDict({METRICS: MetricRecord({COUNTS: told, "epsilon": self.epsilon})})
        return RecordDict({METRICS: MetricRecord({COUNTS: counts.astype(int).tolist()})})

    def _noisy(self) -> NDArray[np.float64]:
        assert self.epsilon is not None, "the release has been checked"
        released: NDArray[np.float64] = privatize(self.data.counts[None], self.epsilon, neighbours=self.neighbours)[0]
        return released

    def _reply(self, update: Update, task: Task, ours: bool, tells: bool) -> RecordDict:
        figures: dict[str, Any] = {LOSS: update.loss}
        if ours:
            figures |= {CLIENT: task.client, ROUND: task.round, STEPS: update.steps}
        if tells:
            figures[SAMPLES] = len(self.data.targets)
        content = RecordDict({ARRAYS: update.observed, METRICS: MetricRecord(figures)})
        if update.reply:
            if not ours:
                raise ConfigError("method: it returns something beside the model; use fedskew.deploy.strategy")
            content[REPLY] = encode(update.reply)
        return content


def client_app(
    model: Model,
    data: Data,
    method: str | Mapping[str, Any] | Method = "fedavg",
    *,
    training: LocalTraining | None = None,
    epochs: int = 1,
    seed: int = 0,
    label_counts: Release = "exact",
    epsilon: float | None = None,
    neighbours: Literal["add-remove", "replace"] = "add-remove",
) -> ClientApp:
    """A Flower ClientApp that trains as a method says: its objective and its local step.

    `model`: a network, or a function that makes one, called once per message; `data`: this site's samples, or a
    function of Flower's `Context` that reads them. `method`: a preset's name, the tables of a config's `[method]`, or a
    `Method`; only what a client does matters here. `epochs`: where the server does not say (ours does). `label_counts`,
    `epsilon`, `neighbours`: what a query of the server gets (see `Agreement`); where it isn't the exact counts, neither
    are confusion matrices told.

    Under a stock Flower strategy such as FedAvg it takes any objective that needs nothing from the server beside the
    model; replies carry `arrays` and `num-examples`. Under `fedskew.deploy.strategy` it takes every method but those
    that change the network (MOON). A method that keeps something at its clients (SCAFFOLD) needs `SiteData.state`.
    Raises ConfigError for a method that can't be; what a message brings that does not fit is an error reply, whose
    reason the site's own log tells.
    """
    chosen = as_method(method, (training or LocalTraining()).momentum)

    def site(context: Context) -> Site:
        held = data if isinstance(data, SiteData) else data(context)
        network = models.swap_dropout(model if isinstance(model, nn.Module) else model())
        work = LocalWork(
            held, chosen.objective, chosen.local_step, training or LocalTraining(), seed, hooks=hooked(chosen)
        )
        exact = label_counts == "exact"
        return Site(FlatModel(network), work, held, epochs, label_counts, epsilon, neighbours, confusion=exact)

    return _app(site)


def site_app(folder: str | Path) -> ClientApp:
    """The ClientApp of an app folder, which holds `run.toml` and `deploy.toml`.

    Which samples are this site's says a file that the node's own config names: `data="/path/of/data.toml"` (see
    `load_site`). A site whose data doesn't fit the agreement answers with an error, and its own log says why.
    """
    folder = Path(folder)

    def site(context: Context) -> Site:
        agreement, config = read_agreement(folder / "deploy.toml"), read(folder / "run.toml")
        path = context.node_config.get("data")
        if not isinstance(path, str):
            raise ConfigError("data: the node's config names no data; start it with --node-config 'data=\"data.toml\"'")
        return agreed_site(config, agreement, load_site(Path(path), agreement))

    return _app(site)


def agreed_site(config: Any, agreement: Agreement, data: SiteData) -> Site:
    """A site as a config and an agreement describe it."""
    check_config(config, agreement, has_target=True)
    seed = config.seeds[0]
    method = methods.build(config.method, config.training.momentum)
    network = make_network(config, seed, method, len(agreement.classes), tuple(agreement.shape))
    work = make_work(config, seed, method, data, tuple(agreement.mean), tuple(agreement.std))
    torch.set_num_threads(config.engine.threads)
    return Site(
        FlatModel(network),
        work,
        data,
        config.training.epochs,
        agreement.label_counts,
        agreement.epsilon,
        agreement.neighbours,
        agreement.evaluates,
    )


def as_method(method: str | Mapping[str, Any] | Method, momentum: float | None = None) -> Method:
    """A method by a preset's name, by tables, or itself.

    Raises ConfigError for one that can't stand in somebody else's app.
    """
    if isinstance(method, Method):
        methods.check(method)
        built = method
    else:
        built = methods.build(methods.expand({"preset": method} if isinstance(method, str) else method), momentum)
    if built.pipeline is not None:
        raise ConfigError("method: FedConcat's stages are not deployed; simulate it")
    for component in hooked(built).values():
        if type(component).adapt is not Hooks.adapt:
            name = type(component).__name__
            raise ConfigError(f"method: {name} changes the network, so server and sites must be ours; use server_app")
    return built


def _app(site: Callable[[Context], Site]) -> ClientApp:
    app = ClientApp()

    def answer(message: Message, context: Context, work: Callable[[Site], RecordDict]) -> Message:
        try:
            return Message(work(site(context)), reply_to=message)
        except FedskewError as error:
            LOG.error("%s", error)
            # The message may name files and classes of this site; the server needs to know neither.
            raise RunError(f"this site can't do it ({type(error).__name__}); its own log says why") from None

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, lambda site: site.train(message.content, context.node_id))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, lambda site: site.evaluate(message.content))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer(message, context, lambda site: site.tell())

    return app


def _config(content: RecordDict) -> ConfigRecord:
    record = content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise ArgumentError(f"message: has no ArrayRecord {key!r}")
    return record


def _tensors(content: RecordDict) -> dict[str, torch.Tensor]:
    """What the server sends beside the model, as it says; its values only shape this site's own training."""
    if BROADCAST not in content:
        return {}
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in _arrays(content, BROADCAST).items()}
