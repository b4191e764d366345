"""A federation in this process: Flower's grid, without Flower's transport, on sites that are folders on disk."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import shutil
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from common import fedskew as fedskew
from fedskew.data import Dataset, load
from fedskew.deploy import Agreement, Ending, Terms, agree, make_deployed_loop, server_app, site_app
from fedskew.deploy._arrays import unpack
from fedskew.deploy.keys import key_line, write_mask_key
from fedskew.engine import RoundRecord
from fedskew.experiment import Config, TrainingLoop, make_training_loop, resolve
from fedskew.models import FlatModel
from fedskew.report import SeedRun
from fedskew.sums import Key

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says

NAMES = ("ash", "birch", "cedar")
FOUR = (*NAMES, "dogwood")
TEN = tuple(f"site-{place}" for place in range(10))
FEDPALS = {"preset": "fedpals", "weighting": {"name": "fedpals", "ess": 0.5}}
MORE = (((4, 6), 80), ((2, 8, 9), 70), ((0, 3, 7), 60), ((1, 5), 50), ((6, 8), 40))
CLASSES = [str(digit) for digit in range(10)]
Tamper = Callable[[Message, Message], Message | None]
"""From a question and an honest answer to what is sent in its place; None: nothing."""


class KilledError(BaseException):
    """The server is killed."""


def on(kind: str, change: Callable[[Message, Message], None], first: int = 0, last: int = 10**6) -> Tamper:
    """Changes answers of one kind in place, in these rounds."""

    def tamper(question: Message, answer: Message) -> Message:
        is_kind = question.metadata.message_type == kind
        if is_kind and first <= question.content["config"].get("server-round", 0) <= last:
            change(question, answer)
        return answer

    return tamper


def training(model: FlatModel, broadcast: Mapping[str, Any] | None = None, **asked: Any) -> RecordDict:
    """A server's message that asks to train a model: `run`, `round` and so on, where these are not the usual."""
    fields = {"run": "0a", "round": 1, "client": 0, "epochs": 1, "counted": 0, **asked}
    keys = {name: "server-round" if name == "round" else f"fedskew-{name}" for name in fields}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    config = ConfigRecord({keys[name]: value for name, value in values.items() if value is not None})
    content = RecordDict({"arrays": arrays_of(model.state_dict()), "config": config})
    return RecordDict({**content, "broadcast": arrays_of(broadcast)}) if broadcast else content


def arrays_of(tensors: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().numpy().copy()) for name, tensor in tensors.items()})


def silent_on(kind: str, first: int = 0, last: int = 10**6, purpose: str | None = None) -> Tamper:
    """Does not answer questions of a kind, and for a purpose, from this to that one of all that it is asked."""
    number = itertools.count()

    def tamper(question: Message, answer: Message) -> Message | None:
        is_kind = question.metadata.message_type == kind
        is_it = is_kind and purpose in (None, question.content["config"].get("fedskew-purpose", purpose))
        return None if is_it and first <= next(number) <= last else answer

    return tamper


def figures(**values: Any) -> Callable[[Message, Message], None]:
    """Says these metrics; an underscore in a name is a dash."""

    def change(question: Message, answer: Message) -> None:
        for name, value in values.items():
            answer.content["metrics"][name.replace("_", "-")] = value

    return change


def times(factor: float, message: Message) -> None:
    """Multiply the model in a message."""
    for name, array in list(message.content["arrays"].items()):
        message.content["arrays"][name] = Array(np.float32(factor) * array.numpy())


def scaled(factor: float) -> Callable[[Message, Message], None]:
    """The model that was trained, further away from the one that was sent by this factor."""

    def change(question: Message, answer: Message) -> None:
        for name, array in list(answer.content["arrays"].items()):
            before, after = question.content["arrays"][name].numpy(), array.numpy()
            if after.dtype == np.float32 and "running" not in name:
                moved = before.astype(np.float64) + factor * (after.astype(np.float64) - before)
                answer.content["arrays"][name] = Array(np.clip(moved, -3e38, 3e38).astype(np.float32))

    return change


@dataclass
class LocalGrid(Grid):
    """Answers every question at once, by the app of the node that it is for. `tamper`: by node; `mislead` changes a
    question to the site of this name, in place."""

    apps: dict[int, tuple[str, ClientApp, dict[str, Any]]]
    offline: set[int] = field(default_factory=set)
    tamper: dict[int, Tamper] = field(default_factory=dict)
    mislead: Callable[[str, Message], None] = lambda name, question: None
    asked: list[Message] = field(default_factory=list)
    answered: dict[str, Message] = field(default_factory=dict)

    def kinds(self, name: str = "ash") -> list[str]:
        """The types of the questions that a site was asked."""
        return [one.metadata.message_type for one in self.asked if self.name_of(one) == name]

    def questions(self, kind: str, name: str | None = None) -> list[Message]:
        """The questions of a type that a site was asked, or all were."""
        return [one for one in self.asked if one.metadata.message_type == kind and name in (None, self.name_of(one))]

    def last(self, kind: str, name: str = "ash") -> Message:
        """The last question of a type that a site was asked."""
        return self.questions(kind, name)[-1]

    def name_of(self, question: Message) -> str:
        """Whom a question is for."""
        return self.apps[question.metadata.dst_node_id][0]

    def leave(self) -> None:
        """All are gone."""
        self.offline.update(self.apps)

    def get_nodes(self) -> Iterable[Any]:
        return [
            SimpleNamespace(node_id=node, name=name)
            for node, (name, _, _) in self.apps.items()
            if node not in self.offline
        ]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = f"message-{len(self.asked)}"
            message.metadata.__dict__["_message_id"] = name
            message.content = unpack(message.content)  # for tests that look at it, or change it
            self.asked.append(message)
            ids.append(name)
            answer = self._answer(message)
            if answer is not None:
                self.answered[name] = answer
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answered.pop(name) for name in message_ids if name in self.answered]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *given: Any, **named: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        name, app, settings = self.apps[node]
        self.mislead(name, message)
        context = Context(run_id=1, node_id=node, node_config=settings, state=RecordDict(), run_config={})
        try:
            answer = app(message, context)
        except Exception as error:  # as Flower's own runtime does
            answer = Message(Error(code=0, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        if answer.has_content():
            answer.content = unpack(answer.content)
        return self.tamper[node](message, answer) if node in self.tamper else answer


def tree(method: Mapping[str, Any] | str, **training: Any) -> dict[str, Any]:
    """A config on the digits, for a few rounds of a small network, whose clients are the data's own."""
    return {
        "name": "digits-sites",
        "seeds": [3],
        "data": {"name": "npz"},
        "partition": {"rule": "natural"},
        "model": {"name": "mlp3", "width": 24},
        "method": {"preset": method} if isinstance(method, str) else dict(method),
        "training": {"rounds": 3, "lr": 0.05, "momentum": 0.5, "batch_size": 32, **training},
    }


@dataclass(frozen=True)
class Federated:
    """The same samples twice: as one file with three natural clients, and as three sites' own files."""

    config: Config
    agreement: Agreement
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        return self.agreement.names

    @property
    def app(self) -> Path:
        return self.folder / "app"

    def data_of(self, name: str) -> Path:
        return self.folder / name / "data.toml"

    def kept(self, name: str) -> Path:
        """Where a site keeps what it counts and masks under the app that it agreed to."""
        return Terms.read(self.folder / name / "agreed.toml").folder(self.folder / name / "state")

    def amend(self, name: str, old: str, new: str) -> None:
        """Edit what a site agreed to by hand."""
        path = self.folder / name / "agreed.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def grid(self, lies: Mapping[str, Tamper] | None = None, away: Collection[str] = ()) -> LocalGrid:
        """The sites as Flower's grid; these change their answers, or are away."""
        app = site_app(self.app)
        # Node ids are Flower's to draw: here they are not in the order of the names.
        nodes = {self.node(name): name for name in self.agreement.members}
        apps = {node: (name, app, {"data": str(self.data_of(name))}) for node, name in nodes.items()}
        changes = {self.node(name): lie for name, lie in (lies or {}).items()}
        return LocalGrid(apps, {*map(self.node, away)}, changes)

    def played(self, lies: Mapping[str, Tamper] | None = None) -> tuple[Federated, LocalGrid]:
        """The federation after its whole run, and what its sites answered."""
        grid = self.grid(lies)
        self.run(grid).run(resume=True)
        return self, grid

    def as_simulated(self, grid: LocalGrid | None = None, **apart: float) -> tuple[SeedRun, SeedRun]:
        """The run as a simulation, and as sites train it; their models are not further apart (see `check_models`)."""
        simulated = make_training_loop(self.config, 3, self.folder / "simulated").run()
        deployed = self.run(grid or self.grid()).run(resume=True)
        check_models(self.folder / "simulated", self.run_folder, **apart)
        return simulated, deployed

    def ask(self, kind: str, content: Mapping[str, Any], name: str = "ash") -> Message:
        """What a site answers to a message by hand."""
        node = self.node(name)
        _, app, settings = self.grid().apps[node]
        message = Message(RecordDict(dict(content)), node, kind)
        message.metadata.__dict__["_message_id"] = "by hand"
        return app(message, Context(1, node, settings, RecordDict(), {}))

    def again(self, question: Message, kind: str, name: str = "ash", **entries: Any) -> Message:
        """What a site answers to a question with other entries; what it contains goes with its own kind alone."""
        content = question.content if kind == question.metadata.message_type else {}
        return self.ask(kind, {**content, "config": ConfigRecord({**question.content["config"], **entries})}, name)

    def refusal(self, question: Message, kind: str, name: str = "ash", **entries: Any) -> str:
        """Why a site does not answer to such a question; empty where it does."""
        answer = self.again(question, kind, name, **entries)
        return str(answer.error.reason) if answer.has_error() else ""

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def run(self, grid: LocalGrid, target: Path | None = None) -> TrainingLoop:
        """The server's run, as `serve` makes it but for its report."""
        return make_deployed_loop(self.config, self.agreement, grid, self.run_folder, target)

    def play(
        self,
        lies: Mapping[str, Tamper] | None = None,
        away: Collection[str] = (),
        after: Mapping[int, Callable[[LocalGrid], Any]] | None = None,
        stop: int | None = None,
        grid: LocalGrid | None = None,
    ) -> list[dict[str, Any]]:
        """The records of a whole run, in which sites change their answers, or are away.

        after: What happens to the sites once these rounds are over.
        stop: The server is killed after this round.
        grid: The sites, which are as they are.
        """
        grid, happens = grid or self.grid(lies, away), after or {}

        def over(record: Mapping[str, Any]) -> None:
            if record["round"] in happens:
                happens[record["round"]](grid)
            if record["round"] == stop:
                raise KilledError

        with suppress(KilledError):
            self.run(grid).run(resume=True, progress=over)
        return self.records()

    def first_rounds(self, grid: LocalGrid | None = None, number: int = 1) -> tuple[list[Any], list[RoundRecord]]:
        """The states before and after each of the first rounds, and their records; the server writes nothing down."""
        loop = self.run(grid or self.grid())
        runner = loop.runner
        states, records = [runner.start(loop.untrained)], []
        for _ in range(number):
            state, record = runner.run_round(states[-1])
            states.append(state)
            records.append(record)
        return states, records

    def records(self) -> list[dict[str, Any]]:
        """The records of the run so far, that of round 0 first."""
        return [json.loads(line) for line in (self.run_folder / "rounds.jsonl").read_text().splitlines()]

    def change_samples(self, name: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Replace some of the arrays of a site's samples by what follows from all of them."""
        path = self.folder / name / "own.npz"
        own = dict(np.load(path))
        np.savez(path, **own | change(own))

    def node(self, name: str) -> int:
        return 900 - 7 * self.agreement.members.index(name)


@functools.cache
def _digits() -> Dataset:
    return load("digits", rng=np.random.default_rng(0))


def federate(folder: Path, config: Mapping[str, Any], names: tuple[str, ...] = NAMES, **agreed: Any) -> Federated:
    """Digits at three sites (or fewer) that hold few classes each, and the app folder of their federation."""
    digits = _digits()
    pixels, test_pixels = digits.inputs.numpy(), digits.test_inputs.numpy()
    labels, test_labels = digits.targets.numpy(), digits.test_targets.numpy()
    shares = (((0, 1, 2, 3), 150), ((3, 4, 5), 90), ((6, 7, 8, 9), 210), ((0, 5, 9), 120), ((1, 2, 7), 100), *MORE)[
        : len(names)
    ]
    rows = [np.flatnonzero(np.isin(labels, held))[:limit] for held, limit in shares]
    tested = np.array_split(np.arange(len(test_labels)), len(names))
    parts = [{"x": pixels[own], "y": labels[own]} for own in rows]
    tests = [{"x": test_pixels[own], "y": test_labels[own]} for own in tested]
    return federate_files(folder, config, names, parts, tests, {}, **{"classes": CLASSES, **agreed})


def federate_files(
    folder: Path,
    config: Mapping[str, Any],
    names: tuple[str, ...],
    parts: list[dict[str, Any]],
    tests: list[dict[str, Any]],
    more: Mapping[str, Any],
    **agreed: Any,
) -> Federated:
    """A federation of sites with these samples, `x` and `y`, and `more` arrays in each file; see `federate`."""
    folder.mkdir(parents=True, exist_ok=True)
    clients = np.repeat(names, [len(part["y"]) for part in parts])
    whole = folder / "whole.npz"
    x, y, x_test, y_test = (np.concatenate([part[name] for part in which]) for which in (parts, tests) for name in "xy")
    np.savez(whole, x=x, y=y, client=clients, x_test=x_test, y_test=y_test, **more)
    resolved = resolve({**config, "data": {"name": "npz", "root": str(whole)}})
    pooled = load("npz", whole, rng=None)
    for name, own, test in zip(names, parts, tests, strict=True):
        site = folder / name
        site.mkdir()
        np.savez(site / "own.npz", x=own["x"], y=own["y"], x_test=test["x"], y_test=test["y"], **more)
        table = {"state": "state", "data": {"name": "npz", "root": "own.npz"}}
        (site / "data.toml").write_text(tomli_w.dumps(table))
        if (weights := resolved.model.weights) is not None:
            shutil.copy(weights, site)
    kind = {"shape": list(pooled.in_shape), "mean": list(pooled.mean), "std": list(pooled.std)}
    return agreed_on(folder, resolved, names, **{"start_timeout": 5.0, "round_timeout": 1.0, **kind, **agreed})


def check_models(one: Path, other: Path, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """The trained models of two run folders are the same: up to rounding, or as nearly as is said."""
    models = (load_file(folder / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(*models, rtol=rtol, atol=atol)


def agreed_on(folder: Path, config: Config, names: tuple[str, ...], **agreed: Any) -> Federated:
    """The federation of sites whose data and `data.toml` are there: with mask keys, app, and what each agreed to."""
    if agreed.get("updates") == "masked":
        keys = {name: Key.generate() for name in names}
        agreed = {"keys": {name: key_line(key.public) for name, key in keys.items()}, **agreed}
        for name, key in keys.items():
            write_mask_key(folder / name, key)
    agreement = Agreement(**{"sites": list(names), **agreed})
    app = folder / "app"
    app.mkdir()
    (app / "run.toml").write_text(tomli_w.dumps(config.tree()))
    agreement.write(app / "deploy.toml")
    assert tomllib.loads((app / "deploy.toml").read_text())["sites"] == list(names)
    terms = agree(folder / names[0] / "data.toml", app)
    for name in names[1:]:  # who have released nothing yet either
        terms.write(folder / name / "agreed.toml")
    return Federated(config, agreement, folder)


def served(federation: Federated, grid: LocalGrid) -> tuple[int, str]:
    """Run the ServerApp as Flower does, in the federation's own folder; return how it said that it ended."""
    ended = federation.folder / "ended.json"
    Ending.reserve(ended)
    config: dict[str, Any] = {"out": str(federation.folder / "server" / "runs"), "target": "", "ended": str(ended)}
    log = logging.getLogger("flwr")
    before = list(log.filters)
    try:
        server_app(federation.app)(grid=grid, context=Context(1, 0, {}, RecordDict(), config))
    except Exception as error:
        log.error("ServerApp raised an exception", exc_info=error)  # as Flower's runtime does
    finally:
        log.filters[:] = before
    ending = Ending.read(ended)
    assert ending is not None
    return ending


def init(folder: Path, config: Mapping[str, Any], *words: object) -> tuple[Agreement, str]:
    """Write a federation's folder by `fedskew deploy init` of a config; its agreement, and what was printed."""
    folder.with_suffix(".toml").write_text(tomli_w.dumps(config))
    status, said = fedskew("deploy", "init", folder, "--config", folder.with_suffix(".toml"), *words)
    assert status == 0, said
    return Agreement.read(folder / "app" / "deploy.toml"), said


def initiated(folder: Path, config: Mapping[str, Any], *words: object) -> tuple[int, str]:
    """Make a federation of digits in `folder/clinics` by `fedskew deploy init`."""
    given = {**config, "data": "digits", "partition": {"rule": "iid", "clients": 3}}
    (folder / "run.toml").write_text(tomli_w.dumps(given))
    return fedskew("deploy", "init", folder / "clinics", "--config", folder / "run.toml", *words)


def agreed_at(folder: Path, name: str) -> tuple[Path, str]:
    """Give a site of `folder/clinics` digits, and let it agree by command; its folder, and what was printed."""
    site = folder / "clinics" / "sites" / name
    samples = federate(folder / "samples", tree("fedavg")).folder / "ash" / "own.npz"
    data = {"server": "127.0.0.1:1", "data": {"name": "npz", "root": str(samples)}}
    (site / "data.toml").write_text(tomli_w.dumps(data))
    status, said = fedskew("deploy", "site", "--check", site / "data.toml", "--agree")
    assert status == 0, said
    return site, " ".join(said.split())


def until(done: Callable[[], Any], seconds: float, log: Path | None = None) -> None:
    """Wait; fails with the end of a log where it takes longer."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {log.read_text()[-3000:] if log else ''}"
        time.sleep(0.2)
