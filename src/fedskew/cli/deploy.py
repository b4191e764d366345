"""`fedskew deploy init | check | local | renew`: a real federation on Flower, as a folder, and one on this machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fedskew.cli.options import Changes, DataRoot, TrustCode, changed_keys, config_file, named, several
from fedskew.cli.page import Console
from fedskew.errors import ConfigError, DataError, DivergedError, EndedEarlyError, RunError, StandstillError
from fedskew.files import writing
from fedskew.own_code import away_from_current_folder
from fedskew.sheets import columns_in
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.data import Dataset
    from fedskew.deploy import LocalFederation
    from fedskew.experiment import Config

LabelCounts = Annotated[
    str,
    Option(
        help="What sites report of their label counts: exact, noisy, withheld, or summed "
        "(only in masked sums over all)."
    ),
]
Epsilon = Annotated[
    float | None, Option(help="Privacy parameter of label counts with noise: --label-counts noisy, or summed.")
]
Updates = Annotated[
    str | None,
    Option(
        help="plain: the server sees each site's update; masked: it sees sums over sites only, three at least. "
        "Default: as the config's engine.updates says, plain."
    ),
]
Federation = Annotated[Path, Argument(help="The federation's folder.")]


def init(
    folder: Annotated[Path, Argument(help="A new folder for the federation.")],
    config: Annotated[Path, Option(help="The config that was simulated, a TOML file.")],
    sites: Annotated[str, Option(help="The sites' names, such as north,south,west.")],
    address: Annotated[str, Option(help="The address by which sites reach the server, HOST:PORT.")] = "localhost:9092",
    label_counts: LabelCounts = "exact",
    epsilon: Epsilon = None,
    updates: Updates = None,
    target: Annotated[Path | None, Option(help="A CSV file with the target mix; it stays at the server.")] = None,
    target_site: Annotated[
        str | None,
        Option(
            help="With target.mix = 'estimate': the site whose samples without labels the target mix is estimated "
            "from. Name it in --sites too if it trains."
        ),
    ] = None,
    classes: Annotated[
        str | None, Option(help="Class names, such as cat,dog, where the config's data is not on this machine.")
    ] = None,
    shape: Annotated[
        str | None, Option(help="Shape of one sample, such as 3,32,32, where the data is not on this machine.")
    ] = None,
    multi_label: Annotated[
        bool,
        Option(
            "--multi-label",
            help="With --classes: a sample may have several of these, or none. A config that says so by data.separator "
            "or a list data.label needs no such word.",
        ),
    ] = False,
    wheel: Annotated[
        Path | None,
        Option(
            help="A wheel of this version of fedskew, for sites whose package index has none: it is put into each "
            "folder. pip wheel --no-deps makes it of the source."
        ),
    ] = None,
    changes: Changes = None,
    data_root: DataRoot = None,
) -> None:
    """Write a federation's folder: the app, TLS certificates, and a key, a data file and a start script for every site.

    Class names, the shape of a sample and its normalisation are taken from the config's data, or given by --classes and
    --shape where the data is not on this machine. Where three sites or more take part in a round, and the config says
    nothing else, no site's update counts for more than half, or twice an equal share (training.weight_limit; 0.4 with
    masked updates), or is longer than the round's median (method.aggregation = norm_clipping).

    With --updates masked every site also gets a key of its own by which its updates are masked; the public halves
    stand in deploy.toml. A site that trusts nobody with its key makes it itself (docs/deploy.md).

    Examples:

        fedskew deploy init hospitals --config run.toml --sites north,south,west --address fl.example.org:9092
        fedskew deploy init hospitals --config run.toml --sites north,south,west --updates masked --label-counts noisy
        --epsilon 1
        fedskew deploy init shops --config run.toml --sites a,b --classes shoe,hat --shape 3,32,32
        fedskew deploy init chests --config run.toml --sites a,b --classes Edema,Hernia --shape 1,64,64 --multi-label
        fedskew deploy init clinics --config run.toml --sites north,south --target-site new --set target.mix=estimate
        fedskew deploy init shops --config run.toml --sites a,b --wheel fedskew-0.1.0-py3-none-any.whl
    """
    from fedskew.deploy import Address, Draft, write_federation
    from fedskew.experiment import read

    place = Address.parse(address)
    whole = read(config, changed_keys(changes, None, None, data_root))
    if (classes is None) != (shape is None):
        raise ConfigError("--classes, --shape: give both, or neither where the config's data is on this machine")
    if multi_label and classes is None:
        raise ConfigError("--multi-label: goes with --classes and --shape; data that is read says it by itself")
    if classes is not None and shape is not None:
        samples: dict[str, Any] = {
            "classes": several("--classes", classes, named, "names"),
            "shape": several("--shape", shape, int, "whole numbers, such as 3,32,32"),
        }
        samples["multi_label"] = multi_label or _says_several(whole, samples["classes"])
    else:
        samples = _kind_by_schema(whole) or _kind(_dataset(whole))
    names = several("--sites", sites, named, "names")
    made = Draft.of(whole, names, samples, label_counts, epsilon, updates, target_site)
    images = _images_table(whole, samples)
    with writing(folder):
        played = write_federation(folder, made.config, made.agreement, place, images, target, made.mask_keys, wheel)
    Console().warn([*made.notes, *played.losses_in_words(harmless=False)])
    if number := len((made.agreement.encoder or {}).get("words", ())):
        said = f"deploy.toml holds {number:,} words of the texts that were read, for all sites: see that none is a name"
        Console().warn([said])
    Console().say(f"{folder}/README.md says who does what; send {folder}/sites/NAME to that site alone")


@away_from_current_folder()
def check(folder: Federation, trust_code: TrustCode = False) -> None:
    """Check a federation's folder before it runs: that server and sites can play its config, what stands still where a
    site is lost, and what bounds a site that lies.

    The label counts are those of the newest run, where there is one, else an example. Nothing that the folder's app
    names of its own is run, unless you trust it.

    Examples:

        fedskew deploy check hospitals
        fedskew deploy check hospitals --trust-code      (with a network or a component of your own in hospitals/app)
    """
    from fedskew.deploy import check_folder, other_code
    from fedskew.deploy.app_files import read_app

    if code := other_code(read_app(folder / "app")):
        said = f"CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at the sites: {', '.join(code)}. Read it."
        Console().say(said, style="bold red")
    for line in check_folder(folder, trust_code):
        Console().say(line)


def local(
    folder: Annotated[Path, Argument(help="A new folder for the federation and its run.")],
    config: Annotated[Path, Option(help="A TOML file whose data is divided among the sites; @local: digits.")] = Path(
        "@local"
    ),
    sites: Annotated[
        int | None, Option(min=1, help="Number of sites; default: as many as the config has clients.")
    ] = None,
    label_counts: LabelCounts = "exact",
    epsilon: Epsilon = None,
    updates: Updates = None,
    changes: Changes = None,
    data_root: DataRoot = None,
) -> None:
    """Run a whole federation on this machine: write each site's images, texts or table, start server and sites with
    TLS and node keys, train, and stop everything.

    Example: fedskew deploy local trial --sites 3

    Example: fedskew deploy local trial --config run.toml --set training.rounds=3

    Example: fedskew deploy local trial --config clinics.toml      (tables: data.root = "clinics/*.csv")
    """
    from fedskew import deploy
    from fedskew.experiment import make_task, read

    whole = read(config_file(config), changed_keys(changes, None, None, data_root))
    if sites is not None and whole.partition.clients is not None:
        whole = whole.with_value("partition.clients", sites)
    task = make_task(whole, whole.seeds[0])
    names = deploy.site_names(task.client_names)
    if sites not in (None, len(names)):
        raise ConfigError(
            f"--sites: the config's data has {counted(len(names), 'client')} of its own, not {sites}; leave --sites out"
        )
    kind = _kind_by_schema(whole) or _kind(task.dataset)
    made = deploy.Draft.of(whole, names, kind, label_counts, epsilon, updates)
    port = deploy.LocalFederation.free_port()
    shares = task.partition.indices[: len(names)]
    address, renamed = deploy.Address("127.0.0.1", port), deploy.renamed_folders(task.dataset.classes)
    images = _images_table(whole, kind)
    images |= {"test": "test.csv"} if images["name"] == "csv" else {"classes": renamed} if renamed else {}
    with writing(folder):
        played = deploy.write_federation(folder, made.config, made.agreement, address, images, mask_keys=made.mask_keys)
    Console().warn([*made.notes, *played.losses_in_words(harmless=False)])
    places = [folder / "sites" / name for name in names]
    deploy.write_samples(task.dataset, shares, places, whole.data.parameters.get("separator"))
    for name in names:
        deploy.agree(folder / "sites" / name / "data.toml", folder / "app")
    console = Console()
    there = counted(sum(map(len, shares)), "sample")
    console.say(f"{counted(len(names), 'site')} with {there} to train on, in {folder / 'sites'}")
    try:
        with _stopped_by_signals(), deploy.LocalFederation(folder, port, tuple(names)) as federation:
            console.say(f"server and sites are running, with TLS and node keys; logs: {folder / 'logs'}")
            summary, still = _train(console, federation)
    except KeyboardInterrupt:
        console.say(f"stopped, server and sites too; {folder / 'README.md'} says what to start for the run to go on")
        raise typer.Exit(130) from None
    console.say(_result(summary))
    console.say(f"report: {next((folder / 'server' / 'runs').glob('*/report.html'))}")
    if still:
        raise StandstillError(still)


def renew(folder: Federation) -> None:
    """Make the server a new certificate, and the authority that sites know it by: each needs its ca.crt.

    The old files are kept in server/replaced. Start superlink.sh again afterwards.

    Examples:

        fedskew deploy renew hospitals
    """
    from fedskew import deploy

    server, console = folder / "server", Console()
    days = deploy.renew(server)
    console.say(f"{server / 'server.crt'}: valid for {days:.0f} days")
    console.say(
        f"send {server / 'ca.crt'} to every site, in the place of its old one, over a channel that nobody else can "
        "change; until a site has it, it can't connect. Keys and registrations stay as they are."
    )
    console.say(f"now start {server / 'superlink.sh'} again")


def _dataset(config: Config) -> Dataset:
    from fedskew.experiment import load_dataset

    try:
        return load_dataset(config, config.seeds[0])
    except DataError as error:
        raise DataError(
            f"{error}; where the data is at the sites only, describe it: --classes cat,dog --shape 3,32,32"
        ) from None


def _says_several(config: Config, classes: Sequence[str]) -> bool:
    """Return whether a config says that a sample may have several of the classes, or none."""
    label, separator = (config.data.parameters.get(key, ()) for key in ("label", "separator"))
    columns = columns_in(label, ()) if isinstance(label, str) else label
    return bool(separator) or (len(columns) > 1 and {*columns} == {*classes})


def _kind_by_schema(config: Config) -> dict[str, Any] | None:
    """Return the keys of an agreement that describe the samples, of a table's schema alone; None where it can't be."""
    from fedskew.data import TableSchema

    if config.data.name != "csv" or "schema" not in config.data.parameters:
        return None
    schema = TableSchema.of_plain(config.data.parameters["schema"])
    if not schema.classes or schema.without_range:
        return None
    several = len(schema.labelled) > 1 or _says_several(config, schema.classes)
    samples = {"classes": list(schema.classes), "shape": [len(schema.slots)], "multi_label": several}
    return samples | {"encoder": schema.plain()}


def _kind(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of an agreement that describe the samples."""
    from fedskew.experiment import ModelInfo

    info = ModelInfo.of(dataset)
    samples = {name: list(one) if isinstance(one, tuple) else one for name, one in info.plain().items()}
    samples["shape"] = samples.pop("in_shape")
    kind = (info.encoder or {}).get("kind")
    if kind in ("text", "tokens") or (kind != "table" and not info.tokens):
        samples["input_cells"] = {name: list(own) for name, own in info.profile(dataset.inputs).cells.items()}
    return samples


def _images_table(config: Config, samples: dict[str, Any]) -> dict[str, object]:
    """Return `[data]` of each `data.toml`: a table, texts, images; of several labels, which no folder has, arrays, or
    what Hugging Face's `datasets` saved, and of numbers alone arrays too."""
    if samples.get("multi_label") and config.data.name == "huggingface":
        kept = ("inputs", "label", "separator", "client", "test", "size")
        columns = {key: config.data.parameters[key] for key in kept if key in config.data.parameters}
        return {"name": "huggingface", "root": "samples", **columns}
    if config.data.name == "csv" or samples.get("encoder", {}).get("kind") == "table":
        said = ("separator",) if "encoder" in samples else ("label", "separator")
        own = {key: config.data.parameters[key] for key in said if key in config.data.parameters}
        return {"name": "csv", "root": "data.csv", **own}
    is_text = samples.get("encoder", {}).get("kind") in ("text", "tokens")
    if samples.get("multi_label") or (len(samples["shape"]) == 1 and not is_text):
        return {"name": "npz", "root": "samples.npz"}
    if is_text:
        return {"name": "folder", "root": "texts"}
    table: dict[str, object] = {"name": "folder", "root": "images"}
    size = config.data.parameters.get("size") if config.data.name == "folder" else None
    return table if size is None else table | {"size": size}


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that what was started is stopped."""
    interrupt = signal.default_int_handler
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(console: Console, federation: LocalFederation) -> tuple[dict[str, Any], str]:
    """Train and show every round; return the summary, and what is to be said of rounds that moved nothing."""
    from fedskew.cli.progress import announced
    from fedskew.experiment import RunBar, RunFolder, read

    config = read(federation.folder / "app" / "run.toml")
    folder = config.folder(federation.folder / "server" / "runs")
    process = federation.run()
    seen, warned = 0, 0
    with RunBar(console, [config]) as bar:
        listen = announced(bar, config)
        while True:
            ended = process.poll() is not None
            records = RunFolder.read_records(folder / "rounds.jsonl")
            for record in records[seen:]:
                listen(record.to_dict())
            seen = len(records)
            warnings = federation.warnings("run")
            for warning in warnings[warned:]:
                console.say(warning, style="yellow")
            warned = len(warnings)
            if ended:
                break
            federation.check()
            time.sleep(0.5)
    if not (folder / "summary.json").exists():
        kinds = (DivergedError, EndedEarlyError, StandstillError)
        kind = next((one for one in kinds if one.exit_code == process.returncode), RunError)
        raise kind(f"the run ended early: {federation.last_message('run')}; see {federation.log('run')}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    still = process.returncode == StandstillError.exit_code
    return summary, federation.last_message("run").removeprefix("fedskew: ") if still else ""


def _result(summary: dict[str, Any]) -> str:
    final, rounds = summary["headline"], summary["rounds"]
    trained = f"{rounds} round{'' if rounds == 1 else 's'} in {summary['seconds']:.0f} s"
    if final.get("accuracy") is None:
        return (
            f"{trained}; accuracy unknown, as sites that do not report exact label counts report no confusion matrices"
        )
    shares = {"worst class": final["worst_class"], "mean over classes": final["balanced_accuracy"]}
    said = ", ".join(f"{name} {100 * value:.1f} %" for name, value in shares.items() if value is not None)
    worst = f" ({said})" if said else ""
    return f"{trained}; accuracy on the sites' own test samples {100 * final['accuracy']:.1f} %{worst}"
