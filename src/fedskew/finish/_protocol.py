"""The protocol of a finish: its base class, and the types that its functions take and return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from fedskew.hooks import Named
from fedskew.parameters import FloatArray

Source: TypeAlias = Literal["training", "held_out", "target"]
"""The samples that a question is about: those that clients trained on, those that they held out, or the target's."""

MOST = 1e30
"""Largest absolute value of a number in a site's answer."""

LARGEST_COUNT = 2.0**40
"""Largest number of samples in a site's answer."""


class Observed(NamedTuple):
    """Samples of one holder as the trained model sees them: `(samples, dim)`, `(samples, classes)`, `(samples,)`.

    `targets` are class ids, int64; None where there are no labels.
    """

    features: Tensor
    logits: Tensor
    targets: Tensor | None


class Head(NamedTuple):
    """The last linear layer, float64: `features @ weight.T + bias` are the logits."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Known:
    """The server's knowledge when a finish begins.

    Attributes:
        sources: The kinds of samples that can be asked about.
        target: The target's label mix, `(classes,)`, sum 1; None if the server does not know it.
        is_estimated: Whether the server estimates that mix during the rounds; there may be no estimate yet.
    """

    sources: frozenset[Source]
    target: FloatArray | None
    is_estimated: bool
    generator: np.random.Generator


@dataclass(frozen=True)
class Finished:
    """The new last layer, of the old one's shape, and plain values for the run's summary."""

    head: Head
    notes: Mapping[str, Any] = field(default_factory=dict)


class Ask(Protocol):
    """Asks all holders of some samples for sums."""

    def __call__(self, source: Source, **question: Tensor) -> dict[str, Tensor]:
        """Return every holder's answer (`Finish.summand`), added up in their order, as float64."""


_LACKS: Mapping[Source, str] = {
    "training": "needs the clients' training samples, and there are none",
    "held_out": "needs labelled samples that no client trains on; set data.held_out = 0.2",
    "target": "needs unlabelled samples of the target; take a partition rule with a target client",
}


def not_counts(values: Tensor, expected: FloatArray | None) -> str | None:
    """Return why values, `(classes,)` or `(classes, outcomes)`, are no numbers of samples (of `expected` ones of each
    class, where known); None if they are."""
    counts = values.double().cpu().numpy()
    if (counts < 0).any() or (counts > LARGEST_COUNT).any() or (counts != np.floor(counts)).any():
        return "are no numbers of samples"
    if expected is not None and not np.array_equal(counts.reshape(len(counts), -1).sum(axis=1), expected):
        return "are not of as many samples of each class as it reported"
    return None


class Finish:
    """A component of the finish place: a frozen dataclass of hyper-parameters that inherits from this class.

    Attributes:
        refuses: The components that no finish goes with; see `fedskew.components`.
        asks: The kinds of samples that it needs; a run without them is refused before its first round.
        most_questions: Most questions that a real site answers.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "objective.fixes_last_layer": "it makes another last layer, and the objective's is fixed; take a loss that "
        "trains it, such as fedlc or fedrod",
        "local_step.fixes_last_layer": "it makes another last layer, and this step keeps the one that was drawn; take "
        "sgd, fedprox or fedsam",
    }
    asks: ClassVar[frozenset[Source]] = frozenset({"training"})
    most_questions: ClassVar[int] = 64

    def lacks(self, known: Known) -> str | None:
        """Return what this finish needs that the run lacks, and how to provide it; None if nothing is missing."""
        return next((_LACKS[source] for source in sorted(self.asks - known.sources)), None)

    def statistics(self, question: Named, observed: Observed) -> dict[str, Tensor]:
        """Answer what the server asks at one holder of at least one sample; only the sum of `summand` is used.

        The shapes of the tensors must not depend on the samples.
        """
        raise NotImplementedError

    def summand(self, question: Named, answer: Named) -> Named:
        """Return what of one holder's answer is added up, which the server computes: the answer itself, as a rule."""
        return answer

    def refuse(self, question: Named, answer: Named, samples: FloatArray | None) -> str | None:
        """Return why a real site's answer can't be true, in words that continue "refused: "; None if nothing is wrong.

        Shapes, dtypes and finiteness have been checked. `samples` are those of each class that the site reported,
        `(classes,)`; None if it did not.
        """
        return None

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Make the new last layer; each call of `ask` is one exchange of messages. ArgumentError: none can be made."""
        raise NotImplementedError
