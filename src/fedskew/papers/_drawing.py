"""What a figure shows, as its recipe says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fedskew.errors import ConfigError, nearest

Kind = Literal["curves", "against", "bars", "classes", "confusion", "weights", "mixes"]


@dataclass(frozen=True)
class Drawing:
    """One part of a figure, such as (a) of (a) to (c).

    `kind`:

    - "curves": `value` of a record over rounds, a line for each label of `lines`;
    - "against": `value` of a run against `x`, an axis whose labels hold numbers or another value of a run;
    - "bars": `value` of a run, a group of bars for each label of `x`, a bar for each label of `lines`;
    - "classes": accuracy by class, of the clients that `clients` names (all: their mean) and of the global model;
    - "confusion": a client's confusion matrix, rows truth;
    - "weights": the weight of each client, sorted by size, beside FedAvg's;
    - "mixes": label mixes of clients and target.

    `panels`: axes each combination of whose labels has a panel. `where`: the rows that are meant, by label. `value` and
    `x` are as in `fedskew.papers.value_of`; for "curves" a key of a record, such as "entropy" or "evaluation.accuracy".
    """

    kind: Kind
    title: str
    value: str = ""
    x: str = ""
    lines: str = "method"
    panels: tuple[str, ...] = ()
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    clients: tuple[int, ...] = ()
    reference: float | None = None

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Drawing:
        """From a table of a recipe. Raises ConfigError for an unknown key or kind."""
        known = cls.__dataclass_fields__
        for key in table:
            if key not in known:
                raise ConfigError(f"figure.{key}: no such key{nearest(key, known)}")
        if table.get("kind") not in get_args(Kind):
            raise ConfigError(f"figure.kind: {table.get('kind')!r} is none of {', '.join(get_args(Kind))}")
        where = {
            axis: (labels,) if isinstance(labels, str) else tuple(labels)
            for axis, labels in table.get("where", {}).items()
        }
        lists = {key: tuple(table[key]) for key in ("panels", "clients") if key in table}
        return cls(**{**table, "where": where, **lists})
