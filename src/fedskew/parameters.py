"""Hyper-parameters of components: their ranges stand in their types, and are checked wherever a component is made.

    @component
    class FedProx:
        mu: NonNegative = 0.01

    FedProx(mu=-1)      # ArgumentError: mu: input should be greater than or equal to 0 (got -1)

The same types check a config, where the error names the key in the file instead.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias, TypeVar, dataclass_transform, get_args, get_type_hints

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from fedskew.errors import ArgumentError, ConfigError, FedskewError, nearest

Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""From 0 to below 1."""
Count = Annotated[int, Field(ge=1, strict=True)]
"""A whole number, 1 or above."""
Size = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
"""A whole number, 0 or above."""
Switch = Annotated[bool, Field(strict=True)]
"""True or false, and nothing that only stands for them."""

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

T = TypeVar("T")


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
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] in _UNKNOWN), errors[0])
    path, known = _place(first["loc"], fields)
    key = prefix + ".".join(path)
    if first["type"] == "value_error":  # the class's own check, which names the parameter itself
        said = str(first["ctx"]["error"])
        return f"{key}: {said}" if fields is not None and path else prefix + said
    if first["type"] in _UNKNOWN:
        return f"{key}: no such {'parameter' if fields is None else f'key{nearest(path[-1], known)}'}"
    if first["type"] in ("missing", "missing_argument"):
        return f"{key}: {f'its value {last + 1} is ' if isinstance(last := first['loc'][-1], int) else ''}missing"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})"


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _place(loc: tuple[int | str, ...], table: type[pydantic.BaseModel] | None) -> tuple[list[str], list[str]]:
    """Return where a mistake is, down to a table's key (pydantic goes on into unions), and the keys of that table."""
    path: list[str] = []
    known: list[str] = []
    for part in loc:
        if isinstance(part, int) and table is not None:  # the place in a list of tables
            path[-1] += f"[{part}]"
            continue
        path.append(str(part))
        if table is None or isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in table.model_fields.items()}
        known = list(fields)
        kinds = _kinds(fields[part].annotation) if part in fields else []
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)), None)
        if table is None:
            break
    return path, known


def _kinds(annotation: Any) -> list[Any]:
    """Return an annotation, and what it is made of."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))]


def checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], what: str, own: Collection[str]
) -> dict[str, Any]:
    """Return a function's options, by name as given, held against its annotated types; lists stand for tuples."""
    hints = get_type_hints(function)
    known = sorted(hints.keys() - {*own, "return"})
    checked = {}
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) if known else " (it has none)"
            raise ArgumentError(f"{option}: {what} has no such option{hint}")
        taken = tuple(value) if type(value) is list else plain(value)
        try:
            checked[option] = pydantic.TypeAdapter(hints[option]).validate_python(taken, strict=True)
        except pydantic.ValidationError as error:
            raise ArgumentError(f"{option}: {error.errors()[0]['msg']} (got {taken!r})") from None
    return checked
