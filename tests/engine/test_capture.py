"""Captured steps: on the CPU the same function over the same tensors, on a GPU a graph (pretended, without one)."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cohort_backend import (
    CLASSES,
    CLIENTS,
    ROWS,
    STEP_AND_TEACHER,
    TEACHING,
    UNEVEN,
    Normed,
    assert_close_updates,
    backends,
    built,
    data,
    fresh,
    network,
    sent_by,
)
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fedskew
from covering import BOUND, LOSSES, TERMS, Cell
from fedskew import local_steps
from fedskew.data import AUGMENTATIONS
from fedskew.engine import Assignment, CohortBackend, PartitionedData, Sent
from fedskew.engine.cohort import CohortRequest, capture, train_together
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import describe_backend
from fedskew.methods import DEFAULTS
from fedskew.models import Concatenated, FlatModel, build

STEPS = tuple(local_steps.INDEX)


def captured(method, module: nn.Module, divided: PartitionedData | None = None, chunk: int | None = None, **parts):
    """One client after another, the cohort by the steps that would be captured, and the untrained model."""
    alone, together, model = backends(method, module, divided, chunk, **parts)
    return alone, CohortBackend(together.model, together.work, together.observe, chunk, capture=True), model


def of_images(channels: int = 3) -> PartitionedData:
    flat = data()
    inputs = torch.from_numpy(np.random.default_rng(5).random((ROWS, channels, 16, 16)).astype(np.float32))
    return PartitionedData(inputs, flat.targets, flat.rows, flat.counts)


def assert_captured(backend: CohortBackend) -> None:
    assert backend.not_captured is None


@pytest.fixture
def captures(monkeypatch) -> Counter[int]:
    """How often a step was captured, by its number of width."""
    counted: Counter[int] = Counter()

    class Counting(capture.CapturedFunction):
        def capture(self, pool: Any = None) -> None:
            counted[self.function.args[-1]] += 1
            super().capture(pool)

    monkeypatch.setattr(capture, "CapturedFunction", Counting)
    return counted


def cells(gathering: bool = True) -> list[Any]:
    """Every loss, term and local step; with `make test-all` every term with FedSAM, which takes two gradients, too.

    That the cohort trains every pair of components as one client after another is shown without capture.

    Args:
        gathering: Also those of which a component gathers tensors from batches.
    """
    terms = [TERMS[place : place + 3] for place in range(0, len(TERMS), 3)]
    count = max(len(terms), len(STEPS), len(LOSSES))
    once = [_accepted(place, terms[place % len(terms)], STEPS[(place + 3) % len(STEPS)]) for place in range(count)]
    twice = [_accepted(place + 1, some, "fedsam") for place, some in enumerate(terms)]
    more = [pytest.param(cell, marks=pytest.mark.whole_product) for cell in twice if gathering or not gathers(cell)]
    return [*(cell for cell in once if gathering or not gathers(cell)), *more]


def _accepted(first: int, terms: tuple[str, ...], step: str) -> Cell:
    """A combination that may be run, with the first loss from a place on that goes with the local step."""
    _, update = BOUND.get(("local_step", step), ("server_update", DEFAULTS["server_update"]["name"]))
    losses = (LOSSES[(first + further) % len(LOSSES)] for further in range(len(LOSSES)))
    candidates = (Cell(loss=loss, terms=terms, local_step=step, server_update=update) for loss in losses)
    return next(cell for cell in candidates if cell.accepted)


def gathers(cell: Cell) -> bool:
    """Whether a component gathers tensors from batches, one client after another."""
    return "fpl" in cell.terms or cell.loss == "fednh"


PARTS = ("crop_flip", "autoaugment")
"""Augmentations of which `crop_flip_autoaugment` is made."""

AUGMENTED = [
    ("cnn_w2", None),
    *(
        pytest.param("lenet5", augmentation, marks=[pytest.mark.whole_product] * (augmentation in PARTS))
        for augmentation in AUGMENTATIONS
    ),
]
"""A network with each augmentation, and one with dropout of channels without."""


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_loss_term_and_local_step_trains_as_one_client_after_another(cell: Cell):
    method = built(**cell.tables())
    alone, together, model = captured(method, network())
    sent, new = sent_by(method, model), fresh(method, model)
    asked = [Assignment(client, 1, new) for client in (2, 0, 3)]
    first = together.train(1, asked, sent)
    assert_close_updates(first, alone.train(1, asked, sent))
    moved = sent._replace(model=model._replace(parameters=model.parameters + 0.1))
    again = [Assignment(update.client, 1, update.state) for update in first]
    assert_close_updates(together.train(2, again, moved), alone.train(2, again, moved))
    assert (together.not_captured is None) == (not gathers(cell))


@pytest.mark.slow
@pytest.mark.parametrize(("step", "left"), STEP_AND_TEACHER)
def test_batch_norm_dropout_and_buffers_are_each_clients_own(step, left):
    method = built(objective=TEACHING, local_step={"name": step})
    alone, together, model = captured(method, network(Normed), batch_size=9, teacher_train_mode=left)
    ours = together.train(1, UNEVEN, Sent(model))
    assert_close_updates(ours, alone.train(1, UNEVEN, Sent(model)))
    assert all(torch.equal(update.buffers, model.buffers) == (update.steps == 0) for update in ours)
    assert_captured(together)


@pytest.mark.slow
def test_frozen_layers_stay_those_of_the_model(captures):
    module = Concatenated(network(Normed), 2)
    alone, together, model = captured(built(), module, batch_size=9)
    for _ in range(2):
        assert_close_updates(together.train(1, UNEVEN, Sent(model)), alone.train(1, UNEVEN, Sent(model)))
        for backend in (alone, together):
            with torch.no_grad():
                backend.model.module.encoders[0].fc.weight.mul_(-2)
    assert captures == {5: 1, 3: 1, 1: 1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "augmentation"), AUGMENTED)
def test_convolutions_channel_dropout_and_augmentation_are_each_clients_own(name, augmentation):
    augment = None if augmentation is None else AUGMENTATIONS[augmentation]().bind((), ())
    module = build(name, CLASSES, (3, 16, 16))
    alone, together, model = captured(built(objective=TEACHING), module, of_images(), augment=augment)
    asked = [Assignment(client, 2) for client in (1, 2, 5)]
    assert_close_updates(together.train(2, asked, Sent(model)), alone.train(2, asked, Sent(model)))
    assert_captured(together)


@pytest.mark.slow
def test_steps_are_captured_once_for_rounds_of_other_sizes_and_learning_rates(captures):
    alone, together, model = captured(built(objective=TEACHING), network(), lr_decay=0.5)
    for round, clients in enumerate([(0, 2, 5, 7, 4, 1), (2, 0, 7), (4,), (1, 6, 0, 5, 3, 2)], start=1):
        asked = [Assignment(client, 3) for client in clients]
        assert_close_updates(together.train(round, asked, Sent(model)), alone.train(round, asked, Sent(model)))
    # 40, 27, 24, 17, 8 and 3 samples: six clients have a first step, three a fourth, and one a thirteenth.
    assert captures == {6: 1, 3: 1, 2: 1, 1: 1}
    assert_captured(together)


@pytest.mark.slow
def test_a_larger_cohort_or_a_longer_round_makes_room_and_is_captured_again(captures):
    alone, together, model = captured(built(), network())
    for clients, epochs in [((4, 2), 1), ((4, 2, 5), 1), ((4, 2), 9)]:
        asked = [Assignment(client, epochs) for client in clients]
        assert_close_updates(together.train(1, asked, Sent(model)), alone.train(1, asked, Sent(model)))
    # The last has 27 steps, for which three width are kept, as before it three clients came at once.
    assert captures == {2: 2 + 1, 3: 1, 1: 2}


def test_a_step_changes_nothing_of_those_that_have_finished(monkeypatch):
    whole = capture.static_step
    held: list[Any] = []

    def step(*arguments) -> None:
        held[:] = arguments
        whole(*arguments)

    monkeypatch.setattr(capture, "static_step", step)
    _, together, model = captured(built(objective=TEACHING), network(Normed), batch_size=9, weight_decay=0.1)
    together.train(2, [Assignment(2, 1), Assignment(0, 1)], Sent(model))
    tensors = held[3]
    steps = int(tensors["shared"]["number"])
    assert steps == 5  # 40 samples, 9 at a time; 17 samples are over after two
    before = copy.deepcopy(tensors["clients"])
    assert not torch.equal(before["model"].parameters[0], model.parameters)
    whole(*held[:4], 2)
    assert int(tensors["shared"]["number"]) == steps + 1
    assert all(map(torch.equal, tree_leaves(before), tree_leaves(tensors["clients"])))


def test_what_a_finished_clients_samples_hold_does_not_matter():
    other = data()
    other.inputs[other.rows[1]] = float("inf")  # client 1's, which diverges in its only step and stays
    results = []
    for divided in (data(), other):
        _, together, model = captured(built(), network(), divided)
        results.append(together.train(2, [Assignment(client, 2) for client in (1, 0, 2)], Sent(model)))
    assert not results[1][0].change.isfinite().all()
    assert all(torch.equal(one.change, two.change) for one, two in zip(results[0][1:], results[1][1:], strict=True))


@pytest.mark.slow
def test_what_was_left_by_a_round_before_does_not_matter():
    method = built(objective=TEACHING)
    _, together, model = captured(method, network())
    diverged = model._replace(parameters=model.parameters * float("inf"))
    together.train(1, [Assignment(client, 2) for client in range(CLIENTS)], Sent(diverged))
    _, anew, _ = captured(method, network())
    # As many width, though one client is asked: what the others held is in the tensors still.
    (after,) = together.train(2, [Assignment(5, 2)], Sent(model))
    (by_itself,) = anew.train(2, [Assignment(5, 2)], Sent(model))
    assert torch.equal(after.change, by_itself.change)
    assert after.loss == by_itself.loss


def test_updates_stay_as_they_are_when_the_next_round_is_trained():
    _, together, model = captured(built(), network())
    first = together.train(1, UNEVEN, Sent(model))
    copies = copy.deepcopy(first)
    together.train(2, UNEVEN[::-1], Sent(model))
    assert all(torch.equal(one.change, other.change) for one, other in zip(first, copies, strict=True))


@pytest.mark.slow
def test_clients_that_kept_something_train_beside_those_that_did_not(captures):
    method = built(objective={"name": "cross_entropy", "terms": [{"name": "moon"}]}, local_step={"name": "scaffold"})
    alone, together, model = captured(method, network(), persist_momentum=True)
    sent, new = sent_by(method, model), fresh(method, model)
    states = dict.fromkeys(range(CLIENTS), new)
    for round, clients in enumerate([(0, 1), (0, 2, 1), (2, 4, 0), (4, 5, 2)], start=1):
        asked = [Assignment(client, 1, states[client]) for client in clients]
        ours = together.train(round, asked, sent)
        assert_close_updates(ours, alone.train(round, asked, sent))
        states |= {update.client: update.state for update in ours}
        sent = sent._replace(model=sent.model._replace(parameters=sent.model.parameters + 0.05))
    assert captures == {1: 2, 2: 2}
    assert_captured(together)


@pytest.mark.slow
def test_federations_of_several_seeds_train_as_each_alone():
    method = built(objective=TEACHING, local_step={"name": "scaffold"})
    requests, apart = [], []
    for shift in (0.0, 0.1, -0.2):
        alone, together, model = captured(method, network(), data())
        moved = model._replace(parameters=model.parameters + shift)
        sent = sent_by(method, moved)
        asked = [Assignment(client, 2, fresh(method, moved)) for client in (0, 4, 2)]
        requests.append(CohortRequest(together, 2, asked, sent))
        apart.append(alone.train(2, asked, sent))
    for _ in range(2):  # the second time on tensors that are there
        for ours, theirs in zip(train_together(requests), apart, strict=True):
            assert_close_updates(ours, theirs)
    assert_captured(requests[0].backend)


@pytest.mark.slow
def test_chunks_of_a_cohort_train_one_after_another():
    alone, together, model = captured(built(objective=TEACHING), network(), chunk=3)
    everybody = [Assignment(client, 2) for client in range(CLIENTS)]
    assert_close_updates(together.train(1, everybody, Sent(model)), alone.train(1, everybody, Sent(model)))
    assert_captured(together)


class LrAsNumber:
    """A user's own local step that needs the learning rate as a number, which is not known when a step is captured."""

    def init(self, parameters: Tensor) -> None:
        return None

    def step(self, parameters, gradient, carried, settings):
        if not isinstance(settings.lr, float):
            raise TypeError("a learning rate\nmust be a number")
        return parameters - settings.lr * gradient(parameters), carried


def test_a_step_that_cannot_be_captured_is_taken_as_it_is_and_says_why():
    alone, together, model = captured(dataclasses.replace(built(), local_step=LrAsNumber()), network(), momentum=0.0)
    asked = [Assignment(client, 2) for client in (0, 2)]
    for round in (1, 2):
        assert_close_updates(together.train(round, asked, Sent(model)), alone.train(round, asked, Sent(model)))
    assert together.not_captured == "capture failed: a learning rate must be a number"


@pytest.mark.slow
def test_a_capture_that_fails_is_not_tried_again(monkeypatch):
    tried = []

    def fail(self, pool: Any = None) -> None:
        self.function()  # as far as the last warm-up
        tried.append(self)
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(capture.CapturedFunction, "capture", fail)
    alone, together, model = captured(built(objective=TEACHING), network())
    for round in (1, 2):
        assert_close_updates(together.train(round, UNEVEN, Sent(model)), alone.train(round, UNEVEN, Sent(model)))
    assert len(tried) == 1
    assert together.not_captured == "capture failed: CUDA error: operation not permitted when stream is capturing"


def test_an_error_of_training_itself_is_reported_as_without_capture():
    _, together, model = captured(built(), network(Normed), batch_size=13)
    with pytest.raises(RunError, match=r"round 1, clients 0, 7, step 2: .*more than 1 value"):
        together.train(1, [Assignment(client, 2) for client in (7, 0, 3)], Sent(model))


class Bytes:
    """Images kept as bytes, of which a batch is made when it is read."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels, self.shape, self.device = pixels, pixels.shape, pixels.device

    def __len__(self) -> int:
        return len(self.pixels)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return self.pixels.index_select(dim, rows) / 255


@pytest.mark.slow
def test_inputs_that_are_read_batch_by_batch_are_not_captured():
    flat, pixels = data(), torch.arange(ROWS * 3 * 16 * 16, dtype=torch.uint8).view(ROWS, 3, 16, 16)
    stored = PartitionedData(Bytes(pixels), flat.targets, flat.rows, flat.counts)
    alone, together, model = captured(built(), build("lenet5", CLASSES, (3, 16, 16)), stored)
    assert_close_updates(together.train(1, UNEVEN, Sent(model)), alone.train(1, UNEVEN, Sent(model)))
    assert together.not_captured == "the inputs are not a tensor in memory; they are read batch by batch"


def test_a_run_records_whether_its_steps_were_captured():
    method = built(objective={"name": "cross_entropy", "terms": [{"name": "fpl"}]})
    _, together, model = captured(method, network())
    runner: Any = SimpleNamespace(backend=together)
    assert describe_backend(runner) == {"name": "cohort", "stacked": together.stack_size, "captured": True}
    together.train(1, UNEVEN, Sent(model))
    assert describe_backend(runner) == {
        "name": "cohort",
        "stacked": together.stack_size,
        "captured": False,
        "not_captured": "FPL gathers tensors from each client's batches, one client after another",
    }
    _, plain, _ = backends(method, network())
    assert "captured" not in describe_backend(SimpleNamespace(backend=plain))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"backend": "cohort", "device": "cpu"}, "engine.capture: .*engine.device"),
        ({"backend": "sequential"}, "engine.capture: .*set engine.backend to 'cohort'"),
        ({}, "engine.capture: .*set engine.backend to 'cohort'"),
    ],
    ids=["on the CPU", "another backend", "any backend"],
)
def test_capture_is_refused_where_there_is_nothing_to_capture(engine, reason):
    with pytest.raises(ConfigError, match=reason):
        fedskew.simulate(
            data="digits",
            partition={"rule": "dirichlet_by_class", "clients": 4, "beta": 1.0},
            model="logistic",
            training={"rounds": 1},
            engine={**engine, "capture": True},
        )


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "unique_dim", "_unique2")


class OnDevice(TorchDispatchMode):
    """Fails at an operation that waits for the device, or takes a tensor to it or from it.

    Plain numbers stand as 0-d tensors on the host; they go along with an operation on single elements, but for `where`.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        assert name not in WAITS, f"{name} waits for the device"
        result = function(*args, **(kwargs or {}))
        parts = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, Tensor)]
        here = [part for part in parts if part.device.type != "meta"]
        numbers = all(part.dim() == 0 for part in here)
        together = len(here) == len(parts) or (torch.Tag.pointwise in function.tags and name != "where")
        assert not here or (numbers and together), f"{name} has to do with a tensor on the host"
        return result


@pytest.fixture
def on_a_device(monkeypatch) -> Counter[int]:
    """Steps run on the meta device instead: it takes every branch of code that is not the CPU's, and holds no values.

    The second run of a step is watched, as the first may make constants that are kept. Counts the steps: one of each
    width is enough, as a step's operations do not depend on values.
    """
    whole, runs = capture.static_step, Counter[int]()

    def step(own, settings, smallest, tensors, width) -> None:
        if runs[width] == 1:
            return
        elsewhere = tree_map(lambda part: torch.empty_like(part, device="meta"), tensors)
        whole(own, settings, smallest, elsewhere, width)
        with OnDevice():
            whole(own, settings, smallest, elsewhere, width)
        runs[width] += 1

    monkeypatch.setattr(capture, "static_step", step)
    return runs


@pytest.mark.slow
def test_a_step_that_waits_for_the_device_is_noticed():
    number = torch.zeros((), device="meta")
    with OnDevice(), pytest.raises(AssertionError, match="to do with a tensor on the host"):
        number + torch.tensor(1.0).to("meta")
    with OnDevice(), pytest.raises((AssertionError, RuntimeError)):
        number.item()


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(gathering=False), ids=str)
def test_no_step_waits_for_the_device(cell: Cell, on_a_device):
    method = built(**cell.tables())
    _, together, model = captured(method, network(Normed), batch_size=9)
    assert together.stack_size >= 2  # computed where the network is
    for frozen in (one for one in together.model.module.parameters() if not one.requires_grad):
        swap_tensors(frozen, nn.Parameter(torch.empty_like(frozen, device="meta"), requires_grad=False))
    sent, new = sent_by(method, model), fresh(method, model)
    if "moon" in cell.terms:
        new |= {"previous.parameters": model.parameters, "previous.buffers": model.buffers}
    together.train(1, [Assignment(client, 1, new) for client in (5, 7)], sent)  # as many steps each: of one width
    assert_captured(together)
    assert on_a_device[2] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "augmentation"), AUGMENTED)
def test_no_convolution_or_augmentation_waits_for_the_device(name, augmentation, on_a_device):
    augment = None if augmentation is None else AUGMENTATIONS[augmentation]().bind((0.5,) * 3, (0.2,) * 3)
    module = build(name, CLASSES, (3, 16, 16))
    _, together, model = captured(built(objective=TEACHING), module, of_images(), augment=augment)
    together.train(1, [Assignment(client, 1) for client in (1, 6)], Sent(model))
    assert_captured(together)
    assert on_a_device[2] == 1


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_a_gpu)]


@pytest.mark.parametrize("name", DEVICES)
def test_every_call_runs_the_function_on_the_same_tensors(name):
    device = torch.device(name)
    total, one = torch.zeros(3, device=device), torch.ones(3, device=device)
    captured = capture.CapturedFunction(lambda: total.add_(one), device)
    captured.capture()
    assert 1 <= total[0] <= capture.WARM_UPS + 1
    total.fill_(10)
    captured()
    one.fill_(5)
    captured()
    assert total.tolist() == [16, 16, 16]


@pytest.mark.parametrize("name", DEVICES)
def test_an_error_of_the_function_is_raised_when_it_is_captured(name):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        capture.CapturedFunction(fail, torch.device(name)).capture()


class Pretended:
    """What a capture calls of PyTorch on a GPU, in order; `fails`: the capture ends in an error, as CUDA's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.fails = False
        for name, stand_in in {
            "device": lambda device: nullcontext(),
            "Stream": lambda: self,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda: self,
            "set_stream": lambda stream: self.calls.append("stream put back"),
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: self.calls.append(("waits", mode)),
            "CUDAGraph": lambda: self,
            "graph": self.graph,
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def wait_stream(self, other: object) -> None:
        self.calls.append("streams in order")

    def replay(self) -> None:
        self.calls.append("replayed")

    @contextmanager
    def graph(self, graph: object, pool: object):
        self.calls.append(("captures into", pool))
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.calls.append("captured")

    def captured(self) -> capture.CapturedFunction:
        return capture.CapturedFunction(lambda: self.calls.append("run"), torch.device("cuda"))


def test_a_function_is_run_to_warm_up_and_once_without_waits_before_it_is_captured(monkeypatch):
    gpu = Pretended(monkeypatch)
    captured = gpu.captured()
    captured.capture("a pool")
    captured()
    assert gpu.calls == [
        "streams in order",
        *["run"] * capture.WARM_UPS,
        *[("waits", "error"), "run", ("waits", 0)],
        "streams in order",
        *[("captures into", "a pool"), "run", "captured"],
        "stream put back",
        "replayed",
    ]


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_its_graph_alive(monkeypatch):
    gpu = Pretended(monkeypatch)
    gpu.fails, captured = True, gpu.captured()
    with pytest.raises(RuntimeError, match="not permitted"):
        captured.capture()
    assert gpu.calls[-1] == "stream put back"
    captured()
    assert gpu.calls[-1] == "replayed"


@needs_a_gpu
def test_gradients_are_captured_too():
    weight, gradient = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def differentiate() -> None:
        leaf = weight.detach().requires_grad_()
        gradient.copy_(torch.autograd.grad(leaf.square().sum(), leaf)[0])

    captured = capture.CapturedFunction(differentiate, torch.device("cuda"))
    captured.capture()
    weight.fill_(3)
    captured()
    assert gradient.tolist() == [6, 6, 6, 6]


@needs_a_gpu
def test_a_function_that_waits_for_the_gpu_is_refused_and_leaves_everything_in_place():
    number = torch.zeros((), device="cuda")
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="synchronizing"):
        capture.CapturedFunction(lambda: number.add_(number.item()), torch.device("cuda")).capture()
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == mode
    assert float(number + 1) == 1


@needs_a_gpu
def test_captured_steps_on_a_gpu_train_as_the_same_steps_on_the_cpu():
    method = built(objective=TEACHING, local_step={"name": "scaffold"})
    _, here, model = captured(method, network(Normed), batch_size=9, lr_decay=0.5)
    flat = data()
    there_data = PartitionedData(flat.inputs.cuda(), flat.targets.cuda(), flat.rows, flat.counts)
    _, host, _ = backends(method, network(Normed), there_data, batch_size=9, lr_decay=0.5)
    there = CohortBackend(FlatModel(network(Normed).cuda()), host.work, capture=True)
    for round in (1, 2, 3):
        results = []
        for backend, device in ((here, "cpu"), (there, "cuda")):
            moved = type(model)(*(part.to(device) for part in model))
            asked = [Assignment(client, 3, fresh(method, moved)) for client in (2, 0, 7, 5)]
            updates = backend.train(round, asked, sent_by(method, moved))
            results.append(tree_map(lambda part: part.cpu() if isinstance(part, Tensor) else part, updates))
        assert_close_updates(results[1], results[0])
    assert there.not_captured is None
