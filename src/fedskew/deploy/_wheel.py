"""How the folders of a federation say to install fedskew: from a package index, or from a wheel that they carry."""

from __future__ import annotations

import hashlib
import re
import zipfile
from email.parser import Parser
from pathlib import Path

from fedskew import __version__
from fedskew.errors import ConfigError

NAME = re.compile(rf"fedskew-{re.escape(__version__)}-[a-z0-9_.]+-[a-z0-9_.]+-[a-z0-9_.]+\.whl")
EXTRAS = "[flower,dp]"


def check_wheel(path: Path) -> None:
    """Raise ConfigError unless a file is a wheel of this version of fedskew."""
    try:
        with zipfile.ZipFile(path) as wheel:
            name = f"fedskew-{__version__}.dist-info/METADATA"
            found = Parser().parsestr(wheel.read(name).decode("utf-8"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        found, why = None, f"{type(error).__name__}: {error}"
    right = found is not None and (found["Name"], found["Version"]) == ("fedskew", __version__)
    if not right or not NAME.fullmatch(path.name):
        raise ConfigError(
            f"{path}: expected a wheel of fedskew {__version__}, as pip wheel --no-deps makes it of its source"
            f"{f' ({why})' if found is None else ''}"
        )


def installation(wheel: Path | None) -> dict[str, str]:
    """Return the fields of the templates that say how fedskew is installed: from a wheel, or a package index."""
    user = "useradd --uid 10001 --no-create-home site"
    if wheel is None:
        what = f"fedskew{EXTRAS}=={__version__}"
        return {
            "PIP": f"pip install '{what}'",
            "DOCKER": f'ARG FEDSKEW="{what}"\nRUN pip install --no-cache-dir "$FEDSKEW" && {user}',
        }
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {
        "PIP": f"echo '{checksum}  {wheel.name}' | sha256sum -c && pip install './{wheel.name}{EXTRAS}'",
        "DOCKER": f"COPY {wheel.name} /tmp/\nRUN echo '{checksum}  /tmp/{wheel.name}' | sha256sum -c "
        f"&& pip install --no-cache-dir '/tmp/{wheel.name}{EXTRAS}' && {user}",
    }
