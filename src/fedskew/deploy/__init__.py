"""A real federation on Flower: the data stay at their sites, and the server never sees them.

The two modules of an app folder (`run.toml`, the config that was simulated, beside `deploy.toml`, the `Agreement`) are

    server = fedskew.deploy.server_app(FOLDER)          client = fedskew.deploy.site_app(FOLDER)

In a Flower project of your own, use `strategy` and `client_app`. The public names are listed in `__init__.pyi`. Flower
comes with the extra `fedskew[flower]`; modules that need it are imported at their first use.
"""

from typing import Any

import lazy_loader

from fedskew.errors import MissingPackageError

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flwr", "psutil"):
            raise
        raise MissingPackageError("Flower is not installed: pip install 'fedskew[flower]'") from None
