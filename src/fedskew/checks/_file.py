"""The components that a user's own file defines."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from fedskew import methods
from fedskew.errors import ConfigError, FedskewError, in_one_line


@dataclass(frozen=True)
class FoundComponent:
    """A component that a file defines.

    Attributes:
        name: Its name in a config, `module:Class`.
    """

    slot: str
    name: str
    kind: type

    @staticmethod
    def in_file(path: Path) -> list[FoundComponent]:
        """Import a file, and return the components that it defines: classes that have the main function of a slot.

        The file's folder is put in front of Python's search path, so that the file can import its neighbours.
        """
        if path.suffix != ".py" or not path.is_file():
            raise ConfigError(f"{path}: is no Python file; give the file that defines your components, such as own.py")
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
            FoundComponent(slot, f"{module.__name__}:{kind.__qualname__}", kind)
            for kind in own
            for slot in (*methods.SLOTS, "finish")
            if methods.fills(slot, kind) and not inspect.isabstract(kind)
        ]
