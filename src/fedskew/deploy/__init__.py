"""A real federation, on Flower: data on its sites, a server that never sees it.

For an app folder (`run.toml`, the config that was simulated, and `deploy.toml`, the `Agreement` beside it), its two
modules are

    server = fedskew.deploy.server_app(FOLDER)          client = fedskew.deploy.site_app(FOLDER)

and for a Flower project of one's own, `strategy` and `client_app`. Flower is the extra `fedskew[flower]`; what needs it
is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedskew.errors import MissingPackageError

if TYPE_CHECKING:
    from fedskew.deploy._agreement import Agreement, check_config, read_agreement
    from fedskew.deploy._check import check_reply
    from fedskew.deploy._client import client_app, site_app
    from fedskew.deploy._leaving import Leaving, leaving
    from fedskew.deploy._server import server_app
    from fedskew.deploy._site_data import SiteData, load_site
    from fedskew.deploy._strategy import strategy

__all__ = [
    "Agreement",
    "Leaving",
    "SiteData",
    "check_config",
    "check_reply",
    "client_app",
    "leaving",
    "load_site",
    "read_agreement",
    "server_app",
    "site_app",
    "strategy",
]

_LATE = {
    "Agreement": "_agreement",
    "Leaving": "_leaving",
    "SiteData": "_site_data",
    "check_config": "_agreement",
    "check_reply": "_check",
    "client_app": "_client",
    "leaving": "_leaving",
    "load_site": "_site_data",
    "read_agreement": "_agreement",
    "server_app": "_server",
    "site_app": "_client",
    "strategy": "_strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'fedskew.deploy' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"fedskew.deploy.{_LATE[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise MissingPackageError("Flower is not installed: pip install 'fedskew[flower]'") from None
