"""The library that draws the figures of a page, as it stands in it."""

from __future__ import annotations

import base64
import zlib
from functools import lru_cache


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Return plotly's own script, compressed (zlib) and in base64: the browser unpacks it.

    It is 4.8 MB, and 2.0 MB so; every run has a page, so this is most of what a short run leaves on disk.
    """
    from plotly.offline import get_plotlyjs

    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 4)).decode()
