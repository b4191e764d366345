"""Names as people give them: columns of clients, classes and counts, names that look alike, characters not seen."""

import unicodedata
import warnings
from collections.abc import Iterable

from fedskew.errors import DataWarning

SYSTEM_FOLDERS = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})
"""Folders that operating systems, archives and file servers add; no class or client is called so."""

CLIENT_WORDS = frozenset({
    "client", "clients", "clientid", "clientname", "site", "siteid", "hospital", "clinic", "centre", "center",
    "institution", "organisation", "organization", "shop", "store", "branch", "bank", "silo", "party", "node", "device",
    "user", "owner",
})  # fmt: skip
"""Names of a column of clients, as `plain` writes them."""
CLASS_WORDS = frozenset({"class", "label", "target", "category", "diagnosis", "disease", "species"})
"""Names of a column of classes."""
COUNT_WORDS = frozenset({"count", "counts", "n", "number", "samples", "size", "amount", "frequency", "images", "cases"})
"""Names of a column of counts."""

_JOINERS = "\u200c\u200d"  # zero width, but letters of Arabic and Indic scripts need them
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's categories


def plain(name: str) -> str:
    """Return a column's name by its letters and digits alone, in lower case."""
    return "".join(filter(str.isalnum, name.casefold()))


def visible(text: str, keep: str = "") -> str:
    """Write characters that can't be seen, or that change how others are seen, as Python writes them in a string.

    These are control characters (among them newlines and the escape that begins a terminal's commands), marks of text
    direction, other characters without a width, and halves of surrogate pairs.

    Example:
        >>> visible("north\\x1b[2J")
        'north\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in _UNSEEN and letter not in _JOINERS + keep else letter
        for letter in text
    )


def warn_of_look_alikes(names: Iterable[str], what: str, where: object) -> None:
    """Issue a DataWarning for names of `what` that differ by case, spaces, leading zeros or how letters are encoded."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        same = name if name.isascii() else unicodedata.normalize("NFKC", name)
        same = (same.lstrip("0") or "0") if same.isdecimal() else same
        groups.setdefault("".join(same.casefold().split()), []).append(name)
    for group in groups.values():
        listed = " and ".join(map(repr, group))
        if len({unicodedata.normalize("NFC", name) for name in group}) < len(group):
            listed = f"{group[0]!r} twice, written with letters that are encoded in two ways (NFC and NFD)"
        if len(group) > 1:
            warnings.warn(
                f"{where}: names {listed}; they are counted as {len(group)} {what}: rename them if they are one",
                DataWarning,
                stacklevel=2,
            )
