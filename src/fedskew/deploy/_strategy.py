"""A method of ours as a Flower strategy, for a ServerApp of one's own."""

from __future__ import annotations

import copy
import dataclasses
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fedskew.deploy._agreement import needs_label_counts
from fedskew.deploy._arrays import decode
from fedskew.deploy._check import (
    COUNTS,
    LOSS,
    SAMPLES,
    Reply,
    bytes_needed,
    check_arrays,
    check_counts,
    check_reply,
    check_samples,
    check_size,
    only_arrays,
    only_metrics,
)
from fedskew.deploy._client import as_method
from fedskew.deploy._exchange import exchange
from fedskew.deploy._instruction import CLIENT, CONFIG, METRICS, ROUND, STEPS, TELL, Task, instruction
from fedskew.deploy._layout import ArraysLayout, Layout, ModelLayout
from fedskew.deploy._refusal import RefusedError
from fedskew.deploy._returned import Forms, trained_forms
from fedskew.deploy._site_data import SiteData
from fedskew.deploy._sites import COUNTED, ReplyValidator, Rules
from fedskew.engine import (
    Assignment,
    Backend,
    Federation,
    LocalTraining,
    LocalWork,
    Round,
    Sent,
    ServerState,
    Update,
    hooked,
)
from fedskew.errors import ArgumentError, ConfigError, RunError
from fedskew.labels import as_target
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.objectives import FPL

LOG = logging.getLogger("flwr")
PAUSE = 1.0

FloatArray = NDArray[np.float64]


def strategy(
    method: str | Mapping[str, Any] | Method = "fedavg",
    *,
    model: nn.Module | None = None,
    target: ArrayLike | None = None,
    participation: float = 1.0,
    epochs: int = 1,
    seed: int = 0,
    momentum: float = 0.0,
    label_counts: Literal["query", "metric"] | None = None,
    min_nodes: int = 2,
    query_timeout: float = 600.0,
    norm_limit: float = 10.0,
    norm_action: Literal["report", "leave_out"] = "report",
    max_reply: int | None = None,
) -> MethodStrategy:
    """A Flower strategy that selects, weighs and updates as a method says.

    It stands where FedAvg stood: `strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)`. Its clients are
    stock ClientApps, whose replies carry the trained arrays and `num-examples`, or `fedskew.deploy.client_app`, which a
    method with an objective, a local step or anything else at the clients needs.

    `method`: a preset's name, the tables of a config's `[method]`, or a `Method`; `target`: the label mix that the
    model is for, `(classes,)`; `participation`, `seed`: as in a config; `epochs`: what clients of ours are told;
    `momentum`: that of the clients' SGD, for FedNova. `label_counts`: how the server learns them: by a query before
    round 1, which clients answer with a metric `label-counts`, one number a class; or as that metric of every reply,
    which is too late for a selection; None: by a query where the method needs any, else by neither. Weights use
    `num-examples` where there are no label counts.
    `model`: the network, where a method has more to send than arrays, or buffers are to be told from parameters.
    `norm_limit`, `norm_action`, `max_reply`: as in `Agreement`.

    The clients are the nodes that are there at round 1, at least `min_nodes`, in the order of the names that their keys
    are registered under, or of their ids; whoever comes later takes part in the next run. Raises ConfigError for a
    method that can't be served so.
    """
    chosen = as_method(method, momentum)
    if label_counts is None:
        label_counts = "query" if needs_label_counts(chosen) else None
    elif label_counts == "metric" and needs_label_counts(chosen, ("selection",)):
        raise ConfigError("label_counts: this selection needs them before the first reply; use 'query'")
    hooks = hooked(chosen)
    if hooks and model is None:
        name = type(next(iter(hooks.values()))).__name__
        raise ConfigError(f"model: {name} needs the network; give strategy(model=...)")
    if any(isinstance(component, FPL) for component in hooks.values()):
        raise ConfigError("method: FPL's prototypes are known in size where the data is; deploy it by server_app")
    rules = Rules(norm_limit, norm_action, max_reply)
    return MethodStrategy(
        method=chosen,
        model=model,
        target=None if target is None else np.asarray(target, dtype=np.float64),
        participation=participation,
        epochs=epochs,
        seed=seed,
        label_counts=label_counts,
        min_nodes=min_nodes,
        query_timeout=query_timeout,
        rules=rules,
    )


class MethodStrategy(FedAvg):
    """See `strategy`.

    `record`: of the last round, as a line of a run's `rounds.jsonl`; `own_seconds`: that the last round took here. The
    arrays of a result are those that training would go on from, also where a method judges others (FedEXP).
    """

    record: Round

    def __init__(
        self,
        method: Method,
        model: nn.Module | None,
        target: FloatArray | None,
        participation: float,
        epochs: int,
        seed: int,
        label_counts: Literal["query", "metric"] | None,
        min_nodes: int,
        query_timeout: float,
        rules: Rules,
    ) -> None:
        super().__init__(min_train_nodes=min_nodes, min_evaluate_nodes=min_nodes, min_available_nodes=min_nodes)
        self._method, self._model, self._target, self._rules = method, model, target, rules
        self._participation, self._epochs, self._seed = participation, epochs, seed
        self._label_counts, self._query_timeout = label_counts, query_timeout
        self._run = secrets.token_hex(8)
        self._federation: Federation | None = None
        self._state: ServerState
        self._nodes: tuple[int, ...] = ()
        self._asked: dict[int, Message] = {}
        self.own_seconds = 0.0

    def summary(self) -> None:
        """What Flower logs before it begins."""
        LOG.info("\t├──> fedskew: %s", self._method)
        LOG.info("\t└──> label counts: %s", self._label_counts or "not asked for")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, to its cohort; label counts are asked for before the first."""
        if self._federation is None:
            self._begin(arrays, grid)
        assert self._federation is not None
        began = time.perf_counter()
        model = self._layout.flat(decode(arrays, self._layout.forms, "the model's array"))
        state = dataclasses.replace(self._state, round=server_round - 1, model=model)
        self._cohort, self._state = self._federation.select_participants(state)
        self._sent, assignments = self._federation.instructions(self._state, self._cohort)
        self._tasks = {task.client: task for task in assignments}
        there = set(grid.get_node_ids())
        self._validator.begin([task.client for task in assignments], model)
        self._asked = {}
        for task in assignments:
            if self._nodes[task.client] not in there:
                LOG.warning("round %d: %s is not there", server_round, self._validator.names[task.client])
                continue
            counted = int(task.state[COUNTED]) if COUNTED in task.state else 0
            told = Task.of(self._run, server_round, task, counted)
            asks_size = self._label_counts is None
            content = instruction(told, arrays, self._sent.broadcast, {**config, TELL: 1} if asks_size else config)
            self._asked[task.client] = Message(content, self._nodes[task.client], MessageType.TRAIN)
        self.own_seconds = time.perf_counter() - began
        return list(self._asked.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, of the replies that are believed; the model stays where there are none."""
        assert self._federation is not None
        began = time.perf_counter()
        updates: dict[int, Update] = {}
        # Only now: a message has its id from when it was sent.
        asked = {question.metadata.message_id: client for client, question in self._asked.items()}
        for message in replies:
            client = self._sender(message, asked)
            if client is None or client in updates:
                node = message.metadata.src_node_id
                LOG.warning("round %d: refused a reply of node %d: it was not asked", server_round, node)
                continue
            if message.has_error():
                LOG.warning(
                    "round %d: %s failed: %s", server_round, self._validator.names[client], message.error.reason
                )
                continue
            try:
                reply = self._believed(message.content, client, server_round)
            except RefusedError as error:
                self._validator.refuse(client, server_round, str(error))
            else:
                updates[client] = self._validator.update(reply, client, server_round, self._sent.model)
        kept = self._validator.in_line(server_round, list(updates.values()))
        federation = dataclasses.replace(self._federation, counts=self._counts)
        cohort = self._cohort
        if not cohort.quotas:
            cohort = cohort._replace(counts=self._counts[cohort.ids])
        self._state, outcome = federation.aggregate(self._state, cohort, self._sent, kept)
        self.record = federation.record(server_round, cohort, outcome)
        self._federation = federation
        loss = self.record["loss"]
        metrics = MetricRecord({"counted": len(outcome.updates), "refused": len(self._validator.notes["refused"])})
        if loss is not None:
            metrics[LOSS] = loss
        arrays = self._layout.record(self._state.model)
        self.own_seconds += time.perf_counter() - began
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means of the figures that all replies have, weighted by `num-examples`."""
        believed: list[tuple[int, dict[str, float]]] = []
        for message in replies:
            if message.has_error():
                node, reason = message.metadata.src_node_id, message.error.reason
                LOG.warning("round %d: node %d could not evaluate: %s", server_round, node, reason)
                continue
            try:
                check_size(message.content, 2**20)
                metrics = only_metrics(message.content)
                figures = {key: value for key, value in metrics.items() if _is_finite(value)}
                believed.append((check_samples(metrics), figures))
            except RefusedError as error:
                LOG.warning("round %d: refused an evaluation: %s", server_round, error)
        samples = sum(number for number, _ in believed)
        if not samples:
            return None
        shared = set.intersection(*(set(figures) for _, figures in believed)) - {SAMPLES}
        return MetricRecord(
            {key: sum(number * figures[key] for number, figures in believed) / samples for key in sorted(shared)}
        )

    def _begin(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Who the clients are, what they hold, and the state before round 1."""
        while len(nodes := list(grid.get_nodes())) < self.min_available_nodes:
            LOG.info("waiting for nodes: %d of %d", len(nodes), self.min_available_nodes)
            time.sleep(PAUSE)
        nodes.sort(key=lambda node: (node.name, node.node_id))
        self._nodes = tuple(node.node_id for node in nodes)
        names = [node.name or str(node.node_id) for node in nodes]
        network = None if self._model is None else FlatModel(copy.deepcopy(self._model))
        self._layout: Layout = ArraysLayout(arrays) if network is None else ModelLayout(network)
        returned: Forms = {} if network is None else self._returned(network)
        self._validator = ReplyValidator(names, self._layout, returned, returned, self._rules)
        self._counts = self._asked_counts(grid) if self._label_counts == "query" else np.zeros((len(names), 1))
        try:
            self._federation = Federation(
                method=self._method,
                backend=_Elsewhere(),
                counts=self._counts,
                target=None if self._target is None else as_target(self._target, len(self._target)),
                participation=self._participation,
                seed=self._seed,
                epochs=self._epochs,
            )
        except ArgumentError as error:
            raise ConfigError(f"method: {error}") from None
        self._state = self._federation.start(self._layout.flat(decode(arrays, self._layout.forms, "the model's array")))

    def _returned(self, network: FlatModel) -> Forms:
        nothing = torch.zeros(0, 1)
        data = SiteData(nothing, torch.zeros(0, dtype=torch.int64), nothing, torch.zeros(0, dtype=torch.int64), 1)
        method = self._method
        work = LocalWork(data, method.objective, method.local_step, LocalTraining(), 0, hooks=hooked(method))
        return trained_forms(network, work, len(self._nodes))

    def _asked_counts(self, grid: Grid) -> FloatArray:
        """Label counts by a query; 0 of who doesn't tell. Raises ConfigError where nobody does."""
        content = RecordDict({CONFIG: ConfigRecord({ROUND: 0})})
        answers = exchange(grid, dict.fromkeys(self._nodes, content), MessageType.QUERY, self._query_timeout, "0")
        told: dict[int, FloatArray] = {}
        for node, reply in answers.contents.items():
            name, metrics = self._validator.names[self._nodes.index(node)], reply
            try:
                values = only_metrics(metrics).get(COUNTS)
                classes = len(next(iter(told.values()))) if told else len(values) if isinstance(values, list) else 0
                told[node] = check_counts(metrics, classes, whole=False)
            except RefusedError as error:
                LOG.warning("refused the label counts of %s: %s", name, error)
        for node, reason in answers.failures.items():
            LOG.warning("%s did not tell its label counts: %s", self._validator.names[self._nodes.index(node)], reason)
        if not told:
            raise ConfigError(
                "label_counts: no client told them; answer queries with a metric 'label-counts', one number per class"
            )
        nothing = np.zeros(len(next(iter(told.values()))))
        return np.array([told.get(node, nothing) for node in self._nodes])

    def _sender(self, message: Message, asked: Mapping[str, int]) -> int | None:
        """The client whose question, by its id, a reply answers; None where it was not asked."""
        client = asked.get(message.metadata.reply_to_message_id)
        return client if client is not None and self._nodes[client] == message.metadata.src_node_id else None

    def _believed(self, content: RecordDict, client: int, round: int) -> Reply:
        """What a client of ours, or a stock one, replied; what it tells of its labels is kept."""
        rules, task = self._rules, self._tasks[client]
        metrics = content.get(METRICS)
        if isinstance(metrics, MetricRecord) and CLIENT in metrics:
            if self._label_counts is None:
                self._counts[client] = check_samples(metrics) / self._counts.shape[1]
            return check_reply(content, self._validator.expected(round, task)._replace(most_steps=MOST_STEPS))
        check_size(content, rules.max_reply or bytes_needed(self._layout.forms))
        if self._validator.returned:
            raise RefusedError("its method needs fedskew.deploy.client_app, and this is another's reply")
        metrics = only_metrics(content)
        reply = Reply(check_arrays(only_arrays(content), self._layout.forms), _steps(metrics), _loss(metrics), {})
        if self._label_counts == "query":
            return reply
        samples = check_samples(metrics)
        if self._label_counts is None:
            self._counts[client] = samples / self._counts.shape[1]
            return reply
        counts = metrics.get(COUNTS)
        classes = len(counts) if isinstance(counts, list) else 0
        if self._counts.shape[1] not in (1, classes):
            raise RefusedError(f"it tells label counts of {classes} classes; others of {self._counts.shape[1]}")
        told = check_counts(RecordDict({METRICS: metrics}), classes, whole=False)
        if self._counts.shape[1] != classes:
            self._counts = np.zeros((len(self._nodes), classes))
        self._counts[client] = told
        return reply


MOST_STEPS = 10**7


class _Elsewhere(Backend):
    """Where a cohort trains whose rounds Flower plays."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Not here."""
        raise RunError("Flower plays the rounds of this strategy")


def _steps(metrics: MetricRecord) -> int:
    steps = metrics.get(STEPS, 0)
    if not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise RefusedError(f"its steps are no whole number from 0 to {MOST_STEPS}")
    return steps


def _loss(metrics: MetricRecord) -> float:
    """The training loss by one of its usual names; NaN where a stock client has none."""
    for key in (LOSS, "train_loss", "loss"):
        value = metrics.get(key)
        if _is_finite(value):
            return float(value)
    return float("nan")


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -1e300 < value < 1e300
