"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedskew.errors import ConfigError

ConfigFile = Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key of the config, such as training.lr=0.05; may be repeated."
    ),
]
Seeds = Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")]
Quick = Annotated[bool, typer.Option("--quick", help="Apply the [quick] table of the file: minutes instead of hours.")]
Out = Annotated[Path, typer.Option(help="The folder to write run folders, tables and reports to.")]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Train anew what was made by other code, of other data or by another fedskew; the old run folders are "
        "moved to earlier/.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="How many runs to train at a time.  [default: cores / engine.threads; 1 on a GPU]", show_default=False
    ),
]
Device = Annotated[str | None, typer.Option(help="Where to train: auto, cpu or cuda.")]
DataRoot = Annotated[Path | None, typer.Option(help="The folder of the data sets (otherwise FEDSKEW_DATA).")]


def changed_keys(
    changes: Sequence[str] | None, seeds: str | None, device: str | None, data_root: Path | None
) -> dict[str, Any]:
    """Return the dotted keys and values that `--set`, `--seeds`, `--device` and `--data-root` change.

    Raises:
        ConfigError: One of them can't be read; the message names the option.
    """
    from fedskew.experiment import parse_change

    changed = dict(parse_change(change) for change in changes or [])
    if seeds is not None:
        try:
            changed["seeds"] = [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise ConfigError(f"--seeds {seeds!r}: expected whole numbers separated by commas, such as 0,1,2") from None
    if device is not None:
        changed["engine.device"] = device
    if data_root is not None:
        changed["data.root"] = str(data_root)
    return changed
