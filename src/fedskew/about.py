"""What a component says of itself beside what it does: its paper, what it costs, what it does not go with.

It says so in class variables. All are optional, so a component of one's own needs none of them:

    paper: ClassVar[str] = "Li et al., MLSys 2020"
    cost: ClassVar[Cost] = Cost(models_down=1)
    refuses: ClassVar[Mapping[str, str]] = {"local_step.scaffold": "the reason; the nearest that makes sense"}
    warns: ClassVar[Mapping[str, str]] = {"selection.fedentopt": "the reason; the nearest that avoids it"}
    default_weight: ClassVar[float] = 0.1      of a term of the objective; 1 where it says none

A key is a slot and a name of its index. One of two components names the other, whichever; a reason reads well on both
their pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What a method costs beyond FedAvg.

    `forward`, `backward`: passes of a batch in each local step; `models_up`, `models_down`: vectors of the model's
    size, per client and round; `client_models`: how many a client that took part keeps between rounds; `numbers`: what
    else travels per client, in words, per round unless it says "once" (C: classes).
    """

    forward: int = 0
    backward: int = 0
    models_up: int = 0
    models_down: int = 0
    client_models: int = 0
    numbers: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """Both; the same numbers travel once."""
        return Cost(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            models_up=self.models_up + other.models_up,
            models_down=self.models_down + other.models_down,
            client_models=self.client_models + other.client_models,
            numbers=tuple(dict.fromkeys(self.numbers + other.numbers)),
        )

    def __str__(self) -> str:
        """In words; empty where there is none."""
        words = [
            f"+{count} {what}"
            for count, what in (
                (self.forward, "forward"),
                (self.backward, "backward"),
                (self.models_up, "model up"),
                (self.models_down, "model down"),
            )
            if count
        ]
        kept = [f"client keeps {self.client_models} model"] if self.client_models else []
        return ", ".join([*words, *self.numbers, *kept])


LABEL_COUNTS = Cost(numbers=("C up once",))
"""The clients' label counts, which they send before the first round."""


def paper(component: Any) -> str:
    """The paper of a component or its class; empty where it names none."""
    return str(getattr(component, "paper", ""))


def refuses(component: Any) -> Mapping[str, str]:
    """What a component can't be combined with, and why."""
    return getattr(component, "refuses", {})


def warns(component: Any) -> Mapping[str, str]:
    """What a component may be combined with although their goals conflict, and why."""
    return getattr(component, "warns", {})


def default_weight(term: Any) -> float:
    """The weight of a term that is given none."""
    return float(getattr(term, "default_weight", 1.0))


def cost(*components: Any) -> Cost:
    """What components, or their classes, cost together.

    What a loss reads costs by itself: the sent model's outputs one forward pass, shared by all losses that read them;
    the client's previous model's outputs another, and that model kept.
    """
    reads = frozenset().union(*(getattr(component, "reads", frozenset()) for component in components))
    total = sum((getattr(component, "cost", Cost()) for component in components), Cost())
    if "teacher" in reads:
        total += Cost(forward=1)
    if "previous" in reads:
        total += Cost(forward=1, client_models=1)
    return total
