"""What a report shows: from the records of runs to captioned pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup

from fedskew.engine import Evaluation, Round
from fedskew.experiment import _figures as figures
from fedskew.experiment._figures import Floats
from fedskew.experiment._folder import SeedRun

# A longer curve is drawn as the means of equal blocks of rounds. What a cohort is made of jumps from round to round;
# there only the level can be read, and fewer points say more.
_POINTS, _POINTS_OF_COHORTS = 200, 60

Kind = Literal["majority", "minority", "vacant"]


@dataclass(frozen=True)
class Group:
    """The seeds of one label, lowest first, and how it is drawn through the whole page."""

    label: str
    style: int
    seeds: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        """The lowest seed, which pictures of single clients show: another seed may split the data otherwise."""
        return self.seeds[0]


@dataclass(frozen=True)
class Picture:
    """A figure and the words around it."""

    title: str
    svg: Markup
    reading: str  # how to read it
    basis: str  # how many seeds it rests on
    groups: list[Group]  # for the legend; none where colours mean something else
    findings: list[str]


def sections(groups: list[Group]) -> list[tuple[str, list[Picture]]]:
    """Every picture that these runs have the records for, under its heading."""
    found = [
        ("How good the model is", [*_accuracy(groups), *_per_class(groups)]),
        (
            "Who holds what, and who trains",
            [*_holdings(groups), *_label_mixes(groups), *_participation(groups), *_weights(groups)],
        ),
        ("What happens in a round", list(_rounds(groups))),
        ("Clients after their local training", list(_clients(groups))),
    ]
    return [(heading, pictures) for heading, pictures in found if pictures]


def _accuracy(groups: list[Group]) -> Iterator[Picture]:
    yield from _curve(
        groups,
        "Accuracy on the test set",
        lambda record: _of(record["evaluation"], "accuracy"),
        "Share of the test samples that the model gets right after each round; higher is better.",
        unit="%",
    )
    yield from _curve(
        groups,
        "Accuracy on the target mix",
        lambda record: _of(record["evaluation"], "target_accuracy"),
        "The same test, its classes weighted by the target's label mix: what to expect where the model will be used.",
        unit="%",
    )
    yield from _curve(
        groups,
        "Accuracy on the worst class",
        lambda record: _worst(record["evaluation"]),
        "Share of the samples of one class that the model gets right, for the class where that share is lowest; it may "
        "be another class every round.",
        unit="%",
    )


def _worst(evaluation: Evaluation | None) -> float | None:
    values = evaluation["per_class"] if evaluation else []
    return min((value for value in values if value is not None and math.isfinite(value)), default=None)


def _rounds(groups: list[Group]) -> Iterator[Picture]:
    classes = {len(group.first.class_names) for group in groups}
    yield from _curve(
        groups,
        "Label entropy of the cohort",
        lambda record: record["entropy"],
        "How evenly the labels of the chosen clients, added up, cover the classes."
        + (" The dashed line is a perfectly even mix, the most there can be." if len(classes) == 1 else ""),
        unit="bits",
        points=_POINTS_OF_COHORTS,
        reference=math.log2(min(classes)) if len(classes) == 1 else None,
    )
    yield from _curve(
        groups,
        "Distance from the target mix",
        lambda record: record["target_distance"],
        "Squared distance between the label mix that the weights give a round and the target's; 0 is a perfect match.",
        points=_POINTS_OF_COHORTS,
    )
    yield from _curve(
        groups,
        "Effective sample size",
        lambda record: record["ess_share"],
        "How many of the cohort's samples count after weighting: 100 % is FedAvg; the lower the line, the fewer "
        "samples decide and the noisier the round.",
        unit="%",
        points=_POINTS_OF_COHORTS,
    )
    yield from _curve(
        groups,
        "Drift diversity",
        lambda record: record["drift"],
        "How much the clients' updates pull apart: their squared lengths, added up, over the squared length of their "
        "sum. The higher, the more they cancel each other.",
        points=_POINTS_OF_COHORTS,
    )
    yield from _curve(
        groups,
        "Training loss",
        lambda record: record["loss"],
        "Mean loss that the clients minimise, weighted as their updates are. Runs with different objectives can't be "
        "compared by it.",
    )


def _clients(groups: list[Group]) -> Iterator[Picture]:
    def mean_of(kind: Kind) -> Callable[[Round], float | None]:
        def value(record: Round) -> float | None:
            found = [client[kind] for client in record["clients"] or []]
            values = [number for number in found if number is not None and math.isfinite(number)]
            return float(np.mean(values)) if values else None

        return value

    held: dict[Kind, str] = {
        "majority": "holds many samples of",
        "minority": "holds few samples of",
        "vacant": "holds no sample of: what it still knows of them, it owes to the other clients",
    }
    for kind, holds in held.items():
        yield from _curve(
            groups,
            f"Accuracy on {kind} classes",
            mean_of(kind),
            f"Each client's own model right after its local training, tested on the classes that this client {holds}. "
            "Mean over the clients of a round.",
            unit="%",
        )


def _curve(
    groups: list[Group],
    title: str,
    value: Callable[[Round], float | None],
    reading: str,
    *,
    unit: str = "",
    points: int = _POINTS,
    reference: float | None = None,
) -> Iterator[Picture]:
    """A line a label over rounds, from those runs that recorded this value; nothing where none did."""
    scale = 100.0 if unit == "%" else 1.0
    lines, shown = [], []
    longest = 1
    for group in groups:
        series = [found for run in group.seeds if (found := _series(run, value, scale))]
        if series:
            line, block = _line(group.style, series, points)
            lines.append(line)
            shown.append((group, len(series)))
            longest = max(longest, block)
    if not lines:
        return
    if any(line.std is not None for line in lines):
        reading += " Line: mean over seeds; band: one standard deviation to each side."
    if not all(line.whole.all() for line in lines):
        reading += " Where a line is thin, some of its seeds had already stopped."
    if longest > 1:
        reading += f" Each point is the mean of up to {longest} recorded rounds."
    ends = [
        f"{group.label} ends at {_number(line.mean[-1], unit)}" for (group, _), line in zip(shown, lines, strict=True)
    ]
    svg = figures.curves(lines, unit, f"{title} over rounds: {', '.join(ends)}.", reference=reference)
    yield Picture(title, Markup(svg), reading, _basis(shown), [group for group, _ in shown], [])


def _series(run: SeedRun, value: Callable[[Round], float | None], scale: float) -> dict[int, float]:
    """Round to value, where there is a finite one."""
    found = ((record["round"], value(record)) for record in run.rounds)
    return {number: scale * x for number, x in found if x is not None and math.isfinite(x)}


def _line(style: int, series: list[dict[int, float]], most: int) -> tuple[figures.Curve, int]:
    """Mean and spread over seeds, at the rounds where each seed that has not yet stopped has a value; block length."""
    ends = [max(points) for points in series]
    rows = []
    for number in sorted(set().union(*series)):
        values = [points[number] for points in series if number in points]
        if len(values) == sum(end >= number for end in ends):
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            rows.append((number, float(np.mean(values)), spread, len(values) == len(series)))
    block = math.ceil(len(rows) / most)
    blocks = [np.array(rows[start : start + block], dtype=np.float64) for start in range(0, len(rows), block)]
    x, mean, std, whole = np.array([part.mean(axis=0) for part in blocks]).T
    return figures.Curve(style, x, mean, std if len(series) > 1 else None, whole == 1), block


def _per_class(groups: list[Group]) -> Iterator[Picture]:
    for members in _alike(groups, lambda group: group.first.class_names):
        names = members[0].first.class_names
        many = len(names) > figures.MANY_CLASSES
        dots, shown, worst = [], [], []
        for group in members:
            finals = [final for run in group.seeds if (final := _final_per_class(run)) is not None]
            if finals:
                mean, std = _mean_and_std(100 * np.array(finals))
                dots.append(figures.Dots(group.style, mean, std))
                shown.append((group, len(finals)))
                if np.isfinite(mean).any():
                    lowest = np.flatnonzero(mean == np.nanmin(mean))
                    others = f" and {len(lowest) - 1} more" if len(lowest) > 1 else ""
                    named = f"{names[lowest[0]]}{others} ({_number(mean[lowest[0]], '%')})"
                    worst.append(f"{group.label}: {named}" if len(groups) > 1 else named)
        if not dots:
            continue
        finding = f"Worst class: {'; '.join(worst) or 'none was tested'}."
        title = _title("Accuracy by class", members, groups)
        reading = (
            "The last evaluated model on each class, every run in its own order from its worst class to its best. "
            if many
            else "The last evaluated model on each class, one row a class. "
        )
        reading += "A ring marks a run's worst class."
        if not many and any(one.std is not None for one in dots):
            reading += " Whiskers: one standard deviation over seeds to each side."
        svg = figures.per_class(dots, names, f"{title}. {finding}")
        yield Picture(title, Markup(svg), reading, _basis(shown), [group for group, _ in shown], [finding])


def _final_per_class(run: SeedRun) -> Floats | None:
    for record in reversed(run.rounds):
        if record["evaluation"] is not None:
            return np.array(record["evaluation"]["per_class"], dtype=np.float64)  # None becomes NaN
    return None


def _holdings(groups: list[Group]) -> Iterator[Picture]:
    for members in _alike(groups, lambda group: (group.first.class_names, group.first.counts.tobytes())):
        counts, names = members[0].first.counts, members[0].first.class_names
        title = _title("Who holds what", members, groups)
        held = np.count_nonzero(counts, axis=1)
        finding = (
            f"{len(counts)} clients, {counts.sum():,} samples, {len(names)} classes; a client holds {held.min()} to "
            f"{held.max()} of the classes, {np.median(held):g} in the median."
        )
        reading = (
            "One column a client, one row a class: the stronger the colour, the more samples; blank is none. A column "
            "with few coloured cells is a client that knows few classes."
        )
        svg = figures.who_holds_what(counts, members[0].first.client_names, names, f"{title}: {finding}")
        yield Picture(title, Markup(svg), reading, _one_seed(members), [], [finding])


def _label_mixes(groups: list[Group]) -> Iterator[Picture]:
    def kind(group: Group) -> Hashable:
        target = group.first.target
        return group.first.class_names, None if target is None else target.tobytes()

    for members in _alike(groups, kind):
        names = members[0].first.class_names
        dots, shown = [], []
        for group in members:
            mixes = [mix for run in group.seeds if (mix := _effective_mix(run)) is not None]
            if mixes:
                dots.append(figures.Dots(group.style, 100 * np.mean(mixes, axis=0), None))
                shown.append((group, len(mixes)))
        if not dots:
            continue
        pooled = np.mean([_shares(run.counts.sum(axis=0)) for group in members for run in group.seeds], axis=0)
        targets = [run.target for group in members for run in group.seeds if run.target is not None]
        target = np.mean(targets, axis=0) if targets else None  # a target may be that of a client, another in each seed
        title = _title("The label mix that trained the model", members, groups)
        reading = (
            "Markers: the labels of those who trained, counted with the weight of their update; mean over rounds and "
            "seeds. Thin line: the labels of all clients together."
        )
        if target is not None:
            reading += " Grey: the target mix; with markers at its edge, training saw what the target asks for."
        svg = figures.label_mix(dots, pooled, target, names, f"{title}, by class.")
        yield Picture(title, Markup(svg), reading, _basis(shown), [group for group, _ in shown], [])


def _effective_mix(run: SeedRun) -> Floats | None:
    """Weights times label marginals of those who answered, mean over the rounds that had any."""
    marginals = _shares(run.counts)
    mixes = [
        np.asarray(record["weights"]) @ marginals[record["answered"]] for record in run.rounds if record["answered"]
    ]
    return np.mean(mixes, axis=0) if mixes else None


def _participation(groups: list[Group]) -> Iterator[Picture]:
    rows, diverged = [], []
    for group in groups:
        trained = [record for record in group.first.rounds if record["round"] > 0]
        if trained:
            clients = len(group.first.counts)
            chosen = _times([record["cohort"] for record in trained], clients) / len(trained)
            failed = _times([record["diverged"] for record in trained], clients) / len(trained)
            rows.append((group, figures.Attendance(group.style, group.label, chosen, failed)))
            if failed.any():
                times = sum(len(record["diverged"]) for record in trained)
                who = np.count_nonzero(failed)
                diverged.append(f"{group.label}: {who} client{'s' if who > 1 else ''} diverged, {times} times in all.")
    if not rows:
        return
    title = "How often each client took part"
    reading = "One bar a client: the share of rounds in which it was chosen. Dashed: the mean."
    if diverged:
        reading += " In the colour of this text: the rounds in which it diverged and was left out."
    spans = [
        f"{row.label} {_number(100 * row.chosen.min(), '%')} to {_number(100 * row.chosen.max(), '%')}"
        for _, row in rows
    ]
    svg = figures.participation([row for _, row in rows], f"{title}, share of rounds: {', '.join(spans)}.")
    yield Picture(title, Markup(svg), reading, _one_seed([group for group, _ in rows]), [], diverged)


def _times(lists: Sequence[Sequence[int]], clients: int) -> Floats:
    ids = np.array([client for clients_ in lists for client in clients_], dtype=np.int64)
    return np.bincount(ids, minlength=clients).astype(np.float64)


def _weights(groups: list[Group]) -> Iterator[Picture]:
    clouds = []
    for group in groups:
        sizes = group.first.counts.sum(axis=1)
        given, fedavg, times = np.zeros((3, len(sizes)))
        for record in group.first.rounds:
            answered = record["answered"]
            given[answered] += record["weights"]
            fedavg[answered] += _shares(sizes[answered])
            times[answered] += 1
        took_part = times > 0
        if took_part.any():
            points = figures.Points(
                group.style, (fedavg / times.clip(1))[took_part], (given / times.clip(1))[took_part]
            )
            clouds.append((group, points))
    if not clouds:
        return
    title = "How much each client counts"
    reading = (
        "One marker a client, mean over the rounds that it took part in. On the dashed diagonal it counts as in "
        "FedAvg, by its number of samples; above it counts more, below less."
    )
    shown = [group for group, _ in clouds]
    named = f"{title}: mean weight against FedAvg's, {', '.join(group.label for group in shown)}."
    yield Picture(
        title, Markup(figures.weights([points for _, points in clouds], named)), reading, _one_seed(shown), shown, []
    )


def _of(evaluation: Evaluation | None, name: Literal["accuracy", "target_accuracy"]) -> float | None:
    return None if evaluation is None else evaluation[name]


def _shares(counts: figures.Ints) -> Floats:
    """Counts over their sum along the last axis; 0 where there is nothing."""
    shares: Floats = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return shares


def _mean_and_std(values: Floats) -> tuple[Floats, Floats | None]:
    """Over the first axis, seeds. A class without a sample has none in every seed, so NaN may spread."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None


def _alike(groups: list[Group], kind: Callable[[Group], Hashable]) -> list[list[Group]]:
    """The groups that can share a picture."""
    alike: dict[Hashable, list[Group]] = {}
    for group in groups:
        alike.setdefault(kind(group), []).append(group)
    return list(alike.values())


def _title(title: str, members: list[Group], groups: list[Group]) -> str:
    return title if len(members) == len(groups) else f"{title}: {', '.join(group.label for group in members)}"


def _basis(shown: list[tuple[Group, int]]) -> str:
    """How many seeds each label brings to a picture."""
    counts = {count for _, count in shown}
    if len(counts) == 1:
        count = counts.pop()
        each = " each" if len(shown) > 1 else ""
        return f"{count} seed{'s' if count > 1 else ''}{each}"
    return "Seeds: " + ", ".join(f"{group.label} {count}" for group, count in shown)


def _one_seed(members: list[Group]) -> str:
    seeds = {group.first.seed for group in members}
    most = max(len(group.seeds) for group in members)
    which = f"seed {seeds.pop()}" if len(seeds) == 1 else "the lowest of each run"
    return f"1 seed{f' of {most}' if most > 1 else ''} ({which})"


def _number(value: float, unit: str) -> str:
    return f"{value:.1f} %" if unit == "%" else f"{value:.3g} {unit}".rstrip()
