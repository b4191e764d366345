"""A site joins: what it checks before, Flower's SuperNode for its folder, and the only app that it runs.

Flower's SuperNodes sign the time of each request. A SuperLink refuses a request whose time is not within its window,
and SuperNodes then stop without a reason. Here a site says why it can't join or had to stop, and exits with status 2.

Flower can refuse apps that no trusted entity has signed, but its open SuperLink does not pass signatures on. Here the
place of a signature is taken by the hash in `agreed.toml`: of another app than the site agreed to, no code is run.
"""

import importlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import httpx
import psutil
from flwr.app import Error
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import fleet_http_connection
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedskew.deploy._log import LOG
from fedskew.deploy.app_files import OFFERED, AppFiles, app_hash, offer_app, unzip_app
from fedskew.deploy.keys import SOON, check_node_key
from fedskew.deploy.terms import Terms, terms_path
from fedskew.errors import ConfigError, FedskewError, RunError
from fedskew.tables import duration
from fedskew.trees import read_tree

MOST_AHEAD = float(SYSTEM_TIME_TOLERANCE)
"""Seconds by which a site's clock may be ahead of the server's."""

MOST_BEHIND = float(SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE)
"""Seconds by which a site's clock may be behind the server's."""

TIMEOUT = 5.0
"""Seconds to wait for an answer."""

WORTH_SAYING = 2.0
"""Seconds of difference between clocks from which on a site is warned."""

SHORTEST_PAUSE, PAUSE_SHARE, LONGEST_PAUSE = 0.1, 0.1, 3.0
"""Seconds between looks for a message: this share of the time since the last reply. The longest is Flower's own."""

REFUSED = 2
"""Exit status of a site that the server refuses; Flower's would be 0, or 1 and a traceback."""

INVALID_APP = 7
"""Flower's code of an app that is not verified."""

REFUSED_APP = Error(INVALID_APP, "not agreed: app; its own log says more")
MESSAGE, TRANSFORMERS = b".", b"t"
"""What wakes the process that forks one for each message: of any app, or of one whose network is of transformers, which
takes seconds to import."""
BY_HASH = {"agreed.toml": ""}  # replaces Flower's check of trusted entities


class _UnreachableError(RunError):
    """The server can't be reached now; it may be later."""


class ServerCheck(NamedTuple):
    """What a server's answer tells: seconds that this clock is ahead, how unsure that is, days of its certificate."""

    ahead: float
    unsure: float
    days: float

    def refusal(self) -> str | None:
        """Return why the server will refuse this machine's requests; None if it will not."""
        if self.ahead + self.unsure > -MOST_BEHIND and self.ahead - self.unsure < MOST_AHEAD:
            return None
        return (
            f"{self.clock}, and Flower refuses a site that is more than {MOST_AHEAD:.0f} s ahead or {MOST_BEHIND:.0f} "
            "s behind; let both set their clocks by NTP"
        )

    def notes(self) -> list[str]:
        """Return what the operator should look at soon, a line each."""
        found = []
        if abs(self.ahead) - self.unsure > WORTH_SAYING:
            found.append(f"{self.clock}; at more than {MOST_AHEAD:.0f} s ahead it is refused: set it by NTP")
        if self.days < SOON:
            found.append(
                f"the server's certificate expires in {duration(86400 * self.days)}; its operator has to renew it "
                "(fedskew deploy renew)"
            )
        return found

    @property
    def clock(self) -> str:
        """The difference of the clocks, in words."""
        side = "ahead of" if self.ahead > 0 else "behind"
        return f"this machine's clock is {abs(self.ahead):.0f} s {side} the server's"

    @staticmethod
    def of_site(data: Path) -> list[str]:
        """Compare clocks with a site's server; return what to look at soon, RunError where it will refuse this one."""
        try:
            check = _check_server(_server_of(data), data.parent / "ca.crt")
        except _UnreachableError as error:
            return [f"{error}; to compare clocks, look again when the server runs"]
        if (refusal := check.refusal()) is not None:
            raise RunError(refusal)
        return check.notes()


def _server_of(path: Path) -> str:
    """Read the server's address, `HOST:PORT`, from a site's `data.toml`; ConfigError where it names none."""
    server = read_tree(path, "site's data", None, False)[0].get("server")
    with suppress(httpx.InvalidURL):
        if isinstance(server, str) and re.fullmatch(r"[^/\s]+:\d+", server):
            httpx.URL(f"https://{server}")
            return server
    raise ConfigError(f'{path}: server: expected its address and port, such as server = "fl.example.org:9092"')


def _check_server(address: str, authority: Path) -> ServerCheck:
    """Ask a server, `HOST:PORT`, for its time and its certificate; `authority` is the federation's `ca.crt`."""
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        why = f"no certificates can be read from it ({type(error).__name__})"
        raise ConfigError(f"{authority}: {why}; put back the one that the server's operator sent last") from None
    began = time.time()
    try:
        with (
            httpx.Client(verify=context, timeout=TIMEOUT) as client,  # by the proxy that Flower would use, too
            client.stream("GET", f"https://{address}/v1/fleet/") as answer,
        ):
            ended = time.time()
            certificate = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
            server_time = parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
    except httpx.HTTPError as error:
        raise _reason(address, error) from None
    except (TypeError, ValueError):
        raise RunError(f"{address}: what answers there tells no time, so it is no fedskew server") from None
    # The server answered between `began` and `ended`, with whole seconds that it updates once a second.
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - ended) / 86400
    return ServerCheck((began + ended) / 2 - (server_time + 1), (ended - began) / 2 + 1, days)


def _reason(address: str, error: httpx.HTTPError) -> RunError:
    text, now = str(error), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if which := next((wrong for wrong in ("not yet valid", "expired") if wrong in text), ""):
        return RunError(
            f"{address}: its certificate, or ca.crt, is {which} by this machine's clock, which says {now}: if that is "
            "wrong, set it by NTP; else the server's operator has to renew it (fedskew deploy renew)"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        how = "see that the address is right, and ask the server's operator for the ca.crt of now"
        return RunError(f"{address}: what answers there has no certificate of this federation's ca.crt: {text}; {how}")
    return _UnreachableError(f"{address} can't be reached: {text or type(error).__name__}")


class _Signer(NodeAuthHttpInterceptor):
    """Flower's signer of requests, which ends the process with a line where the server refuses them."""

    refused: ClassVar[Callable[[str], None]]

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        response = super().intercept(context, call_next)
        error = None if response.is_success else FlowerError.from_json(response.text)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            type(self).refused(
                "no longer accepts this site's key: it was revoked there, or the server has lost its registrations "
                "(register.sh)"
            )
        elif error is not None and error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            type(self).refused(
                "does not accept this site's key: it is not registered there (register.sh), or was revoked; or this "
                "site runs already, or was killed less than a minute ago and still counts as there: start it again then"
            )
        return response


def run_supernode(data: Path, arguments: Sequence[str]) -> None:
    """Run `flower-supernode`, with more of its options, for the folder of a site's `data.toml` until it ends.

    The folder has `ca.crt` and `key` beside `data.toml`. A server that can't be reached is waited for; where it refuses
    the site later, the process ends with a line in its log and status 2. RunError where it refuses this clock.
    """
    from flwr.supernode.cli.flower_supernode import flower_supernode

    data = data.absolute()
    folder, server = data.parent, _server_of(data)
    authority, ending = folder / "ca.crt", Lock()
    for note in ServerCheck.of_site(data):
        LOG.warning("%s", note)
    if not any(one.startswith("--auth-supernode-private-key") for one in arguments):
        check_node_key(folder / "key")

    def refused(why: str) -> None:
        ending.acquire()  # for good: one thread says it
        reason = f"{server} {why}"
        try:
            ServerCheck.of_site(data)
        except FedskewError as error:
            reason = str(error)
        LOG.error("%s", reason)
        for process in psutil.Process().children(recursive=True):  # an answer of theirs would be refused, too
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(REFUSED)  # Flower's threads would go on to tell what they make of the refusal

    answer_at_once(run_agreed_only(data))
    os.chdir(folder)
    os.environ.setdefault("FLWR_HOME", str(folder / "flower"))
    _Signer.refused = refused
    fleet_http_connection.NodeAuthHttpInterceptor = _Signer  # type: ignore[attr-defined]
    sys.argv = [
        "flower-supernode",
        *("--superlink", server, "--root-certificates", str(authority)),
        *("--auth-supernode-private-key", str(folder / "key"), "--node-config", node_config(data)),
        *arguments,
    ]
    try:
        flower_supernode()
    except RuntimeError as error:
        if "failed to start" not in str(error):
            raise
        raise RunError(
            f"{folder}: the lines above say why it did not start; where its port is in use, this site runs already, or "
            "another one of this machine has it: give this one its own, PORT=9095 sh supernode.sh"
        ) from None


def node_config(data: Path) -> str:
    """Return the config by which Flower tells its apps a site's `data.toml`: TOML, without a quote within quotes."""
    said = json.dumps(str(data).replace('"', "\0"), ensure_ascii=False)
    return f"data={said}".replace("\\u0000", "\\u0022").replace("\x7f", "\\u007f")


def is_agreed(content: bytes, data: Path) -> bool:
    """Return whether a site agreed to an app, a zip file; if not, log it, and write it to `offered/`."""
    site = data.parent
    try:
        files = unzip_app(content)
    except FedskewError as error:
        LOG.error("app: %s", error)
        return False
    try:
        if app_hash(files) == Terms.read(terms_path(data)).app:
            shutil.rmtree(site / OFFERED, ignore_errors=True)
            return True
        look = f"look at it, and agree: fedskew deploy site --check {data}"
        said = f"app: the server sent another app than this site agreed to; it is not run; {look}"
    except FedskewError as error:
        said = str(error)
    try:
        offer_app(files, site)
    except OSError as error:
        LOG.error("%s: can't be written: %s", site / OFFERED, error.strerror)
    LOG.error("%s", said)
    return False


class _AgreedRuns:
    """A SuperNode's state in which a run is known only while the site agrees to its app (`apps`: hash by run)."""

    def __init__(self, state: Any, apps: Mapping[int, str], data: Path) -> None:
        self._state, self._apps, self._data = state, apps, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_run(self, run: int) -> Any:
        """Return a run, or None if it is not known, or its app is not agreed to."""
        try:
            agreed = Terms.read(terms_path(self._data)).app
        except FedskewError:
            return None
        return self._state.get_run(run) if self._apps.get(run) == agreed else None


def run_agreed_only(data: Path) -> Mapping[int, bytes]:
    """Make this process's SuperNode ask `is_agreed` before it takes an app; return what its messages wake by, by run.
    Flower takes an app once a run; a message of a run whose app is no longer agreed to is treated as its first, whose
    app is asked for, and refused, again. RunError where this version of Flower takes apps in another way."""
    supernode: Any = importlib.import_module("flwr.supernode.start_client_internal")
    if not all(
        hasattr(supernode, name) for name in ("_pull_and_store_message", "_verify_fab", "FAB_VERIFICATION_ERROR")
    ):
        raise RunError("this version of Flower can't be kept to agreed.toml; install flwr 1.41 or another that can")
    pull, verify = supernode._pull_and_store_message, supernode._verify_fab
    apps: dict[int, str] = {}  # hashes of the apps that were taken, by run
    words: dict[int, bytes] = {}

    def pull_agreed(*, state: Any, get_fab: Callable[[str, int], Any], trusted_entities: Any, **more: Any) -> Any:
        def get_agreed(fab_hash: str, run: int) -> Any:
            fab = get_fab(fab_hash, run)
            if is_agreed(fab.content, data):
                files = unzip_app(fab.content)
                apps[run], words[run] = app_hash(files), wakes_by(files)
            else:
                fab.content = b""  # nothing of it is left that could be run
            if not trusted_entities:
                fab.verifications["valid_license"] = "by hash"
            return fab

        agreed = _AgreedRuns(state, apps, data)
        return pull(state=agreed, get_fab=get_agreed, trusted_entities=trusted_entities or BY_HASH, **more)

    def verify_agreed(fab: Any, trusted_entities: Any) -> bool:
        return bool(fab.content) and (trusted_entities is BY_HASH or verify(fab, trusted_entities))

    supernode._pull_and_store_message = pull_agreed
    supernode._verify_fab = verify_agreed
    supernode.FAB_VERIFICATION_ERROR = REFUSED_APP
    return words


def wakes_by(app: AppFiles) -> bytes:
    """Return what messages of an app wake by."""
    return TRANSFORMERS if re.search(rb'^name = "transformers:', app.get("run.toml", b""), re.MULTILINE) else MESSAGE


class _Forks:
    """The process that forks one for each message (see `_forks`), in the place of Flower's SuperExec."""

    def __init__(self) -> None:
        self._command: list[str] = []
        self._code: object = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        """Start it in place of this command, whose options it takes."""
        self._command, self._code, forks = [*command], _installed(), "from fedskew.deploy._forks import main; main()"
        options = [sys.executable, "-P", "-c", forks, *command[1:]]
        self._process = subprocess.Popen(options, bufsize=0, stdin=subprocess.PIPE)

    def wake(self, word: bytes) -> None:
        """Say by this word that there is a message; start it again where it was killed, or fedskew is another."""
        if self._process is not None:
            if self._process.poll() is not None or self._code != _installed():
                self._process.communicate()  # closes its input, with which it ends
                self.start(self._command)
            assert self._process.stdin is not None, "as it is started"
            self._process.stdin.write(word)


def _installed() -> tuple[int, int]:
    found = Path(__file__).stat()
    return found.st_ino, found.st_mtime_ns


def answer_at_once(words: Mapping[int, bytes]) -> None:
    """Make this process's SuperNode notice messages and replies soon, and answer by forks of a process that is ready,
    which a run's messages wake by its one of `words`. Flower looks for a message every 3 s, for its reply every 0.5 s,
    and starts a Python for each; it still does elsewhere than on Linux, where a process with numerical libraries can't
    safely be forked."""
    supernode: Any = importlib.import_module("flwr.supernode.start_client_internal")
    pull, forks = supernode._pull_and_store_message, _Forks()

    def pull_next(**more: Any) -> int:
        began = time.monotonic()
        while (run := pull(**more)) is None:
            time.sleep(min(max(SHORTEST_PAUSE, PAUSE_SHARE * (time.monotonic() - began)), LONGEST_PAUSE))
        forks.wake(words.get(run, MESSAGE))
        return int(run)

    supernode._pull_and_store_message = pull_next
    supernode.time = SimpleNamespace(sleep=lambda _: time.sleep(SHORTEST_PAUSE))  # until this machine's reply is there
    if sys.platform == "linux":
        supernode.subprocess = SimpleNamespace(Popen=forks.start)
