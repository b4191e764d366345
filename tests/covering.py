"""Combinations of components to try: the whole product, and a small set that covers every accepted pair.

Not a test: tests that train, checkpoint and resume draw their cases from here.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedskew.components import default_weight
from fedskew.errors import CombinationError
from fedskew.methods import DEFAULTS, PLACES, SLOTS, Method, check
from fedskew.objectives import Objective

Item = tuple[str, str]

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "selection.recorded": {"cohorts": ((0, 1, 2), (3, 4, 5))},
    "selection.function": {"function": "covering:any_clients"},
    "aggregation.krum": {"malicious": 0},
    "finish.ccvr": {"samples": 20, "ridge": 1.0},
}
"""What a component needs that has no default, by `slot.name`, for six clients or more; of CCVR a quick form.

By its defaults CCVR's minimum takes L-BFGS nearly 200 steps, most of the time of all these trainings. The defaults are
tested in `finish/` and at real sites.
"""


def any_clients(round: int, counts: NDArray[np.float64], size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """A selection of a user's own."""
    return rng.permutation(len(counts))[:size]


BOUND: Mapping[Item, Item] = {
    ("local_step", "feddyn"): ("server_update", "feddyn"),
    ("server_update", "feddyn"): ("local_step", "feddyn"),
}
"""Components that go with one of another slot alone, which therefore comes with them."""

ALIKE = {"fedadagrad": "plain", "fedadam": "plain", "fedyogi": "plain", "feddisco": "fedla", "fedcbs": "fedentopt"}
ALIKE |= {"gaussian": "ccvr", "ridge": "ccvr", "fedcof": "ccvr"}
"""Components that the whole product leaves out, as they declare what another one of their slot does."""

NAMED_TERMS: tuple[tuple[str, ...], ...] = (
    ("vacant_distillation", "suppression"),
    ("vacant_distillation", "suppression", "fedntd"),
    ("vacant_distillation", "suppression", "fpl"),
    ("fedntd", "feddkd"),
    ("moon", "fedmr"),
)
"""Sets of terms that the whole product holds beside none and single ones: the papers', and those that interfere."""

TERMS_AT_ONCE = 3

_ROLES = {name: kind.role for name, kind in SLOTS["objective"].items()}
LOSSES = tuple(name for name, role in _ROLES.items() if role == "classification")
TERMS = tuple(name for name, role in _ROLES.items() if role == "term")


class Cell(NamedTuple):
    """One combination, by names."""

    selection: str = DEFAULTS["selection"]["name"]
    loss: str = DEFAULTS["objective"]["name"]
    terms: tuple[str, ...] = ()
    local_step: str = DEFAULTS["local_step"]["name"]
    weighting: str = DEFAULTS["weighting"]["name"]
    server_update: str = DEFAULTS["server_update"]["name"]
    aggregation: str = DEFAULTS["aggregation"]["name"]
    finish: str = ""

    def tables(self) -> dict[str, Any]:
        """It as the `[method]` of a config."""
        objective = {**_table("objective", self.loss), "terms": [_table("objective", term) for term in self.terms]}
        slots = ("selection", "local_step", "weighting", "server_update", "aggregation")
        finish = {"finish": _table("finish", self.finish)} if self.finish else {}
        return {"objective": objective, **{slot: _table(slot, getattr(self, slot)) for slot in slots}, **finish}

    def method(self) -> Method:
        """It as components with their defaults, not checked."""
        terms = [_component("objective", term) for term in self.terms]
        return Method(
            selection=_component("selection", self.selection),
            objective=Objective(
                _component("objective", self.loss), tuple((default_weight(term), term) for term in terms)
            ),
            local_step=_component("local_step", self.local_step),
            weighting=_component("weighting", self.weighting),
            server_update=_component("server_update", self.server_update),
            aggregation=_component("aggregation", self.aggregation),
            finish=_component("finish", self.finish) if self.finish else None,
        )

    @property
    def accepted(self) -> bool:
        """Whether it may be run."""
        try:
            check(self.method())
        except CombinationError:
            return False
        return True

    def __str__(self) -> str:
        return "+".join([*self[:2], *self.terms, *filter(None, self[3:])])


def whole_product(losses: tuple[str, ...] = LOSSES, terms: tuple[str, ...] = TERMS) -> Iterator[Cell]:
    """Every selection, loss, set of terms (none, single ones, named sets), local step, weighting and server update.

    Aggregations know nothing of selections, and of the objective only FPL: with them there is every local step,
    weighting and server update, and every set of terms.
    """
    known = SLOTS["objective"]
    named = [terms for terms in NAMED_TERMS if all(term in known for term in terms)]
    subsets = [(), *((term,) for term in terms), *named]
    selections, *slots = (
        [name for name in SLOTS[slot] if name not in ALIKE]
        for slot in ("selection", "local_step", "weighting", "server_update")
    )
    for cell in itertools.product(selections, losses, subsets, *slots):
        yield Cell(*cell)
    others = [name for name in SLOTS["aggregation"] if name != DEFAULTS["aggregation"]["name"]]
    for some, step, weighting, update, aggregation in itertools.product(subsets, *slots, others):
        yield Cell(terms=some, local_step=step, weighting=weighting, server_update=update, aggregation=aggregation)


@cache
def covering_set() -> tuple[Cell, ...]:
    """Accepted combinations that hold every accepted pair of components, of terms too; the same ones every time.

    Greedy: each begins with the first pair that is not covered yet, and takes in every other slot what covers most.
    """
    missing = dict.fromkeys(accepted_pairs())
    cells = []
    while missing:
        cell = _holding(next(iter(missing)))
        fixed = {factor for factor, _ in next(iter(missing))}
        for factor, names in _factors().items():
            if factor == "terms":
                while len(cell.terms) < TERMS_AT_ONCE:
                    more = [_put(cell, (factor, name)) for name in names if name not in cell.terms]
                    best = _best(more, missing)
                    if best is None or _gain(best, missing) == _gain(cell, missing):
                        break
                    cell = best
            elif factor not in fixed:
                cell = _best([_put(cell, (factor, name)) for name in names], missing) or cell
        cells.append(cell)
        for pair in pairs_of(cell):
            missing.pop(pair, None)
    return tuple(cells)


@cache
def few() -> tuple[Cell, ...]:
    """Of the covering set some that hold every component: the next is the one with most of those that are missing."""
    cells: list[Cell] = []
    missing = set().union(*map(_items, covering_set()))
    while missing:
        cells.append(max(covering_set(), key=lambda cell: len(_items(cell) & missing)))
        missing -= _items(cells[-1])
    return tuple(cells)


def _items(cell: Cell) -> set[Item]:
    return {item for pair in pairs_of(cell) for item in pair}


def accepted_pairs() -> list[tuple[Item, Item]]:
    """Every two components that may stand in one method, everything else as in FedAvg."""
    return [pair for pair in _pairs() if _holding(pair).accepted]


def pairs() -> Iterator[Cell]:
    """Every two components, everything else as in FedAvg but what they are bound to."""
    return map(_holding, _pairs())


def _pairs() -> Iterator[tuple[Item, Item]]:
    items = [(factor, name) for factor, names in _factors().items() for name in names]
    two = itertools.combinations(items, 2)
    return (pair for pair in two if pair[0][0] != pair[1][0] or pair[0][0] == "terms")


def pairs_of(cell: Cell) -> set[tuple[Item, Item]]:
    """The pairs that a combination holds."""
    own = cell._asdict()
    items = [
        (factor, name)
        for factor, names in _factors().items()
        for name in names
        if (name in own[factor] if factor == "terms" else name == own[factor])
    ]
    return set(itertools.combinations(items, 2))


def _factors() -> dict[str, tuple[str, ...]]:
    slots = {
        slot: tuple(SLOTS[slot]) for slot in ("selection", "local_step", "weighting", "server_update", "aggregation")
    }
    return {"loss": LOSSES, **slots, "finish": tuple(PLACES["finish"]), "terms": TERMS}


def _holding(pair: tuple[Item, Item]) -> Cell:
    """FedAvg with two components, and what these are bound to."""
    cell = Cell()
    for item in (*(BOUND[item] for item in pair if item in BOUND), *pair):
        cell = _put(cell, item)
    return cell


def _put(cell: Cell, item: Item) -> Cell:
    factor, name = item
    return cell._replace(**{factor: (*cell.terms, name) if factor == "terms" else name})


def _best(cells: list[Cell], missing: Mapping[tuple[Item, Item], None]) -> Cell | None:
    """The accepted one that covers most, the first of several."""
    most_first = sorted(cells, key=lambda cell: -_gain(cell, missing))
    return next((cell for cell in most_first if cell.accepted), None)


def _gain(cell: Cell, missing: Mapping[tuple[Item, Item], None]) -> int:
    return len(pairs_of(cell) & missing.keys())


def _table(slot: str, name: str) -> dict[str, Any]:
    return {"name": name, **PARAMETERS.get(f"{slot}.{name}", {})}


@cache
def _component(slot: str, name: str) -> Any:
    return PLACES[slot][name](**PARAMETERS.get(f"{slot}.{name}", {}))
