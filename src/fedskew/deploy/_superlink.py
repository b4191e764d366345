"""Flower's SuperLink behind a filter, by which other machines reach only the API that SuperNodes need.

A SuperLink serves three APIs at one port: one for SuperNodes (`/v1/fleet`, which requires node keys), one for the
command `flwr` (`/v1/control`: register a node, run an app), and one for the apps that it runs (`/v1/runtime`). In
Flower's open edition the last two require no authentication, so whoever reaches the port could register a key, or run
code on the server and on every site. The filter serves both to this machine only.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from fedskew.deploy._body_limits import SITES_API, Application, BodyLimits, Receive, Scope, Send, refuse
from fedskew.deploy._log import LOG
from fedskew.deploy._tls import expires_soon

LONGEST_WAIT = "25000"
"""Milliseconds that a request waits for the database, which others write; a SuperNode waits 30 s for its answer, and
does not send again what was refused."""


class LocalCommands:
    """ASGI middleware that passes on requests to the SuperNodes' API, and all requests from this machine."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI 3.0)."""
        if scope["type"] == "lifespan" or is_local(scope) or scope.get("path", "").startswith(SITES_API):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403, "only the server's own machine may do this")
        else:
            await send({"type": "websocket.close", "code": 1008})


def is_local(scope: Scope) -> bool:
    """Return whether a request comes from this machine: over loopback, or from the address that it was sent to.

    Args:
        scope: The ASGI connection scope.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or (server is not None and client[0] == server[0])


def run_superlink(arguments: Sequence[str], max_reply: int) -> None:
    """Run `flower-superlink` until it ends, so that only this machine can give it commands.

    Args:
        arguments: Options of `flower-superlink`.
        max_reply: Most bytes that a site may push in reply to one message (see `BodyLimits`).
    """
    from flwr.superlink.cli.flower_superlink import flower_superlink

    serve = uvicorn.run

    def serve_filtered(app: Application, **settings: Any) -> None:
        # Headers that claim another origin of a request are ignored.
        serve(LocalCommands(BodyLimits(app, max_reply)), **settings, proxy_headers=False)

    uvicorn.run = serve_filtered  # type: ignore[assignment]
    # Flower's own 5 s are too short where ten sites answer at once on a busy disk: their answers were lost.
    with suppress(ImportError, AttributeError):  # it is Flower 1.41's own affair, and another may have it elsewhere
        from flwr.supercore import sql_mixin

        pragmas = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", LONGEST_WAIT))  # type: ignore[attr-defined]
        setattr(sql_mixin, "SQLITE_PRAGMAS", pragmas)  # noqa: B010, it exports none
    sys.argv = ["flower-superlink", *arguments]
    if "--ssl-certfile" in arguments[:-1]:
        say_expiry(Path(arguments[arguments.index("--ssl-certfile") + 1]))
    flower_superlink()


def say_expiry(certificate: Path) -> None:
    """Log when a certificate expires, if that is soon."""
    if said := expires_soon(certificate):
        LOG.warning("%s", said)
