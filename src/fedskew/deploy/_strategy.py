"""A method as a Flower strategy, for a ServerApp of your own."""

from __future__ import annotations

import copy
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fedskew import components
from fedskew.deploy._agreement import needs_label_counts
from fedskew.deploy._arrays import ArraysLayout, Layout, ModelLayout, RefusedError, Specs, decode, short
from fedskew.deploy._ask import Arrivals, error_line, exchange
from fedskew.deploy._client import as_method
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import (
    CLIENT,
    CONFIG,
    COUNTS,
    LOSS,
    METRICS,
    REPORT_SAMPLES,
    ROUND,
    SAMPLES,
    STEPS,
    TrainInstruction,
)
from fedskew.deploy._plan import returned_by
from fedskew.deploy._replies import (
    bytes_needed,
    check_counts,
    check_finite,
    check_only_samples,
    check_size,
    only,
)
from fedskew.deploy._round import log_aggregation
from fedskew.deploy._site_data import SiteData
from fedskew.deploy._validator import MOST_STEPS, ReplyValidator, Trained
from fedskew.engine import Assignment, Backend, Federation, LocalTraining, LocalWork, Sent, ServerState, Update
from fedskew.engine.contracts import hooked
from fedskew.errors import ArgumentError, ConfigError, RunError
from fedskew.hooks import Hooks
from fedskew.labels import as_target
from fedskew.methods import Method
from fedskew.models import FlatModel, ModelState

PAUSE = 1.0

_BESIDE = ("broadcast", "init_client", "gather", "end_local")
"""Hooks by which a component sends, keeps or returns something beside the model."""

FloatArray = NDArray[np.float64]


class MethodStrategy(FedAvg):
    """A Flower strategy with the selection, weighting and server update of a method.

    It is used like Flower's FedAvg: `strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)`. Its clients are
    either stock ClientApps, whose replies contain the trained arrays and `num-examples`, or
    `fedskew.deploy.client_app`, which is needed if the method has its own objective or local step. The clients are the
    nodes that are connected in round 1, at least `min_nodes`. They are ordered by the names under which their keys are
    registered, or by their ids. A node that connects later takes part in the next run.

    The arrays in a result, and those that are evaluated, are the model that the method evaluates. Training continues
    from another where the method says so (FedACG's momentum, FedEXP's `average_last_two`).

    Args:
        method: A preset's name, the tables of a config's `[method]`, or a `Method`.
        model: The network. It is needed if the method sends more than the model, and to treat buffers differently from
            parameters.
        target: Target label mix, shape `(classes,)`.
        participation: Share of the clients that train in each round.
        epochs: Local epochs of clients made by `client_app`.
        seed: Seed of the selection.
        momentum: Momentum of the clients' SGD; FedNova needs it.
        label_counts: How the server learns label counts. "query": it queries them before round 1, and clients reply
            with a metric `label-counts`, one number per class. "metric": every reply contains that metric, which is too
            late for a selection that needs label counts. None: "query" if the method needs label counts; otherwise they
            are not used, and weights follow from `num-examples`.
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
        own_seconds: Seconds that the server itself computed in the last round, without waiting for clients.

    Raises:
        ConfigError: The method can't be used in a Flower project of your own, or not with these arguments.

    Example:
        chosen = strategy("fedentopt+fedla", participation=0.5)
        of_two = strategy("fedavg", nodes=["berlin-*", "lyon"])
    """

    record: dict[str, Any]

    def __init__(
        self,
        method: str | Mapping[str, Any] | Method = "fedavg",
        *,
        model: nn.Module | None = None,
        target: ArrayLike | None = None,
        participation: float = 1.0,
        epochs: int = 1,
        seed: int = 0,
        momentum: float = 0.0,
        label_counts: Literal["query", "metric"] | None = None,
        classes: int | None = None,
        min_nodes: int = 2,
        nodes: str | Sequence[str] | None = None,
        query_timeout: float = 600.0,
        max_reply: int | None = None,
        weight_limit: float | None = None,
    ) -> None:
        super().__init__(min_train_nodes=min_nodes, min_evaluate_nodes=min_nodes, min_available_nodes=min_nodes)
        patterns = (nodes,) if isinstance(nodes, str) else None if nodes is None else tuple(nodes)
        if patterns is not None and not (patterns and all(isinstance(one, str) and one for one in patterns)):
            raise ConfigError(
                f'nodes: expected a pattern of names such as "hospital-*", or a list of them, got {nodes!r}'
            )
        if weight_limit is not None and not 0 < weight_limit <= 1:
            raise ConfigError(f"weight_limit: expected a share above 0 and at most 1, got {weight_limit!r}")
        self._method = as_method(method, momentum)
        if label_counts == "metric" and needs_label_counts(self._method, ("selection",)):
            raise ConfigError("label_counts: this selection needs them before the first reply; use 'query'")
        shares = None if target is None else np.asarray(target, dtype=np.float64)
        if shares is not None and classes not in (None, shares.size):
            raise ConfigError(f"classes: {classes}, but the target has {shares.size} shares")
        _check_hooks(self._method, model is not None)
        self._model, self._target, self._max_reply = model, shares, max_reply
        self._participation, self._epochs, self._seed = participation, epochs, seed
        self._label_counts = label_counts or ("query" if needs_label_counts(self._method) else None)
        self._query_timeout, self._patterns, self._weight_limit = query_timeout, patterns, weight_limit
        self._agreed = classes if shares is None else shares.size
        self._classes = 1
        self._classes_of: dict[int, int] = {}  # number of classes that each client reports last
        self._counts_of: dict[int, FloatArray] = {}
        self._run = secrets.token_hex(8)
        self._federation: Federation | None = None
        self._state: ServerState
        self._nodes: tuple[int, ...] = ()
        self._messages: dict[int, Message] = {}
        self._shown: ArrayRecord | None = None  # the model of the last round, where training continues from another
        self.own_seconds = 0.0

    def summary(self) -> None:
        """Log the method when Flower starts."""
        LOG.info("\t├──> fedskew: %s", self._method)
        LOG.info("\t└──> label counts: %s", self._label_counts or "not used")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the training messages of a round; before the first, query label counts."""
        if self._federation is None:
            self._federation = self._begin(arrays, grid)
        began = time.perf_counter()
        if arrays is self._shown:
            arrays = self._layout.to_record(self._state.model)
        model = self._model_state(arrays)
        state = dataclasses.replace(self._state, round=server_round - 1).having("model", model._asdict())
        self._cohort, self._state = self._federation.select(state)
        self._sent, tasks = self._federation.instruct(self._state, self._cohort)
        self._validator.begin(tasks, self._sent)
        online = set(grid.get_node_ids())
        offline = [task.client for task in tasks if self._nodes[task.client] not in online]
        self._validator.missing(server_round, "offline", offline)
        entries = {**config, REPORT_SAMPLES: 1} if self._label_counts is None else config
        self._messages = {
            task.client: Message(
                TrainInstruction.of(self._run, server_round, task).content(arrays, self._sent.broadcast, entries),
                self._nodes[task.client],
                MessageType.TRAIN,
            )
            for task in tasks
            if task.client not in offline
        }
        self.own_seconds = time.perf_counter() - began
        return list(self._messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the valid replies into the next model; without any, the model stays as it is."""
        assert self._federation is not None
        began = time.perf_counter()
        validator, arrivals = self._validator, self._arrivals(server_round, replies)
        if self._label_counts == "metric":
            self._count_classes(arrivals)
        read = arrivals.read(
            lambda content, client: self._read(content, client, server_round),
            f"round {server_round}",
            validator.names,
        )
        validator.note(read)
        federation = self._federation = dataclasses.replace(self._federation, counts=self._counts)
        cohort = self._cohort
        if not cohort.quotas:
            cohort = cohort._replace(counts=self._counts[cohort.ids])
        updates = [trained.update for trained in read.valid.values()]
        self._state, outcome = federation.aggregate(self._state, cohort, self._sent, updates)
        record = federation.record(server_round, cohort, outcome)
        log_aggregation(record, validator.names, self._weight_limit)
        self.record = record.to_dict()
        metrics = MetricRecord({"counted": len(outcome.updates), "refused": len(validator.notes["refused"])})
        if self.record["loss"] is not None:
            metrics[LOSS] = self.record["loss"]
        shown = federation.evaluated_model(self._state)
        arrays = self._layout.to_record(shown)
        self._shown = None if shown.parameters is self._state.model.parameters else arrays
        self.own_seconds += time.perf_counter() - began
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the evaluation messages of a round, to nodes that may take part."""
        among: Any = grid if self._patterns is None or not self._nodes else _Only(grid, self._nodes)
        return super().configure_evaluate(server_round, arrays, config, among)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average each metric that at least half of the valid replies contain, weighted by `num-examples`."""
        messages = [*replies]
        nodes = [str(message.metadata.src_node_id) for message in messages]
        errors = {place: error_line(message) for place, message in enumerate(messages) if message.has_error()}
        contents = {place: message.content for place, message in enumerate(messages) if place not in errors}
        valid = [
            *Arrivals(contents, errors).read(_figures, f"evaluation of round {server_round}", nodes).valid.values()
        ]
        often = Counter(key for _, figures in valid for key in figures if key != SAMPLES)
        averages = MetricRecord()
        for key in sorted(key for key, number in often.items() if 2 * number >= len(valid)):
            having = [(number, figures[key]) for number, figures in valid if key in figures]
            samples = sum(number for number, _ in having)
            if samples:
                averages[key] = sum(number / samples * value for number, value in having)
        return averages if averages else None

    def _begin(self, arrays: ArrayRecord, grid: Grid) -> Federation:
        """Find the clients and their label counts, and make what plays the rounds."""
        nodes = self._matching(grid)
        self._nodes = tuple(node for _, node in nodes)
        network = None if self._model is None else FlatModel(copy.deepcopy(self._model))
        self._layout: Layout = ArraysLayout(arrays) if network is None else ModelLayout(network)
        returned: Specs = {} if network is None else self._returned(network)
        names = [name for name, _ in nodes]
        self._validator = ReplyValidator(
            names, self._layout, returned, returned, hooked(self._method), max_reply=self._max_reply
        )
        if self._label_counts == "query":
            self._query_counts(grid)
        try:
            federation = Federation(
                method=self._method,
                backend=_FlowerBackend(),
                counts=self._counts,
                target=None if self._target is None else as_target(self._target, len(self._target)),
                participation=self._participation,
                seed=self._seed,
                epochs=self._epochs,
                weight_limit=self._weight_limit,
            )
        except ArgumentError as error:
            raise ConfigError(f"method: {error}") from None
        self._state = federation.start(self._model_state(arrays))
        return federation

    def _matching(self, grid: Grid) -> list[tuple[str, int]]:
        """Wait for enough nodes that match the patterns; return names and ids, ordered by both."""
        patterns = self._patterns
        while True:
            nodes = sorted((node.name, node.node_id) for node in grid.get_nodes())
            named = [(name or str(node), node) for name, node in nodes]
            fit = [
                one for one in named if patterns is None or any(fnmatchcase(one[0], pattern) for pattern in patterns)
            ]
            if len(fit) >= self.min_available_nodes:
                return fit
            said = "" if patterns is None else f", of {len(named)} connected, whose names fit {', '.join(patterns)}"
            LOG.info("waiting for nodes: %d of %d%s", len(fit), self.min_available_nodes, said)
            time.sleep(PAUSE)

    def _model_state(self, arrays: ArrayRecord) -> ModelState:
        return self._layout.to_state(decode(arrays, self._layout.specs, "the model's array"))

    def _returned(self, network: FlatModel) -> Specs:
        inputs, targets = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        data = SiteData(inputs, targets, inputs, targets, 1)
        method = self._method
        work = LocalWork(data, method.objective, method.local_step, LocalTraining(), 0, hooks=hooked(method))
        return returned_by(network, work, len(self._nodes))

    @property
    def _counts(self) -> FloatArray:
        """Label counts `(clients, classes)`; 0 of clients that report none."""
        table = np.zeros((len(self._nodes), self._classes))
        for client, counts in self._counts_of.items():
            if len(counts) == self._classes:
                table[client] = counts
        return table

    def _query_counts(self, grid: Grid) -> None:
        """Query label counts; those of clients that do not report them stay 0."""
        content = RecordDict({CONFIG: ConfigRecord({ROUND: 0})})
        arrivals = exchange(grid, dict.fromkeys(self._nodes, content), MessageType.QUERY, self._query_timeout)
        arrivals = arrivals.by({node: client for client, node in enumerate(self._nodes)})
        self._count_classes(arrivals)
        read = arrivals.read(
            lambda reply, _: check_counts(reply, self._classes, whole=False), "label counts", self._validator.names
        )
        self._counts_of = read.valid
        if not self._counts_of:
            raise ConfigError(
                "label_counts: no client reported them; reply to queries with a metric 'label-counts', one number per "
                "class"
            )

    def _count_classes(self, arrivals: Arrivals) -> None:
        """Find the number of classes: the agreed one, or that of most clients' last reports."""
        for client, reply in arrivals.contents.items():
            for record in reply.metric_records.values():
                if isinstance(values := record.get(COUNTS), list):
                    self._classes_of[client] = len(values)
        votes = Counter(self._classes_of.values()).most_common(2)
        if self._agreed is None and len(votes) == 2 and votes[0][1] == votes[1][1]:
            said = ", ".join(f"{self._validator.names[client]} {of}" for client, of in sorted(self._classes_of.items()))
            raise ConfigError(f"label_counts: clients differ in their number of classes ({said}); pass classes=...")
        if votes:
            self._classes = self._agreed or votes[0][0]

    def _arrivals(self, round: int, replies: Iterable[Message]) -> Arrivals:
        """Sort replies by client; refuse replies of nodes that were sent no message, and second replies."""
        # Built only now, since a message gets its id when it is sent.
        clients = {message.metadata.message_id: client for client, message in self._messages.items()}
        arrivals = Arrivals({}, {})
        for message in replies:
            node, client = message.metadata.src_node_id, clients.get(message.metadata.reply_to_message_id)
            if client is None or self._nodes[client] != node or client in arrivals.contents:
                LOG.warning("round %d: refused a reply of node %d: it was not asked", round, node)
            elif message.has_error():
                arrivals.failed[client] = error_line(message)
            else:
                arrivals.contents[client] = message.content
        return arrivals

    def _read(self, content: RecordDict, client: int, round: int) -> Trained:
        """Read the reply of a client, fedskew's or stock, and the label counts or samples that it reports."""
        validator, metrics = self._validator, content.get(METRICS)
        ours = isinstance(metrics, MetricRecord) and CLIENT in metrics
        if ours:
            trained = validator.read(content, client, round)
        else:
            check_size(content, self._max_reply or bytes_needed(self._layout.specs))
            if validator.returned or components.has(self._method.server_update, "is_dynamic"):
                raise RefusedError("the method needs fedskew.deploy.client_app, but this is the reply of another app")
            figures = only(MetricRecord, content)
            trained = validator.trained(client, round, only(ArrayRecord, content), _steps(figures), _loss(figures))
        report = RecordDict({METRICS: only(MetricRecord, content)})
        if self._label_counts is None:
            self._counts_of[client] = np.array([check_only_samples(report)], dtype=np.float64)
        elif self._label_counts == "metric" and not ours:
            check_only_samples(report)
            self._counts_of[client] = check_counts(report, self._classes, whole=False)
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


class _FlowerBackend(Backend):
    """Takes the place of a backend in a federation whose rounds Flower drives."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Always raises: Flower drives the rounds."""
        raise RunError("Flower drives the rounds of this strategy; call start")


class _Only:
    """A grid of some of its nodes, which are all that Flower's own sampling sees."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        self._grid, self._nodes = grid, frozenset(nodes)

    def get_node_ids(self) -> list[int]:
        """Return the ids of those that are connected."""
        return [node for node in self._grid.get_node_ids() if node in self._nodes]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


def _figures(content: RecordDict, _: int) -> tuple[int, dict[str, float]]:
    """Read an evaluation: its number of samples, and its metrics that are numbers."""
    check_size(content, 2**20)
    metrics = only(MetricRecord, content)
    figures = {key: _finite(key, value) for key, value in metrics.items() if isinstance(value, int | float)}
    return check_only_samples(RecordDict({METRICS: metrics})), figures


def _steps(metrics: MetricRecord) -> int:
    steps = metrics.get(STEPS, 0)
    if not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise RefusedError(f"its steps are {short(steps)}; expected a whole number from 0 to {MOST_STEPS}")
    return steps


def _loss(metrics: MetricRecord) -> float:
    """Read the training loss under one of its usual names; NaN if a stock client reports none."""
    for key in (LOSS, "train_loss", "loss"):
        value = metrics.get(key)
        if isinstance(value, int | float):
            return _finite(key, value)
    return float("nan")


def _finite(key: str, value: float) -> float:
    return check_finite(value, f"metric {short(key)}")
