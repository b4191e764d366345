"""The library that draws the figures of a page, as it stands in it."""

from __future__ import annotations

import base64
import zlib
from functools import lru_cache
from pathlib import Path

from fedskew.files import replacing


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Return plotly's own script, compressed (zlib) and in base64: the browser unpacks it.

    It is 4.8 MB, and 2.0 MB so: most of what a short run leaves on disk.
    """
    from plotly.offline import get_plotlyjs

    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 4)).decode()


def shared_script(folder: Path) -> Path:
    """Write plotly's own script to a folder, for all pages that are below it, unless it is there.

    Args:
        folder: The folder; it is made.

    Returns:
        The script's file, whose name has its version.
    """
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    path = folder / f"plotly-{get_plotlyjs_version()}.js"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as part:
            part.write_text(get_plotlyjs(), encoding="utf-8", newline="\n")
    return path
