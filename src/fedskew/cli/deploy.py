"""`fedskew deploy`: a real federation on Flower."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.console import Console
from fedskew.cli.options import TrustCode
from fedskew.own_code import away_from_current_folder, refused
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.data import Dataset
    from fedskew.deploy import Draft, LocalFederation
    from fedskew.experiment import Config

app = typer.Typer(
    help="A real federation on Flower: data stays at its sites.", no_args_is_help=True, rich_markup_mode="markdown"
)

CONFIG = typer.Option("--config", help="The config that was simulated, a TOML file.", show_default=False)
SET = typer.Option(
    "--set", metavar="KEY=VALUE", help="Change one key of the config, such as training.rounds=20; may be repeated."
)
COUNTS = typer.Option(
    help="What sites report of their label counts: exact, noisy, withheld, or summed (only in masked sums over all)."
)
EPSILON = typer.Option(
    help="Privacy parameter of label counts with noise: --label-counts noisy, or summed.",
    show_default=False,
)
UPDATES = typer.Option(
    help="plain: the server sees each site's update; masked: it sees sums over sites only, three at least. "
    "Default: as the config's engine.updates says, plain.",
    show_default=False,
)
PASSPHRASE = "FEDSKEW_PASSPHRASE"
"""Environment variable with the passphrase of the authority's key."""

FOLDER = typer.Argument(help="The federation's folder.", show_default=False)
LOCAL: dict[str, Any] = {
    "schema": 1,
    "name": "local",
    "seeds": [0],
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 3, "beta": 0.3},
    "model": {"name": "mlp3"},
    "method": {"preset": "fedla"},
    "training": {"rounds": 5, "participation": 1.0, "epochs": 5, "batch_size": 16, "lr": 0.05},
}


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation.", show_default=False)],
    config: Annotated[Path, CONFIG],
    sites: Annotated[str, typer.Option(help="The sites' names, such as north,south,west.", show_default=False)],
    address: Annotated[
        str, typer.Option(help="The address by which sites reach the server, HOST:PORT.")
    ] = "localhost:9092",
    label_counts: Annotated[str, COUNTS] = "exact",
    epsilon: Annotated[float | None, EPSILON] = None,
    updates: Annotated[str | None, UPDATES] = None,
    target: Annotated[
        Path | None, typer.Option(help="A CSV file with the target mix; it stays at the server.", show_default=False)
    ] = None,
    target_site: Annotated[
        str | None,
        typer.Option(
            help="With target.mix = 'estimate': the site whose samples without labels the target mix is estimated "
            "from. Name it in --sites too if it trains.",
            show_default=False,
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Class names, such as cat,dog, where the config's data is not on this machine.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 3,32,32, where the data is not on this machine.")
    ] = None,
    keep_authority: Annotated[
        bool,
        typer.Option(
            "--keep-authority",
            help="Keep the authority's key, encrypted, for the next server certificate; asks for a passphrase, or "
            f"takes {PASSPHRASE} from the environment.",
        ),
    ] = False,
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="A wheel of this version of fedskew, for sites whose package index has none: it is put into each "
            "folder. pip wheel --no-deps makes it of the source.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[list[str] | None, SET] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: FEDSKEW_DATA.")] = None,
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

        fedskew deploy init clinics --config run.toml --sites north,south --target-site new --set target.mix=estimate

        fedskew deploy init shops --config run.toml --sites a,b --wheel fedskew-0.1.0-py3-none-any.whl
    """
    from fedskew.cli.options import changed_keys
    from fedskew.deploy import Address, Draft, write_federation
    from fedskew.errors import ConfigError
    from fedskew.experiment import read

    place = Address.parse(address)
    secret = _passphrase(new=True) if keep_authority else None
    whole = read(config, changed_keys(changes, None, None, data_root))
    if (classes is None) != (shape is None):
        raise ConfigError("--classes, --shape: give both, or neither where the config's data is on this machine")
    if classes is not None and shape is not None:
        samples: dict[str, Any] = {"classes": _names(classes, "--classes"), "shape": _numbers(shape)}
    else:
        samples = _kind(_dataset(whole))
    made = Draft.of(whole, _names(sites, "--sites"), samples, label_counts, epsilon, updates, target_site)
    images = _images_table(whole)
    played = write_federation(folder, made.config, made.agreement, place, images, target, secret, made.mask_keys, wheel)
    _print_notes(made, played.losses_in_words(harmless=False))
    Console().say(f"{folder}/README.md says who does what; send {folder}/sites/NAME to that site alone")


@app.command("check")
@away_from_current_folder()
def check_federation(folder: Annotated[Path, FOLDER], trust_code: TrustCode = False) -> None:
    """Check a federation's folder before it runs: that server and sites can play its config, what stands still where a
    site is lost, and what bounds a site that lies.

    The label counts are those of the newest run, where there is one, else an example. Nothing that the folder's app
    names of its own is run, unless you trust it.

    Examples:

        fedskew deploy check hospitals

        fedskew deploy check hospitals --trust-code      (with a network or a component of your own in hospitals/app)
    """
    from fedskew.deploy import NOT_YET, asked_of_site, check_folder, other_code, read_app, running
    from fedskew.errors import ConfigError
    from fedskew.experiment import Config

    app = folder / "app"
    files = read_app(app)
    if code := other_code(files):
        said = f"CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at the sites: {', '.join(code)}. Read it."
        Console().say(said, style="bold red")
    asked = asked_of_site(Config.outline(app / "run.toml").model_dump())
    if asked and not trust_code:
        key, name = next(iter(asked.items()))
        raise ConfigError(
            f"{app / 'run.toml'}: {key}: {name!r} is the app's own, and to check the app would run or open it here; "
            "read it, and if you trust it add --trust-code"
        )
    with running(files) if asked else refused(NOT_YET):
        for line in check_folder(folder):
            Console().say(line)


@app.command()
@away_from_current_folder()
def site(
    check: Annotated[Path, typer.Option(help="The site's data.toml.", show_default=False)],
    agreement: Annotated[
        Path | None,
        typer.Option(
            help="The federation's app folder; default: the app that the server sent last, or the one that came with "
            "the site's folder."
        ),
    ] = None,
    agree: Annotated[
        bool, typer.Option("--agree", help="Agree to what is shown, without being asked; writes agreed.toml.")
    ] = False,
) -> None:
    """Check before a site joins that its data fits the federation, list everything that will leave the site, and agree.

    Looking runs nothing of the app: what only its own code could tell is unknown until you agree, and worked out then.
    What you agree to is written to agreed.toml beside data.toml, with the hash of the app's files. The site refuses
    whatever goes beyond it, whatever the server sends. Do this again when the server changes its app, when the site has
    trained in all rounds that were agreed on, or, with noisy label counts, when the site's data changed.

    Examples:

        fedskew deploy site --check data.toml

        fedskew deploy site --check data.toml --agree
    """
    from fedskew.cli.tables import disclosure_table, samples_table, terms_table
    from fedskew.deploy import Look, ServerCheck

    look, console = Look.at(check, agreement), Console(highlight=False)
    data = look.data
    for note in ServerCheck.of_site(check):
        console.say(f"note: {note}", style="yellow")
    if not data.is_unlabelled:
        console.print(samples_table(data, look.agreement))
    if data.unlabelled is not None:
        samples = counted(len(data.unlabelled()), "sample")
        others = "; it has no others, and does not train" if data.is_unlabelled else ""
        console.say(f"As the target site this site has {samples} without labels{others}")
    console.print(disclosure_table(look.leaves, look.agreement))
    console.print(terms_table(look))
    for line in look.lines():
        console.say(line)
    path = check.with_name("agreed.toml")
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if look.before is not None and look.is_agreed and not agree:
        result = f"this site agreed to this at {look.before.agreed}; --agree renews it, and counts rounds anew"
    elif agree or (asks and typer.confirm(f"Agree{', run its code' if look.needs_code else ''}, and write {path}?")):
        if look.needs_code:
            look = look.run_code()
            console.print(disclosure_table(look.leaves, look.agreement))
            console.print(terms_table(look))
        look.accept()
        result = "agreed; the site refuses whatever goes beyond it"
    else:
        result = "nothing is written; if you agree, run this again with --agree"
    console.say(f"{path}: {result}")


@app.command()
def local(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation and its run.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="A TOML file whose data is divided among the sites; default: scikit-learn's digits."
        ),
    ] = None,
    sites: Annotated[
        int | None, typer.Option(min=1, help="Number of sites; default: as many as the config has clients.")
    ] = None,
    label_counts: Annotated[str, COUNTS] = "exact",
    epsilon: Annotated[float | None, EPSILON] = None,
    updates: Annotated[str | None, UPDATES] = None,
    changes: Annotated[list[str] | None, SET] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: FEDSKEW_DATA.")] = None,
) -> None:
    """Run a whole federation on this machine: write each site's images, start server and sites with TLS and node keys,
    train, and stop everything.

    Examples:

        fedskew deploy local trial --sites 3

        fedskew deploy local trial --config run.toml --set training.rounds=3
    """
    from fedskew.cli.options import changed_keys
    from fedskew.deploy import (
        Address,
        Draft,
        LocalFederation,
        agree,
        renamed_folders,
        site_names,
        write_federation,
        write_images,
    )
    from fedskew.errors import ConfigError, StandstillError
    from fedskew.experiment import make_task, read, resolve
    from fedskew.trees import put

    changed = changed_keys(changes, None, None, data_root)
    if config is not None:
        whole = read(config, changed)
    else:
        tree = deepcopy(LOCAL)
        for key, value in changed.items():
            put(tree, key, value)
        whole = resolve(tree)
    if sites is not None and whole.partition.clients is not None:
        whole = whole.with_value("partition.clients", sites)
    task = make_task(whole, whole.seeds[0])
    names = site_names(task.client_names)
    if sites not in (None, len(names)):
        raise ConfigError(
            f"--sites: the config's data has {counted(len(names), 'client')} of its own, not {sites}; leave --sites out"
        )
    made = Draft.of(whole, names, _kind(task.dataset), label_counts, epsilon, updates)
    port = LocalFederation.free_port()
    shares = task.partition.indices[: len(names)]
    address, renamed = Address("127.0.0.1", port), renamed_folders(task.dataset.classes)
    images = _images_table(whole) | ({"classes": renamed} if renamed else {})
    played = write_federation(folder, made.config, made.agreement, address, images, mask_keys=made.mask_keys)
    _print_notes(made, played.losses_in_words(harmless=False))
    write_images(task.dataset, shares, [folder / "sites" / name / "images" for name in names])
    for name in names:
        agree(folder / "sites" / name / "data.toml", folder / "app")
    console = Console()
    there = counted(sum(map(len, shares)), "image")
    console.say(f"{counted(len(names), 'site')} with {there} to train on, in {folder / 'sites'}")
    try:
        with _stopped_by_signals(), LocalFederation(folder, port, tuple(names)) as federation:
            console.say(f"server and sites are running, with TLS and node keys; logs: {folder / 'logs'}")
            summary, still = _train(console, federation)
    except KeyboardInterrupt:
        console.say(f"stopped, server and sites too; what was trained is in {folder}")
        raise typer.Exit(130) from None
    console.say(_result(summary))
    console.say(f"report: {next((folder / 'server' / 'runs').glob('*/report.html'))}")
    if still:
        raise StandstillError(still)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(
    context: typer.Context,
    max_reply: Annotated[int, typer.Option(min=1, help="Most bytes that a site may send in reply to one message.")] = 2
    ** 30,
) -> None:
    """Run Flower's flower-superlink with its options, but accept commands (register a node, run an app) from this
    machine only, and from others no more bytes than they need. Flower's own accepts both from anybody who reaches its
    port.

    Example:

        fedskew deploy superlink --host 0.0.0.0 --port 9092 --enable-supernode-auth ...      (see server/superlink.sh)
    """
    from fedskew.deploy import run_superlink

    run_superlink(context.args, max_reply)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(
    context: typer.Context,
    data: Annotated[
        Path, typer.Argument(help="The site's data.toml, with ca.crt and key beside it.", show_default=False)
    ],
) -> None:
    """Join the federation with Flower's flower-supernode, whose further options it takes.

    A site whose clock the server would refuse, or whose key it no longer accepts, gets a line that says so.

    Example:

        fedskew deploy supernode data.toml --port 9094
    """
    from fedskew.deploy import run_supernode

    run_supernode(data, context.args)


@app.command()
def register(folder: Annotated[Path, FOLDER]) -> None:
    """Register the sites' keys at the server that runs on this machine, those that are not registered yet.

    Example:

        fedskew deploy register hospitals       (as server/register.sh does)
    """
    from fedskew.deploy import Agreement, Registry

    names = Agreement.read(folder / "app" / "deploy.toml").members
    with Registry.of(folder) as registry:
        for line in registry.register(names):
            typer.echo(line)


@app.command()
def revoke(
    folder: Annotated[Path, FOLDER],
    name: Annotated[str, typer.Argument(help="The site.", show_default=False)],
) -> None:
    """Remove a site's key from the server that runs on this machine: the site is out, and can't join with it again.

    Rounds go on without the site. It may come back with another key: put its key.pub into sites/NAME, and run
    register.sh.

    Example:

        fedskew deploy revoke hospitals north
    """
    from fedskew.deploy import Registry

    with Registry.of(folder) as registry:
        Console().say(registry.revoke(name))


@app.command()
def renew(
    folder: Annotated[Path, FOLDER],
    new_authority: Annotated[
        bool, typer.Option("--new-authority", help="Make a new authority, too; every site then needs its ca.crt.")
    ] = False,
    keep_authority: Annotated[
        bool, typer.Option("--keep-authority", help="With --new-authority: keep its key, encrypted.")
    ] = False,
) -> None:
    """Issue the server a new certificate, by the authority whose key was kept (deploy init --keep-authority).

    The old files are kept in server/replaced. Start superlink.sh again afterwards.

    Examples:

        fedskew deploy renew hospitals

        fedskew deploy renew hospitals --new-authority --keep-authority
    """
    from fedskew import deploy
    from fedskew.errors import ConfigError

    server = folder / "server"
    if keep_authority and not new_authority:
        raise ConfigError("--keep-authority: goes with --new-authority; the key of the present one is gone, or is kept")
    asks = keep_authority or not new_authority
    days = deploy.renew(server, (lambda: _passphrase(new=new_authority)) if asks else None, new_authority)
    console = Console()
    console.say(f"{server / 'server.crt'}: valid for {days:.0f} days")
    if new_authority:
        console.say(
            f"send {server / 'ca.crt'} to every site, in the place of its old one, over a channel that nobody else can "
            "change; until a site has it, it can't connect. Keys and registrations stay as they are."
        )
    console.say(f"now start {server / 'superlink.sh'} again")


def _passphrase(new: bool) -> bytes:
    """Ask for the passphrase of the authority's key."""
    from fedskew.errors import ConfigError

    given = os.environ.get(PASSPHRASE)
    if given is None and not sys.stdin.isatty():
        raise ConfigError(f"passphrase: there is no terminal to ask at; set {PASSPHRASE} in the environment")
    if given is None:
        given = typer.prompt("Passphrase of the authority's key", hide_input=True, confirmation_prompt=new)
    if not given:
        raise ConfigError("passphrase: expected at least one character")
    return str(given).encode()


def _names(text: str, option: str) -> list[str]:
    from fedskew.errors import ConfigError

    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option}: expected names separated by commas; got {text!r}")
    return names


def _numbers(text: str) -> list[int]:
    from fedskew.errors import ConfigError

    try:
        return [int(side) for side in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--shape: expected whole numbers separated by commas, such as 3,32,32; got {text!r}"
        ) from None


def _dataset(config: Config) -> Dataset:
    from fedskew.errors import DataError
    from fedskew.experiment import load_dataset

    try:
        return load_dataset(config, config.seeds[0])
    except DataError as error:
        raise DataError(
            f"{error}; where the data is at the sites only, describe it: --classes cat,dog --shape 3,32,32"
        ) from None


def _kind(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of an agreement that describe the samples."""
    import torch

    return {
        "classes": list(dataset.classes),
        "shape": list(dataset.in_shape),
        "tokens": isinstance(dataset.inputs, torch.Tensor) and dataset.inputs.dtype == torch.int64,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
    }


def _print_notes(made: Draft, losses: list[str]) -> None:
    """Print what an operator should know of a new federation: what was filled in, and what a lost site stops."""
    for line in (*made.notes, *losses):
        Console().say(f"note: {line}", style="yellow")


def _images_table(config: Config) -> dict[str, object]:
    """Return the table `[data]` of every site's `data.toml`: images, of the size that the config sets."""
    table: dict[str, object] = {"name": "folder", "root": "images"}
    size = config.data.parameters.get("size") if config.data.name == "folder" else None
    return table if size is None else table | {"size": size}


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that what was started is stopped."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(console: Console, federation: LocalFederation) -> tuple[dict[str, Any], str]:
    """Train and show every round; return the run's summary, and what is to be said of rounds that moved nothing.

    Raises RunError where a process ended early.
    """
    import json

    from fedskew.cli.progress import announced
    from fedskew.errors import DivergedError, EndedEarlyError, RunError, StandstillError
    from fedskew.experiment import RunBar, RunFolder, read, run_folder

    config = read(federation.folder / "app" / "run.toml")
    folder = run_folder(config, federation.folder / "server" / "runs")
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
        kinds: dict[int, type[RunError]] = {
            kind.exit_code: kind for kind in (DivergedError, EndedEarlyError, StandstillError)
        }
        kind = kinds.get(process.returncode, RunError)
        raise kind(f"the run ended early: {federation.last_message('run')}; see {federation.log('run')}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    still = process.returncode == StandstillError.exit_code
    return summary, federation.last_message("run").removeprefix("fedskew: ") if still else ""


def _result(summary: dict[str, Any]) -> str:
    """Return the run's result in one line."""
    final, rounds = summary["headline"], summary["rounds"]
    trained = f"{rounds} round{'' if rounds == 1 else 's'} in {summary['seconds']:.0f} s"
    if final.get("accuracy") is None:
        return (
            f"{trained}; accuracy unknown, as sites that do not report exact label counts report no confusion matrices"
        )
    worst = "" if final["worst_class"] is None else f" (worst class {100 * final['worst_class']:.1f} %)"
    return f"{trained}; accuracy on the sites' own test images {100 * final['accuracy']:.1f} %{worst}"
