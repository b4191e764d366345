"""What is the user's own in a config: names for objects that were given from Python, and the source of all of it.

Own is what a config names as `module:attribute`, the classes and functions of what is given as an object, and every
module that these import, directly or not, that is not installed: neither Python's own, nor in site-packages, nor
fedskew's. Of a module, the whole file counts. Of a script or a notebook (`__main__`), only the definitions that the
named ones use: the rest is what calls fedskew.
"""

import ast
import dataclasses
import hashlib
import linecache
import re
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedskew import components, data, methods, models
from fedskew.components import given_in
from fedskew.errors import ConfigError, DataWarning
from fedskew.own_code import SCRIPT, file_of, names_in, origin_of
from fedskew.parameters import plain as plain_number

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_DEEP = 8  # objects inside objects


def with_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's tree with names in place of classes, functions, networks and data given from Python."""
    plain = {key: _plain(dict(value)) if _is_table(value) else _plain(value) for key, value in tree.items()}
    for section, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        table = plain.get(section)
        if section in tree and not _is_table(table):
            table = plain[section] = {key: table}
        if isinstance(table, dict) and table.get(key) is not None and not isinstance(table[key], str):
            plain[section] = _with_name(section, key, table)
    if isinstance(method := plain.get("method"), str):
        plain["method"] = {"preset": method}
    elif dataclasses.is_dataclass(method):
        filled = {place: getattr(method, place) for place in methods.PLACES}
        plain["method"] = {place: component for place, component in filled.items() if component is not None}
    if isinstance(plain.get("seeds"), int):
        plain["seeds"] = [plain["seeds"]]
    return plain


def _plain(value: Any) -> Any:
    """Return a value as TOML has it: Python's numbers for NumPy's, a list for a tuple, a range or an array."""
    value = list(value) if isinstance(value, tuple | range) and not hasattr(value, "_fields") else value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if type(value) is list else plain_number(value)


def _is_table(value: Any) -> bool:
    """Return whether it is a table of a config; a `DatasetDict` of the package `datasets` is a mapping too."""
    return isinstance(value, Mapping) and type(value).__module__.partition(".")[0] != "datasets"


def _with_name(section: str, key: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with a name in place of an object, and of a test part that is one."""
    value = table[key]
    if isinstance(value, type | FunctionType) and value.__qualname__.isidentifier():
        return table | {key: components.name_of(value, f"{section}.{key}")}
    if section == "model":
        return table | {key: _network_name(value)}
    if section == "partition" or isinstance(value, bool | int | float):
        return table if not callable(value) else table | {key: components.name_of(value, f"{section}.{key}")}
    if isinstance(value, type | FunctionType):
        return table | {key: components.keep(value, value.__name__.strip("<>"), _digest_of_code(value))}
    given = data.from_object(value, table.get("test"))
    return {name: part for name, part in table.items() if name != "test"} | {
        key: components.keep(given.read, given.label, given.digest)
    }


def _network_name(value: Any) -> str:
    """Name an `nn.Module`, whose weights every seed starts from, or a function that makes one."""
    if isinstance(value, nn.Module):
        label = type(value).__name__
        try:
            kept = models.copied(value).cpu()
        except Exception as error:
            raise ConfigError(f"model.name: {label} can't be copied: {error}; give a function that makes it") from None
        return components.keep(partial(models.copied, kept), label, _digest_of_network(kept))
    if callable(value):
        label = getattr(value, "__name__", type(value).__name__).strip("<>")
        return components.keep(value, label, _digest_of_code(value))
    raise ConfigError(
        f"model.name: {type(value).__name__} {value!r} is no network; give a name, an nn.Module, or a function that "
        "makes one"
    )


def _digest_of_code(function: Callable[..., Any]) -> str:
    """Hex digits that change with a function's or class's code, and with what it has closed over."""
    return hashlib.sha256("\n".join(_parts(function)).encode()).hexdigest()[:8]


def _parts(value: Any, around: tuple[int, ...] = ()) -> list[str]:
    def text(part: Any) -> str:
        return _text(part, around)

    if isinstance(value, partial):
        return [*_parts(value.func, around), text(value.args), text(value.keywords)]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__, around), text(value.__self__)]
    if isinstance(value, staticmethod | classmethod):
        return _parts(value.__func__, around)
    if isinstance(value, type):
        functions = [one for one in vars(value).values() if callable(one)]
        return [value.__qualname__, *(part for one in functions for part in _parts(one, around))]
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = [text(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
        nested = [constant.co_code.hex() for constant in code.co_consts if hasattr(constant, "co_code")]
        return [value.__qualname__, code.co_code.hex(), str(code.co_names), *inner, *nested, *map(text, cells),
                text(value.__defaults__), text(value.__kwdefaults__)]  # fmt: skip
    return [text(value)]


def _text(value: Any, around: tuple[int, ...] = ()) -> str:
    """Describe a value inside others, the same in every process: like its repr, but sorted and without an address."""
    if id(value) in around or len(around) > _DEEP:
        return type(value).__qualname__
    inside = (*around, id(value))
    if isinstance(value, nn.Module):
        return _digest_of_network(value, inside)
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
    if type(value) in (set, frozenset, list, tuple, dict):
        parts = [_text(one, inside) for one in (chain(*value.items()) if type(value) is dict else value)]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)})"
    if isinstance(value, partial | staticmethod | classmethod | type | FunctionType | MethodType):
        return "\n".join(_parts(value, inside))
    if not (found := _ADDRESS.search(text := repr(value))):
        return text
    if state := getattr(value, "__dict__", None):
        return f"{type(value).__qualname__}{_text(dict(state), inside)}"
    warnings.warn(
        f"what {text[: found.start()]}...> holds can't be told: networks and functions that differ in it alone have "
        "one name, and one run folder; give what differs as plain values",
        DataWarning,
        stacklevel=2,
    )
    return _ADDRESS.sub("", text)


def _digest_of_network(module: nn.Module, around: tuple[int, ...] = ()) -> str:
    """Hex digits that change with a network's layers, its hooks, and the values of its tensors."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if not is_lazy(value):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    for hooked in models.hooks_of(module):
        digest.update(_text(hooked, around).encode())
    return digest.hexdigest()[:8]


def own_sources(tree: Any) -> dict[str, str]:
    """Return the source of what a config names, by file name as in a folder of sys.path (`package/module.py`)."""
    named = {name.partition(":")[::2] for name in names_in(tree).values()}
    found: dict[str, str] = {}
    modules = {module for module, _ in named if module in sys.modules and module != SCRIPT}
    tops = frozenset(module.partition(".")[0] for module in modules)
    used = set().union(*map(_used, given_in(tree)))
    modules |= {module for module, _ in used if module in sys.modules and module != SCRIPT}
    if script := {attribute for module, attribute in named | used if module == SCRIPT}:
        found["__main__.py"], imported = _of_script(script)
        modules |= imported
    waiting = list(modules)
    seen = set(modules)
    while waiting:
        module = waiting.pop()
        path = _file(module, tops)
        if path is None:
            continue
        text = _read(path)
        found[_place(module, path)] = text
        new = set(_imports(text, module, path.name == "__init__.py")) - seen
        seen |= new
        waiting += new
    return found


def _used(value: Any) -> set[tuple[str, str]]:
    """Return module and name of the classes and functions that an object given from Python is made of."""
    if isinstance(value, partial):
        return set().union(*map(_used, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, nn.Module):
        return set().union(*(_used(kind) for kind in {type(layer) for layer in value.modules()}))
    if not isinstance(value, type | FunctionType):
        return set()
    if isinstance(value, FunctionType) and value.__module__ == SCRIPT and not value.__qualname__.isidentifier():
        cells = [cell.cell_contents for cell in value.__closure__ or ()]  # of a lambda or a function inside another
        return {(SCRIPT, name) for name in _globals_of(value.__code__)}.union(*map(_used, cells))
    return {(value.__module__, value.__qualname__.partition(".")[0])}


def _globals_of(code: CodeType) -> set[str]:
    """Return the names that a function, and what is defined inside it, looks up outside."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_globals_of, inner))


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files that differ by more than comments and layout, or that only one side has."""
    differ = (name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return sorted(name for name in differ if _meaning(before.get(name)) != _meaning(now.get(name)))


def _meaning(text: str | None) -> str | None:
    with suppress(SyntaxError, ValueError):
        return None if text is None else ast.dump(ast.parse(text))
    return text


def _read(path: Path) -> str:
    with suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
        return file.read()
    return ""


def _place(module: str, path: Path) -> str:
    place = module.replace(".", "/")
    return f"{place}/__init__.py" if path.name == "__init__.py" else f"{place}.py"


def _file(module: str, tops: frozenset[str]) -> Path | None:
    """Return the Python file of a module that is the user's own or of `tops`; else None."""
    if origin_of(module) != "own" and module.partition(".")[0] not in tops - {"fedskew"}:
        return None
    path = file_of(module)
    return path if path is not None and path.suffix == ".py" else None


def _imports(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Names of the modules that a module's source may import, at its top or inside a function."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return
    package = module if is_package else module.rpartition(".")[0]
    for node in nodes:
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            whole = ".".join(filter(None, [base, node.module]))
            names = [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _of_script(names: Iterable[str]) -> tuple[str, set[str]]:
    """Return the definitions of `__main__` that these names use, and the modules that they come from or use."""
    script, found, modules, waiting = vars(sys.modules[SCRIPT]), dict[str, str](), set[str](), sorted(names)
    while waiting:
        name = waiting.pop()
        if name in found or name not in script:
            continue
        value = script[name]
        if isinstance(value, ModuleType):
            modules.add(value.__name__)
            continue
        elsewhere = hasattr(value, "__qualname__") and value.__module__ not in (None, SCRIPT)
        if elsewhere:
            modules.add(str(value.__module__))
        found[name] = text = _definition(name, value, [] if elsewhere else _files_of(value))
        waiting += [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return "\n\n".join(filter(None, (found[name] for name in sorted(found)))) + "\n", modules


def _definition(name: str, value: Any, files: Iterable[str]) -> str:
    """Return what a script or a notebook's newest cell that binds a name binds it to; of a plain value, what it is."""
    if _is_plain(value):
        return f"{name} = {value!r}"
    main = getattr(sys.modules[SCRIPT], "__file__", None)
    for file in [*files, *([main] if main else _cells())]:
        try:
            statements = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):
            continue
        if found := [ast.unparse(node) for node in _statements(statements) if name in _bound(node)]:
            return "\n".join(found)
    return ""


def _cells() -> list[str]:
    """Return what linecache calls a notebook's cells, newest first: they are in no file, so they have no time."""
    return [name for name, entry in reversed(linecache.cache.items()) if len(entry) > 1 and entry[1] is None]


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, str, bool)


def _files_of(value: Any) -> list[str]:
    """Return where a class's or a function's own code is from."""
    codes = [value, *vars(value).values()] if isinstance(value, type) else [value]
    found = [code.co_filename for code in (getattr(each, "__code__", None) for each in codes) if code is not None]
    return list(dict.fromkeys(found))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements outside of functions and classes, those inside an `if` or a loop included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from _statements(child)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines or assigns to, also where it changes an element or an attribute."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    kinds = ast.Assign | ast.AnnAssign | ast.AugAssign
    parts = [part for target in targets if target is not None for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)} if isinstance(node, kinds) else set()
