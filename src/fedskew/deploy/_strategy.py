"""A method as a Flower strategy, for a ServerApp of your own."""

import copy
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import ArrayLike
from torch import nn

from fedskew import components
from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import ArraysLayout, FloatArray, ModelLayout, RefusedError, Specs, decode, short
from fedskew.deploy._ask import Arrivals, Contents, Read, Replies, T, error_line, exchange
from fedskew.deploy._client import as_method
from fedskew.deploy._log import LOG
from fedskew.deploy._plan import returned_by
from fedskew.deploy._rehearsal import Nobody
from fedskew.deploy._replies import bytes_needed, check_counts, check_finite, check_only_samples, check_size, only
from fedskew.deploy._round import log_aggregation
from fedskew.deploy._validator import ReplyValidator
from fedskew.deploy.site_data import SiteData
from fedskew.engine import Federation, LocalTraining, LocalWork, ServerState, Update
from fedskew.engine.contracts import hooked
from fedskew.errors import ConfigError, placed
from fedskew.hooks import Hooks
from fedskew.labels import as_target
from fedskew.methods import Method
from fedskew.models import FlatModel, ModelState

PAUSE = 1.0

_BESIDE = ("broadcast", "init_client", "gather", "end_local")
"""Hooks by which a component sends, keeps or returns something beside the model."""


@dataclass(eq=False)
class MethodStrategy(Strategy):
    """A Flower strategy with the selection, weighting and server update of a method.

    It is used like Flower's FedAvg: `strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)`. Its clients are
    either stock ClientApps, whose replies contain the trained arrays and `num-examples`, or
    `fedskew.deploy.client_app`, which is needed if the method has its own objective or local step. The clients are the
    nodes that are connected in round 1, at least `min_nodes`. They are ordered by the names under which their keys are
    registered, or by their ids. A node that connects later takes part in the next run.

    Where the method needs label counts, the server queries them before round 1, and clients reply with a metric
    `label-counts`, one number per class. Otherwise weights follow from the `num-examples` of their replies.

    The arrays in a result, and those that are evaluated, are the model that the method evaluates. Training continues
    from another where the method says so (FedACG's momentum, FedEXP's `average_last_two`).

    Args:
        method: A preset's name, the tables of a config's `[method]`, or a `Method`.
        model: The network. It is needed if the method sends more than the model, and to treat buffers by themselves.
        target: Target label mix, shape `(classes,)`.
        participation: Share of the clients that train in each round.
        epochs: Local epochs of clients made by `client_app`.
        seed: Seed of the selection.
        momentum: Momentum of the clients' SGD; FedNova needs it.
        classes: Number of classes; label counts of another number are refused. None: as many as the target has, or
            without a target as most of the clients report.
        min_nodes: Smallest number of nodes to begin with.
        nodes: Which nodes may take part: a pattern such as "hospital-*", or several, of the names under which their
            keys are registered, or their ids where they have no name (`fnmatch`: *, ? and [...]). The selection
            chooses among these; no other node is asked anything. None: all nodes.
        query_timeout: Seconds to wait for label counts.
        max_reply: See `Agreement`.
        weight_limit: Upper limit on a client's weight, from above 0 to 1 (see `mixing.limited`); None: no limit.

    Attributes:
        record: The last round's record, as in a line of a run's `rounds.jsonl`.

    Raises:
        ConfigError: The method can't be used in a Flower project of your own, or not with these arguments.

    Example:
        chosen = strategy("fedentopt+fedla", participation=0.5)
        of_two = strategy("fedavg", nodes=["berlin-*", "lyon"])
    """

    method: str | Mapping[str, Any] | Method = "fedavg"
    _: KW_ONLY
    model: nn.Module | None = None
    target: ArrayLike | None = None
    participation: float = 1.0
    epochs: int = 1
    seed: int = 0
    momentum: float = 0.0
    classes: int | None = None
    min_nodes: int = 2
    nodes: str | Sequence[str] | None = None
    query_timeout: float = 600.0
    max_reply: int | None = None
    weight_limit: float | None = None
    record: dict[str, Any] = field(init=False, default_factory=dict)
    _state: ServerState = field(init=False, repr=False)

    def __post_init__(self) -> None:
        patterns = (self.nodes,) if isinstance(self.nodes, str) else None if self.nodes is None else tuple(self.nodes)
        if patterns is not None and not (patterns and all(isinstance(one, str) and one for one in patterns)):
            raise ConfigError(
                f'nodes: expected a pattern of names such as "hospital-*", or a list of them, got {self.nodes!r}'
            )
        if self.weight_limit is not None and not 0 < self.weight_limit <= 1:
            raise ConfigError(f"weight_limit: expected a share above 0 and at most 1, got {self.weight_limit!r}")
        self._patterns, self._chosen = patterns, as_method(self.method, self.momentum)
        self._target = None if self.target is None else np.asarray(self.target, dtype=np.float64)
        if self._target is not None and self.classes not in (None, self._target.size):
            raise ConfigError(f"classes: {self.classes}, but the target has {self._target.size} shares")
        _check_hooks(self._chosen, self.model is not None)
        slots = "selection", "weighting"
        self._queries = any(components.needs_label_counts(slot, getattr(self._chosen, slot)) for slot in slots)
        self._run = secrets.token_hex(8)
        self._federation: Federation | None = None
        self._asked: dict[int, Message] = {}
        self._shown: ArrayRecord | None = None  # the model of the last round, where training continues from another

    def summary(self) -> None:
        """Log the method when Flower starts."""
        LOG.info("\t├──> fedskew: %s", self._chosen)
        LOG.info("\t└──> label counts: %s", "query" if self._queries else "not used")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the training messages of a round; before the first, query label counts."""
        if self._federation is None:
            self._federation = self._begin(arrays, grid)
        if arrays is self._shown:
            arrays = self._layout.to_record(self._state.model)
        model = self._model_state(arrays)
        state = dataclasses.replace(self._state, round=server_round - 1).having("model", model._asdict())
        self._cohort, self._state = self._federation.select(state)
        self._sent, tasks = self._federation.instruct(self._state, self._cohort)
        self._validator.begin(tasks, self._sent)
        online = self._online(grid)
        self._validator.missing(server_round, "offline", [task.client for task in tasks if task.client not in online])
        contents = {
            task.client: wire.TrainInstruction.of(self._run, server_round, task).content(
                arrays, self._sent.broadcast, config
            )
            for task in tasks
            if task.client in online
        }
        return self._ask(contents, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies into the next model; without any, the model stays as it is."""
        assert self._federation is not None
        validator, cohort = self._validator, self._cohort
        read = self._answers(f"round {server_round}", replies, partial(self._read, round=server_round))
        validator.note(read)
        federation = self._federation = dataclasses.replace(self._federation, counts=self._counts)
        if not cohort.quotas:
            cohort = cohort._replace(counts=self._counts[cohort.ids])
        self._state, collected = federation.aggregate(self._state, cohort, self._sent, [*read.valid.values()])
        record = federation.record(server_round, cohort, collected)
        log_aggregation(record, validator.names, self.weight_limit)
        self.record = record.to_dict()
        metrics = MetricRecord({"counted": len(collected.members.ids), "refused": len(validator.notes["refused"])})
        if self.record["loss"] is not None:
            metrics[wire.LOSS] = self.record["loss"]
        shown = federation.evaluated_model(self._state)
        arrays = self._layout.to_record(shown)
        self._shown = None if shown.parameters is self._state.model.parameters else arrays
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the evaluation messages of a round, to the nodes that take part."""
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord({**config, wire.ROUND: server_round})})
        return self._ask(dict.fromkeys(self._online(grid), content), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average each metric that at least half of the valid replies contain, weighted by `num-examples`."""
        valid = [*self._answers(f"evaluation of round {server_round}", replies, _figures).valid.values()]
        often = Counter(key for _, figures in valid for key in figures if key != wire.SAMPLES)
        averages = MetricRecord()
        for key in sorted(key for key, number in often.items() if 2 * number >= len(valid)):
            having = [(number, figures[key]) for number, figures in valid if key in figures]
            samples = sum(number for number, _ in having)
            if samples:
                averages[key] = sum(number / samples * value for number, value in having)
        return averages if averages else None

    def _begin(self, arrays: ArrayRecord, grid: Grid) -> Federation:
        nodes = self._matching(grid)
        names, self._nodes = [name for name, _ in nodes], tuple(node for _, node in nodes)
        network = None if self.model is None else FlatModel(copy.deepcopy(self.model))
        self._layout = ArraysLayout(arrays) if network is None else ModelLayout(network, whole=True)
        returned: Specs = {} if network is None else self._returned(network)
        self._validator = ReplyValidator(
            names, self._layout, returned, returned, hooked(self._chosen), max_reply=self.max_reply
        )
        self._counts = self._query_counts(grid) if self._queries else np.zeros((len(nodes), 1))
        with placed("method: "):
            federation = Federation(
                method=self._chosen,
                backend=Nobody(),
                counts=self._counts,
                target=None if self._target is None else as_target(self._target, len(self._target)),
                participation=self.participation,
                seed=self.seed,
                epochs=self.epochs,
                weight_limit=self.weight_limit,
            )
        self._state = federation.start(self._model_state(arrays))
        return federation

    def _matching(self, grid: Grid) -> list[tuple[str, int]]:
        """Wait for enough nodes that match the patterns; return names and ids, ordered by both."""
        patterns = self._patterns
        while True:
            nodes = sorted((node.name, node.node_id) for node in grid.get_nodes())
            named = [(name or str(node), node) for name, node in nodes]
            fit = [one for one in named if patterns is None or any(fnmatchcase(one[0], each) for each in patterns)]
            if len(fit) >= self.min_nodes:
                return fit
            said = "" if patterns is None else f", of {len(named)} connected, whose names fit {', '.join(patterns)}"
            LOG.info("waiting for nodes: %d of %d%s", len(fit), self.min_nodes, said)
            time.sleep(PAUSE)

    def _model_state(self, arrays: ArrayRecord) -> ModelState:
        return self._layout.to_state(decode(arrays, self._layout.specs, "the model's array"))

    def _returned(self, network: FlatModel) -> Specs:
        inputs, targets = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        data = SiteData(inputs, targets, inputs, targets, 1)
        method = self._chosen
        work = LocalWork(data, method.objective, method.local_step, LocalTraining(), 0, hooks=hooked(method))
        return returned_by(network, work, len(self._nodes))

    def _query_counts(self, grid: Grid) -> FloatArray:
        """Query label counts, `(clients, classes)`, of as many classes as agreed or most report; 0 where none come."""
        content = RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 0})})
        nodes = dict(enumerate(self._nodes))
        arrivals = exchange(grid, nodes, dict.fromkeys(nodes, content), MessageType.QUERY, self.query_timeout)
        classes_of = {
            client: len(values)
            for client, reply in arrivals.contents.items()
            for record in reply.metric_records.values()
            if isinstance(values := record.get(wire.COUNTS), list)
        }
        names, votes = self._validator.names, Counter(classes_of.values()).most_common(2)
        agreed = self.classes if self._target is None else self._target.size
        if agreed is None and len(votes) == 2 and votes[0][1] == votes[1][1]:
            said = ", ".join(f"{names[client]} {of}" for client, of in sorted(classes_of.items()))
            raise ConfigError(f"label_counts: clients differ in their number of classes ({said}); pass classes=...")
        classes = agreed or (votes[0][0] if votes else 1)
        read = arrivals.read(lambda reply, _: check_counts(reply, classes, whole=False), "label counts", names)
        if not read.valid:
            raise ConfigError(
                "label_counts: no client reported them; reply to queries with a metric 'label-counts', one number per "
                "class"
            )
        return np.array([read.valid.get(client, np.zeros(classes)) for client in range(len(names))])

    def _online(self, grid: Grid) -> list[int]:
        online = set(grid.get_node_ids())
        return [client for client, node in enumerate(self._nodes) if node in online]

    def _ask(self, contents: Contents, kind: str) -> list[Message]:
        self._asked = {client: Message(content, self._nodes[client], kind) for client, content in contents.items()}
        return list(self._asked.values())

    def _answers(self, about: str, replies: Iterable[Message], read: Read[T]) -> Replies[T]:
        """Read replies by client; refuse those of nodes that were sent no message, and second ones."""
        # Built only now, since a message gets its id when it is sent.
        clients = {message.metadata.message_id: client for client, message in self._asked.items()}
        arrivals = Arrivals({}, {})
        for message in replies:
            node, client = message.metadata.src_node_id, clients.get(message.metadata.reply_to_message_id)
            if client is None or self._nodes[client] != node or client in arrivals.contents:
                LOG.warning("%s: refused a reply of node %d: it was not asked", about, node)
            elif message.has_error():
                arrivals.failed[client] = error_line(message)
            else:
                arrivals.contents[client] = message.content
        return arrivals.read(read, about, self._validator.names)

    def _read(self, content: RecordDict, client: int, round: int) -> Update:
        """Read the reply of a client, fedskew's or stock, and the number of samples that it reports."""
        validator, figures = self._validator, only(MetricRecord, content)
        if wire.CLIENT in figures:
            trained = validator.read(content, client, round)
        else:
            check_size(content, self.max_reply or bytes_needed(self._layout.specs))
            if validator.returned or components.has(self._chosen.server_update, "is_dynamic"):
                raise RefusedError("the method needs fedskew.deploy.client_app, but this is the reply of another app")
            trained = validator.trained(client, round, only(ArrayRecord, content), 0, _loss(figures))
        if not self._queries:
            self._counts[client] = check_only_samples(RecordDict({wire.METRICS: figures}))
        return trained


strategy = MethodStrategy


def _check_hooks(method: Method, has_model: bool) -> None:
    """Raise ConfigError where a component sends or returns what a strategy can't know the shapes of."""
    for component in hooked(method).values():
        kind, name = type(component), type(component).__name__
        if not has_model and any(getattr(kind, hook) is not getattr(Hooks, hook) for hook in _BESIDE):
            raise ConfigError(f"model: {name} needs the network; pass strategy(model=...)")
        if kind.gather is not Hooks.gather:
            raise ConfigError(
                f"method: {name} returns arrays gathered from batches, whose shapes a strategy can't know before "
                "training; deploy it by server_app"
            )


def _figures(content: RecordDict, _: int) -> tuple[int, dict[str, float]]:
    check_size(content, 2**20)
    metrics = only(MetricRecord, content)
    figures = {key: _finite(key, value) for key, value in metrics.items() if isinstance(value, int | float)}
    return check_only_samples(RecordDict({wire.METRICS: metrics})), figures


def _loss(metrics: MetricRecord) -> float:
    """Read the training loss under one of its usual names; NaN if a stock client reports none."""
    for key in (wire.LOSS, "train_loss", "loss"):
        value = metrics.get(key)
        if isinstance(value, int | float):
            return _finite(key, value)
    return float("nan")


def _finite(key: str, value: float) -> float:
    return check_finite(value, f"metric {short(key)}")
