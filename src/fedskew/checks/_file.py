"""The components that a user's own file defines."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from fedskew.errors import ConfigError, FedskewError, in_one_line

FUNCTIONS = {
    "selection": "select",
    "objective": "value",
    "local_step": "step",
    "weighting": "weigh",
    "aggregation": "combine",
    "server_update": "update",
    "finish": "finish",
}
"""By what function a component of a slot is known."""


@dataclass(frozen=True)
class Found:
    """A class of a file that fills a slot.

    Attributes:
        slot: The slot.
        name: Its name in a config, `module:Class`.
        kind: The class.
    """

    slot: str
    name: str
    kind: type


def components_of(path: Path) -> list[Found]:
    """Import a file, and find the components that it defines.

    The file's folder is put in front of Python's search path, so that what it imports from there is found.

    Args:
        path: The Python file.

    Returns:
        The components in the order of the file; a class counts as one if it has the function of a slot.

    Raises:
        ConfigError: There is no such file, or it can't be imported.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{path}: is no Python file; give the one that defines your components, such as own.py")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path.stem)
    except FedskewError as error:
        raise ConfigError(f"{path}: can't be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}: can't be imported: {in_one_line(error)}") from error
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ConfigError(f"{path}: another module is called {path.stem!r} ({module.__file__}); rename the file")
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    return [
        Found(slot, f"{module.__name__}:{kind.__qualname__}", kind)
        for kind in own
        for slot, function in FUNCTIONS.items()
        if callable(getattr(kind, function, None)) and not inspect.isabstract(kind)
    ]
