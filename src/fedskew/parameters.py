"""Hyper-parameters of components: their ranges stand in their types, and are checked wherever a component is made.

    @component
    class FedProx:
        mu: NonNegative = 0.01

    FedProx(mu=-1)      # ArgumentError: mu: input should be greater than or equal to 0 (got -1)

The same types check a config, where the error names the key in the file instead.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar, dataclass_transform, get_args, get_type_hints

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from fedskew.errors import ArgumentError, ConfigError, FedskewError, nearest

Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
PositiveShare = Annotated[float, Field(gt=0, le=1, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""From 0 to below 1."""
Between = Annotated[float, Field(gt=0, lt=1, strict=True)]  # 0 and 1, neither of them
Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, 1 or above."""
Size = Annotated[int, Field(ge=0, strict=True)]  # a whole number, 0 or above
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Switch = Annotated[bool, Field(strict=True)]
"""True or false, and nothing that only stands for them."""

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

T = TypeVar("T")
P = ParamSpec("P")


@dataclass_transform(frozen_default=True)
def component(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked against their annotated types on construction; a check
    over several is in `__post_init__`, which raises ArgumentError."""
    config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(cls)
    checked = made.__init__
    names = [field.name for field in dataclasses.fields(made) if field.init and not field.kw_only]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
        named = dict(zip(names, args, strict=False))  # so that a message can name an argument given by position
        try:
            checked(self, *args[len(names) :], **named, **kwargs)
        except pydantic.ValidationError as error:
            own = error.errors()[0].get("ctx", {}).get("error")  # raised by the class's own __post_init__
            raise own if isinstance(own, FedskewError) else ArgumentError(first_mistake(error)) from None

    made.__init__ = init
    own: type[T] = made
    return own


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function check the arguments whose types are ranges, as a component checks its parameters."""
    signature = inspect.signature(function)
    ranges = {
        name: pydantic.TypeAdapter(kind)
        for name, kind in get_type_hints(function, include_extras=True).items()
        if any(hasattr(part, "__metadata__") for part in (kind, *get_args(kind)))  # an Annotated, or it or None
    }

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in ranges:
                _valid(name, value, ranges[name])
        return function(*args, **kwargs)

    return call


def _valid(name: str, value: Any, kind: pydantic.TypeAdapter[Any], strict: bool | None = None) -> Any:
    try:
        return kind.validate_python(plain(value), strict=strict)
    except pydantic.ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ArgumentError(f"{name}: {said[0].lower()}{said[1:]} (got {value!r})") from None


def plain(value: Any) -> Any:
    """Return NumPy scalars, also in a list, tuple or table, as the Python numbers that they stand for."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(one) for key, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def one_mistake(prefix: str = "", fields: type[pydantic.BaseModel] | None = None) -> Iterator[None]:
    """Turn what pydantic finds in the block into a ConfigError of one line (see `first_mistake`)."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise ConfigError(first_mistake(error, prefix, fields)) from None


def first_mistake(
    error: pydantic.ValidationError, prefix: str = "", fields: type[pydantic.BaseModel] | None = None
) -> str:
    """Return a line for the first mistake that pydantic found, unknown keys first: dotted key, what is wrong, value."""
    first = min(error.errors(), key=lambda entry: entry["type"] not in _UNKNOWN)
    path, known = _place(first["loc"], fields)
    key = prefix + ".".join(path)
    if first["type"] == "value_error":  # the class's own check, which names the parameter itself
        said = str(first["ctx"]["error"])
        return f"{key}: {said}" if fields is not None and path else prefix + said
    if first["type"] in _UNKNOWN and fields is not None:
        tables = {"": fields} | {f"{name}.": inner for name, inner in _keys(fields).items() if inner is not None}
        homes = [f"{prefix}{table}{path[-1]}" for table, inner in tables.items() if path[-1] in _keys(inner)]
        hint = f" (did you mean {' or '.join(map(repr, homes))}?)" if homes else nearest(path[-1], known)
        return f"{key}: no such key{hint}"
    if first["type"] in _UNKNOWN:
        return f"{key}: no such parameter"
    if first["type"] in ("missing", "missing_argument"):
        return f"{key}: {f'its value {last + 1} is ' if isinstance(last := first['loc'][-1], int) else ''}missing"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})"


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _place(loc: tuple[int | str, ...], table: type[pydantic.BaseModel] | None) -> tuple[list[str], list[str]]:
    """Return where a mistake is, down to a table's key (pydantic goes on into unions), and the keys of that table."""
    if table is None:
        return [str(part) for part in loc], []
    path, known = list[str](), dict[str, Any]()
    for part in loc:
        if table is None:
            break
        if isinstance(part, int):  # the place in a list of tables
            path[-1] += f"[{part}]"
        else:
            path.append(part)
            known = _keys(table)
            table = known.get(part)
    return path, list(known)


def _keys(table: type[pydantic.BaseModel]) -> dict[str, type[pydantic.BaseModel] | None]:
    """Return the keys of a table, with the table that each one holds."""
    return {field.alias or name: _table(field.annotation) for name, field in table.model_fields.items()}


def _table(annotation: Any) -> type[pydantic.BaseModel] | None:
    """Return the table that an annotation is, or is made of."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_table, get_args(annotation))), None)


def checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], what: str, own: Collection[str]
) -> dict[str, Any]:
    """Return a function's options, by name as given, held against its annotated types; lists stand for tuples."""
    hints = get_type_hints(function, include_extras=True)
    known = sorted(hints.keys() - {*own, "return"})
    valid = {}
    for option, value in options.items():
        if option not in known:
            raise ArgumentError(f"{option}: {what} has no such option{nearest(option, known)}")
        taken = tuple(value) if type(value) is list else value
        valid[option] = _valid(option, taken, pydantic.TypeAdapter(hints[option]), strict=True)
    return valid
