"""A real federation, on Flower: data on its sites, a server that never sees it.

For an app folder (`run.toml`, the config that was simulated, and `deploy.toml`, the `Agreement` beside it), its two
modules are

    server = fedskew.deploy.server_app(FOLDER)          client = fedskew.deploy.site_app(FOLDER)

and for a Flower project of one's own, `strategy` and `client_app`. Flower is the extra `fedskew[flower]`; what needs it
is imported when it is first used.
"""

from typing import Any

import lazy_loader

from fedskew.errors import MissingPackageError

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingPackageError("Flower is not installed: pip install 'fedskew[flower]'") from None
