"""The terminal: rich's, but text from files and sites can't move its cursor, colour it, or turn its lines around."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from fedskew.names import visible

KEEP = "\n\t"


class Console(rich.console.Console):
    """rich's console, which writes characters that can't be seen as escapes (see `names.visible`)."""

    def say(self, text: str, style: str | None = None) -> None:
        """Print a text as it is, whatever its width."""
        self.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def note(self, text: str, style: str | None = None) -> None:
        """Print a text as it is, wrapped."""
        self.print(text, style=style, markup=False, highlight=False)

    @property
    def wide(self) -> Console:
        """The console itself; in a log, one where lines may be long."""
        return self if self.is_terminal else Console(width=160)

    def render_str(self, text: str, **more: Any) -> Text:
        """See rich; here, so that the width of what is shown is known."""
        return super().render_str(visible(text, KEEP), **more)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See rich."""
        return _visible(super().render(renderable, options))


def _visible(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        if segment.control or segment.text.isprintable():
            yield segment
        else:
            yield segment._replace(text=visible(segment.text, KEEP))
