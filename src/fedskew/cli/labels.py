"""Look at label counts: `fedskew describe` and `fedskew weights`. Nothing is trained, and PyTorch is not imported."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.padding import Padding
from rich.table import Table

from fedskew.cli.advise import Epochs, Participation, advice_for, print_advice
from fedskew.cli.console import Console
from fedskew.cli.counts import (
    AsJson,
    ClientColumn,
    DecimalSign,
    LabelColumn,
    SourcePath,
    TargetPath,
    TotalsAre,
    read_source,
    target_of,
)
from fedskew.cli.options import DataRoot
from fedskew.cli.page import bullet, empty_table, escaped, heading, print_json, print_note, some_of
from fedskew.components import covers, has, make_component
from fedskew.errors import ArgumentError, ConfigError
from fedskew.labels import (
    GROUPS,
    LabelCounts,
    SkewReport,
    effective_sample_size,
    unheld_in_words,
)
from fedskew.labels import describe as describe_labels
from fedskew.tables import amount, counted, csv_text
from fedskew.weighting import INDEX, Answered, fedavg

CLASSES_SHOWN = 20
CLASSES_NAMED = 4
CLIENTS_SHOWN = 12
DEFAULT_FIGURE = Path("who-holds-what.html")


def describe(
    path: SourcePath,
    target: TargetPath = None,
    client: ClientColumn = None,
    label: LabelColumn = None,
    decimal: DecimalSign = None,
    totals: TotalsAre = None,
    data_root: DataRoot = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            help=f"The page that shows who holds what (.html).  [default: {DEFAULT_FIGURE}; none with --json]",
        ),
    ] = None,
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Draw nothing.")] = False,
    participation: Participation = None,
    epochs: Epochs = None,
    as_json: AsJson = False,
) -> None:
    """Describe how skewed a federation's labels are, what that means for training, and which method to take.

    Takes seconds; nothing is trained.

    Label counts stand in a table, or are counted in whatever `fedskew counts` takes: images, a config, a run folder.
    The method is that of `fedskew advise`, which also shows the simulated federations that it is taken from.

    Examples:

        fedskew describe counts.csv --target target.csv --picture who.html

        fedskew describe my.toml
    """
    if picture is not None and no_picture:
        raise ArgumentError("--no-picture: contradicts --picture; give only one of them")
    source = read_source(path, client, label, decimal, totals, data_root)
    counts, mix = source.counts, target_of(source, target, decimal)
    report = describe_labels(counts, mix)
    drawn = None if no_picture else picture if picture is not None or as_json else DEFAULT_FIGURE
    if drawn is not None:
        _draw(report, mix, drawn)
    if as_json:
        print_json(report.to_dict())
        return
    console = Console(highlight=False)
    heading(console, "What the labels look like")
    said = [] if source.said is None or target is not None else [f"{source.said[0].upper()}{source.said[1:]}."]
    for sentence in (*said, *report.sentences()):
        console.print(Padding(bullet(sentence), (0, 0, 0, 1)))
    heading(console, "Figures")
    console.print(_figures_table(report))
    heading(console, "Classes")
    _print_classes(console, report)
    heading(console, "Clients")
    _print_clients(console, report)
    print_advice(console, advice_for(source, mix, participation, epochs))
    if drawn is not None:
        console.print(f"\nWho holds what: {drawn}", soft_wrap=True, markup=False)


def weights(
    path: SourcePath,
    method: Annotated[
        str,
        typer.Option("--method", help=f"A weighting: {', '.join(INDEX)}, or module:Class of your own."),
    ],
    target: TargetPath = None,
    client: ClientColumn = None,
    label: LabelColumn = None,
    decimal: DecimalSign = None,
    totals: TotalsAre = None,
    data_root: DataRoot = None,
    strength: Annotated[
        float | None,
        typer.Option("--strength", help="FedPALS's lambda: 0 fits the target best, inf is FedAvg.  [default: 0]"),
    ] = None,
    ess: Annotated[
        float | None,
        typer.Option("--ess", help="Find FedPALS's lambda: the least share of effective samples to keep, from 0 to 1."),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the weighting; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write every client's weight to this file.")] = None,
) -> None:
    """Weigh clients by a method, and show what it costs and which label mix results.

    Takes a second or two; nothing is trained.

    Example: fedskew weights counts.csv --method fedpals --target target.csv --ess 0.5 --csv weights.csv
    """
    source = read_source(path, client, label, decimal, totals, data_root)
    counts, mix = source.counts, target_of(source, target, decimal)
    given = {"strength": strength, "ess": ess}
    found = _weigh(counts, method, mix, {name: value for name, value in given.items() if value is not None}, parameters)
    if csv_path is not None:
        _write_weights(csv_path, found)
    if as_json:
        print_json(found.to_dict())
        return
    console = Console(highlight=False)
    heading(console, f"{method}: {counted(len(counts), 'client')}")
    for sentence in found.sentences():
        console.print(Padding(bullet(sentence), (0, 0, 0, 1)))
    heading(console, "Weights")
    _print_weights(console, found)
    heading(console, "Label mix")
    _print_mix(console, found)
    if csv_path is not None:
        console.print(f"\nEvery client's weight: {csv_path}", soft_wrap=True, markup=False)


def _draw(report: SkewReport, target: np.ndarray | None, path: Path) -> None:
    """Write the page that shows who holds what, and which pairs of classes."""
    from fedskew.report import SeedRun, write_report

    if path.suffix != ".html":
        raise ArgumentError(f"--picture: {path}: the picture is a page to look at in a browser; name it .html")
    counts = report.counts
    mix = None if target is None else target / target.sum()
    run = SeedRun("label counts", 0, {}, [], counts.counts, counts.clients, counts.classes, mix, {})
    write_report([run], path, "Who holds what")


@dataclass(frozen=True)
class _Weighed:
    """Weights of a federation's clients, and the label mix and effective samples that result."""

    counts: LabelCounts
    method: str
    weights: np.ndarray
    target: np.ndarray | None
    solved: dict[str, float]
    asked: float | None = None
    """The share of effective samples that the strength was sought for."""
    unread: str = ""
    """Why the weights don't depend on a target that was given, where a switch of the weighting decides that."""

    @property
    def plain(self) -> np.ndarray:
        """FedAvg's weights."""
        return fedavg(self.counts)

    @property
    def ess(self) -> float:
        """Effective sample size."""
        return effective_sample_size(self.weights, self.counts.sizes)

    def mix(self, weights: np.ndarray) -> np.ndarray:
        """Return the label mix that weighted clients have."""
        return weights @ self.counts.marginals

    def distance(self, weights: np.ndarray) -> float | None:
        """Squared distance of that mix from the target."""
        if self.target is None:
            return None
        missing = self.target - self.mix(weights)
        return float(missing @ missing)

    def sentences(self) -> Iterable[str]:
        samples = self.counts.sizes.sum()
        yield (
            f"Effective sample size {self.ess:,.1f} of {samples:,.10g} ({self.ess / samples:.1%}); FedAvg has all of "
            "it. The fewer, the noisier the averaged update."
        )
        if self.asked is not None and self.solved["strength"] == 0 and self.ess / samples > self.asked + 1e-6:
            yield (
                f"A share of {self.asked:.1%} can't be reached: the best fit to the target, at strength 0, keeps "
                f"{self.ess / samples:.1%} already, and a larger strength keeps more. These are its weights."
            )
        if self.unread:
            yield self.unread
        unweighted = int(np.count_nonzero((self.weights == 0) & (self.counts.sizes > 0)))
        if unweighted:
            which = ("client that holds samples gets", "clients that hold samples get")
            yield f"{counted(unweighted, *which)} no weight."
        if self.target is not None:
            if lacking := unheld_in_words(self.counts, self.target, self.counts.classes):
                yield lacking
            yield (
                f"Squared distance of the resulting label mix from the target: {self.distance(self.weights):.3g}; "
                f"FedAvg's: {self.distance(self.plain):.3g}."
            )
        if self.solved:
            yield (
                f"Strength (lambda) {self.solved['strength']:.6g}; optimal to a duality gap of "
                f"{self.solved['gap']:.0e} and a KKT residual of {self.solved['kkt']:.0e}."
            )

    def to_dict(self) -> dict[str, Any]:
        samples = float(self.counts.sizes.sum())
        strength = self.solved.get("strength")
        named = dict(zip(self.counts.clients, self.weights.tolist(), strict=True))
        return {
            "method": self.method,
            "clients": len(self.counts),
            "samples": samples,
            "ess": self.ess,
            "ess_share": self.ess / samples,
            # JSON has no infinity.
            "ess_asked": self.asked,
            "strength": "inf" if strength == math.inf else strength,
            "gap": self.solved.get("gap"),
            "kkt": self.solved.get("kkt"),
            "distance": self.distance(self.weights),
            "fedavg_distance": self.distance(self.plain),
            "mix": dict(zip(self.counts.classes, self.mix(self.weights).tolist(), strict=True)),
            "target": None
            if self.target is None
            else dict(zip(self.counts.classes, self.target.tolist(), strict=True)),
            "weights": named,
        }


def _weigh(
    counts: LabelCounts, method: str, target: np.ndarray | None, options: dict[str, float], settings: list[str] | None
) -> _Weighed:
    """Weigh all clients by the weighting of a name, as if every one of them replied in the first round."""
    if len(options) > 1:
        raise ArgumentError("--ess: finds the strength itself; give --strength or --ess, not both")
    table: dict[str, Any] = {"name": method, **options}
    for setting in settings or []:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ArgumentError(f"--set: expected NAME=VALUE, got {setting!r}")
        table[name] = _parsed(text)
    try:
        chosen = make_component(INDEX, table, "--set")
    except ConfigError as error:
        key, _, reason = str(error).removeprefix("--set.").partition(": ")
        option = f"--{'method' if key == 'name' else key}" if key == "name" or key in options else f"--set {key}"
        raise ArgumentError(f"{option}: {reason}") from None
    if has(chosen, "keeps_state"):
        raise ArgumentError(
            f"--method: {method} learns its weights during training, from what clients return in each round, so label "
            "counts alone don't give them"
        )
    if has(chosen, "needs_target") and target is None:
        raise ArgumentError(f"--target: {method} weighs clients towards a target label mix; give one as TARGET.CSV")
    unread = ""
    if target is not None and getattr(chosen, "target", True) is False:
        unread = f"{method} doesn't read the target as it is set here; it does with --set target=true."
    everyone = Answered(np.asarray(counts), counts.sizes, target, np.arange(len(counts)))
    if covers(chosen, "solve", "weigh"):
        solution, strength = chosen.solve(everyone)
        solved = {"strength": strength, "gap": solution.gap, "kkt": solution.kkt}
        return _Weighed(counts, method, solution.weights, target, solved, getattr(chosen, "ess", None))
    return _Weighed(counts, method, chosen.weigh(everyone), target, {}, unread=unread)


def _parsed(text: str) -> Any:
    """Read a value as TOML; text that is no TOML value stays a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _figures_table(report: SkewReport) -> Table:
    table = empty_table(("", "left"), ("", "left"), header=False)
    for name, value in report.statistics():
        table.add_row(name if value else f"[bold]{name}", value)
    return table


def _print_classes(console: Console, report: SkewReport) -> None:
    """Print every class, or the rarest; one that falls short of the target comes first."""
    labels, inter, target = report.label_distribution, report.inter_client, report.target
    columns = [("class", "left"), ("samples", "right"), ("share", "right"), ("holders", "right")]
    columns += [("largest holding", "right")]
    columns += [] if target is None else [("target", "right"), ("nearest", "right")]
    table = empty_table(*columns)
    short = np.zeros(len(labels.histogram)) if target is None else target.short
    shown = some_of(np.lexsort((labels.histogram, -short)), CLASSES_SHOWN)
    pooled = report.counts.pooled
    for label in shown:
        cells = [
            escaped(report.counts.classes[label]),
            amount(pooled[label]),
            f"{labels.histogram[label]:.1%}",
            f"{inter.holders[label]:,}",
            f"{inter.largest_holding[label]:.0%}",
        ]
        if target is not None:
            reached = f"{target.nearest[label]:.1%}"
            cells += [f"{target.mix[label]:.1%}", f"[red]{reached}" if target.short[label] else reached]
        table.add_row(*cells)
    console.print(table)
    first = "" if target is None else ", those short of the target first"
    print_note(console, shown, len(pooled), f"the {len(shown)} rarest{first}; all with --json")


def _print_clients(console: Console, report: SkewReport) -> None:
    """Print every client, or the most one-sided of those with samples."""
    table = empty_table(
        ("client", "left"), ("samples", "right"), ("evenness", "right"), *((name, "left") for name in GROUPS)
    )
    sizes = report.counts.sizes
    shown = some_of(np.lexsort((-sizes, -report.kl_to_uniform, sizes == 0)), CLIENTS_SHOWN)
    for client in shown:
        groups = report.groups[client]
        table.add_row(
            escaped(report.counts.clients[client]),
            amount(sizes[client]),
            f"{report.label_distribution.client_evenness[client]:.0%}",
            *(_listed(report, np.flatnonzero(groups == group)) for group in range(len(GROUPS))),
        )
    console.print(table)
    print_note(console, shown, len(sizes), f"the {len(shown)} most one-sided; all with --json")


def _print_weights(console: Console, found: _Weighed) -> None:
    """Print every client, or those with most weight."""
    table = empty_table(
        ("client", "left"), ("samples", "right"), ("weight", "right"), ("FedAvg", "right"), ("times", "right")
    )
    sizes, plain = found.counts.sizes, found.plain
    shown = some_of(np.argsort(-found.weights, kind="stable"), CLIENTS_SHOWN)
    for client in shown:
        times = f"{found.weights[client] / plain[client]:.2f}" if plain[client] else "-"
        name = escaped(found.counts.clients[client])
        table.add_row(name, amount(sizes[client]), f"{found.weights[client]:.4g}", f"{plain[client]:.4g}", times)
    console.print(table)
    print_note(console, shown, len(sizes), f"the {len(shown)} with most weight; all with --csv or --json")


def _print_mix(console: Console, found: _Weighed) -> None:
    """Print every class, or those that change most against FedAvg."""
    mix, plain = found.mix(found.weights), found.mix(found.plain)
    columns = [("class", "left"), ("mix", "right"), ("FedAvg's mix", "right")]
    table = empty_table(*columns, *([] if found.target is None else [("target", "right")]))
    shown = some_of(np.argsort(-np.abs(mix - plain), kind="stable"), CLASSES_SHOWN)
    for label in shown:
        target = [] if found.target is None else [f"{found.target[label]:.1%}"]
        table.add_row(escaped(found.counts.classes[label]), f"{mix[label]:.1%}", f"{plain[label]:.1%}", *target)
    console.print(table)
    print_note(console, shown, len(mix), f"the {len(shown)} that differ most from FedAvg's; all with --json")


def _write_weights(path: Path, found: _Weighed) -> None:
    sizes = [f"{size:.17g}" for size in found.counts.sizes.tolist()]
    rows = zip(found.counts.clients, sizes, found.weights.tolist(), found.plain.tolist(), strict=True)
    try:
        path.write_text(csv_text([("client", "samples", "weight", "fedavg"), *rows]), encoding="utf-8", newline="")
    except OSError as error:
        raise ArgumentError(f"--csv: {path} can't be written: {error.strerror}") from None


def _listed(report: SkewReport, classes: np.ndarray) -> str:
    named = len(classes) if len(classes) <= CLASSES_NAMED else CLASSES_NAMED - 1
    names = ", ".join(report.counts.classes[label] for label in classes[:named])
    return escaped(names + (f" +{len(classes) - named}" if len(classes) > named else ""))
