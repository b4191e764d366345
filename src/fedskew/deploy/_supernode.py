"""Flower's SuperNode for a site's folder, which says why it can't join or had to stop, and then exits with status 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import ClassVar

import httpx
import psutil
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import fleet_http_connection
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedskew.deploy._admission import run_agreed_only
from fedskew.deploy._log import LOG
from fedskew.deploy._server_check import UnreachableError, check_server, server_of
from fedskew.errors import RunError

REFUSED = 2
"""Exit status of a site that the server refuses; Flower's would be 0, or 1 and a traceback."""


class _Signer(NodeAuthHttpInterceptor):
    """Flower's signer of requests, which ends the process with a line where the server refuses them."""

    refused: ClassVar[Callable[[str], None]]

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        response = super().intercept(context, call_next)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            type(self).refused(
                "no longer accepts this site's key: it was revoked there, or the server has lost its registrations "
                "(register.sh)"
            )
        elif _is_activation(response):
            type(self).refused(
                "does not accept this site's key: it is not registered there (register.sh), or was revoked; or this "
                "site was killed less than a minute ago, and is still taken to be connected: start it again then"
            )
        return response


def _is_activation(response: httpx.Response) -> bool:
    """Return whether a response says that this site can't begin."""
    if response.is_success:
        return False
    error = FlowerError.from_json(response.text)
    return error is not None and error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


def run_supernode(data: Path, arguments: Sequence[str]) -> None:
    """Run `flower-supernode` for a site's folder until it ends.

    The folder has `ca.crt` and `key` beside `data.toml`. A server that can't be reached is waited for; where it refuses
    the site later, the process ends with a line in its log and status 2.

    Args:
        data: The site's `data.toml`, which names the server.
        arguments: More options of `flower-supernode`.

    Raises:
        ConfigError: The file names no server.
        RunError: The server refuses this machine's clock.
    """
    from flwr.supernode.cli.flower_supernode import flower_supernode

    data = data.absolute()
    folder, server = data.parent, server_of(data)
    authority = folder / "ca.crt"
    if (refusal := _refusal(server, authority)) is not None:
        raise RunError(refusal)

    ending = Lock()

    def refused(why: str) -> None:
        ending.acquire()  # for good: one thread says it
        LOG.error("%s", _refusal(server, authority) or f"{server} {why}")
        for process in psutil.Process().children(recursive=True):  # an answer of theirs would be refused, too
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(REFUSED)  # Flower's threads would go on to tell what they make of the refusal

    run_agreed_only(data)
    os.chdir(folder)
    os.environ.setdefault("FLWR_HOME", str(folder / "flower"))
    _Signer.refused = refused
    fleet_http_connection.NodeAuthHttpInterceptor = _Signer  # type: ignore[attr-defined]
    sys.argv = [
        "flower-supernode",
        *("--superlink", server, "--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(folder / "key")),
        *("--node-config", f"data={json.dumps(str(data))}"),
        *arguments,
    ]
    flower_supernode()


def _refusal(server: str, authority: Path) -> str | None:
    """Return why the server refuses this machine's clock, and log what should be looked at soon."""
    try:
        found = check_server(server, authority)
    except UnreachableError as error:
        LOG.warning("%s; its clock is not compared", error)
        return None
    refusal = found.refusal()
    for note in found.notes() if refusal is None else ():
        LOG.warning("%s", note)
    return refusal
