"""`fedskew deploy init`: the folder of a federation, its keys and certificates, and what it refuses to write."""

import json
import os
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

from fedskew import __version__
from fedskew.cli import app
from fedskew.deploy import Address, Agreement
from fedskew.errors import ConfigError, DataError, FedskewError, RunError
from fedskew.experiment import read

CONFIG = """\
name = "shops"
[data]
name = "digits"
root = "/somewhere/private"
[partition]
rule = "quantity"
clients = 3
labels_per_client = 4
[model]
name = "mlp3"
[method]
preset = "fedla"
[training]
rounds = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace('root = "/somewhere/private"\n', ""))
    return path


def deploy(*words: object) -> None:
    """A command as a person types it, whose errors are exceptions."""
    app(["deploy", *map(str, words)], standalone_mode=False)


def init(config: Path, folder: Path, *more: object, masked: bool = False) -> Path:
    how = ("--sites", "north,south,west", "--updates", "masked") if masked else ("--sites", "north,south")
    deploy("init", folder, "--config", config, *how, *more)
    return folder


def permissions(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_private_keys_and_their_folders_are_their_owners_alone(config, tmp_path):
    folder = init(config, tmp_path / "fed")
    keys = {path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    assert keys == {folder / "server" / "server.key", *(folder / "sites" / name / "key" for name in ("north", "south"))}
    assert {permissions(key) for key in keys} == {"0o600"}
    assert {permissions(key.parent) for key in keys} == {"0o700"}
    # Nothing private is in what Flower sends to everybody.
    assert not any(key.is_relative_to(folder / "app") for key in keys)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_servers_certificate_is_one_to_openssl(config, tmp_path):
    server = init(config, tmp_path / "fed", "--address", "fl.example.org:9092") / "server"

    def verify(*more: str) -> int:
        words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.crt", *more, "server.crt"]
        return subprocess.run(words, cwd=server, capture_output=True, check=False).returncode

    for name in ("fl.example.org", "localhost"):
        assert verify("-verify_hostname", name) == 0
    assert verify("-verify_ip", "127.0.0.1") == 0
    assert verify("-verify_hostname", "elsewhere.example.org") != 0
    # The certificate is of the key beside it.
    asked = (["x509", "-in", "server.crt", "-noout", "-pubkey"], ["pkey", "-in", "server.key", "-pubout"])
    halves = [subprocess.run(["openssl", *one], cwd=server, capture_output=True, check=True).stdout for one in asked]
    assert halves[0] == halves[1]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_sites_key_is_one_to_ssh_keygen(config, tmp_path):
    sites = init(config, tmp_path / "fed") / "sites"
    public = {}
    for name in ("north", "south"):
        done = subprocess.run(["ssh-keygen", "-y", "-f", sites / name / "key"], capture_output=True, check=True)
        public[name] = done.stdout.split()[:2]
        assert public[name] == (sites / name / "key.pub").read_bytes().split()[:2]
    assert public["north"] != public["south"]


def test_the_app_is_the_config_and_the_agreement(config, tmp_path):
    app_folder = init(config, tmp_path / "fed", "--label-counts", "noisy", "--epsilon", "0.5") / "app"
    assert read(app_folder / "run.toml") == read(config)
    agreement = Agreement.read(app_folder / "deploy.toml")
    assert agreement.names == ("north", "south")
    assert (agreement.label_counts, agreement.epsilon) == ("noisy", 0.5)
    assert (agreement.classes, agreement.shape) == ([str(digit) for digit in range(10)], [1, 8, 8])
    project = tomllib.loads((app_folder / "pyproject.toml").read_text())
    assert {"name", "version", "description", "license"} <= set(project["project"])  # what `flwr run` would warn of
    components = project["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "federation.server:server", "clientapp": "federation.site:site"}


def test_where_the_simulations_data_was_is_not_disclosed(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    folder = init(tmp_path / "run.toml", tmp_path / "fed", "--classes", "shoe,hat", "--shape", "3,32,32")
    written = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any("/somewhere/private" in text or str(tmp_path) in text for text in written)


def test_tls_and_node_keys_are_on(config, tmp_path):
    folder = init(config, tmp_path / "fed")
    superlink = (folder / "server" / "superlink.sh").read_text()
    assert {"--enable-supernode-auth", "--ssl-certfile", "--ssl-keyfile", "--database"} <= set(superlink.split())
    for name in ("north", "south"):
        supernode = (folder / "sites" / name / "supernode.sh").read_text()
        assert "fedskew deploy supernode" in supernode  # which has ca.crt and key from this folder
        assert {path.name for path in (folder / "sites" / name).iterdir()} >= {"ca.crt", "key"}
    assert not any("--insecure" in path.read_text() for path in folder.rglob("*.sh"))


SCRIPTS = ("server/superlink.sh", "server/register.sh", "server/run.sh", "sites/north/supernode.sh")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_what_sh_reads(config, tmp_path, script):
    folder = init(config, tmp_path / "a folder")
    assert subprocess.run(["sh", "-n", folder / script], check=False).returncode == 0
    assert "$$" not in (folder / script).read_text()


def test_a_folder_that_holds_anything_is_left_as_it_is(config, tmp_path):
    folder = init(config, tmp_path / "fed")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for place in (folder, config):
        with pytest.raises(ConfigError, match="is a file, or not empty"):
            init(config, place)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with pytest.raises(RunError, match=r"/dev/null/fed: can't be written: Not a directory"):
        init(config, Path("/dev/null/fed"))


def test_the_target_mix_stays_at_the_server(config, tmp_path):
    target = tmp_path / "mix.csv"
    target.write_text("class,share\n" + "".join(f"{digit},{digit + 1}\n" for digit in range(10)))
    folder = init(config, tmp_path / "fed", "--target", target)
    assert [path.relative_to(folder) for path in folder.rglob("*.csv")] == [Path("server/target.csv")]
    assert "target.csv" in (folder / "server" / "run.sh").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sites", "north,,south"], "--sites"),
        (["--sites", "north,north"], "sites: a name occurs twice"),
        (["--sites", "../north"], "'../north'"),
        (["--sites", "a b"], "'a b'"),
        (["--address", "fl.example.org"], "HOST:PORT"),
        (["--address", "fl.example.org:99999"], "HOST:PORT"),
        (["--address", "fl.example.org;reboot:9092"], "HOST:PORT"),
        (["--address", "$(reboot):9092"], "HOST:PORT"),
        (["--label-counts", "some"], "label_counts"),
        (["--label-counts", "noisy"], "epsilon"),
        (["--epsilon", "1"], "epsilon"),
        (["--label-counts", "noisy", "--epsilon", "-1"], "epsilon"),
        (["--label-counts", "withheld"], "fedla"),
        (["--classes", "a,b"], "--shape"),
        (["--classes", "a,b", "--shape", "3,x"], "--shape"),
        (["--classes", "a,a", "--shape", "3,8,8"], "classes: a name occurs twice"),
        (["--classes", "a,b", "--shape", f"3,{10**10},{10**10}"], "shape: a sample of more than 268,435,456 numbers"),
        (["--set", "seeds=[0,1]"], "seeds"),
        (["--set", "conditions.dropout=0.5"], "conditions.dropout"),
        (["--set", "data.validation=0.1"], "data.validation"),
        (["--set", "method.preset=fedvsl"], "fedvls"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(config, tmp_path, words, says):
    with pytest.raises(FedskewError) as error:
        init(config, tmp_path / "fed", *words)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "fed").exists()


def test_data_that_is_not_here_can_be_described(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace('"digits"', '"folder"'))
    with pytest.raises(DataError, match="--classes cat,dog --shape 3,32,32"):
        init(path, tmp_path / "fed")
    folder = init(path, tmp_path / "fed", "--classes", "shoe,hat", "--shape", "3,32,32")
    agreement = Agreement.read(folder / "app" / "deploy.toml")
    assert (agreement.classes, agreement.shape) == (["shoe", "hat"], [3, 32, 32])


@pytest.mark.parametrize(
    ("text", "listen", "local"),
    [
        ("fl.example.org:9092", "0.0.0.0", "127.0.0.1"),
        ("203.0.113.7:9092", "0.0.0.0", "127.0.0.1"),
        ("localhost:9092", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:9092", "127.0.0.1", "127.0.0.1"),
        ("[2001:db8::1]:9092", "::", "::1"),
        ("[::1]:9092", "::1", "::1"),
    ],
)
def test_an_address_says_who_can_reach_the_server(text, listen, local):
    address = Address.parse(text)
    assert (str(address), address.listen, address.local) == (text, listen, local)


@pytest.mark.parametrize(
    "text", ["", ":", ":9092", "host:", "host:0", "host:9x", "-a:1", "a..b:1", "[host]:1", "a:b:1"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Address.parse(text)


@pytest.mark.slow
def test_of_three_sites_no_update_is_longer_than_the_median_unless_the_method_takes_no_clipping(config, tmp_path):
    def rule(folder: str, sites: str, *more: str) -> str:
        deploy("init", tmp_path / folder, "--config", config, "--sites", sites, *more)
        return read(tmp_path / folder / "app" / "run.toml").method["aggregation"]["name"]

    assert rule("two", "a,b") == "mean"
    assert rule("three", "a,b,c") == "norm_clipping"
    assert rule("own", "a,b,c", "--set", "method.preset=fedavg+median") == "median"
    for method in ("scaffold", "fednova", "fedexp", "afl"):
        assert rule(method, "a,b,c", "--set", f"method.preset={method}") == "mean"
    assert rule("masked", "a,b,c", "--updates", "masked") == "mean"


@pytest.mark.slow
def test_check_says_what_bounds_a_liar_by_the_label_counts_of_the_newest_run(config, tmp_path, capsys):
    folder = init(config, tmp_path / "fed", "--set", "method.preset=fedavg")
    capsys.readouterr()
    deploy("check", folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "can be played, by 2 sites" in said
    assert "norm_action = leave_out" in said
    assert "training.weight_limit: none; one site may have all of the weight" in said
    assert "made-up label counts" in said
    run = folder / "server" / "runs" / "shoes-1"
    run.mkdir(parents=True)
    classes = len(Agreement.read(folder / "app" / "deploy.toml").classes)
    run.joinpath("deployment.json").write_text(json.dumps({"label_counts": [[3] * classes, [1] * classes]}))
    deploy("check", folder)
    assert "the label counts of shoes-1" in " ".join(capsys.readouterr().out.split())


UNITS = ("server/fedskew-server.service", "sites/north/fedskew-site.service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_services_are_what_systemd_reads_and_rates_as_safe(config, tmp_path, unit):
    path = init(config, tmp_path / "fed", "--address", "203.0.113.7:9092") / unit
    # The programs and the user that it names are not on this machine.
    here = path.read_text().replace("/opt/fedskew/bin/fedskew", "/bin/true").replace("User=fedskew", "User=daemon")
    (tmp_path / path.name).write_text(here)
    words = ["systemd-analyze", "verify", "--man=no", tmp_path / path.name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert path.name not in done.stderr, done.stderr
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=25", tmp_path / path.name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]  # an exposure of at most 2.5 of 10


def test_a_sites_service_writes_only_its_state_and_reaches_only_the_server(config, tmp_path):
    sites = init(config, tmp_path / "fed", "--address", "203.0.113.7:9092") / "sites"
    unit = (sites / "north" / "fedskew-site.service").read_text().splitlines()
    assert "ProtectSystem=strict" in unit
    assert "ReadWritePaths=/srv/fedskew/north/state /srv/fedskew/north/flower" in unit
    assert [line for line in unit if line.startswith("IPAddress")] == [
        "IPAddressDeny=any",
        "IPAddressAllow=localhost",
        "IPAddressAllow=203.0.113.7",
    ]
    assert (sites / "north" / ".dockerignore").read_text() == "*\n!*.whl\n"  # neither key nor data are in an image
    by_name = init(config, tmp_path / "named", "--address", "fl.example.org:9092") / "sites"
    lines = (by_name / "south" / "fedskew-site.service").read_text().splitlines()
    assert sum(line.startswith("IPAddressAllow") for line in lines) == 1  # closed until its address is written
    assert any("the IP address of fl.example.org" in line for line in lines)


def test_the_containers_user_is_whom_the_folder_belongs_to(config, tmp_path):
    site = init(config, tmp_path / "fed", masked=True) / "sites" / "north"
    run = (site / "Dockerfile").read_text().partition("docker run")[2].partition("fedskew-site\n")[0]
    assert '--user "$(id -u):$(id -g)"' in run
    assert "chown" not in (site / "Dockerfile").read_text()
    for path in (site, site / "key", site / "mask.key", site / "data.toml", site / "app" / "run.toml"):
        assert path.stat().st_uid == os.getuid()  # whom --user names; nobody else may read what is private
    assert permissions(site / "mask.key") == "0o600"


def test_a_dockerfile_runs_a_user_without_rights_and_copies_nothing(config, tmp_path):
    text = (init(config, tmp_path / "fed") / "sites" / "north" / "Dockerfile").read_text()
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert [step for step, _ in steps] == ["FROM", "ARG", "RUN", "USER", "WORKDIR", "ENV", "ENTRYPOINT"]
    assert dict(steps)["USER"] == "10001"
    assert json.loads(dict(steps)["ENTRYPOINT"])[:3] == ["fedskew", "deploy", "supernode"]
    assert f"=={__version__}" in dict(steps)["ARG"]
