"""What a site checks before it joins: that the server can be reached, the clocks agree, and certificates are valid.

Flower's SuperNodes sign the time of each request. A SuperLink refuses a request whose time is not within its window,
and SuperNodes then stop without a reason.
"""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import httpx
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedskew.deploy._tls import SOON
from fedskew.errors import ConfigError, RunError
from fedskew.trees import read_tree

MOST_AHEAD = float(SYSTEM_TIME_TOLERANCE)
"""Seconds by which a site's clock may be ahead of the server's."""

MOST_BEHIND = float(SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE)
"""Seconds by which a site's clock may be behind the server's."""

TIMEOUT = 5.0
"""Seconds to wait for an answer."""

WORTH_SAYING = 2.0
"""Seconds of difference between clocks from which on a site is warned."""

DAY = 86400.0
CHECKED = ("not yet valid", "expired")


class UnreachableError(RunError):
    """The server can't be reached now; it may be later."""


class ServerCheck(NamedTuple):
    """What a server's answer tells of its clock and its certificate.

    Attributes:
        ahead: Seconds by which this machine's clock is ahead of the server's; negative: behind.
        unsure: Half the width of the interval in which the true value is, as answers give the time in whole seconds.
        days: Days for which the server's certificate is still valid.
    """

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
                f"the server's certificate expires in {self.days:.0f} days; its operator has to renew it (fedskew "
                "deploy renew)"
            )
        return found

    @property
    def clock(self) -> str:
        """The difference of the clocks, in words."""
        side = "ahead of" if self.ahead > 0 else "behind"
        return f"this machine's clock is {abs(self.ahead):.0f} s {side} the server's"


def server_of(path: Path) -> str:
    """Read the address of the server that a site's `data.toml` names.

    Args:
        path: The site's `data.toml`.

    Returns:
        The address, `HOST:PORT`.

    Raises:
        ConfigError: The file can't be read, or names no server.
    """
    server = read_tree(path, "site's data", None, False)[0].get("server")
    if not isinstance(server, str):
        raise ConfigError(f'{path}: server: expected the server\'s address, such as server = "fl.example.org:9092"')
    return server


def check_server(address: str, authority: Path) -> ServerCheck:
    """Ask a server for its time and its certificate.

    Args:
        address: The server, `HOST:PORT`.
        authority: The federation's `ca.crt`.

    Returns:
        The clocks' difference, and how long the certificate is valid.

    Raises:
        ConfigError: `ca.crt` can't be read.
        UnreachableError: There is no answer.
        RunError: What answers is not this federation's server, or a certificate is not valid at this machine's time.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(f"{authority}: no certificates can be read from it ({type(error).__name__})") from None
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
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - ended) / DAY
    return ServerCheck((began + ended) / 2 - (server_time + 1), (ended - began) / 2 + 1, days)


def _reason(address: str, error: httpx.HTTPError) -> RunError:
    text = str(error)
    if any(wrong in text for wrong in CHECKED):
        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        which = next(wrong for wrong in CHECKED if wrong in text)
        return RunError(
            f"{address}: its certificate, or ca.crt, is {which} by this machine's clock, which says {now}: if that is "
            "wrong, set it by NTP; else the server's operator has to renew it (fedskew deploy renew)"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return RunError(f"{address}: what answers there has no certificate of this federation's ca.crt: {text}")
    return UnreachableError(f"{address} can't be reached: {text or type(error).__name__}")
