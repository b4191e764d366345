"""Numbers as people and spreadsheets write them, with decimal commas and thousands separators; none is guessed.

`1,234` is 1234 in English and 1.234 in German. A file's other numbers mostly tell which (`2,5` and `1.234.567` do);
where none does, the caller is asked.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Decimal: TypeAlias = Literal[".", ","]

_SPACES = " \u00a0\u2009\u202f'\u2019"
_SIGNS: tuple[tuple[Decimal, Decimal], ...] = ((".", ","), (",", "."))
_FORMS: dict[Decimal, re.Pattern[str]] = {
    decimal: re.compile(
        rf"[+-]?(?:\d+(?:[{decimal}]\d*)?(?:[eE][+-]?\d+)?|[{decimal}]\d+|"
        rf"[1-9]\d{{0,2}}(?:[{thousands}]\d{{3}})+(?:[{decimal}]\d+)?|"
        rf"[1-9]\d{{0,2}}(?:[{_SPACES}]\d{{3}})+(?:[{decimal}]\d+)?)"
    )
    for decimal, thousands in _SIGNS
}
"""A number by its decimal sign: plain, or with thousands apart by the other sign, spaces or apostrophes."""


def decimals(text: str) -> list[Decimal]:
    """Return the decimal signs with which a cell can be read as a number; none where it is no number.

    Both mean the same unless it `is_separated`: then `1,234` is 1234 or 1.234.
    """
    return [decimal for decimal, form in _FORMS.items() if form.fullmatch(text)]


def is_separated(text: str) -> bool:
    """Return whether a cell has a decimal or thousands sign that may be read in two ways."""
    return "." in text or "," in text


def number(text: str, decimal: Decimal) -> float:
    """Return the number that a cell holds, given the decimal sign.

    Raises:
        ValueError: It is no number with that sign.
    """
    if not _FORMS[decimal].fullmatch(text):
        if is_separated(text):
            raise ValueError(text)
        return float(text)  # nan, inf, or no number at all
    thousands = "," if decimal == "." else "."
    return float(re.sub(f"[{_SPACES}{thousands}]", "", text).replace(decimal, "."))
