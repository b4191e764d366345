"""A site can install fedskew from its folder alone, where no package index has it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from federated import initiated, tree

from fedskew import __version__

NAME = f"fedskew-{__version__}-py3-none-any.whl"


def init(folder: Path, wheel: Path) -> tuple[int, str]:
    return initiated(folder, tree("fedavg", rounds=1), "--sites", "north,south", "--wheel", wheel)


def made_up(path: Path, version: str = __version__) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"fedskew-{version}.dist-info/METADATA", f"Name: fedskew\nVersion: {version}\n")
    return path


def test_each_folder_carries_the_wheel_and_names_its_hash(tmp_path: Path) -> None:
    wheel = made_up(tmp_path / NAME)
    status, said = init(tmp_path, wheel)
    assert status == 0, said
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    site = tmp_path / "clinics" / "sites" / "north"
    for folder in (tmp_path / "clinics", site):
        assert (folder / NAME).read_bytes() == wheel.read_bytes()
        assert checksum in (folder / "README.md").read_text()
    assert f"COPY {NAME} /tmp/" in (site / "Dockerfile").read_text()
    assert (site / ".dockerignore").read_text().split() == ["*", "!*.whl"]  # and neither key nor data
    assert not list((tmp_path / "clinics" / "app").rglob("*.whl"))  # what sites agree to by its hash


@pytest.mark.parametrize("kind", ["no zip", "another version", "a shell's name"])
def test_what_is_no_wheel_of_this_version_is_refused_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    wheel = tmp_path / NAME
    if kind == "no zip":
        wheel.write_text("x")
    else:
        wheel = made_up(wheel, "0.0.1") if kind == "another version" else made_up(tmp_path / "x;reboot.whl")
    status, said = init(tmp_path, wheel)
    assert (status, f"expected a wheel of fedskew {__version__}" in said) == (2, True)
    assert not (tmp_path / "clinics").exists()


@pytest.mark.faults
def test_the_readmes_command_installs_it_in_a_new_environment_without_an_index(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    source = tmp_path / "source"  # builds leave nothing beside the real one
    for name in ("src", "recipes"):
        shutil.copytree(root / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    subprocess.run([*build, str(tmp_path), str(source)], check=True)
    status, said = init(tmp_path, tmp_path / NAME)
    assert status == 0, said
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "new"], check=True)
    others = tmp_path / "others"  # what an index would give: all packages but this one
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("fedskew", "_editable_impl_fedskew", "pip")):
            (others / path.name).symlink_to(path)
    site = tmp_path / "clinics" / "sites" / "north"
    found = re.search(r"^    (echo .*pip install.*)$", (site / "README.md").read_text(), re.MULTILINE)
    assert found is not None
    path = f"{tmp_path / 'new' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PIP_NO_INDEX": "1", "PYTHONPATH": str(others), "HOME": str(tmp_path)}
    subprocess.run(["sh", "-ec", found[1]], cwd=site, env=environment, check=True)
    words = [tmp_path / "new" / "bin" / "fedskew", "deploy", "supernode", "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert "Join the federation" in done.stdout
