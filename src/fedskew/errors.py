"""Every error that fedskew raises on purpose: one type per cause, all of them `FedskewError`.

A message is one line that says what is wrong, where, and what would be right. The command line prints it and exits with
the error's `exit_code`.
`DataWarning` is no error: the command line prints it as a note and goes on.
"""

import difflib
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar


class FedskewError(Exception):
    """Base class of every error raised on purpose."""

    exit_code: ClassVar[int] = 2
    """Status with which a command ends."""


class ArgumentError(FedskewError, ValueError):
    """An argument has the wrong shape or value; the message names it."""


class ConfigError(FedskewError, ValueError):
    """A configuration can't be run as written; the message names the key."""


class CombinationError(ConfigError):
    """Two components can't be combined; the message gives the reason and the nearest that can."""


class DataError(FedskewError):
    """A data set is missing, damaged, or not what it claims to be."""


class PartitionError(FedskewError, ValueError):
    """A partition rule can't divide this data set among this many clients."""


class RunError(FedskewError):
    """A run folder can't be written, read or resumed."""


class DivergedError(RunError):
    """A run is stopped, because its model was ruined again and again."""

    exit_code = 1


class EndedEarlyError(RunError):
    """A run of real sites ended before its last round, and can be gone on with."""

    exit_code = 3


class StandstillError(RunError):
    """Rounds of real sites moved nothing; once what the message names is mended, the run can be gone on with."""

    exit_code = 4


class FinishError(RunError):
    """A trained model can't be finished by its method's finish; the model as it was trained stays."""


class SumsError(FedskewError):
    """A masked sum can't be opened, or a site refuses to open its mask; the message says which site and why."""


class ComponentError(RunError):
    """A component of a user's own does not do what its slot asks for; the message names it and what it returned."""


class MissingPackageError(FedskewError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


def optional(path: str, missing: str) -> Any:
    """Import `module` or `module:name` of an optional package; where it fails, MissingPackageError begins so."""
    try:
        return resolve_name(path if ":" in path else f"{path}:")
    except (ImportError, RuntimeError, AttributeError) as error:  # torchvision's of another build than torch
        raise MissingPackageError(f"{missing} ({' '.join(str(error).split())})") from None


class DataWarning(UserWarning):
    """Data or a table of counts look unusual but were read; the message says what is unusual and how it was read."""


class BackendWarning(UserWarning):
    """A cohort is not trained in the way that was asked for; the message says why, and what is done instead."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest a known word for an unknown one, as the end of a message: ` (did you mean 'x'?)`, or all known ones."""
    known = sorted(known)
    if not known:
        return " (there are none)"
    if alike := {unicodedata.normalize(form, word) for form in ("NFC", "NFD")} & ({*known} - {word}):
        return f" (it is {alike.pop()!r} with letters encoded in another way, NFC or NFD; write both in one)"
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"


@contextmanager
def placed(
    where: str,
    kind: type[Exception] | None = ConfigError,
    of: type[Exception] | tuple[type[Exception], ...] = ArgumentError,
) -> Iterator[None]:
    """Let errors of the block be of this kind (None: of their own), and begin with the place that they are about."""
    try:
        yield
    except of as error:
        raise (kind or type(error))(f"{where}{error}") from None


def reason_of(error: BaseException) -> str:
    """Return why something failed, in one line."""
    return str(error) if isinstance(error, FedskewError) else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """Describe an error of a user's own code: type, message, and the line that raised it."""
    said = " ".join(str(error).split())
    place = place_of(error)
    return f"{type(error).__name__}{': ' if said else ''}{said}{f' ({place})' if place else ''}"


def place_of(error: BaseException) -> str:
    """Return the innermost line of a user's own code in a traceback, as "own.py, line 7"; empty if there is none."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename
        if not path.startswith(("<frozen", "<string", str(Path(__file__).parent), *libraries)):
            return f"{Path(path).name}, line {frame.lineno}"
    return ""
