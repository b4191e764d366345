"""The folder of a federation, as `fedskew deploy init` writes it.

README.md                  who does what, with the commands
app/                       what `flwr run` sends to the server and to every site
    pyproject.toml         what Flower wants to know
    run.toml, deploy.toml  the config that was simulated, and the agreement
    federation/            server.py and site.py: Flower's two apps, a line each
server/                    stays with the server: ca.crt, server.crt, server.key, superlink.sh, run.sh; later state.db
                           and runs/
sites/NAME/                goes to that site and to nobody else: ca.crt, key, key.pub, data.toml, supernode.sh,
                           run.toml, deploy.toml (copies, for `deploy site --check`); later state/, what it remembers
"""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

import tomli_w

from fedskew import __version__
from fedskew.deploy._agreement import Agreement, check_config
from fedskew.deploy._tls import write_certificates, write_node_key
from fedskew.errors import ConfigError
from fedskew.experiment._config import Config, write
from fedskew.labels import read_target

CONNECTION = "fedskew"
"""What the SuperLink is called in Flower's own configuration."""

SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""It names a folder, and a key at the SuperLink."""

TARGET = "target.csv"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names and addresses that the server's certificate holds for beside its own."""


class Address(NamedTuple):
    """Where sites reach the server: a name or an IP address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT`, or `[HOST]:PORT` for an IPv6 address. Raises ConfigError."""
        host, _, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            named = False
        else:
            named = re.fullmatch(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*", host) is not None
        if not (named or _is_ipv6(host)) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ConfigError(f"address: expected HOST:PORT, such as fl.example.org:9092; got {text!r}")
        return cls(host, int(port))

    @property
    def listen(self) -> str:
        """What the server binds: all of its addresses, or loopback where nobody else is to reach it."""
        if self.host in LOOPBACK:
            return self.local
        return "::" if _is_ipv6(self.host) else "0.0.0.0"

    @property
    def local(self) -> str:
        """Where the server's own machine reaches it."""
        return "::1" if _is_ipv6(self.host) else "127.0.0.1"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if _is_ipv6(self.host) else f"{self.host}:{self.port}"


def write_federation(
    folder: Path,
    config: Config,
    agreement: Agreement,
    address: Address,
    data: Mapping[str, object],
    target: Path | None = None,
) -> None:
    """A new federation in `folder`, with TLS and a key for every site.

    `data`: what a site's `data.toml` begins with; `target`: a file with the target mix (see `labels.read_target`), of
    which the server gets a copy.

    Raises ConfigError where the folder is not empty, or the config can't be deployed under the agreement.
    """
    check_config(config, agreement, has_target=target is not None)
    if target is not None:
        read_target(target, agreement.classes)
    for name in agreement.sites:
        if not SITE_NAME.fullmatch(name):
            raise ConfigError(f"sites: {name!r}: a site's name is made of letters, digits, '.', '_' and '-'")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty, and keys are not written over; name a new folder")
    fields = {
        "NAME": config.name,
        "ADDRESS": str(address),
        "LISTEN": address.listen,
        "LOCAL": str(address._replace(host=address.local)),
        "PORT": str(address.port),
        "CONNECTION": CONNECTION,
        "SITES": " ".join(agreement.names),
        "TARGET": "" if target is None else f' target=\\"$PWD/{TARGET}\\"',
    }
    app, server = folder / "app", folder / "server"
    _write_app(app, config, agreement)
    _private(server)
    write_certificates(server, [*dict.fromkeys([address.host, *LOOPBACK])])
    if target is not None:
        shutil.copyfile(target, server / TARGET)
    for script in ("superlink.sh", "register.sh", "run.sh"):
        _fill(script, server / script, fields)
    for name in agreement.names:
        site = folder / "sites" / name
        _private(site)
        write_node_key(site / "key")
        for path in (server / "ca.crt", app / "run.toml", app / "deploy.toml"):
            shutil.copyfile(path, site / path.name)
        (site / "data.toml").write_text(tomli_w.dumps({"state": "state", "data": dict(data)}), encoding="utf-8")
        _fill("supernode.sh", site / "supernode.sh", fields)
    _fill("README.md", folder / "README.md", fields)


def _private(folder: Path) -> None:
    """A folder that only its owner may enter: the server's has every model, a site's its data and its key."""
    folder.mkdir(parents=True)
    folder.chmod(0o700)


def _write_app(app: Path, config: Config, agreement: Agreement) -> None:
    """What `flwr run` sends."""
    package = app / "federation"
    package.mkdir(parents=True)
    nowhere = config.data.model_copy(update={"root": None})  # where the data was simulated is nobody's business
    write(config.model_copy(update={"data": nowhere}), app / "run.toml")
    agreement.write(app / "deploy.toml")
    (app / "pyproject.toml").write_text(tomli_w.dumps(_flower_app(config.name)), encoding="utf-8")
    (package / "__init__.py").write_text('"""A federation, as `fedskew deploy init` wrote it."""\n', encoding="utf-8")
    for script in ("server.py", "site.py"):
        _fill(script, package / script, {})


def _fill(template: str, path: Path, fields: Mapping[str, str]) -> None:
    text = files("fedskew.deploy").joinpath("templates", template).read_text(encoding="utf-8")
    path.write_text(Template(text).substitute(fields), encoding="utf-8")


def _flower_app(name: str) -> dict[str, object]:
    """The `pyproject.toml` of the app folder."""
    return {
        "project": {
            "name": _project_name(name),
            "version": "1.0.0",
            "description": f"{name}, a federation by fedskew",
            "license": "Apache-2.0",
            "dependencies": [f"fedskew[flower]>={__version__}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedskew",
                    "components": {"serverapp": "federation.server:server", "clientapp": "federation.site:site"},
                    "config": {"out": "runs", "target": ""},
                }
            }
        },
    }


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _project_name(name: str) -> str:
    """A config's name as a project may be called."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    return kept or "federation"
