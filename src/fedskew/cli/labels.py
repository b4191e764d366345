"""Look at label counts: `fedskew describe` and `fedskew weights`. Nothing is trained, and PyTorch is not imported."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.text import Text
from typer import Option

from fedskew.cli import options
from fedskew.cli.counts import Source, advice_for, print_advice, read_source
from fedskew.cli.page import BARE, AsJson, Console, NoPicture, picture_path, print_json, shares, table_of, write_csv
from fedskew.components import SEEN, covers, has, make_component, seen_by
from fedskew.errors import ArgumentError, ConfigError
from fedskew.labels import LabelCounts, SkewReport, effective_sample_size
from fedskew.labels import describe as describe_labels
from fedskew.tables import amount, counted
from fedskew.trees import parse_change
from fedskew.weighting import INDEX, Answered, fedavg

CLASSES_NAMED = 4
CLIENTS_SHOWN = 12
DEFAULT_FIGURE = Path("who-holds-what.html")


def describe(
    path: options.SourcePath,
    target: options.TargetPath = None,
    client: options.ClientColumn = None,
    label: options.LabelColumn = None,
    separator: options.Separator = None,
    decimal: options.DecimalSign = None,
    totals: options.TotalsAre = None,
    data_root: options.DataRoot = None,
    picture: Annotated[
        Path | None,
        Option(help=f"The page that shows who holds what (.html).  [default: {DEFAULT_FIGURE}; none with --json]"),
    ] = None,
    no_picture: NoPicture = False,
    participation: options.Participation = None,
    epochs: options.Epochs = None,
    as_json: AsJson = False,
) -> None:
    """Describe how skewed a federation's labels are, what that means for training, and which methods gained there.

    Takes seconds; nothing is trained.

    Label counts stand in a table, or are counted in whatever `fedskew counts` takes: images, a config, a run folder.
    The methods are those of `fedskew advise`, which also shows the simulated federations that they are taken from.

    Examples:

        fedskew describe counts.csv --target target.csv --picture who.html
        fedskew describe my.toml
    """
    drawn = picture_path(picture, no_picture, as_json, DEFAULT_FIGURE)
    source = read_source(path, client, label, separator, decimal, totals, data_root, target, held=True)
    report = describe_labels(source.counts, source.target)
    advice = advice_for(source, participation, epochs)
    if drawn is not None:
        _draw(source, drawn)
    if as_json:
        print_json(report.to_dict())
        return
    console = Console(highlight=False)
    said = [] if source.said is None else [f"{source.said[0].upper()}{source.said[1:]}."]
    console.sentences("What the labels look like", [*said, *report.sentences()])
    console.heading("Figures")
    figures = ((Text(name, style="" if value else "bold"), value) for name, value in report.statistics())
    console.print(table_of(["", ""], figures, **BARE))
    _print_classes(console, report)
    _print_clients(console, report)
    print_advice(console, advice, source.network)
    if drawn is not None:
        console.say(f"\nWho holds what: {drawn}")


def weights(
    path: options.SourcePath,
    method: Annotated[str, Option(help=f"A weighting: {', '.join(INDEX)}, or module:Class of your own.")],
    target: options.TargetPath = None,
    client: options.ClientColumn = None,
    label: options.LabelColumn = None,
    separator: options.Separator = None,
    decimal: options.DecimalSign = None,
    totals: options.TotalsAre = None,
    data_root: options.DataRoot = None,
    strength: Annotated[
        float | None, Option(help="FedPALS's lambda: 0 fits the target best, inf is FedAvg.  [default: 0]")
    ] = None,
    ess: Annotated[
        float | None, Option(help="Find FedPALS's lambda: the least share of effective samples to keep, from 0 to 1.")
    ] = None,
    parameters: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="A parameter of the weighting; may be repeated.")
    ] = None,
    as_json: AsJson = False,
    csv_path: Annotated[Path | None, Option("--csv", help="Write every client's weight to this file.")] = None,
) -> None:
    """Weigh clients by a method, and show what it costs and which label mix results.

    Takes a second or two; nothing is trained.

    Example: fedskew weights counts.csv --method fedpals --target target.csv --ess 0.5 --csv weights.csv
    """
    source = read_source(path, client, label, separator, decimal, totals, data_root, target, held=True)
    counts = source.counts
    given = {name: value for name, value in (("strength", strength), ("ess", ess)) if value is not None}
    found = _weigh(counts, method, source.target, given, parameters)
    if csv_path is not None:
        sizes = [f"{size:.17g}" for size in counts.sizes.tolist()]
        rows = zip(counts.clients, sizes, found.weights.tolist(), found.plain.tolist(), strict=True)
        write_csv(csv_path, [("client", "samples", "weight", "fedavg"), *rows], path, target, *source.files)
    if as_json:
        print_json(found.to_dict())
        return
    console = Console(highlight=False)
    console.sentences(f"{method}: {counted(len(counts), 'client')}", found.sentences())
    found.show(console)
    if csv_path is not None:
        console.say(f"\nEvery client's weight: {csv_path}")


def _draw(source: Source, path: Path) -> None:
    from fedskew.report import SeedRun, write_report

    counts, target = source.counts, source.target
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
        if unweighted := int(np.count_nonzero((self.weights == 0) & (self.counts.sizes > 0))):
            which = ("client that holds samples gets", "clients that hold samples get")
            yield f"{counted(unweighted, *which)} no weight."
        if self.target is not None:
            if lacking := SkewReport.unheld_in_words(self.counts, self.target, self.counts.classes):
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

    def show(self, console: Console) -> None:
        """Print the clients with most weight, and the label mix that results."""
        counts, plain = self.counts, self.plain
        columns: dict[str, Sequence[str]] = {
            "client": counts.clients,
            ">samples": [*map(amount, counts.sizes)],
            ">weight": [f"{weight:.4g}" for weight in self.weights],
            ">FedAvg": [f"{weight:.4g}" for weight in plain],
            ">times": [f"{own / one:.2f}" if one else "-" for own, one in zip(self.weights, plain, strict=True)],
        }
        order = np.argsort(-self.weights, kind="stable")
        console.columns("Weights", columns, order, "with most weight; all with --csv or --json", CLIENTS_SHOWN)
        mix, fedavg_mix = self.mix(self.weights), self.mix(plain)
        columns = {"class": counts.classes, ">mix": shares(mix), ">FedAvg's mix": shares(fedavg_mix)}
        if self.target is not None:
            columns[">target"] = shares(self.target)
        order = np.argsort(-np.abs(mix - fedavg_mix), kind="stable")
        console.columns("Label mix", columns, order, "that differ most from FedAvg's; all with --json")

    def to_dict(self) -> dict[str, Any]:
        samples = float(self.counts.sizes.sum())
        strength = self.solved.get("strength")

        def by_class(mix: np.ndarray) -> dict[str, float]:
            return dict(zip(self.counts.classes, mix.tolist(), strict=True))

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
            "mix": by_class(self.mix(self.weights)),
            "target": None if self.target is None else by_class(self.target),
            "weights": dict(zip(self.counts.clients, self.weights.tolist(), strict=True)),
        }


def _weigh(
    counts: LabelCounts, method: str, target: np.ndarray | None, given: dict[str, float], settings: list[str] | None
) -> _Weighed:
    """Weigh all clients by the weighting of a name, as if every one of them replied in the first round."""
    if len(given) > 1:
        raise ArgumentError("--ess: finds the strength itself; give --strength or --ess, not both")
    changes = dict(map(parse_change, settings or []))
    if twice := given.keys() & changes.keys():
        raise ArgumentError(f"--{min(twice)}: is given by --set, too; give it once")
    table = {"name": method, **given, **changes}
    try:
        chosen = make_component(INDEX, table, "--set")
    except ConfigError as error:
        key, _, reason = str(error).removeprefix("--set.").partition(": ")
        option = f"--{'method' if key == 'name' else key}" if key == "name" or key in given else f"--set {key}"
        raise ArgumentError(f"{option}: {reason}") from None
    if has(chosen, "keeps_state"):
        raise ArgumentError(
            f"--method: {method} learns its weights during training, from what clients return in each round, so label "
            "counts alone don't give them"
        )
    if seen_by(chosen.weigh, dict.fromkeys(SEEN["weigh"])):
        raise ArgumentError(f"--method: {method} looks at models and updates, of which label counts tell nothing")
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


def _print_classes(console: Console, report: SkewReport) -> None:
    """Print every class, or the rarest; one that falls short of the target comes first."""
    labels, inter, target = report.label_distribution, report.inter_client, report.target
    columns: dict[str, Sequence[str | Text]] = {
        "class": report.counts.classes,
        ">samples": [*map(amount, report.counts.pooled)],
        ">share": shares(labels.histogram),
        ">holders": [f"{number:,}" for number in inter.holders],
        ">largest holding": shares(inter.largest_holding, 0),
    }
    short, first = np.zeros(len(labels.histogram)), ""
    if target is not None:
        short, first = target.short, ", those short of the target first"
        columns[">target"] = shares(target.mix)
        reached = zip(shares(target.nearest), short, strict=True)
        columns[">nearest"] = [Text(share, style="red" if is_short else "") for share, is_short in reached]
    console.columns("Classes", columns, np.lexsort((labels.histogram, -short)), f"rarest{first}; all with --json")


def _print_clients(console: Console, report: SkewReport) -> None:
    """Print every client, or the most one-sided of those with samples."""
    counts = report.counts
    columns: dict[str, Sequence[str]] = {
        "client": counts.clients,
        ">samples": [*map(amount, counts.sizes)],
        ">evenness": shares(report.label_distribution.client_evenness, 0),
    }
    for group, name in enumerate(report.group_sizes()):
        columns[name] = [_listed(counts.classes, np.flatnonzero(row == group)) for row in report.groups]
    order = np.lexsort((-counts.sizes, -report.kl_to_uniform, counts.sizes == 0))
    console.columns("Clients", columns, order, "most one-sided; all with --json", CLIENTS_SHOWN)


def _listed(names: Sequence[str], classes: np.ndarray) -> str:
    named = len(classes) if len(classes) <= CLASSES_NAMED else CLASSES_NAMED - 1
    more = f" +{len(classes) - named}" if len(classes) > named else ""
    return ", ".join(names[label] for label in classes[:named]) + more
