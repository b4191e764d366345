"""`fedskew deploy`: a real federation on Flower."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.console import Console
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.data import Dataset
    from fedskew.deploy import Agreement, Lie, LocalFederation
    from fedskew.experiment import Config
    from fedskew.sums import Key

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


WEIGHT_LIMIT = 0.5
"""The most that one of three sites or more may count for, where the config does not say."""


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
    changes: Annotated[list[str] | None, SET] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; default: FEDSKEW_DATA.")] = None,
) -> None:
    """Write a federation's folder: the app, TLS certificates, and a key, a data file and a start script for every site.

    Class names, the shape of a sample and its normalisation are taken from the config's data, or given by --classes and
    --shape where the data is not on this machine. With three sites or more, no site's update may count for more than
    half (training.weight_limit), unless the config says otherwise.

    With --updates masked every site also gets a key of its own by which its updates are masked; the public halves
    stand in deploy.toml. A site that trusts nobody with its key makes it itself (docs/deploy.md).

    Examples:

        fedskew deploy init hospitals --config run.toml --sites north,south,west --address fl.example.org:9092

        fedskew deploy init hospitals --config run.toml --sites north,south,west --updates masked --label-counts noisy
        --epsilon 1

        fedskew deploy init shops --config run.toml --sites a,b --classes shoe,hat --shape 3,32,32

        fedskew deploy init clinics --config run.toml --sites north,south --target-site new --set target.mix=estimate
    """
    _require_flower()
    from fedskew.cli.options import changed_keys
    from fedskew.deploy import Address, write_federation
    from fedskew.errors import ConfigError
    from fedskew.experiment import read

    place = Address.parse(address)
    secret = _passphrase(new=True) if keep_authority else None
    whole = read(config, changed_keys(changes, None, None, data_root))
    if (classes is None) != (shape is None):
        raise ConfigError("--classes, --shape: give both, or neither where the config's data is on this machine")
    agreed: dict[str, Any] = {
        "sites": _names(sites, "--sites"),
        "label_counts": label_counts,
        "epsilon": epsilon,
        "target_site": target_site,
    }
    if classes is not None and shape is not None:
        agreed |= {"classes": _names(classes, "--classes"), "shape": _numbers(shape)}
    else:
        agreed |= _kind(_dataset(whole))
    keys = _mask_keys(_updates(updates, label_counts, whole), agreed)
    if keys is not None:
        whole = whole.with_value("engine.updates", "masked")  # so that the same config simulates the same
    if label_counts == "summed":
        whole = whole.with_value("engine.label_counts", "summed")
    if len(agreed["sites"]) >= 3 and whole.training.weight_limit is None:
        whole = whole.with_value("training.weight_limit", WEIGHT_LIMIT)
    if whole.privacy is not None and label_counts == "exact":
        agreed["evaluation"] = "none"
        Console().print(
            "evaluation = 'none' is written to deploy.toml, as confusion matrices would have no noise; change it to "
            "'confusion' before sites agree, if sums of these may be known",
            soft_wrap=True,
            highlight=False,
        )
    write_federation(folder, whole, _agreement(agreed), place, _images_table(whole), target, secret, keys)
    Console().print(
        f"{folder}/README.md says who does what; send {folder}/sites/NAME to that site alone", soft_wrap=True
    )


@app.command("check")
def check_federation(folder: Annotated[Path, FOLDER]) -> None:
    """Check a federation's folder before it runs: that server and sites can play its config, what bounds a site that
    lies, and how much weight a lie about its own label counts gains it under this method.

    The label counts are those of the newest run, where there is one, else an example.

    Example:

        fedskew deploy check hospitals
    """
    from fedskew.cli.tables import lies_table
    from fedskew.deploy import (
        attempts_in_words,
        check_config,
        check_target_file,
        noise_in_words,
        read_agreement,
        target_site_in_words,
    )
    from fedskew.experiment import read
    from fedskew.labels import read_target

    config, agreed = read(folder / "app" / "run.toml"), read_agreement(folder / "app" / "deploy.toml")
    target = folder / "server" / "target.csv"
    mix = read_target(target, agreed.classes) if target.exists() else None
    check_config(config, agreed, has_target=mix is not None)
    check_target_file(config, target if target.exists() else None)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{folder}: can be played, by {counted(len(agreed.sites), 'site')}", markup=False)
    limit = config.training.weight_limit
    whose = "a site" if agreed.updates == "plain" else "an honest site"
    for line in (
        f"updates = masked: the server sees sums over {agreed.sum_sites} sites at least, so that nothing bounds "
        "what a site that lies sends"
        if agreed.updates == "masked"
        else f"norm_limit = {agreed.norm_limit:g}, norm_action = {agreed.norm_action}: what is so many times as large "
        f"as is likely is {'left out' if agreed.norm_action == 'leave_out' else 'counted, and only reported'}",
        "training.weight_limit: none; one site may have all of the weight"
        if limit is None
        else f"training.weight_limit = {limit:g}: the largest share of the weight that {whose} can have",
        f"method.aggregation: {config.method.get('aggregation', {'name': 'mean'})['name']}",
        *attempts_in_words(config, agreed),
        *noise_in_words(config),
        *target_site_in_words(config, agreed),
    ):
        console.print(line, markup=False)
    console.print(lies_table(*_lies_of(folder, config, agreed, mix)), soft_wrap=False)


@app.command()
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

    What you agree to is written to agreed.toml beside data.toml, with the hash of the app's files. The site refuses
    whatever goes beyond it, whatever the server sends. Do this again when the server changes its app, when the site has
    trained in all rounds that were agreed on, or, with noisy label counts, when the site's data changed.

    Examples:

        fedskew deploy site --check data.toml

        fedskew deploy site --check data.toml --agree
    """
    from fedskew.cli.tables import disclosure_table, samples_table, terms_table
    from fedskew.deploy import (
        accept_terms,
        app_changes,
        app_hash,
        attempts_in_words,
        disclosures,
        key_fingerprint,
        load_site,
        other_code,
        propose_terms,
        read_agreement,
        read_app,
        read_mask_key,
        read_terms,
        standing_app,
        take_offered,
        terms_path,
    )
    from fedskew.errors import ConfigError
    from fedskew.experiment import read

    if not check.is_file():
        raise ConfigError(f"{check}: there is no such file; every site's folder has a data.toml")
    place = agreement or standing_app(check.parent)
    files = read_app(place)
    agreed, config = read_agreement(place / "deploy.toml"), read(place / "run.toml")
    data, path = load_site(check, agreed), terms_path(check)
    before = read_terms(path) if path.exists() else None
    terms = propose_terms(app_hash(files), config, agreed, data, before)
    console, copy = Console(highlight=False), check.parent / "app"
    _print_server_check(console, check)
    if not data.is_unlabelled:
        console.print(samples_table(data, agreed))
    if data.unlabelled is not None:
        samples = counted(len(data.unlabelled()), "sample")
        others = "; it has no others, and does not train" if data.is_unlabelled else ""
        console.print(f"As the target site this site has {samples} without labels{others}", soft_wrap=True)
    console.print(disclosure_table(disclosures(config, agreed, data), agreed))
    noise = None if config.privacy is None else config.privacy.noise
    console.print(terms_table(terms, data, agreed.classes, before, other_code(files), noise))
    lines = []
    if agreed.updates == "masked":
        name, _ = read_mask_key(check, agreed.keys)
        lines += [
            f"Updates are masked among {', '.join(agreed.names)}: a sum is over {agreed.sum_sites} of these or more.",
            *attempts_in_words(config, agreed),
            f"Their keys are {key_fingerprint(agreed.keys)}: compare this with the other sites, by telephone. Where "
            "it differs, somebody was given another's key.",
            f"It masks with {check.with_name('mask.key')}, whose public half deploy.toml has for {name}. Whoever has "
            "the private half, as who ran deploy init may, can open what this site masks; docs/deploy.md says how to "
            "make another.",
        ]
    sent = place.name == "offered" and agreement is None
    known = "the server sent it last, and has not been allowed to run it" if sent else "the server has sent no other"
    lines += [
        f"The app is that in {place}{'' if agreement else f' ({known})'}. Agreed to, it is the only one that this site "
        "runs: the hash of its files is compared."
    ]
    if before is not None and before.app != terms.app and copy.is_dir():
        lines += [f"changed since {before.agreed}: {line}" for line in app_changes(read_app(copy), files)]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if before is not None and before == terms.model_copy(update={"agreed": before.agreed}) and not agree:
        result = f"this site agreed to this at {before.agreed}; --agree renews it, and counts rounds anew"
    elif agree or (asks and typer.confirm(f"Agree, and write {path}?")):
        accept_terms(terms, check, data.state, before)
        if agreement is None:
            take_offered(check.parent)
        result = "agreed; the site refuses whatever goes beyond it"
    else:
        result = "nothing is written; if you agree, run this again with --agree"
    console.print(f"{path}: {result}", soft_wrap=True, markup=False)


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
    _require_flower()
    from fedskew.cli.options import changed_keys
    from fedskew.deploy import (
        Address,
        LocalFederation,
        agree,
        free_port,
        site_names,
        write_federation,
        write_images,
    )
    from fedskew.errors import ConfigError
    from fedskew.experiment import make_task, put, read, resolve

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
    agreed = {"sites": names, "label_counts": label_counts, "epsilon": epsilon} | _kind(task.dataset)
    keys = _mask_keys(_updates(updates, label_counts, whole), agreed)
    if keys is not None:
        whole = whole.with_value("engine.updates", "masked")
        if whole.training.weight_limit is None:
            whole = whole.with_value("training.weight_limit", WEIGHT_LIMIT)
    if label_counts == "summed":
        whole = whole.with_value("engine.label_counts", "summed")
    port = free_port()
    shares = task.partition.indices[: len(names)]
    address, images = Address("127.0.0.1", port), _images_table(whole)
    write_federation(folder, whole, _agreement(agreed), address, images, mask_keys=keys)
    write_images(task.dataset, shares, [folder / "sites" / name / "images" for name in names])
    for name in names:
        agree(folder / "sites" / name / "data.toml", folder / "app")
    console = Console(soft_wrap=True, highlight=False)
    there = counted(sum(map(len, shares)), "image")
    console.print(f"{counted(len(names), 'site')} with {there} to train on, in {folder / 'sites'}")
    try:
        with _stopped_by_signals(), LocalFederation(folder, port, tuple(names)) as federation:
            console.print(f"server and sites are running, with TLS and node keys; logs: {folder / 'logs'}")
            summary = _train(console, federation)
    except KeyboardInterrupt:
        console.print(f"stopped, server and sites too; what was trained is in {folder}")
        raise typer.Exit(130) from None
    console.print(_result(summary))
    console.print(f"report: {next((folder / 'server' / 'runs').glob('*/report.html'))}")


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
    _require_flower()
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
    _require_flower()
    from fedskew.deploy import run_supernode

    run_supernode(data, context.args)


@app.command()
def register(folder: Annotated[Path, FOLDER]) -> None:
    """Register the sites' keys at the server that runs on this machine, those that are not registered yet.

    Example:

        fedskew deploy register hospitals       (as server/register.sh does)
    """
    _require_flower()
    from fedskew.deploy import control, read_agreement
    from fedskew.deploy import register as register_keys

    names = read_agreement(folder / "app" / "deploy.toml").members
    with control(folder) as client:
        for line in register_keys(client, folder, names):
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
    _require_flower()
    from fedskew.deploy import control
    from fedskew.deploy import revoke as revoke_key

    with control(folder) as client:
        Console(soft_wrap=True).print(revoke_key(client, folder, name), markup=False, highlight=False)


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
    _require_flower()
    from fedskew.deploy import days_left, renew_authority, renew_certificate
    from fedskew.errors import ConfigError

    server = folder / "server"
    if keep_authority and not new_authority:
        raise ConfigError("--keep-authority: goes with --new-authority; the key of the present one is gone, or is kept")
    if not new_authority and not (server / "ca.key").exists():
        raise ConfigError(
            f"{server / 'ca.key'}: is not there: the authority's key was not kept, so a new certificate needs a new "
            "authority, and a new ca.crt at every site: --new-authority"
        )
    if new_authority:
        renew_authority(server, _passphrase(new=True) if keep_authority else None)
    else:
        renew_certificate(server, _passphrase(new=False))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{server / 'server.crt'}: valid for {days_left(server / 'server.crt'):.0f} days")
    if new_authority:
        console.print(
            f"send {server / 'ca.crt'} to every site, in the place of its old one, over a channel that nobody else can "
            "change; until a site has it, it can't connect. Keys and registrations stay as they are."
        )
    console.print(f"now start {server / 'superlink.sh'} again")


def _passphrase(new: bool) -> bytes:
    """Ask for the passphrase of the authority's key."""
    from fedskew.errors import ConfigError

    given = os.environ.get(PASSPHRASE)
    if given is None:
        given = typer.prompt("Passphrase of the authority's key", hide_input=True, confirmation_prompt=new)
    if not given:
        raise ConfigError("passphrase: expected at least one character")
    return str(given).encode()


def _lies_of(folder: Path, config: Config, agreed: Agreement, mix: Any) -> tuple[Sequence[Lie], str]:
    """Return what lies gain in a federation, and whose label counts they were worked out with."""
    import json

    import numpy as np

    from fedskew import methods
    from fedskew.deploy import example_counts, lies
    from fedskew.experiment import target_mix

    classes, training = len(agreed.classes), config.training
    runs = sorted((folder / "server" / "runs").glob("*/deployment.json"), key=lambda path: path.stat().st_mtime)
    counts, whose = example_counts(len(agreed.sites), classes), "made-up label counts"
    if runs and agreed.label_counts in ("exact", "noisy"):
        counts = np.array(json.loads(runs[-1].read_text(encoding="utf-8"))["label_counts"], dtype=np.float64)
        whose = f"the label counts of {runs[-1].parent.name}"
    if mix is None and config.target.is_estimated:
        mix, whose = (
            np.full(classes, 1 / classes),
            f"{whose}, and a target of equal shares, as nobody knows its mix yet",
        )
    elif mix is None:
        mix = target_mix(config.target.mix, classes, {"pooled": counts.sum(axis=0)}, {})
    method = methods.build(config.method, training.momentum)
    return lies(method, counts, mix, training.participation, training.weight_limit), whose


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


def _agreement(tree: dict[str, Any]) -> Agreement:
    from fedskew.deploy import Agreement

    return Agreement.resolve({key: value for key, value in tree.items() if value is not None})


def _updates(given: str | None, label_counts: str, config: Config) -> str:
    """Return how updates are sent: as given; else masked where label counts are summed; else as the config says."""
    return given or ("masked" if label_counts == "summed" else config.engine.updates)


def _mask_keys(updates: str, agreed: dict[str, Any]) -> dict[str, Key] | None:
    """Make a key of masked sums for each site, and add the public halves to an agreement's tree; None without masks."""
    from fedskew.deploy import key_line
    from fedskew.sums import Key

    agreed["updates"] = updates
    if updates != "masked":
        return None
    keys = {name: Key.generate() for name in agreed["sites"]}
    agreed["keys"] = {name: key_line(key.public) for name, key in keys.items()}
    return keys


def _images_table(config: Config) -> dict[str, object]:
    """Return the table `[data]` of every site's `data.toml`: images, of the size that the config sets."""
    table: dict[str, object] = {"name": "folder", "root": "images"}
    size = config.data.parameters.get("size") if config.data.name == "folder" else None
    return table if size is None else table | {"size": size}


def _require_flower() -> None:
    """Raise MissingPackageError unless Flower is installed."""
    from importlib.util import find_spec

    from fedskew.errors import MissingPackageError

    if find_spec("flwr") is None:
        raise MissingPackageError("Flower is not installed: pip install 'fedskew[flower]'")


def _print_server_check(console: Console, data: Path) -> None:
    """Print what is to be said of the server that a site names; raise RunError where it would refuse the site."""
    from fedskew.deploy import UnreachableError, check_server, server_of
    from fedskew.errors import RunError

    server = server_of(data)
    try:
        found = check_server(server, data.parent / "ca.crt")
    except UnreachableError as error:
        console.print(f"note: {error}; run this again when the server runs, to compare clocks", style="yellow")
        return
    if (refusal := found.refusal()) is not None:
        raise RunError(refusal)
    for note in found.notes():
        console.print(f"note: {note}", style="yellow")


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


def _train(console: Console, federation: LocalFederation) -> dict[str, Any]:
    """Train and show every round; return the run's summary. Raises RunError where a process ended early."""
    import json

    from fedskew.cli.progress import RunProgressBar
    from fedskew.errors import DivergedError, EndedEarlyError, RunError
    from fedskew.experiment import read, read_records, run_folder

    config = read(federation.folder / "app" / "run.toml")
    folder = run_folder(config, federation.folder / "server" / "runs")
    process = federation.run()
    seen, warned = 0, 0
    with RunProgressBar(console, [config]) as watch:
        listen = watch.start(config)
        while True:
            ended = process.poll() is not None
            records = read_records(folder / "rounds.jsonl")
            for record in records[seen:]:
                listen(record.to_dict())
            seen = len(records)
            warnings = federation.warnings("run")
            for warning in warnings[warned:]:
                console.print(warning, style="yellow", markup=False)
            warned = len(warnings)
            if ended:
                break
            federation.check()
            time.sleep(0.5)
    if not (folder / "summary.json").exists():
        kinds: dict[int, type[RunError]] = {kind.exit_code: kind for kind in (DivergedError, EndedEarlyError)}
        kind = kinds.get(process.returncode, RunError)
        raise kind(f"the run ended early: {federation.last_message('run')}; see {federation.log('run')}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _result(summary: dict[str, Any]) -> str:
    """Return the run's result in one line."""
    final, rounds = summary["final"], summary["rounds"]
    trained = f"{rounds} round{'' if rounds == 1 else 's'} in {summary['seconds']:.0f} s"
    if final is None or final["accuracy"] is None:
        return (
            f"{trained}; accuracy unknown, as sites that do not report exact label counts report no confusion matrices"
        )
    worst = "" if final["worst_class"] is None else f" (worst class {100 * final['worst_class']:.1f} %)"
    return f"{trained}; accuracy on the sites' own test images {100 * final['accuracy']:.1f} %{worst}"
