"""Flower's SuperLink behind a filter, by which other machines reach only the API that SuperNodes need.

A SuperLink serves three APIs at one port: one for SuperNodes (`/v1/fleet`, which requires node keys), one for the
command `flwr` (`/v1/control`: register a node, run an app), and one for the apps that it runs (`/v1/runtime`). In
Flower's open edition the last two require no authentication, so whoever reaches the port could register a key, or run
code on the server and on every site. The filter serves both to this machine only.

Flower also reads and parses a whole body before it looks at who sent it. Its SuperNodes' own requests are small, but
for a reply to a message, which they push in pieces; so a larger body is let in only for that, and only so much of it.
"""

import argparse
import base64
import binascii
import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedskew.deploy._log import LOG
from fedskew.deploy.keys import check_server_files
from fedskew.errors import RunError

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SITES_API = "/v1/fleet/"
PULL = f"{SITES_API}pull-messages"
PUSHES = (f"{SITES_API}push-messages", f"{SITES_API}push-object")
SSL_FILES = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
SMALL = 2**16
"""Bytes that anybody's request may have; those of a SuperNode that pushes nothing have a few hundred."""

PIECE = 2**26
"""Most bytes of one request. Flower pushes arrays in pieces of 5 MiB, by default."""

LONGEST_WAIT = "25000"
"""Milliseconds that a request waits for the database, which others write; a SuperNode waits 30 s for its answer, and
does not send again what was refused."""


class Door:
    """ASGI middleware that lets in what a SuperLink's port is for: sites' requests, and this machine's commands. Of a
    site's, a body of more than 64 KiB has to be signed, as all of a SuperNode's are, by a key that Flower has handed a
    message since; all that this key then pushes may have `max_reply` bytes, until it is handed the next."""

    def __init__(self, app: Application, max_reply: int) -> None:
        self._app, self._max_reply = app, max_reply
        self._left: dict[str, int] = {}  # by key, of those to which Flower has handed a message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI 3.0)."""
        path = scope.get("path", "")
        if scope["type"] != "lifespan" and not path.startswith(SITES_API) and not _is_local(scope):
            if scope["type"] == "http":
                await _refuse(send, 403, "only the server's own machine may do this")
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http" or not path.startswith(SITES_API):
            await self._app(scope, receive, send)
        else:
            await self._pass_site(scope, receive, send, path)

    async def _pass_site(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Pass on a SuperNode's request, or refuse it by its size, before its body is read."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        size = _body_size(headers)
        key = _signer(headers) if path in (*PUSHES, PULL) else None
        if size is None:
            await _refuse(send, 411, "say how long the body is (Content-Length)")
        elif path in PUSHES and key in self._left:
            if size > min(self._left[key], PIECE):
                LOG.warning("a site's reply is refused: --max-reply leaves %d bytes for %d", self._left[key], size)
                while (await receive()).get("more_body"):  # a SuperNode reads the answer only when it has sent all
                    pass
                await _refuse(send, 413, "the reply is larger than the server's --max-reply")
            else:
                self._left[key] -= size
                await self._app(scope, receive, send)
        elif size > SMALL:
            await _refuse(send, 413, "only a site may send as much, and only in reply to a message")
        elif path == PULL and key is not None:
            await self._app(scope, receive, self._allowing(send, key))
        else:
            await self._app(scope, receive, send)

    def _allowing(self, send: Send, key: str) -> Send:
        """Return a `send` that allows a key its reply when Flower hands it a message; without one, a body is empty."""
        accepted = False

        async def pass_on(event: Event) -> None:
            nonlocal accepted
            if event["type"] == "http.response.start":
                accepted = event["status"] == 200
            elif accepted and event.get("body"):
                self._left[key] = self._max_reply
            await send(event)

        return pass_on


def _body_size(headers: MutableMapping[str, str]) -> int | None:
    """Return the size of a request's body as its headers, in lower case, tell it; None where they do not."""
    if "transfer-encoding" in headers:
        return None
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdecimal() else None


def _signer(headers: MutableMapping[str, str]) -> str | None:
    """Return the public key that has signed a request's time, or None. Flower checks the time, and whose key it is."""
    with suppress(KeyError, ValueError, TypeError, AttributeError, UnicodeError, binascii.Error):
        key = headers[FLEET_HTTP_PUBLIC_KEY_HEADER]
        signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        public = bytes_to_public_key(base64.b64decode(key, validate=True))
        return key if verify_signature(public, headers[TIMESTAMP_HEADER].encode("ascii"), signature) else None
    return None


async def _refuse(send: Send, status: int, reason: str) -> None:
    """Answer with a status and one line, and end the connection."""
    body = f"{reason}\n".encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", length), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_local(scope: Scope) -> bool:
    """Return whether a request comes from this machine: over loopback, or from the address that it was sent to."""
    client, server = scope.get("client") or [""], scope.get("server")
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or (server is not None and client[0] == server[0])


def run_superlink(arguments: Sequence[str], max_reply: int) -> None:
    """Run `flower-superlink` with these options until it ends, so that only this machine can give it commands."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in SSL_FILES:
        parser.add_argument(name, type=Path)
    files = [*vars(parser.parse_known_args(arguments)[0]).values()]
    if all(files) and (warning := check_server_files(*(file.absolute() for file in files))):
        LOG.warning("%s", warning)
    serve = uvicorn.run

    def serve_filtered(app: Application, **settings: Any) -> None:
        try:  # headers that claim another origin of a request are ignored
            serve(Door(app, max_reply), **settings, proxy_headers=False)
        except SystemExit:
            again = "where its address is in use, it runs already, and nothing has to be done"
            raise RunError(f"the SuperLink did not start, and the lines above say why; {again}") from None

    uvicorn.run = serve_filtered  # type: ignore[assignment]
    # Flower's own 5 s are too short where ten sites answer at once on a busy disk: their answers were lost.
    with suppress(ImportError, AttributeError):  # it is Flower 1.41's own affair, and another may have it elsewhere
        from flwr.supercore import sql_mixin

        pragmas = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", LONGEST_WAIT))  # type: ignore[attr-defined]
        setattr(sql_mixin, "SQLITE_PRAGMAS", pragmas)  # noqa: B010, it exports none
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()
