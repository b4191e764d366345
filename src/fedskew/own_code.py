"""Code that a config names as `module:name`: where it is from, found out before any of it runs, and whether it may run.

What a name may stand for, whoever gives it: anything that a file of the user's own defines; of an installed package or
of fedskew an `nn.Module` or a frozen dataclass; of Python's standard library nothing. The rest follows from whose
config it is:

- the user's own: names are imported from Python's search path;
- that of an app that a site only looks at: nothing but fedskew is imported (`refused`);
- that of a run folder, which may be somebody else's: nothing inside it is imported (`of_run`), unless it is trusted.
"""

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal

from fedskew.errors import ConfigError, in_one_line

CODE = "code"
"""Folder of a run folder with the source of the run's own components."""

RUN_FILES = ("identity.json", "rounds.jsonl", "summary.json")
"""Files by one of which a folder with a `config.toml` is known for a run folder."""

SCRIPT = "__main__"

SOURCES = ("timm", "torchvision", "transformers")
"""Packages whose networks a config names as `PACKAGE:NAME`, which is no `module:name`."""

Origin = Literal["standard library", "fedskew", "installed", "own"]
Limit = Callable[[str, Path | None], str | None]

_limits: ContextVar[tuple[Limit, ...]] = ContextVar("_limits", default=())
_trusted: set[Path] = set()
"""The `code` folders that the user trusted in this process; what is in them is imported for their own runs only."""


def is_name(text: str) -> bool:
    """Return whether a text has the form `module:name`."""
    module, separator, attribute = text.partition(":")
    return (
        bool(separator)
        and module not in SOURCES
        and all(part.isidentifier() for part in [*module.split("."), attribute])
    )


def names_in(tree: Any, key: str = "") -> dict[str, str]:
    """Return every `module:name` in a config's tree by its dotted key, whatever that is."""
    if isinstance(tree, Mapping):
        parts = [(part, f"{key}.{name}" if key else str(name)) for name, part in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [(part, f"{key}[{at}]") for at, part in enumerate(tree)]
    else:
        return {key: tree} if isinstance(tree, str) and is_name(tree) else {}
    return {place: name for part, at in parts for place, name in names_in(part, at).items()}


def is_ours(name: str) -> bool:
    """Return whether a `module:name` names something in fedskew."""
    return name.partition(":")[0].partition(".")[0] == "fedskew"


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Import nothing but fedskew for a config's names while the block runs."""
    with _limited(lambda name, file: None if is_ours(name) else reason):
        yield


@contextmanager
def of_run(folder: Path, trust_code: bool) -> Iterator[None]:
    """Import nothing from inside a run folder for a config's names while the block runs, unless it is trusted: then its
    `code/` is importable, after all else, for as long as this process runs."""
    while _is_run(folder.absolute().parent):  # the folder of one seed
        folder = folder.absolute().parent
    brought = sorted(path.resolve() for parts in ("", "seed-*/") for path in folder.glob(f"{parts}{CODE}"))

    def limit(name: str, file: Path | None) -> str | None:
        module = name.partition(":")[0].replace(".", "/")
        there = [place for code in brought for place in (code / f"{module}.py", code / module / "__init__.py")]
        found = next(filter(Path.is_file, there), None) if file is None and module != SCRIPT else file
        inside = file is None or any(file.resolve().is_relative_to(one.resolve()) for one in (folder, *_trusted))
        if is_ours(name) or found is None or not inside:
            return None
        return (
            f"asks for code that came with the run: {name!r} in {found}, which would run as you; read it, and if "
            "you trust it add --trust-code (in Python: trust_code=True)"
        )

    if trust_code or (brought and _trusted.issuperset(brought)):
        _trusted.update(brought)
        sys.path.extend(str(code) for code in brought if str(code) not in sys.path)
        yield
    else:
        with _limited(limit):
            yield


def is_run(config: Path) -> bool:
    """Return whether a config's file is that of a run folder."""
    return config.name == "config.toml" and _is_run(config.parent)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Import from a folder first while the block runs; what was imported from it is forgotten afterwards."""
    place, wrote = os.path.abspath(folder), sys.dont_write_bytecode
    sys.path.insert(0, place)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = wrote
        sys.path[:] = [path for path in sys.path if path != place]
        for name, module in sys.modules.copy().items():  # in one step: a collection may import in the midst of a list
            if (getattr(module, "__file__", None) or "").startswith(place + os.sep):
                del sys.modules[name]


@contextmanager
def away_from_current_folder() -> Iterator[None]:
    """Import nothing from the current folder while the block runs, unless PYTHONPATH names it."""
    before, here = list(sys.path), os.getcwd()
    meant = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    if here not in meant:
        sys.path[:] = [path for path in before if path not in ("", ".", here)]
    try:
        yield
    finally:
        sys.path[:] = before


def load(name: str, where: str) -> Any:
    """Import what a `module:name` stands for.

    Raises:
        ConfigError: It names nothing, can't be imported, or is nothing that a config may name.
    """
    if not is_name(name):
        raise ConfigError(
            f"{where}: {name!r} names nothing; expected module:Class, such as own:Mine for class Mine of own.py"
        )
    module, _, attribute = name.partition(":")
    if origin_of(module) == "standard library":
        raise ConfigError(
            f"{where}: {name!r} is of Python's standard library, which a config can't name; a file of your own needs "
            "a name that no module of Python has"
        )
    for limit in _limits.get():
        if (reason := limit(name, file_of(module))) is not None:
            raise ConfigError(f"{where}: {reason}")
    if module != SCRIPT and ((module not in sys.modules and _spec(module) is None) or module.endswith(f".{SCRIPT}")):
        raise ConfigError(f"{where}: {name!r} can't be imported: No module named {module!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        cure = f"; put it into a file of your own and name that here, as own:{attribute}" if module == SCRIPT else ""
        raise ConfigError(f"{where}: {name!r} can't be imported: {error}{cure}") from None
    except Exception as error:  # whatever its file does
        raise ConfigError(f"{where}: {name!r} can't be imported: {in_one_line(error)}") from error
    if not _may_be_named(found):
        raise ConfigError(
            f"{where}: {name!r} is defined in {_definer(found)}, and a config names what your own files define, and of "
            "installed packages only nn.Module classes and frozen dataclasses; call it in a function of your own"
        )
    return found


def file_of(module: str) -> Path | None:
    """Return the file of a module without importing it, or anything else; None where it has none."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if loaded is None and (spec := _spec(module)) is not None and spec.has_location:
        file = spec.origin
    return None if file is None else Path(file)


def origin_of(module: str) -> Origin:
    """Return whose a module is, without importing it; "own" also where it does not exist, or has no file."""
    if module.partition(".")[0] in {*sys.stdlib_module_names, *sys.builtin_module_names}:
        return "standard library"
    file = file_of(module)
    if module == SCRIPT or file is None:
        return "own"
    path = file.resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return "installed"
    if path.is_relative_to(Path(__file__).resolve().parent):
        return "fedskew"
    return "standard library" if any(path.is_relative_to(place) for place in _standard_library()) else "own"


@contextmanager
def _limited(limit: Limit) -> Iterator[None]:
    token = _limits.set((*_limits.get(), limit))
    try:
        yield
    finally:
        _limits.reset(token)


@cache
def _standard_library() -> tuple[Path, ...]:
    return tuple(Path(place).resolve() for name in ("stdlib", "platstdlib") if (place := sysconfig.get_path(name)))


def _spec(module: str) -> ModuleSpec | None:
    """Find a module as Python would, without importing the packages that it is in."""
    package, search = module.rpartition(".")[0], None
    if package:
        within = sys.modules.get(package) or _spec(package)
        search = getattr(within, "__path__", None) or getattr(within, "submodule_search_locations", None)
        if search is None:
            return None
    for finder in sys.meta_path:
        try:
            spec: ModuleSpec | None = finder.find_spec(module, search, None)
        except (ImportError, ValueError, OSError):
            continue
        if spec is not None:
            return spec
    return None


def _may_be_named(value: Any) -> bool:
    if isinstance(value, type) and (
        _is_network(value) or getattr(vars(value).get("__dataclass_params__"), "frozen", False)
    ):
        return origin_of(value.__module__) != "standard library"
    return origin_of(_definer(value)) == "own"


def _is_network(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.nn.Module)


def _definer(value: Any) -> str:
    """Return the module that defines a class or function, also one that another module has imported."""
    if isinstance(value, partial):
        return _definer(value.func)
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else type(value).__module__


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists() and any((folder / name).exists() for name in RUN_FILES)
