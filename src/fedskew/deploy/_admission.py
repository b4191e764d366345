"""A site's SuperNode runs the app that the site agreed to; of another, no code is run.

Flower can refuse apps that no trusted entity has signed, but its open SuperLink does not pass signatures on. Here the
place of a signature is taken by the hash in `agreed.toml`.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Error

from fedskew.deploy._app_files import OFFERED, app_hash, offer_app, unzip_app
from fedskew.deploy._log import LOG
from fedskew.deploy._terms import read_terms, terms_path
from fedskew.errors import FedskewError, RunError

INVALID_APP = 7
"""Flower's code of an app that is not verified."""

REFUSED_APP = Error(INVALID_APP, "not agreed: app; its own log says more")
BY_HASH = {"agreed.toml": ""}
"""What takes the place of Flower's trusted entities."""


def is_agreed(content: bytes, data: Path) -> bool:
    """Return whether a site agreed to an app; if not, log it, and write the app to `offered/` to be looked at.

    Args:
        content: The app as Flower sends it, a zip file.
        data: The site's `data.toml`.
    """
    site = data.parent
    try:
        files = unzip_app(content)
    except FedskewError as error:
        LOG.error("app: %s", error)
        return False
    try:
        if app_hash(files) == read_terms(terms_path(data)).app:
            shutil.rmtree(site / OFFERED, ignore_errors=True)
            return True
        said = "app: the server sent another app than this site agreed to; it is not run"
    except FedskewError as error:
        said = str(error)
    try:
        offer_app(files, site)
    except OSError as error:
        LOG.error("%s: can't be written: %s", site / OFFERED, error.strerror)
    LOG.error("%s; look at it, and agree: fedskew deploy site --check %s", said, data)
    return False


def run_agreed_only(data: Path) -> None:
    """Make this process's SuperNode ask `is_agreed` before it takes an app.

    Args:
        data: The site's `data.toml`.

    Raises:
        RunError: This version of Flower takes apps in another way.
    """
    supernode: Any = importlib.import_module("flwr.supernode.start_client_internal")
    if not all(
        hasattr(supernode, name) for name in ("_pull_and_store_message", "_verify_fab", "FAB_VERIFICATION_ERROR")
    ):
        raise RunError("this version of Flower can't be kept to agreed.toml; install flwr 1.41 or another that can")
    pull, verify = supernode._pull_and_store_message, supernode._verify_fab

    def pull_agreed(*, get_fab: Callable[[str, int], Any], trusted_entities: Any, **more: Any) -> Any:
        def get_agreed(fab_hash: str, run: int) -> Any:
            fab = get_fab(fab_hash, run)
            if not is_agreed(fab.content, data):
                fab.content = b""  # nothing of it is left that could be run
            if not trusted_entities:
                fab.verifications["valid_license"] = "by hash"
            return fab

        return pull(get_fab=get_agreed, trusted_entities=trusted_entities or BY_HASH, **more)

    def verify_agreed(fab: Any, trusted_entities: Any) -> bool:
        return bool(fab.content) and (trusted_entities is BY_HASH or verify(fab, trusted_entities))

    supernode._pull_and_store_message = pull_agreed
    supernode._verify_fab = verify_agreed
    supernode.FAB_VERIFICATION_ERROR = REFUSED_APP
