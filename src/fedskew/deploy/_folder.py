"""The folder of a federation, as `fedskew deploy init` and `fedskew deploy local` write it.

README.md                  who does what, with the commands; with --wheel the wheel of fedskew beside it
app/                       what `flwr run` sends to the server and to every site
    pyproject.toml         the app's description for Flower
    run.toml, deploy.toml  the config that was simulated, and the agreement
    federation/            server.py and site.py: Flower's two apps, one statement each
server/                    stays with the server: ca.crt, server.crt, server.key, superlink.sh, register.sh, run.sh,
                           fedskew-server.service; later state.db and runs/
sites/NAME/                goes to that site and to nobody else: ca.crt, key, key.pub, mask.key if updates are masked,
                           data.toml, supernode.sh, fedskew-site.service, Dockerfile, README.md and wheel once more,
                           and app/, a copy that the site looks at before it agrees; later agreed.toml and state/
weights.safetensors        in server/ and each site's folder, where the config names a file of first weights
"""

import hashlib
import ipaddress
import json
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import tomli_w

from fedskew import __version__
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._rehearsal import Rehearsal, rehearse
from fedskew.deploy.app_files import APP, PROJECT, AppFiles, project_content, read_app, read_toml, running
from fedskew.deploy.keys import CONNECTION, write_certificates, write_mask_key, write_node_key
from fedskew.errors import ConfigError
from fedskew.experiment import Config, read
from fedskew.files import private_folder
from fedskew.own_code import is_ours, names_in, refused
from fedskew.privacy import epsilon as epsilon_of
from fedskew.privacy import most_rounds
from fedskew.sums import Key
from fedskew.tables import counted
from fedskew.trees import on_one_line

SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Valid names of sites; a site's folder and its key at the SuperLink have its name."""

HOST_NAME = re.compile(r"(?=.{1,253}$)(?!-)[a-z0-9-]{1,63}(\.(?!-)[a-z0-9-]{1,63})*")
WHEEL = re.compile(rf"fedskew-{re.escape(__version__)}-[a-z0-9_.]+-[a-z0-9_.]+-[a-z0-9_.]+\.whl")
EXTRAS = "[flower,dp]"
NOT_YET = "it takes the app's own code, which nothing runs before the app is agreed to"
"""Why a name is not imported while an app is only looked at."""
TARGET, WEIGHTS = "target.csv", "weights"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names and addresses for which the server's certificate is valid in addition to its own."""


class Address(NamedTuple):
    """The address at which sites reach the server: a host name or an IP address, and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse `HOST:PORT`, or `[HOST]:PORT` for an IPv6 address; ConfigError for anything else."""
        try:
            parts = urlsplit(f"//{text}")
            address = cls(parts.hostname or "", parts.port or 0)
        except ValueError:
            address = cls("", 0)
        is_host = HOST_NAME.fullmatch(address.host) or (address.is_ipv6 and "%" not in address.host)
        if not is_host or not address.port or str(address) != text.lower():
            raise ConfigError(f"address: expected HOST:PORT, such as fl.example.org:9092; got {text!r}")
        return address

    @property
    def ip(self) -> str:
        """The host, if it is an IP address; else nothing."""
        try:
            return str(ipaddress.ip_address(self.host))
        except ValueError:
            return ""

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an address of IPv6."""
        return ":" in self.ip

    @property
    def listen(self) -> str:
        """The address that the server listens on: loopback if sites reach it by loopback, else all addresses."""
        if self.host in LOOPBACK:
            return self.local
        return "::" if self.is_ipv6 else "0.0.0.0"

    @property
    def local(self) -> str:
        """The loopback address, by which the server's own machine reaches it."""
        return "::1" if self.is_ipv6 else "127.0.0.1"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def write_federation(
    folder: Path,
    config: Config,
    agreement: Agreement,
    address: Address,
    data: Mapping[str, object],
    target: Path | None = None,
    mask_keys: Mapping[str, Key] | None = None,
    wheel: Path | None = None,
) -> Rehearsal:
    """Write a new federation's folder, with TLS certificates and a key for every site; return it as it plays on paper.

    `data` is the first table `[data]` of every `data.toml`. The file with the `target` mix is copied to the server's
    folder, and a `wheel` of fedskew to each; public halves of `mask_keys` are the agreement's `keys`. ConfigError where
    the folder is not empty, a site's name is not valid, or the config can't be deployed.
    """
    played, own = rehearse(config, agreement, target), config.model.weights
    weights = None if own is None else Path(config.place(own))
    weights_name = "" if own is None else f"{WEIGHTS}{Path(own).suffix}"
    if wheel is not None:
        _check_wheel(wheel)
    for name in agreement.members:
        if not SITE_NAME.fullmatch(name):
            raise ConfigError(f"sites: {name!r}: a site's name may have letters, digits, '.', '_' and '-'")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is a file, or not empty, and keys are never overwritten; name a new folder")
    unknown = f"# IPAddressAllow=ADDRESS, the IP address of {address.host}: until it is here, the site can't connect"
    fields = {
        "NAME": config.name,
        "ADDRESS": str(address),
        "LISTEN": address.listen,
        "LOCAL": str(address._replace(host=address.local)),
        "PORT": str(address.port),
        "CONNECTION": CONNECTION,
        "ALLOW": f"IPAddressAllow={address.ip}" if address.ip else unknown,
        "VERSION": __version__,
        **_installation(wheel),
        "MAX_REPLY": str(played.plan.pushed_bytes),
        "SITES": " ".join(agreement.members),
        "TARGET": "" if target is None else f' target=\\"$PWD/{TARGET}\\"',
        "WEIGHTS": weights_name and f' weights=\\"$PWD/{weights_name}\\"',
    }
    app, server = folder / APP, folder / "server"
    _write_app(app, config, agreement, weights_name)
    private_folder(server)  # it will have all models
    write_certificates(server, [*dict.fromkeys([address.host, *LOOPBACK])])
    if target is not None:
        shutil.copyfile(target, server / TARGET)
    if weights is not None:
        shutil.copyfile(weights, server / weights_name)
    for script in ("superlink.sh", "register.sh", "run.sh", "fedskew-server.service"):
        _fill(script, server / script, fields)
    for name in agreement.members:
        site = folder / "sites" / name
        private_folder(site)  # as are its data and its key
        write_node_key(site / "key")
        if mask_keys is not None:
            write_mask_key(site, mask_keys[name])
        shutil.copyfile(server / "ca.crt", site / "ca.crt")
        shutil.copytree(app, site / APP)
        if weights is not None:
            shutil.copyfile(weights, site / weights_name)
        described: dict[str, object] = {"server": str(address), "state": "state"}
        if name == agreement.target_site:
            described["unlabelled"] = "unlabelled"
        if name in agreement.sites:
            described["data"] = dict(data)
        (site / "data.toml").write_text(tomli_w.dumps(described), encoding="utf-8")
        for script in ("supernode.sh", "fedskew-site.service", "Dockerfile"):
            _fill(script, site / script, fields | {"SITE": name})
        (site / ".dockerignore").write_text("*\n!*.whl\n", encoding="utf-8")  # no image holds the site's key or data
    for place in (folder, *(folder / "sites" / name for name in agreement.members)):
        _fill("README.md", place / "README.md", fields)
        if wheel is not None:
            shutil.copyfile(wheel, place / wheel.name)
    return played


def site_names(clients: Sequence[str]) -> list[str]:
    """Name a simulation's clients as sites: their own names if these are valid and sorted, else `site-0` and so on."""
    width = len(str(len(clients) - 1))
    valid = all(SITE_NAME.fullmatch(name) and not name.isdecimal() for name in clients)
    own = valid and sorted(set(clients)) == list(clients)
    return list(clients) if own else [f"site-{place:0{width}d}" for place in range(len(clients))]


def _write_app(app: Path, config: Config, agreement: Agreement, weights: str) -> None:
    (app / "federation").mkdir(parents=True)
    without_root = config.data.model_copy(update={"root": None, "tokenizer": None})  # the simulation's places
    model = config.model.model_copy(update={"weights": weights or None})
    config.model_copy(update={"data": without_root, "model": model}).write(app / "run.toml")
    agreement.write(app / "deploy.toml")
    (app / "pyproject.toml").write_text(_project(config.name), encoding="utf-8")
    for name, text in app_code().items():
        (app / name).write_text(text, encoding="utf-8")


def app_code() -> dict[str, str]:
    """Return the Python files of every app that `write_federation` writes, by relative path."""
    code = {f"federation/{script}": _template(script) for script in ("server.py", "site.py")}
    return {"federation/__init__.py": '"""A federation, as `fedskew deploy init` wrote it."""\n', **code}


def other_code(app: AppFiles) -> list[str]:
    """List what an app brings that `write_federation` does not write, and that would run, or be opened, at a site.

    These are files that are not as they are written, and what `run.toml` names by `module:name`, each with its key.
    """
    tree = read_toml(app.get("run.toml", b"")) or {}
    ours = {name: text.encode() for name, text in app_code().items()}
    known = {"run.toml", "deploy.toml", *(name for name in ours if app.get(name) == ours[name])}
    written = _project(str(tree.get("name", Config.model_fields["name"].default))).encode()
    if project_content(app.get(PROJECT, b"")) == project_content(written):
        known.add(PROJECT)
    return [*sorted(set(app) - known), *(f"run.toml: {key} = {name}" for key, name in asked_of_site(tree).items())]


def asked_of_site(tree: Mapping[str, Any]) -> dict[str, str]:
    """Find what a config would have imported or opened at a site, which waits until it has agreed: each `module:name`
    outside fedskew, by dotted key; and a file of weights but that in the site's own folder, whose content is known."""
    names = {key: name for key, name in names_in(tree).items() if not is_ours(name)}
    model = tree.get("model")
    weights = model.get("weights") if isinstance(model, Mapping) else None
    is_known = isinstance(model, Mapping) and model.get("weights_hash") and Path(str(weights)).stem == str(WEIGHTS)
    return names if weights is None or is_known else names | {"model.weights": str(weights)}


def check_folder(folder: Path, trust_code: bool = False) -> list[str]:
    """Check that a federation's folder can be played; say what bounds its sites, and what the loss of each stops.
    ConfigError where it can't be, or where that takes the app's own code and this is not trusted."""
    app = folder / "app"
    asked = asked_of_site(Config.outline(app / "run.toml").model_dump())
    if asked and not trust_code:
        key, name = next(iter(asked.items()))
        raise ConfigError(
            f"{app / 'run.toml'}: {key}: {name!r} is the app's own, and to check the app would run or open it here; "
            "read it, and if you trust it add --trust-code"
        )
    with running(read_app(app)) if asked else refused(NOT_YET):
        return _checked(folder)


def _checked(folder: Path) -> list[str]:
    """Play a federation on paper, by its newest run's label counts or made-up ones."""
    config = read(folder / "app" / "run.toml").weights_in(folder / "server")
    agreement = Agreement.read(folder / "app" / "deploy.toml")
    target = folder / "server" / "target.csv"
    place = target if target.exists() else None
    runs = sorted((folder / "server" / "runs").glob("*/deployment.json"), key=lambda path: path.stat().st_mtime)
    counts, whose = None, "made-up label counts"
    if runs and agreement.label_counts in ("exact", "noisy"):
        counts = np.array(json.loads(runs[-1].read_text(encoding="utf-8"))["label_counts"], dtype=np.float64)
        whose = f"the label counts of {runs[-1].parent.name}"
    played = rehearse(config, agreement, place, counts)
    leaves_out = agreement.norm_action == "leave_out"
    bound = (
        f"norm_limit = {agreement.norm_limit:g}, norm_action = {agreement.norm_action}: what is so many times as large "
        f"as is likely is {'left out' if leaves_out else 'counted, and only reported'}"
    )
    if agreement.updates == "masked":
        bound = (
            f"updates = masked: the server sees sums over {agreement.sum_sites} sites at least, one of a round, so "
            "that nothing bounds what a site that lies sends, and a round is lost with a site that masks and does not "
            "open"
        )
    compared = agreement.updates == "plain" and agreement.label_counts == "exact"
    return [
        f"{folder}: can be played, by {counted(len(agreement.sites), 'site')}, with {whose}",
        bound,
        played.limit_in_words(),
        f"method.aggregation: {config.method.get('aggregation', {'name': 'mean'})['name']}",
        *played.losses_in_words(),
        "directions: updates are compared with those of sites that told the same labels, from four sites in a round"
        if compared
        else "directions: not compared, as that takes exact label counts and updates that are not masked",
        *noise_in_words(config),
        *target_site_in_words(config, agreement),
    ]


def noise_in_words(config: Config) -> list[str]:
    """Say in a line what the noise on updates costs a site; no line where updates have no noise."""
    section, rounds = config.privacy, config.training.rounds
    if section is None:
        return []
    all_rounds = epsilon_of(section.noise, rounds, section.delta)
    most = most_rounds(section.noise, section.epsilon, section.delta)
    return [
        f"privacy.noise = {section.noise:g}: a site that takes part in all rounds ({rounds}) spends epsilon "
        f"{all_rounds:.3g} (delta {section.delta:g}), and in {min(most, rounds)} of them at most, for an epsilon of "
        f"{section.epsilon:g}"
    ]


def target_site_in_words(config: Config, agreement: Agreement) -> list[str]:
    """Say who the target site is, what it sends, and what bounds it if it lies; nothing where there is none."""
    name, section = agreement.target_site, config.target
    if name is None or not section.is_estimated:
        return []
    cells = len(agreement.classes) * section.bins
    work = "it trains, too" if name in agreement.sites else "it does not train, and sends no model"
    return [
        f"target_site = {name}: after round {section.warmup} and every {counted(section.every, 'round')} it sends how "
        f"many of its samples without labels are in each of {cells} cells (class and confidence of the model); {work}",
        f"what {name} sends decides towards which label mix sites are weighed; training.weight_limit, the weighting's "
        f"effective_clients, and target.on_misfit = {section.on_misfit} bound that (docs/threats.md of fedskew)",
    ]


def _check_wheel(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as wheel:
            name = f"fedskew-{__version__}.dist-info/METADATA"
            found = Parser().parsestr(wheel.read(name).decode("utf-8"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        found, why = None, f"{type(error).__name__}: {error}"
    right = found is not None and (found["Name"], found["Version"]) == ("fedskew", __version__)
    if not right or not WHEEL.fullmatch(path.name):
        raise ConfigError(
            f"{path}: expected a wheel of fedskew {__version__}, as pip wheel --no-deps makes it of its source"
            f"{f' ({why})' if found is None else ''}"
        )


def _installation(wheel: Path | None) -> dict[str, str]:
    """Return the fields of the templates that say how fedskew is installed: from a wheel, or a package index."""
    user = "useradd --uid 10001 --no-create-home site"
    if wheel is None:
        what = f"fedskew{EXTRAS}=={__version__}"
        return {
            "PIP": f"pip install '{what}'",
            "DOCKER": f'ARG FEDSKEW="{what}"\nRUN pip install --no-cache-dir "$FEDSKEW" && {user}',
        }
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {
        "PIP": f"echo '{checksum}  {wheel.name}' | sha256sum -c && pip install './{wheel.name}{EXTRAS}'",
        "DOCKER": f"COPY {wheel.name} /tmp/\nRUN echo '{checksum}  /tmp/{wheel.name}' | sha256sum -c "
        f"&& pip install --no-cache-dir '/tmp/{wheel.name}{EXTRAS}' && {user}",
    }


def _fill(template: str, path: Path, fields: Mapping[str, str]) -> None:
    path.write_text(Template(_template(template)).substitute(fields), encoding="utf-8")


def _template(name: str) -> str:
    return files("fedskew.deploy").joinpath("templates", name).read_text(encoding="utf-8")


def _project(name: str) -> str:
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower()).strip("-")
    fields = {"NAME": kept or "federation", "DESCRIPTION": on_one_line(f"{name}, a federation by fedskew")}
    return Template(_template("app.toml")).substitute(fields, VERSION=__version__)
