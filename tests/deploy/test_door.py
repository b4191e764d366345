"""What a SuperLink's port takes from others before Flower reads it, and how much of it."""

import asyncio
import base64
import importlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore import sql_mixin
from sqlalchemy import MetaData

from fedskew.deploy.superlink import Door, run_superlink
from fedskew.errors import RunError

PUSH, MESSAGES, PULL = "/v1/fleet/push-object", "/v1/fleet/push-messages", "/v1/fleet/pull-messages"
MEGABYTE = 10**6


class Flower:
    """What stands behind the door: reads a request to its end, and answers a pull with a message or with none."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.answer, self.status = b"a message", 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            event = await receive()
            size, more = size + len(event["body"]), event["more_body"]
        self.read.append(size)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.answer if scope["path"] == PULL else b""})


class Port:
    """A door with Flower behind it."""

    def __init__(self, max_reply: int = 3 * MEGABYTE) -> None:
        self.flower = Flower()
        self.door = Door(self.flower, max_reply)

    def events(self, path: str, size: int, headers: dict[str, str] | None = None, **more: Any) -> list[dict[str, Any]]:
        """The answer to a request with a body of this size, of which without one nothing is said."""
        named = ({"content-length": str(size)} if size else {}) | (headers or {})
        given = [(name.encode(), value.encode()) for name, value in named.items()]
        pieces = iter([*([65536] * (size // 65536)), size % 65536])
        left, answer = size, list[dict[str, Any]]()
        self.taken = 0

        async def receive() -> dict[str, Any]:
            nonlocal left
            piece = next(pieces)
            left, self.taken = left - piece, self.taken + piece
            return {"type": "http.request", "body": bytes(piece), "more_body": left > 0}

        async def send(event: Any) -> None:
            answer.append(event)

        asyncio.run(self.door({"type": "http", "path": path, "headers": given, **more}, receive, send))
        return answer

    def status(self, *request: Any, **more: Any) -> int:
        return int(self.events(*request, **more)[0]["status"])


def signed(key: ec.EllipticCurvePrivateKey, time: str = "2026-11-22T07:00:00+00:00") -> dict[str, str]:
    """Headers as Flower's SuperNode makes them."""
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signature = key.sign(time.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(key.public_key().public_bytes(*form)).decode(),
        "flwr-timestamp": time,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


@pytest.fixture(scope="module")
def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


@pytest.mark.parametrize("path", [PUSH, MESSAGES, PULL, "/v1/fleet/activate-node", "/v1/fleet/none"])
def test_a_large_body_without_a_key_is_refused_before_it_is_read(path: str) -> None:
    port = Port()
    assert port.status(path, 500 * MEGABYTE) == 413
    assert port.taken == 0
    assert port.flower.read == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"transfer-encoding": "chunked"}, 411),
        ({"content-length": "1e9"}, 411),
        ({"content-length": "-1"}, 411),
        ({"content-length": "²"}, 411),
        ({"content-length": ""}, 411),
        ({"content-length": "99999999999999999999"}, 413),
    ],
)
def test_a_body_of_no_told_size_is_refused(headers: dict[str, str], status: int) -> None:
    port = Port()
    assert port.status(PUSH, 100, headers) == status
    assert (port.taken, port.flower.read) == (0, [])


def test_what_supernodes_ask_passes() -> None:
    port = Port()
    for path in (PULL, PUSH, MESSAGES, "/v1/fleet/activate-node", "/v1/fleet/send-node-heartbeat"):
        assert port.status(path, 300) == 200
    assert port.flower.read == [300] * 5


def test_other_apis_are_not_its_business() -> None:
    assert Port().status("/v1/runtime/push-object", 5 * MEGABYTE, client=("127.0.0.1", 1)) == 200


@pytest.mark.parametrize(
    ("client", "server", "local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("203.0.113.7", "203.0.113.7", True),  # this machine, by its own address
        ("203.0.113.8", "203.0.113.7", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("2001:db8::1", "::1", False),
        ("unknown", "127.0.0.1", False),
    ],
)
def test_requests_of_this_machine_are_told_from_others(client: str, server: str, local: bool) -> None:
    port = Port()
    status = port.status("/v1/control/start-run", 0, client=(client, 5000), server=(server, 9092))
    assert (status, port.flower.read) == ((200, [0]) if local else (403, []))


@pytest.mark.parametrize(
    ("path", "passes"),
    [
        ("/v1/fleet/pull-messages", True),
        ("/v1/control/start-run", False),
        ("/v1/fleet", False),
        ("/v1/fleetx/pull-messages", False),
        ("//v1/fleet/pull-messages", False),
        ("/V1/FLEET/pull-messages", False),
        ("/docs", False),
        ("/", False),
        ("", False),
    ],
)
def test_from_elsewhere_only_supernodes_are_served(path: str, passes: bool) -> None:
    port, elsewhere = Port(), {"client": ("203.0.113.8", 5000), "server": ("203.0.113.7", 9092)}
    assert [event.get("status") for event in port.events(path, 0, **elsewhere)] == [200 if passes else 403, None]
    assert port.flower.read == [0] * passes
    closed = port.events("/v1/control/x", 0, type="websocket", **elsewhere)
    assert closed == [{"type": "websocket.close", "code": 1008}]


def test_a_key_may_push_so_much_for_each_message_that_it_is_handed(key: ec.EllipticCurvePrivateKey) -> None:
    port = Port(max_reply=3 * MEGABYTE)
    assert port.status(PUSH, MEGABYTE, signed(key)) == 413  # nothing has been asked of it
    for _ in range(2):
        assert port.status(PULL, 100, signed(key)) == 200
        assert port.status(MESSAGES, 1000, signed(key)) == 200
        assert [port.status(PUSH, MEGABYTE, signed(key)) for _ in range(3)] == [200, 200, 413]
        assert port.status(PUSH, 50_000, signed(key)) == 200
    assert max(port.flower.read) == MEGABYTE


def test_many_small_pieces_are_as_much_as_one(key: ec.EllipticCurvePrivateKey) -> None:
    port = Port(max_reply=200_000)
    port.status(PULL, 100, signed(key))
    assert [port.status(PUSH, 60_000, signed(key)) for _ in range(5)] == [200, 200, 200, 413, 413]


def test_a_single_body_is_never_large(key: ec.EllipticCurvePrivateKey) -> None:
    port = Port(max_reply=10**10)
    port.status(PULL, 100, signed(key))
    assert port.status(PUSH, 100 * MEGABYTE, signed(key)) == 413
    assert port.flower.read == [100]
    assert port.taken == 100 * MEGABYTE  # read and forgotten: a SuperNode sends all before it reads the answer


@pytest.mark.parametrize(("status", "answer"), [(200, b""), (401, b"no"), (500, b"an error")])
def test_a_pull_that_hands_over_nothing_allows_nothing(
    key: ec.EllipticCurvePrivateKey, status: int, answer: bytes
) -> None:
    port = Port()
    port.flower.status, port.flower.answer = status, answer
    port.status(PULL, 100, signed(key))
    assert port.status(PUSH, MEGABYTE, signed(key)) == 413


def run_in_its_place(monkeypatch: pytest.MonkeyPatch, flower: Callable[[], None]) -> None:
    """Run a SuperLink that is this in place of Flower's, in this process."""
    for module, name in ((uvicorn, "run"), (sys, "argv"), (sql_mixin, "SQLITE_PRAGMAS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(importlib.import_module("flwr.superlink.cli.flower_superlink"), "flower_superlink", flower)
    run_superlink([], MEGABYTE)


def test_a_superlink_that_is_started_twice_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(RunError, match="where its address is in use, it runs already"):
            run_in_its_place(monkeypatch, lambda: uvicorn.run(Flower(), port=port, ws="none"))


def test_a_database_that_others_write_is_waited_for_nearly_as_long_as_a_site_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ten sites on a busy machine Flower's own 5 s lost answers; a SuperNode gives up after 30 s."""
    waits = []

    class Database(sql_mixin.SqlMixin):
        def get_metadata(self) -> MetaData:
            return MetaData()

    def ask() -> None:
        database = Database(":memory:")
        database.initialize()
        waits.append(database.query("PRAGMA busy_timeout")[0]["timeout"])

    run_in_its_place(monkeypatch, ask)
    assert waits == [25_000]


def test_a_public_key_alone_is_not_enough(key: ec.EllipticCurvePrivateKey) -> None:
    port = Port()
    port.status(PULL, 100, signed(key))
    mine, other = signed(key), signed(ec.generate_private_key(ec.SECP384R1()))
    for wrong in (
        {**mine, "flwr-signature": other["flwr-signature"]},
        {**mine, "flwr-timestamp": "2026-11-22T07:00:01+00:00"},
        {**mine, "flwr-signature": "no base64"},
        {**mine, "flwr-public-key": base64.b64encode(b"no key").decode()},
        {name: value for name, value in mine.items() if name != "flwr-signature"},
        other,
    ):
        assert port.status(PUSH, MEGABYTE, wrong) == 413
        assert port.taken == 0
    assert port.status(PUSH, MEGABYTE, mine) == 200
