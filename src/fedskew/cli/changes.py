"""Options of the command line that change a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError


def changed_keys(
    changes: Sequence[str] | None, seeds: str | None, device: str | None, data_root: Path | None
) -> dict[str, Any]:
    """Dotted keys and values from `--set`, `--seeds`, `--device` and `--data-root`."""
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
