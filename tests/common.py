"""Rounds and hooks without training, and comparisons of models: what tests of several packages share."""

import json
import resource
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from fedskew import methods, sums
from fedskew.engine import Assignment, Federation, Sent, Update
from fedskew.engine.totals import summed
from fedskew.errors import FedskewError
from fedskew.hooks import LocalEnd, RoundEnd
from fedskew.labels import as_counts
from fedskew.methods import Method
from fedskew.models import ModelState
from fedskew.weighting import INDEX, Answered

NONE = torch.zeros(0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def as_bits(table: Any) -> Any:
    """What each row of 0 and 1 holds, as one number, the first finding's bit the lowest (see `findings.as_table`)."""
    return np.asarray(table, dtype=np.int64) @ (1 << np.arange(np.shape(table)[1]))


class Normalised(nn.Sequential):
    """A network on digits with batch norm."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))


def some_first(some: Collection[Any], everything: Iterable[Any]) -> list[Any]:
    """Cases of a test: those that are not among some belong to the whole product."""
    return [*some, *(pytest.param(case, marks=pytest.mark.whole_product) for case in everything if case not in some)]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a full disk, a longer file can't be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fedskew(*words: object) -> tuple[int, str]:
    """Run a command in this process; return its exit status, and what it printed or its error's line."""
    from fedskew.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "250"})
    if isinstance(result.exception, FedskewError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


@contextmanager
def refused(kind: type[Exception], *words: str, match: str | None = None) -> Iterator[None]:
    """What is refused in one line, with these words in it."""
    with pytest.raises(kind, match=match) as raised:
        yield
    said = str(raised.value)
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said


def one_line(error: FedskewError, case: object) -> None:
    """An error of a fuzzed case says all in one line."""
    if "\n" in str(error):
        raise AssertionError(case) from error


def task(
    clients: int, beta: float | None = None, labels: int | None = None, width: int | None = None, **training: Any
) -> dict[str, Any]:
    """A config on digits: divided by Dirichlet shares, by labels a client, or evenly; `width`: of an MLP."""
    rule = {"rule": "iid"}
    if beta is not None:
        rule = {"rule": "dirichlet_by_class", "beta": beta, "min_size": 1}
    elif labels is not None:
        rule = {"rule": "quantity", "labels_per_client": labels}
    model = {"name": "logistic"} if width is None else {"name": "mlp3", "width": width}
    return {"data": {"name": "digits"}, "partition": rule | {"clients": clients}, "model": model, "training": training}


TO_FINISH = task(6, width=12, rounds=2, participation=0.5, batch_size=32, lr=0.1) | {
    "name": "digits",
    "data": {"name": "digits", "held_out": 0.25},
    "partition": {"rule": "dirichlet_by_client", "clients": 6, "beta": 0.5, "target_client": True},
}


def built(preset: str = "fedavg", momentum: float = 0.0, **tables: Any) -> Method:
    """A method by names."""
    return methods.build(methods.expand({"preset": preset, **tables}), momentum)


def feddisco(counts: Any, target: Any = None, sizes: Any = None, **options: Any) -> Any:
    """FedDisco's weights of clients that all replied."""
    held = as_counts(counts)
    weighting = INDEX["feddisco"](target=target is not None, **options)
    return weighting.weigh(Answered(held, held.sum(axis=1) if sizes is None else sizes, target))


def alike(one: nn.Module | Mapping[str, Tensor], other: nn.Module | Mapping[str, Tensor]) -> set[str]:
    """The names of parameters and buffers that have the same bits in both models."""
    ours, theirs = (each.state_dict() if isinstance(each, nn.Module) else each for each in (one, other))
    assert ours.keys() == theirs.keys()
    return {name for name, value in ours.items() if torch.equal(value, theirs[name])}


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models are the same to the bit."""
    return alike(one, other) == one.state_dict().keys()


def without_times(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "seconds": None} for record in records]


def records_of(folder: Path) -> list[dict[str, Any]]:
    """The records of a seed's folder, without times."""
    return without_times(map(json.loads, (folder / "rounds.jsonl").read_text().splitlines()))


def bits(result: Any) -> tuple[Any, ...]:
    """Everything that a run leaves, without times."""
    return without_times(result.rounds), [value.numpy().tobytes() for value in result.model.state_dict().values()]


def stop_at(round: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Mapping[str, Any]], None]:
    """What ends a run once a round is over; without more, as Ctrl-C does."""

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == round:
            raise error

    return stop


def exported(model: Any, path: Path, kind: str, samples: Any) -> tuple[Any, dict[str, str]]:
    """What a trained model gives for samples where another program runs it, and the notes in its file."""
    place = model.export(path, kind)
    if kind == "onnx":
        onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
        (found,) = reference.ReferenceEvaluator(str(place)).run(None, {"samples": np.asarray(samples)})
        return found, {one.key: one.value for one in onnx.load(place).metadata_props}
    notes = dict.fromkeys(("classes", "encoder", "probabilities", "samples"), "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's, of torch.jit
        script = torch.jit.load(place, _extra_files=notes)
    return script(torch.as_tensor(samples)).numpy(), {
        name: bytes(said).decode() for name, said in notes.items() if said
    }


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def save_image(path: Path, levels: Any, mode: str | None = None, **options: Any) -> Path:
    """Write an image, or an array of levels as one; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = levels if isinstance(levels, Image.Image) else Image.fromarray(np.asarray(levels))
    (image.convert(mode) if mode else image).save(path, **options)
    return path


@dataclass
class Told:
    """A backend whose clients move the model by what they are told; who is told nothing does not reply."""

    moves: Mapping[int, Sequence[float]]
    buffers: Callable[[int, Tensor], Any] = lambda client, move: 10.0 * client
    also: Callable[[int], dict[str, Any]] = lambda client: {}
    asked: list[list[int]] = field(default_factory=list)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        return [update._replace(change=update.change.clone()) for update in self.train_each(round, cohort, sent)]

    def train_each(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> Iterator[Update]:
        """One by one, in memory that is written over."""
        self.asked.append([task.client for task in cohort])
        _, buffers, integers = sent.model
        row = torch.empty(2)
        for client in self.asked[-1]:
            if client in self.moves:
                move = row.copy_(torch.tensor(self.moves[client]))
                yield Update(
                    client,
                    move,
                    move.norm(),
                    buffers + self.buffers(client, move),
                    integers + client,
                    1 + client,
                    float(client),
                    **self.also(client),
                )


def start(federation: Federation, *parameters: float, buffers: Sequence[float] = (1.0,)) -> Any:
    """The state before the first round of a model of two parameters, a buffer and a counter."""
    model = ModelState(torch.tensor(parameters or (10.0, 20.0)), torch.tensor(buffers), torch.tensor([5]))
    return federation.start(model)


def weights_by_client(record: Any) -> dict[int, float]:
    """The weights of a round's updates."""
    return dict(zip(record.answered, record.weights, strict=True))


def normaliser(steps: int, momentum: float) -> float:
    """FedNova's a(tau, rho) as its authors' loop has it: a counter goes through the momentum, and is summed."""
    counter = total = 0.0
    for _ in range(steps):
        counter = momentum * counter + 1
        total += counter
    return total


def moved(
    component: Any, state: Any, model: Tensor, updates: Tensor, weights: Any, steps: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The next model and state by a server update, from updates `(clients, parameters)`, weights and local steps."""
    change, extras = summed(component, updates, np.asarray(weights), [int(step) for step in steps])
    return component.move(state, model, change, extras)


def under_masks(values: Mapping[str, Any], ask: int = 1, absent: Sequence[str] = ()) -> Any:
    """The sum of what clients send under masks, once it is opened; who is absent has a key, and sends nothing."""
    keys = {name: sums.Key.generate() for name in (*values, *absent)}
    peers = {name: key.public for name, key in keys.items()}
    context = sums.SumContext("run", 1, ask, "train", tuple(values))
    sealed = {name: sums.mask(own, keys[name], peers, context) for name, own in values.items()}
    masked, openings = ({name: both[part] for name, both in sealed.items()} for part in (0, 1))
    return sums.unmask(masked, openings, context)


def local_end(start: Tensor = NONE, parameters: Tensor | None = None, **others: Any) -> LocalEnd:
    """What a client's hook is given; without more, after one step of length 0.1."""
    end = LocalEnd(start, start, NONE, 1, 0.1, 0.0, {}, {}, {}, lambda at: at, torch.sum)
    return end._replace(parameters=start if parameters is None else parameters, **others)


def round_end(
    replies: Sequence[Mapping[str, Tensor]] = (), old: Tensor = NONE, new: Tensor | None = None, **others: Any
) -> RoundEnd:
    """What a server's hook is given; without more, nobody moved the model, and there are nine clients."""
    many = len(replies)
    end = RoundEnd(old, old, torch.zeros(many, len(old)), np.arange(many), np.ones(many), replies, clients=9)
    return end._replace(new=old if new is None else new, **others)


class Residual(nn.Module):
    """One convolution beside what it reads, called in a way: a network that is no chain."""

    def __init__(self, channels: int, way: Callable[..., torch.Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.convolution, self.head, self.way = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(channels, 2), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x + self.way(self.convolution, x)).mean((2, 3)))
