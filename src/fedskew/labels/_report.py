"""The skew report: what the labels look like, what it means for training, and which methods look at it.

It says of a method only what follows from its formula; what each gained in simulations `fedskew.arena` says.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels import _skew
from fedskew.labels._counts import CountsLike, LabelCounts, as_counts, as_target
from fedskew.labels._measures import GROUPS, ClassPairs, class_group_matrix, entropy
from fedskew.names import visible
from fedskew.tables import amount, counted, filled

RARE = 0.2
"""A class is rare where its share of all samples is below this part of an even share."""

NAMED_AT_MOST = 6
"""Classes that a sentence names."""


class SkewReport:
    """The result of `describe`: `print` it as a page to read, or take plain values from `to_dict`.

    Attributes:
        groups: Group of each class at each client, shape `(clients, classes)`; see `class_group_matrix`.
        kl_to_uniform: Divergence of each client's mix from the uniform one in bits, shape `(clients,)`.
        pairs: Which pairs of classes some client can tell apart.
        target: How near weighted clients come to the target mix; None where none was given.
        rare: Ids of classes that occur, but whose share of all samples is below a fifth of an even share.
        single_holder: Ids of classes that only one client holds; empty if there is only one client.
        absent: Ids of classes that no client holds.
    """

    def __init__(self, counts: LabelCounts, target: ArrayLike | None = None) -> None:
        bits, pairs = np.asarray(entropy(counts)), _skew.ClientPairs(counts)
        self.counts = counts
        self.label_distribution = _skew.LabelDistribution(counts, bits)
        self.client_consistency = _skew.ClientConsistency(counts, pairs)
        self.inter_client = _skew.InterClientDistribution(counts, pairs)
        self.quantity = _skew.QuantitySkew(counts.sizes)
        self.groups = class_group_matrix(counts)
        self.kl_to_uniform = np.maximum(math.log2(len(counts.classes)) - bits, 0.0)
        self.pairs = ClassPairs.of(counts)
        self.target = None if target is None else _skew.TargetCoverage(counts, target)
        histogram, holders = self.label_distribution.histogram, self.inter_client.holders
        self.rare = np.flatnonzero((histogram > 0) & (histogram < RARE / len(histogram)))
        self.single_holder = np.flatnonzero((holders == 1) & (len(counts) > 1))
        self.absent = np.flatnonzero(holders == 0)

    def group_sizes(self) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of vacant, minority and majority classes of each client, shape `(clients,)` each."""
        return {name: np.count_nonzero(self.groups == group, axis=1) for group, name in enumerate(GROUPS)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, clients and classes by name; an undefined number is None."""
        classes, labels = self.counts.classes, self.label_distribution
        few = self.pairs.under(ClassPairs.few)

        def names(ids: NDArray[Any]) -> list[str]:
            return [classes[label] for label in ids]

        def plain(part: Any, *by_class: str) -> dict[str, Any]:
            """Return the numbers of a part, NaN as None, and of its arrays those that have a value for each class."""
            numbers = {name: value for name, value in vars(part).items() if not isinstance(value, np.ndarray)}
            arrays = {name: dict(zip(classes, getattr(part, name).tolist(), strict=True)) for name in by_class}
            return {name: None if value != value else value for name, value in numbers.items()} | arrays

        per_client = zip(
            self.counts.clients,
            self.counts.sizes.tolist(),
            labels.client_richness.tolist(),
            labels.client_evenness.tolist(),
            self.kl_to_uniform.tolist(),
            self.groups,
            strict=True,
        )
        target = self.target
        return {
            "clients": len(self.counts),
            "classes": list(classes),
            "samples": float(self.counts.sizes.sum()),
            "label_distribution": plain(labels, "histogram"),
            "client_consistency": plain(self.client_consistency),
            "inter_client": plain(self.inter_client, "holders", "largest_holding"),
            "quantity": plain(self.quantity),
            "rare": names(self.rare),
            "single_holder": names(self.single_holder),
            "absent": names(self.absent),
            "class_pairs": {
                "pairs": self.pairs.number,
                f"under_{ClassPairs.hardly}": len(self.pairs.under(ClassPairs.hardly)),
                f"under_{ClassPairs.few}": len(few),
                "fewest": [
                    {"classes": names(pair), "together": together}
                    for pair, together in zip(few, self.pairs.together[tuple(few.T)].tolist(), strict=True)
                ],
            },
            "by_client": {
                client: {"samples": samples, "richness": richness, "evenness": even, "kl_to_uniform": divergence}
                | {name: names(np.flatnonzero(own == group)) for group, name in enumerate(GROUPS)}
                for client, samples, richness, even, divergence, own in per_client
            },
            "target": target
            and {
                **plain(target, "mix", "nearest"),
                "short": {classes[label]: float(target.short[label]) for label in np.flatnonzero(target.short)},
                "unheld": names(target.unheld),
            },
        }

    def sentences(self) -> list[str]:
        """Return the report in sentences: in each a finding and its consequence."""
        return [line[2:] for line in self._lines() if line.startswith("- ")]

    def statistics(self) -> list[tuple[str, str]]:
        """Return the report's numbers as rows of name and value; a heading has an empty value."""
        rows = [line.partition("|") for line in self._lines() if not line.startswith("- ")]
        return [(name, value) for name, bar, value in rows if bar]

    def _lines(self) -> list[str]:
        names, target = tuple(map(visible, self.counts.classes)), self.target
        page = filled(
            "fedskew.labels",
            "describe.txt",
            {
                "amount": amount,
                "counted": counted,
                "f": lambda value, form: "-" if value != value else format(value, form),
                "listed": lambda classes: _listed(names, classes),
                "percent": _percent,
                "verb": lambda number, one, several: one if number == 1 else several,
            },
            report=self,
            names=names,
            unheld="" if target is None else self.unheld_in_words(self.counts, target.mix, names),
            short=[] if target is None else np.argsort(-target.short, kind="stable")[: np.count_nonzero(target.short)],
        )
        return page.splitlines()

    def __str__(self) -> str:
        rows = self.statistics()
        width = max(len(name) for name, _ in rows)
        lines = [f"- {sentence}" for sentence in self.sentences()]
        return "\n".join([*lines, "", *(f"{name:<{width}}  {value}".rstrip() for name, value in rows)])

    @staticmethod
    def unheld_in_words(
        counts: CountsLike, target: ArrayLike, class_names: tuple[str, ...], where: str = "target"
    ) -> str:
        """Say what it means that no client holds some of a target's classes; empty where there are none."""
        mix = as_target(target, len(class_names))
        missing = np.flatnonzero((mix > 0) & ~as_counts(counts).any(axis=0))
        if not len(missing):
            return ""
        share = float(mix[missing].sum())
        return (
            f"No client holds {_listed(class_names, missing)}, {_percent(share)} of the {where}: no method learns what "
            f"nobody has, so expect at most {1 - share:.1%} accuracy on the {where}'s mix."
        )


def describe(counts: CountsLike, target: ArrayLike | None = None) -> SkewReport:
    """Describe a federation's labels: FedLA's three properties, quantity skew, class groups, coverage of a target.

    Memory does not grow with the square of the clients: means over pairs of clients are exact by algebra or up to
    500,000 pairs, else over 200,000 pairs drawn with a fixed generator, and the report says so.

    Args:
        counts: Label counts, shape `(clients, classes)`.
        target: Label mix that the model will serve, shape `(classes,)`; normalised here.
    """
    record = counts if isinstance(counts, LabelCounts) else LabelCounts(counts)
    if not record.counts.max() > 0:
        raise ArgumentError("counts: no client holds a sample")
    return SkewReport(record, target)


def _listed(class_names: tuple[str, ...], classes: NDArray[Any]) -> str:
    names = [class_names[label] for label in classes[:NAMED_AT_MOST]]
    if len(classes) > len(names):
        return f"classes {', '.join(names)} and {len(classes) - len(names)} more"
    return f"class {names[0]}" if len(names) == 1 else f"classes {', '.join(names[:-1])} and {names[-1]}"


def _percent(share: float) -> str:
    return "under 1%" if share < 0.01 else f"{share:.0%}"
