"""`fedskew deploy`: a real federation, on Flower."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fedskew.data import Dataset
    from fedskew.deploy import Agreement
    from fedskew.deploy._loopback import Loopback
    from fedskew.experiment import Config

app = typer.Typer(
    help="A real federation, on Flower: data on its sites.", no_args_is_help=True, rich_markup_mode="markdown"
)

CONFIG = typer.Option("--config", help="The TOML file that was simulated.", show_default=False)
SET = typer.Option("--set", metavar="KEY=VALUE", help="Change one key of it, such as training.rounds=20.")
COUNTS = typer.Option(help="What sites tell of their labels: exact, noisy, or withheld.")
EPSILON = typer.Option(help="How noisy: the label counts' epsilon, with --label-counts noisy.", show_default=False)
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
    folder: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    config: Annotated[Path, CONFIG],
    sites: Annotated[str, typer.Option(help="The sites' names, such as north,south,west.", show_default=False)],
    address: Annotated[str, typer.Option(help="Where sites reach the server, HOST:PORT.")] = "localhost:9092",
    label_counts: Annotated[str, COUNTS] = "exact",
    epsilon: Annotated[float | None, EPSILON] = None,
    target: Annotated[
        Path | None, typer.Option(help="A CSV file with the target mix, which the server keeps.", show_default=False)
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Class names, such as cat,dog, where the config's data is not here.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of one sample, such as 3,32,32, where the data is not here.")
    ] = None,
    changes: Annotated[list[str] | None, SET] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the data sets are (else FEDSKEW_DATA).")] = None,
) -> None:
    """Write a federation's folder: the app, TLS certificates, and a key, a data file and a start script for every site.

    Class names, the shape of a sample and its normalisation are those of the config's data, where it is here.

    Examples:

        fedskew deploy init hospitals --config run.toml --sites north,south,west --address fl.example.org:9092

        fedskew deploy init shops --config run.toml --sites a,b --classes shoe,hat --shape 3,32,32
    """
    from fedskew.cli.changes import changed_keys
    from fedskew.deploy._folder import Address, write_federation
    from fedskew.errors import ConfigError
    from fedskew.experiment import read

    whole = read(config, changed_keys(changes, None, None, data_root))
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--address: expected HOST:PORT, such as fl.example.org:9092; got {address!r}")
    if (classes is None) != (shape is None):
        raise ConfigError("--classes, --shape: give both, or neither where the config's data is here")
    agreed: dict[str, Any] = {"sites": _names(sites, "--sites"), "label_counts": label_counts, "epsilon": epsilon}
    if classes is not None and shape is not None:
        agreed |= {"classes": _names(classes, "--classes"), "shape": _numbers(shape)}
    else:
        agreed |= _kind(_dataset(whole))
    named = {"name": "folder", "root": "pictures"}
    write_federation(folder, whole, _agreement(agreed), Address(host.strip("[]"), int(port)), named, target)
    Console().print(
        f"{folder}/README.md says who does what; {folder}/sites/NAME goes to that site alone", soft_wrap=True
    )


@app.command()
def site(
    check: Annotated[Path, typer.Option(help="The site's data.toml.", show_default=False)],
    agreement: Annotated[
        Path | None,
        typer.Option(help="The federation's deploy.toml and run.toml are here; beside data.toml if not said."),
    ] = None,
) -> None:
    """Before a site joins: does its data fit the federation, and exactly what will leave it.

    Example:

        fedskew deploy site --check data.toml
    """
    from fedskew.cli.site_tables import held_table, leaving_table
    from fedskew.deploy import leaving, load_site, read_agreement
    from fedskew.experiment import read

    place = agreement or check.parent
    agreed, config = read_agreement(place / "deploy.toml"), read(place / "run.toml")
    data = load_site(check, agreed)
    console = Console()
    console.print(held_table(data, agreed))
    console.print(leaving_table(leaving(config, agreed, data)))


@app.command()
def local(
    folder: Annotated[Path, typer.Argument(help="A new folder for the federation and its run.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A TOML file, whose data is divided among the sites; digits if none."),
    ] = None,
    sites: Annotated[
        int | None, typer.Option(min=1, help="How many; as many as the config has clients if not said.")
    ] = None,
    label_counts: Annotated[str, COUNTS] = "exact",
    epsilon: Annotated[float | None, EPSILON] = None,
    changes: Annotated[list[str] | None, SET] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the data sets are (else FEDSKEW_DATA).")] = None,
) -> None:
    """A whole federation on this machine: writes each site's pictures, starts server and sites with TLS and node keys,
    trains, and stops everything.

    Examples:

        fedskew deploy local trial --sites 3

        fedskew deploy local trial --config run.toml --set training.rounds=3
    """
    from fedskew.cli.changes import changed_keys
    from fedskew.deploy._folder import Address, write_federation
    from fedskew.deploy._loopback import Loopback, free_port
    from fedskew.deploy._shares import write_pictures
    from fedskew.experiment import put, read, resolve
    from fedskew.experiment._setup import make_task

    changed = changed_keys(changes, None, None, data_root)
    if sites is not None:
        changed["partition.clients"] = sites
    if config is not None:
        whole = read(config, changed)
    else:
        tree = deepcopy(LOCAL)
        for key, value in changed.items():
            put(tree, key, value)
        whole = resolve(tree)
    task = make_task(whole, whole.seeds[0])
    width = len(str(len(task.counts) - 1))
    names = [f"site-{place:0{width}d}" for place in range(len(task.counts))]
    agreed = {"sites": names, "label_counts": label_counts, "epsilon": epsilon} | _kind(task.dataset)
    port = free_port()
    write_federation(
        folder, whole, _agreement(agreed), Address("127.0.0.1", port), {"name": "folder", "root": "pictures"}
    )
    shares = task.partition.indices[: len(names)]
    write_pictures(task.dataset, shares, [folder / "sites" / name / "pictures" for name in names])
    console = Console()
    console.print(f"{len(names)} sites, {sum(map(len, shares))} pictures; starting server and sites ...")
    with Loopback(folder, port, tuple(names)) as federation:
        _train(console, federation, whole)
    console.print(f"run, report and models: {folder / 'server' / 'runs'}", soft_wrap=True)


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
    from fedskew.experiment._setup import load_dataset

    try:
        return load_dataset(config, config.seeds[0])
    except DataError as error:
        raise DataError(
            f"{error}; or, where the data is at the sites only, say what it is: --classes cat,dog --shape 3,32,32"
        ) from None


def _kind(dataset: Dataset) -> dict[str, Any]:
    """What an agreement says of the samples."""
    import torch

    return {
        "classes": list(dataset.classes),
        "shape": list(dataset.in_shape),
        "tokens": isinstance(dataset.inputs, torch.Tensor) and dataset.inputs.dtype == torch.int64,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
    }


def _agreement(tree: dict[str, Any]) -> Agreement:
    from fedskew.deploy._agreement import agree

    return agree({key: value for key, value in tree.items() if value is not None})


def _train(console: Console, federation: Loopback, config: Config) -> None:
    """The rounds of a run as they come. Raises RunError where it, the server or a site ended early."""
    from fedskew.cli.progress import Watch
    from fedskew.cli.tables import percent
    from fedskew.experiment import read_runs, run_folder
    from fedskew.experiment._folder import whole_lines

    process = federation.run()
    folder = run_folder(config, federation.folder / "server" / "runs")
    seen = 0
    with Watch(console, [config]) as watch:
        listen = watch.start(config)
        while True:
            over = process.poll() is not None
            records = whole_lines(folder / "rounds.jsonl")
            for record in records[seen:]:
                listen(record)
            seen = len(records)
            if over:
                break
            time.sleep(0.5)
    federation.wait("run", process, 1.0)
    (run,) = read_runs(folder)
    last = run.summary["last10"]
    console.print(f"accuracy on the sites' test samples, mean of the last rounds: {percent(last['accuracy'])} %")
