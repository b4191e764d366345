"""Flower's SuperLink, behind a door: from elsewhere it takes what a SuperNode says, and nothing else.

A SuperLink serves three things at one port: to SuperNodes (`/v1/fleet`, where node keys are asked for), to `flwr`
(`/v1/control`: register a node, run an app) and to the apps that it runs (`/v1/runtime`). The last two ask nobody who
he is in Flower's open edition, so whoever reaches the port could register a key of his own, or run code of his own on
the server and on every site. Here both answer to this machine only.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

FOR_SITES = "/v1/fleet/"


class Door:
    """An ASGI application that lets requests through: all from this machine, those of SuperNodes from anywhere."""

    def __init__(self, behind: Application) -> None:
        self._behind = behind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification, 3.0."""
        if scope["type"] == "lifespan" or is_local(scope) or scope.get("path", "").startswith(FOR_SITES):
            await self._behind(scope, receive, send)
        elif scope["type"] == "http":
            body = b"this is taken from the server's own machine only\n"
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine: over loopback, or from the address that it came to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or (server is not None and client[0] == server[0])


def run(arguments: Sequence[str]) -> None:
    """`flower-superlink` with these arguments, behind the door. Ends with its process."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    serve = uvicorn.run

    def serve_behind_door(app: Application, **settings: Any) -> None:
        # No header may say where a request comes from.
        serve(Door(app), **settings, proxy_headers=False)

    uvicorn.run = serve_behind_door  # type: ignore[assignment]
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()
