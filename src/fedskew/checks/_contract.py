"""Contract tests of a component: it can be made, holds in corner cases of its slot, trains, repeats and resumes."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew import methods
from fedskew.checks._trial import CLASSES, COUNTS, FEATURES, MOMENTUM, FoundComponent, Shapes, tiny_data, train
from fedskew.components import SEEN, covers, has, make_component, seen_by, takes, with_clients
from fedskew.engine import LocalTraining, Private, contracts
from fedskew.engine.heeding import HEEDED, check_heeds
from fedskew.engine.totals import summed
from fedskew.errors import ArgumentError, BackendWarning, ComponentError, reason_of
from fedskew.experiment import Config, make_network
from fedskew.finish import Head, Known, Observed, Source
from fedskew.hooks import Batch, Hooks
from fedskew.labels import LabelCounts
from fedskew.local_steps import SGD, StepSettings, steps_in_place
from fedskew.models import FlatModel, Outputs
from fedskew.objectives import Context
from fedskew.personal import HeldOut, Names, Personal
from fedskew.report import SeedRun
from fedskew.weighting import Answered, BySums

CLOSE = 1e-3


class Finding(NamedTuple):
    """The result of one test.

    Attributes:
        problem: What is wrong, in one line; None if the test passed.
    """

    test: str
    problem: str | None


def check(found: FoundComponent, parameters: Mapping[str, Any], config: Config | None = None) -> list[Finding]:
    """Run the contract tests on a component with these parameters: the finding of each test.

    With a `config` the small federation has its samples' shape, its classes and its network.
    """
    shapes = Shapes() if config is None else Shapes.of(config)
    table = {"name": found.name, **parameters}
    made: list[Any] = []

    def make() -> None:
        make_component(methods.PLACES[found.slot], table, found.slot)  # alone first, as its messages are shorter
        method = methods.build(methods.expand(_method(found, table)), MOMENTUM)
        made.extend(component for slot, component in method.components() if slot == found.slot)

    findings = [_tried("it is made, with the functions of its slot", make)]
    if findings[0].problem is not None:
        return findings
    component, method = made[-1], _method(found, table)
    reads = any(takes(component, function, "samples") for function in ("move", "next_model", "end_round"))
    run = partial(train, method, shapes, validation=0.2 if reads else 0.0)
    known = {"sized": _Sized.of(config, shapes)}
    cases, steps = _CASES[found.slot], found.slot == "local_step"
    if getattr(found.kind, "local_step", Personal.local_step) is not Personal.local_step:
        cases, steps = cases + _CASES["local_step"], True
    findings += [_tried(test, partial(case, component, **seen_by(case, known))) for test, case in cases]
    test = "it trains a small federation with an empty client and vacant classes"
    trained: list[_Trained] = []
    findings.append(_tried(test, lambda: trained.append(_seeded(1, run))))
    for whole in trained:
        test = "the same seed gives the same bits, and draws use no global generator"
        findings.append(_tried(test, partial(_again, run, whole)))
        test = "a run that is stopped and resumed ends with the same bits"
        findings.append(_tried(test, partial(_resumed, run, whole)))
        if config is None:
            test = "it trains a network whose first layer is frozen, and no part of the parameters"
            findings.append(_tried(test, partial(run, freeze=("fc1.*",))))
        if found.slot == "objective" or steps:
            test = "a cohort trained at once (backend 'cohort') agrees with one client after another"
            findings.append(_tried(test, partial(_together, run, whole, found.slot, partial(train, {}, shapes))))
    if trained and steps and any(own.adam for _, own in _settings(component, torch.ones(3))):
        test = "with AdamW, whose state clients keep, a run that is stopped and resumed ends with the same bits"
        findings.append(_tried(test, partial(_kept, run)))
    return findings


def _method(found: FoundComponent, table: dict[str, Any]) -> dict[str, Any]:
    """Return the `[method]` of FedAvg with the component and what it declares to need in other slots."""
    if getattr(found.kind, "role", None) == "term":
        return {"objective": {"extra_terms": [table]}}
    terms = {"objective": {"extra_terms": [{"name": "fedkd"}]}} if found.slot == "local_step" else {}  # parts of it
    return terms | _partners(found.kind) | {found.slot: table}


def _partners(kind: type) -> dict[str, Any]:
    """For each rule that requires a property of another slot, one of our components that has it."""
    wanted = [key.split(".not ") for key in getattr(kind, "refuses", {}) if ".not " in key]
    fitting = {slot: [name for name, one in methods.PLACES[slot].items() if has(one, what)] for slot, what in wanted}
    return {slot: {"name": names[0]} for slot, names in fitting.items() if names}


def _tried(test: str, run: Callable[[], Any]) -> Finding:
    try:
        with _own_generators():
            run()
    except Exception as error:  # a component can raise anything
        return Finding(test, reason_of(error))
    return Finding(test, None)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Restore the global generators when the block ends."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002


# ---- whole runs


_Trained = tuple[SeedRun, Tensor]
"""A run and its final parameters."""
_Run = Callable[..., _Trained]


def _seeded(seed: int, run: _Run) -> _Trained:
    """Train once, with the global generators set to this seed."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return run()


def _again(run: _Run, whole: _Trained) -> None:
    cure = "draw from the generator that is passed in, and from no other"
    _same(whole, _seeded(2, run), "two runs of one seed", cure)


def _resumed(run: _Run, whole: _Trained) -> None:
    cure = "keep what a round leaves to the next in the state, a frozen dataclass of arrays and plain values"
    _same(whole, run(stop=True), "a run that was resumed and one that was not", cure)


def _kept(run: _Run) -> None:
    training = {**ADAMW, "momentum": 0.0, "keep_optimizer": True}
    cure = "keep nothing of a round outside of what is carried and what hooks keep"
    _same(run(**training), run(stop=True, **training), "a run that was resumed, and one not", cure)


def _same(one: _Trained, other: _Trained, what: str, cure: str) -> None:
    for first, second in zip(one[0].rounds, other[0].rounds, strict=True):
        for key in ("cohort", "weights", "loss"):
            if getattr(first, key) != getattr(second, key):
                raise ComponentError(f"{what} differ from round {first.round} on, first in {key}; {cure}")
    if not torch.equal(one[1], other[1]) or repr(one[0].sites) != repr(other[0].sites):
        raise ComponentError(f"{what} end with different models; {cure}")


_STEPS = (
    "write no Python branch on values, let step_in_place(), where there is one, take step()'s step, and say takes_rows "
    "only where step() takes a row for each client"
)
_CURES = {
    "objective": "leave out the rows that batch.mask does, write no Python branch on values, and say takes_stacks only "
    "where value() takes several clients' batches",
    "local_step": _STEPS,
    "personal": _STEPS,
}


def _together(run: _Run, whole: _Trained, slot: str, plain: _Run) -> None:
    alone = whole[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendWarning)  # it can't be mapped over clients
        try:
            together = run(backend="cohort")[1]
        except BackendWarning as error:
            with suppress(BackendWarning):
                plain(backend="cohort")
                raise ComponentError(str(error)) from error
            return  # nor can the network itself be
    apart = float((alone - together).abs().max())
    if not apart <= CLOSE * max(1.0, float(alone.abs().max())):
        raise ComponentError(f"the models differ by up to {apart:.2g}; {_CURES[slot]}")


# ---- corner cases, by slot


@contextmanager
def _case(name: str) -> Iterator[None]:
    """Let errors inside the block begin with the case's name."""
    try:
        yield
    except Exception as error:
        raise ComponentError(f"{name}: {reason_of(error)}") from error


class _Sized(NamedTuple):
    """The network of corner cases, a small one or a config's, and samples for it."""

    network: FlatModel
    inputs: Tensor

    @staticmethod
    def of(config: Config | None, shapes: Shapes) -> "_Sized":
        if config is None:
            layers = torch.nn.Linear(FEATURES, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, CLASSES)
            drawn = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(0))
            return _Sized(FlatModel(torch.nn.Sequential(*layers)), drawn)
        network = make_network(config, 0, methods.build(methods.expand({})), shapes.classes, shapes.inputs)
        return _Sized(FlatModel(network), tiny_data(shapes).inputs.index_select(0, torch.arange(12)))

    @property
    def start(self) -> Tensor:
        return torch.linspace(-1, 1, len(self.network.vector))


def _seen(component: Any, function: str, sized: _Sized | None = None, clients: int = 1) -> dict[str, Any]:
    """Return what a function takes by name."""
    if not seen_by(getattr(component, function), dict.fromkeys(SEEN[function])):
        return {}
    network, inputs = sized = sized or _Sized.of(None, Shapes())
    hooks = component if isinstance(component, Hooks) else Hooks()
    known = {
        "layout": network.layout,
        "network": network,
        "samples": SimpleNamespace(inputs=inputs, targets=torch.zeros(len(inputs), dtype=torch.int64)),
        "sent": sized.start,
        "updates": torch.randn(clients, len(sized.start), generator=torch.Generator().manual_seed(0)),
        "kept": hooks.init_server(sized.start, clients if function == "select" else len(COUNTS)),
        "target": None,
        "losses": lambda ids: 1.0 + np.arange(len(ids)),
        "log": contracts.checked_figure,
    }
    return seen_by(getattr(component, function), {name: known[name] for name in SEEN[function]})


def _distinct_clients(component: Any) -> None:
    for counts in (COUNTS, np.ones((1, 3)), np.ones((20, 2)), np.diag([3.0, 1.0, 7.0])):
        held = LabelCounts(counts.astype(float))
        for size in {1, max(1, len(counts) // 2), len(counts)}:
            if not _can_choose(component, held, size):
                continue
            state, rng = component.init(held), np.random.default_rng(0)
            seen = _seen(component, "select", None, len(counts))
            for _ in range(4):
                ids, state = contracts.checked_choice(
                    component, component.select(state, held, size, rng, **seen), len(counts)
                )
            if len(ids) > size and not has(component, "assigns_quotas"):
                raise ComponentError(f"select() chose {len(ids)} clients where size is {size}")


def _can_choose(component: Any, counts: LabelCounts, size: int) -> bool:
    """Return whether the selection's own `check`, if it has one, accepts such cohorts."""
    try:
        component.check(counts, size)
    except AttributeError:
        return True
    except ArgumentError:
        return False
    return True


def _weights_sum_to_one(component: Any, sized: _Sized) -> None:
    sizes = COUNTS.sum(axis=1).astype(float)
    target = np.full(CLASSES, 1 / CLASSES)
    for ids in (np.arange(6), np.array([2]), np.array([1, 3]), np.array([5, 0, 4])):
        kept = component.init_server(torch.zeros(3), len(COUNTS)) if hasattr(component, "init_server") else {}
        for mix in (target,) if has(component, "needs_target") else (target, None):
            without = " and no target mix (one that needs it declares needs_target)" if mix is None else ""
            with _case(f"with samples {sizes[ids].astype(int).tolist()}{without}"):
                answered = Answered(COUNTS[ids].astype(float), sizes[ids], mix, ids, kept)
                seen = _seen(component, "weigh", sized, len(ids))
                contracts.checked_weights(component, component.weigh(answered, **seen), ids)


_BATCHES = {
    "a batch of every class": ([0, 1, 2, 3, 1, 0], [3, 2, 1, 4]),
    "a client with one class": ([1, 1, 1], [0, 9, 0, 0]),
    "a batch of one sample": ([2], [1, 0, 3, 0]),
}


def _own_weights(component: Any) -> None:
    by_sums = isinstance(component, BySums) and covers(component, "own_weight", "weigh")
    if not by_sums or component.why_no_sums() is not None:
        return
    # Who has no sample may hold a share that nobody gets, as a sum of updates is divided by its own weights' sum.
    counts = np.tile(COUNTS[COUNTS.any(axis=1)].astype(float), (2, 1))
    target = np.full(CLASSES, 1 / CLASSES)

    def ask(question: Mapping[str, Any]) -> Any:
        return np.sum([component.answer(row, question) for row in counts], axis=0)

    announced = component.announce(ask, target, len(counts))
    own = np.array([component.own_weight(row, announced) for row in counts])
    weights = component.weigh(Answered(counts, counts.sum(axis=1), target, np.arange(len(counts))))
    if not np.allclose(own, weights, rtol=CLOSE, atol=CLOSE / len(counts)):
        raise ComponentError(
            f"own_weight() gives {np.round(own[:6], 3).tolist()}, and weigh() {np.round(weights[:6], 3).tolist()}; "
            "they are to be the same"
        )


def _losses(component: Any, scale: float, padding: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield for each case its name, the loss, and the loss's gradient at features and logits of the real rows."""
    for case, (labels, counts) in _BATCHES.items():
        draw = torch.Generator().manual_seed(3)
        rows = len(labels)
        drawn = [torch.randn(rows, width, generator=draw) for width in (FEATURES, CLASSES) * 3]
        features, logits, *others = [torch.cat([part, torch.full((padding, part.shape[1]), 7.0)]) for part in drawn]
        features, logits = (scale * features).requires_grad_(), (scale * logits).requires_grad_()
        mask = torch.arange(rows + padding) < rows if padding else None
        targets = torch.tensor(labels + labels[:1] * padding)
        reads = component.reads
        context = Context(
            torch.tensor(counts, dtype=torch.float32),
            Outputs(others[0], others[1]) if "teacher" in reads else None,
            Outputs(others[2], others[3]) if "previous" in reads else None,
            component.broadcast(component.init_server(torch.zeros(3), 6)) if "broadcast" in reads else {},
        )
        value = component.value(Batch(features, logits, targets, mask), context, **_seen(component, "value"))
        if not isinstance(value, Tensor) or value.dim():
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ComponentError(f"{case}: value() must return one number, a 0-d tensor; got {got}")
        gradients = [torch.zeros_like(features), torch.zeros_like(logits)]
        if value.requires_grad:
            found = torch.autograd.grad(value, [features, logits], allow_unused=True)
            gradients = [zero if part is None else part for zero, part in zip(gradients, found, strict=True)]
        yield case, value.detach(), torch.cat([part[:rows].flatten() for part in gradients])


def _finite_losses(component: Any) -> None:
    moved = False
    for scale in (1.0, 0.0, 30.0):
        for case, value, gradient in _losses(component, scale):
            given = f"{case}, logits {'all 0' if scale == 0 else f'up to about {3 * scale:g}'}"
            if not value.isfinite():
                raise ComponentError(f"{given}: the loss is {float(value):g}")
            if not gradient.isfinite().all():
                raise ComponentError(f"{given}: the gradient is NaN or infinite")
            moved |= bool(gradient.any())
    if not moved and "broadcast" not in component.reads:  # which may still be empty
        raise ComponentError("its gradient is always 0: it doesn't depend on the batch's logits or features")


def _masked_losses(component: Any) -> None:
    for plain, padded in zip(_losses(component, 1.0), _losses(component, 1.0, padding=2), strict=True):
        near = partial(torch.allclose, rtol=1e-4, atol=1e-5)
        if not near(plain[1], padded[1]) or not near(plain[2], padded[2]):
            raise ComponentError(
                f"{plain[0]}: {float(plain[1]):.4g} becomes {float(padded[1]):.4g} with two rows that batch.mask "
                "leaves out; take the mean over the real rows only"
            )


ADAMW: Mapping[str, Any] = {"optimizer": "adamw"}
OPTIMISERS: tuple[Mapping[str, Any], ...] = ({}, {"momentum": 0.9}, {"clip_norm": 0.5}, ADAMW)
"""Settings of local training that steps are tried with."""


def _step_of(component: Any) -> Any:
    """Return a local step, or that which a personal component makes of SGD."""
    return component.local_step(SGD()) if hasattr(component, "local_step") else component


def _settings(component: Any, start: Tensor) -> Iterator[tuple[str, StepSettings]]:
    """Yield settings for steps, and what they are in words: those that a component does not refuse."""
    hooks = component if isinstance(component, Hooks) else Hooks()
    broadcast = hooks.broadcast(hooks.init_server(start, len(COUNTS)))
    turns = Private(torch.arange(len(start)) % 2 == 0, start[:0], getattr(component, "head_epochs", 0)).steps(1)
    for options in OPTIMISERS:
        training = LocalTraining(lr=0.1, weight_decay=0.01, **options)
        settings = training.settings(1, start.clone())
        settings = settings._replace(broadcast=broadcast, client=hooks.init_client(start) | turns)
        if training.adam is None or _takes_adam(component, settings):
            yield ", ".join(f"{key} {value}" for key, value in options.items()) or "plain SGD", settings


def _takes_adam(component: Any, settings: StepSettings) -> bool:
    """Return whether a step does not refuse Adam, nor a run the step with it."""
    refused = "training.adapts_rates" in getattr(component, "refuses", {})
    step = _step_of(component)
    return not refused and contracts.checked_carried(step, step.init(settings)).keys() >= SGD().init(settings).keys()


def _steps(component: Any, sized: _Sized) -> None:
    start, step = sized.start, _step_of(component)
    for said, settings in _settings(component, start):
        for slope in (torch.ones_like(start), torch.zeros_like(start)):
            parameters, carried = start + 0.5, contracts.checked_carried(step, step.init(settings))
            before = parameters.clone()
            given, seen = slope.clone(), _seen(step, "step", sized)
            after, _ = contracts.checked_step(
                step, step.step(parameters, lambda at, *part, given=given: given, carried, settings, **seen), parameters
            )
            if not after.isfinite().all():
                raise ComponentError(f"a gradient of {slope[0]:g}, {said}: the parameters are NaN or infinite")
            if not torch.equal(parameters, before) or not torch.equal(given, slope):
                raise ComponentError("step() writes to its parameters or to the gradient; return new ones")


def _gradient(at: Tensor, *part: Any) -> Tensor:
    return 2 * at + 1


def _two_steps(component: Any, start: Tensor, settings: StepSettings, sized: _Sized | None = None) -> Tensor:
    parameters, carried = start, contracts.checked_carried(component, component.init(settings))
    for _ in range(2):
        stepped = component.step(parameters, _gradient, carried, settings, **_seen(component, "step", sized))
        parameters, carried = contracts.checked_step(component, stepped, parameters)
    return parameters


def _by_optimizer(component: Any, sized: _Sized) -> None:
    start, step = sized.start, _step_of(component)
    (_, plain), *_, (said, settings) = _settings(component, start)
    if settings.adam is None:
        return
    one, other = (_two_steps(step, start, own, sized) for own in (plain, settings))
    first = contracts.checked_carried(step, step.init(settings))
    stepped = step.step(start, _gradient, first, settings, **_seen(step, "step", sized))
    carried = contracts.checked_step(step, stepped, start)[1]
    # A step that goes by signs is the same where these don't change, but what Adam carries is another.
    if torch.allclose(one, other) and all(torch.equal(carried[name], values) for name, values in first.items()):
        raise ComponentError(
            f"step() does the same with {said} and with SGD; step by SGD().step(...), or refuse it: "
            'refuses = {"training.adapts_rates": "why; what to do instead"}'
        )


def _heeds(component: Any, sized: _Sized) -> None:
    asked = [name for name in HEEDED if f"training.{name}" not in getattr(component, "refuses", {})]
    step = _step_of(component)
    for _, settings in _settings(component, sized.start):
        check_heeds(step, asked, settings, _seen(step, "step", sized))


def _in_place(component: Any) -> None:
    step = _step_of(component)
    in_place = steps_in_place(step)
    if in_place is None:
        return
    starts = torch.linspace(-1, 1, 16).view(2, 8)
    for each in zip(*(_settings(component, start) for start in starts), strict=True):
        said, settings = each[0]
        ends = [_two_steps(step, start, own) for start, (_, own) in zip(starts, each, strict=True)]
        firsts = [contracts.checked_carried(step, step.init(own)) for _, own in each]
        written = starts.clone()  # clients that train together
        stacked = {name: torch.stack([one[name] for one in firsts]) for name in firsts[0]}
        together = steps_in_place(step, rows=True) is not None
        alone = zip(written, firsts, (own for _, own in each), strict=True)
        for rows, kept, own in [(written, stacked, settings._replace(start=starts))] if together else alone:
            for _ in range(2):
                in_place.step_in_place(rows, _gradient, kept, own)
        apart = float((written - torch.stack(ends)).abs().max())
        if not apart <= CLOSE:
            raise ComponentError(
                f"step_in_place() and step() end up to {apart:.2g} apart after two steps, {said}; "
                "write both alike, or leave step_in_place() out: it is used in place of step()"
            )


def _cases_of_updates(width: int) -> dict[str, Tensor]:
    return {
        "three updates": torch.randn(3, width, generator=torch.Generator().manual_seed(0)),
        "one update": torch.ones(1, width),
        "updates of zeros": torch.zeros(2, width),
        "updates that cancel out": torch.stack([torch.ones(width), -torch.ones(width)]),
    }


def _aggregates(component: Any, sized: _Sized) -> None:
    for case, updates in _cases_of_updates(len(sized.start)).items():
        given, clients = updates.clone(), len(updates)
        if clients < component.least:
            continue
        for combine in ("combine", "combine_buffers"):
            made = getattr(component, combine)(given, np.full(clients, 1 / clients), **_seen(component, combine, sized))
            with _case(f"{case}, {combine}()"):
                contracts.checked_aggregate(component, made, given)
            if not torch.equal(given, updates):
                raise ComponentError(f"{case}: {combine}() writes to the updates; return new ones")


def _updates(component: Any, sized: _Sized) -> None:
    parameters = sized.start
    for case, updates in _cases_of_updates(len(parameters)).items():
        sent, given, clients = parameters.clone(), updates.clone(), len(updates)
        made = with_clients(component, clients)
        state = contracts.checked_state(made, made.init(sent))
        for _ in range(2):
            change, extras = summed(made, given, np.full(clients, 1 / clients), [3] * clients)
            moved = made.move(state, sent, change, extras, **_seen(made, "move", sized))
            following, state = contracts.checked_model(made, moved, sent)
            if not following.isfinite().all():
                raise ComponentError(f"{case}: the next model is NaN or infinite")
            if not torch.equal(sent, parameters) or not torch.equal(given, updates):
                raise ComponentError(f"{case}: move() or share() writes to the model or to the updates")


def _finishes(component: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    head = Head(torch.randn(CLASSES, FEATURES, generator=draw).double(), torch.zeros(CLASSES, dtype=torch.float64))
    for case, counts in (("clients of few classes", COUNTS), ("a class that nobody holds", COUNTS * [1, 1, 1, 0])):
        held = []
        for row in counts[counts.sum(axis=1) > 0]:
            targets = torch.from_numpy(np.repeat(np.arange(CLASSES), row))
            features = torch.randn(len(targets), FEATURES, generator=draw) + 2 * torch.eye(CLASSES, FEATURES)[targets]
            features[:, -1] = 1.0  # a feature that is always the same
            held.append(Observed(features, (features.double() @ head.weight.T + head.bias).float(), targets))

        def ask(source: Source, held: list[Observed] = held, **question: Tensor) -> dict[str, Tensor]:
            seen = [one._replace(targets=None) for one in held[:1]] if source == "target" else held
            return contracts.checked_sums(
                component, (component.summand(question, component.statistics(question, one)) for one in seen)
            )

        sources: frozenset[Source] = frozenset({"training", "held_out", "target"})
        known = Known(sources, np.full(CLASSES, 1 / CLASSES), False, np.random.default_rng(0))
        with _case(case):
            contracts.checked_finished(component, component.finish(head, ask, known), head)


def _personal(component: Any, sized: _Sized) -> None:
    contracts.checked_trainings(component, component.trainings())
    model = sized.network
    names = Names.of(model.module, model.names, model.buffer_names, model.outputs(sized.inputs).logits.shape[1])
    contracts.checked_private(component, component.private(names), names)
    if not methods.fills("local_step", _step_of(component)):
        raise ComponentError("local_step() must return a local step: the one that it is given, or one around it")
    drawn = np.random.default_rng(0).normal(size=(20, CLASSES))
    told = HeldOut.of(drawn, np.arange(20) % CLASSES) if component.reads_held_out else None
    for row in COUNTS:
        for logits in (drawn, drawn[:1], drawn[:0]):
            with _case(f"{len(logits)} logits of a client with samples {row.tolist()}"):
                contracts.checked_moved(component, component.moved(logits, told, row), logits)


_CASES: Mapping[str, tuple[tuple[str, Callable[..., None]], ...]] = {
    "selection": (("it chooses distinct clients of the pool: 1, half and all of 1 to 20", _distinct_clients),),
    "weighting": (
        ("weights are finite, not negative, sum 1: for one client, an empty one, several", _weights_sum_to_one),
        ("own_weight(), where it has one, gives the weights that weigh() gives", _own_weights),
    ),
    "objective": (
        ("loss and gradient are finite: one class, one sample, logits 0 and large", _finite_losses),
        ("rows that the mask leaves out change nothing", _masked_losses),
    ),
    "local_step": (
        ("steps are finite and write to nothing: SGD, with momentum, AdamW, gradient 0", _steps),
        ("steps go by training.optimizer, unless a run would refuse the step with another than SGD", _by_optimizer),
        ("steps go by training.clip_norm and training.groups, unless a run would refuse it with these", _heeds),
        ("step_in_place(), where it has one, takes the step that step() takes", _in_place),
    ),
    "aggregation": (("what it returns is finite: one update, zeros, updates that cancel out", _aggregates),),
    "server_update": (("the next model is finite: one update, zeros, updates that cancel out", _updates),),
    "finish": (("the new layer is finite: clients of few classes, a class that nobody holds", _finishes),),
    "personal": (("what it returns can be used: trainings, private layers, a local step, logits", _personal),),
}
