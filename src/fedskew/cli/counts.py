"""Who holds which labels: `fedskew counts` counts them in any data, `fedskew advise` names methods for such clients."""

import glob
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from typer import Option

from fedskew.cli import options
from fedskew.cli.page import BARE, AsJson, Console, check_apart, print_json, table_of
from fedskew.errors import ArgumentError, FedskewError, nearest
from fedskew.labels import LabelCounts, read_target
from fedskew.tables import counted, flatten
from fedskew.trees import read_tree

if TYPE_CHECKING:
    from fedskew.arena import Advice

Network = Annotated[
    str | None,
    Option(help="Only where this network trained, such as lenet5.  [default: that of a config or run, if it is there]"),
]
TablePath = Annotated[
    Path | None,
    Option(
        metavar="EVIDENCE.CSV.GZ",
        help="A table of your own, evidence.csv.gz of `fedskew arena`.  [default: the one that comes with fedskew]",
    ),
]

LIMITS = (
    "Small networks, images, texts and tables, 5 to 20 clients that differ only in labels: that is the evidence. "
    "docs/advice.md says what it is worth."
)


def counts(
    path: options.SourcePath,
    client: options.ClientColumn = None,
    label: options.LabelColumn = None,
    separator: options.Separator = None,
    decimal: options.DecimalSign = None,
    totals: options.TotalsAre = None,
    form: Annotated[
        Literal["wide", "long"], Option(help="A row for each client, or for each client and class.")
    ] = "wide",
    out: Annotated[Path | None, Option(help="The file to write.  [default: print]")] = None,
    data_root: options.DataRoot = None,
) -> None:
    """Count who holds which labels, and print the table that `fedskew describe` and `fedskew weights` read.

    All samples count but those of a test part; in a config, those that its clients train on with its first seed. A
    table of counts is printed as it was understood. Takes seconds: nothing is trained.

    Examples:

        fedskew counts hospitals > counts.csv      (a folder HOSPITAL/CLASS/*.png)
        fedskew counts patients.csv --client hospital --label diagnosis > counts.csv
        fedskew counts chests.csv --client hospital --label Edema,Effusion      (or --label findings --separator '|')
        fedskew counts my.toml
    """
    source = read_source(path, client, label, separator, decimal, totals, data_root)
    table = source.counts
    check_apart(out, path, *source.files)
    table.to_csv(out or sys.stdout, form)
    if table.several:
        samples = counted(int(table.sizes.sum()), "sample")
        said = f"A sample may have several labels, or none: these are counts of labels, of {samples}."
        Console(highlight=False, stderr=True).note(said)


class Source(NamedTuple):
    """Label counts; the target's mix, in words too if it is of a config or run; how that trains, the config's files."""

    counts: LabelCounts
    target: np.ndarray | None = None
    said: str | None = None
    participation: float = 1.0
    epochs: float = 1.0
    files: tuple[Path, ...] = ()
    network: str | None = None


def read_source(
    path: Path,
    client: str | None,
    label: str | None,
    separator: str | None,
    decimal: options.DecimalSign,
    totals: options.TotalsAre,
    data_root: Path | None,
    target: Path | None = None,
    held: bool = False,
) -> Source:
    """Return the label counts in a file or folder, of samples that must be there if `held`, and the target's mix."""
    is_config, is_run = path.suffix.lower() == ".toml" or str(path).startswith("@"), (path / "config.toml").exists()
    for option, value in (("label", label), ("client", client), ("separator", separator)):
        if value is not None and (is_config or is_run):
            raise ArgumentError(f"--{option}: is for tables; a config or run says it itself, by data.{option}")
    if is_config:
        source = _of_config(path, data_root)
    elif is_run:
        source = _of_run(path)
    elif (
        path.suffix.lower() not in (".npz", ".parquet", ".pq")
        and not (path.is_dir() or label or separator or (glob.has_magic(str(path)) and not path.exists()))
        and not LabelCounts.lists_samples(path)
    ):
        source = Source(LabelCounts.read_csv(path, client=client, decimal=decimal, totals=totals))
    else:
        from fedskew.data import holdings

        source = Source(LabelCounts(*holdings(path, label, client, separator)))
    if held and not source.counts.sizes.any():
        raise ArgumentError(f"{path}: no client holds a sample")
    if target is None:
        return source
    return source._replace(target=_read_mix(target, source.counts.classes, decimal), said=None)


def _of_config(path: Path, data_root: Path | None) -> Source:
    from fedskew.arena import local_epochs
    from fedskew.experiment import make_task, read

    file, changes = options.config_file(path), {} if data_root is None else {"data.root": str(data_root)}
    config, given = read(file, changes), flatten(read_tree(file, "config", changes)[0])
    root = None if config.data.name in ("digits", "synthetic") else os.environ.get("FEDSKEW_DATA")
    values = [root, *(value for key, value in given.items() if key not in ("name", "data.name"))]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    files = tuple(Path(os.path.expanduser(config.place(text))) for text in texts if isinstance(text, str) and text)
    training, task = config.training, make_task(config, config.seeds[0])
    counts = LabelCounts(task.counts, task.client_names, task.dataset.classes, task.sizes)
    said, network = config.target_in_words(), config.model.name
    epochs = local_epochs(training.model_dump(), counts.sizes.mean())
    return Source(counts, task.target, said, training.participation, epochs, files, network)


def _of_run(folder: Path) -> Source:
    from fedskew.arena import local_epochs
    from fedskew.experiment import RunFolder, read

    said = None
    with suppress(FedskewError):  # components of one's own need not be importable here
        said = read(folder / "config.toml").target_in_words()
    run = RunFolder.read_runs(folder)[0]
    counts = LabelCounts(run.counts, run.client_names, run.class_names, run.samples)
    training, network = run.config["training"], run.config["model"]["name"]
    epochs = local_epochs(training, counts.sizes.mean())
    return Source(counts, run.target, said, training["participation"], epochs, network=network)


def _read_mix(path: Path, classes: Sequence[str], decimal: options.DecimalSign) -> np.ndarray:
    """Return the target mix; the decimal sign given is that of the counts, and this file may have the other."""
    if not path.exists():
        raise ArgumentError(f"--target {path}: no such file; give a CSV of columns class,share, or of a column a class")
    if decimal is not None:
        with suppress(ArgumentError):
            return read_target(path, classes, decimal)
    return read_target(path, classes)


def advise(
    path: options.SourcePath,
    target: options.TargetPath = None,
    participation: options.Participation = None,
    epochs: options.Epochs = None,
    without: Annotated[str | None, Option(help="Methods that can't be used, such as fedentopt,ccvr.")] = None,
    network: Network = None,
    table: TablePath = None,
    client: options.ClientColumn = None,
    label: options.LabelColumn = None,
    separator: options.Separator = None,
    decimal: options.DecimalSign = None,
    totals: options.TotalsAre = None,
    data_root: options.DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Show what each method gained over FedAvg in the simulated federations that are most like yours.

    Takes seconds; nothing is trained. Federations are compared by skew, sizes, participation, epochs and target, for
    each network that trained in some of them. Where fewer than five are like yours no method is named. Leave out
    methods that need what clients won't give, such as label counts: fedskew methods NAME says what a method needs and
    reveals, and what the letters of its costs stand for.

    Examples:

        fedskew advise counts.csv --target target.csv --participation 0.2 --epochs 5
        fedskew advise counts.csv --participation 0.2 --network lenet5 --without fedentopt,ccvr
    """
    source = read_source(path, client, label, separator, decimal, totals, data_root, target, held=True)
    left_out = options.several("--without", without, options.named, "names") if without else []
    found = advice_for(source, participation, epochs, left_out, table, network)
    if as_json:
        print_json({one.network: one.to_dict() for one in found})
        return
    console = Console(highlight=False)
    print_advice(console, found, network or source.network)
    if named := [one for one in found if not one.refusal]:
        gains = [{gain["method"]: gain for gain in one.methods} for one in named]
        means = {method: [own[method]["mean"] for own in gains if method in own] for own in gains for method in own}
        often = Counter(gain["method"] for one in named for gain in one.often)  # on how many networks
        order = sorted(means, key=lambda method: (-often[method], -fmean(means[method])))
        cells = [[method, *(_cell(own.get(method)) for own in gains), _cost(method)] for method in order]
        console.heading("What each method gained there: points on average, and where it was ahead")
        networks = [f">{one.network}" for one in named]
        console.print(table_of(["method", *networks, "costs beyond FedAvg"], cells, **BARE))
    console.heading("The nearest simulated federations")
    shown = "{federation}", "{distance:.2f}", "{best} {gain:+.1f}"
    near = [[one.network, *(text.format(**row) for text in shown)] for one in found for row in one.neighbours]
    console.print(table_of(["network", "federation", ">distance", "best there"], near, **BARE))
    console.say(f"\n{LIMITS}")


def _cell(gain: Mapping[str, Any] | None) -> str:
    return "" if gain is None else "{mean:+.1f} ({ahead} of {of})".format(**gain)


def _cost(label: str) -> str:
    """Return what a method costs beyond FedAvg; a dash where an arena's label is no preset's or finish's name."""
    from fedskew import methods

    name = label.partition(":")[0]
    slot = "finish" if name in methods.PLACES["finish"] else "preset"
    if slot == "preset" and name not in methods.PRESETS:
        return "-"
    return str(methods.cost(methods.build(methods.expand({slot: name})))) or "none"


def advice_for(
    source: Source,
    participation: float | None,
    epochs: float | None,
    without: Collection[str] = (),
    table: Path | None = None,
    network: str | None = None,
) -> "list[Advice]":
    """Return the advice for label counts; participation, epochs and network are of their config or run if not given."""
    from fedskew.arena import advise as look_up

    share = source.participation if participation is None else participation
    times = source.epochs if epochs is None else epochs
    found = {one.network: one for one in look_up(source.counts, source.target, share, times, without, table)}
    if network is not None and network not in found:
        raise ArgumentError(f"--network: the table has {', '.join(found)}{nearest(network, found)}")
    own = network or source.network
    return [found[own]] if own in found else [*found.values()]


def print_advice(console: Console, found: "Sequence[Advice]", network: str | None) -> None:
    """Print advice in sentences below a heading; one says so where the network trained in no simulated federation."""
    sentences = [one.sentence() for one in found]
    if network is not None and network not in [one.network for one in found]:
        sentences.append(f"{network} itself trained in no simulated federation of the table.")
    if any(one.method not in (None, "fedavg") for one in found):
        sentences.append("fedskew methods NAME says what a method asks of clients and reveals.")
    console.sentences("Which method", sentences)
