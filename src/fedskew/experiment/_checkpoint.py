"""The server's state on disk: one safetensors file, replaced whole.

A state is a tree of frozen dataclasses, named tuples, tensors, arrays and plain values. Tensors and arrays become
tensors of the file, plain values a JSON text in its header.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.errors import ComponentError, RunError
from fedskew.files import load_tensors, read_notes, save_tensors, writing

FILE = "checkpoint/state.safetensors"


class Mark(NamedTuple):
    """How far `rounds.jsonl` was when a round was over.

    Attributes:
        size: Its length in bytes.
        checksum: Its content's checksum.
    """

    size: int
    checksum: str


def save(folder: Path, state: Any, records: Mark) -> None:
    """Replace the folder's checkpoint by a state, of the round that `rounds.jsonl` had reached at a mark.

    Args:
        folder: The run folder.
        state: The server's state.
        records: The mark.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    _flatten("", state, tensors, values)
    path = folder / FILE
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    save_tensors(path, tensors, {"values": json.dumps(values), "records": json.dumps(records)})


def load(folder: Path, template: Any) -> tuple[Any, Mark] | None:
    """Read the folder's checkpoint in the shape of a template, on its devices.

    Args:
        folder: The run folder.
        template: A state of the same method, such as the first one.

    Returns:
        The state and its mark; None if there is no checkpoint yet.

    Raises:
        RunError: The file is damaged, or of another method.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        tensors, notes = load_tensors(path)
        state = _restore("", template, tensors, json.loads(notes["values"]))
        return state, Mark(*json.loads(notes["records"]))
    except (RunError, KeyError, ValueError, TypeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RunError(
            f"{path}: the checkpoint can't be read ({said}); start over with --fresh, which keeps the old folder"
        ) from None


def mark(folder: Path) -> Mark | None:
    """Read how far `rounds.jsonl` was at the folder's checkpoint.

    Args:
        folder: The run folder.

    Returns:
        The mark; None if there is no checkpoint.

    Raises:
        RunError: The file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return Mark(*json.loads(read_notes(path)["records"]))
    except (RunError, KeyError, ValueError, TypeError) as error:
        raise RunError(f"{path}: the checkpoint can't be read ({error})") from None


def _flatten(name: str, value: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())  # safetensors writes no memory twice
    elif (parts := _parts(value)) is not None:
        for key, part in parts.items():
            _flatten(f"{name}.{key}" if name else key, part, tensors, values)
    elif _is_plain(value):
        values[name] = value
    else:
        raise ComponentError(
            f"{name} in the run's state is a {type(value).__name__} that can't be saved; what a component keeps "
            "between rounds is a frozen dataclass of tensors, arrays and plain values, or None"
        )


def _is_plain(value: Any) -> bool:
    """Return whether JSON holds it."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _restore(name: str, template: Any, tensors: dict[str, Tensor], values: dict[str, Any]) -> Any:
    if isinstance(template, Tensor):
        return tensors[name].to(template.device)
    if isinstance(template, np.ndarray):
        return tensors[name].numpy()
    if (parts := _parts(template)) is not None:
        made = {key: _restore(f"{name}.{key}" if name else key, part, tensors, values) for key, part in parts.items()}
        return made if isinstance(template, dict) else type(template)(**made)
    return values[name]


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the named parts of a dataclass, a named tuple or a dict; None for a leaf."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts: dict[str, Any] = value._asdict()
        return parts
    return value if isinstance(value, dict) else None
