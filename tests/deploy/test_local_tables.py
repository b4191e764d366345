"""`fedskew deploy local` with tables: what is written to sites is what they read, and their federation is agreed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from federated import fedskew, tree

from fedskew import deploy
from fedskew.cli import deploy as commands
from fedskew.data import load
from fedskew.deploy import Agreement, SiteData, write_samples
from fedskew.errors import ConfigError
from fedskew.experiment import Config, make_task, resolve

SCHEMA: dict[str, Any] = {
    "columns": {
        "age": {"kind": "number", "range": [0, 99.9], "missing": True},
        "sex": {"kind": "category", "categories": ["f", "m, or other"]},
        "seen": {"kind": "date"},
        "label": {"kind": "label", "categories": ["ill", "well"]},
    }
}


def clinics(folder: Path, **data: Any) -> Config:
    """A config of three clinics' files, whose oldest patients are at the end of the range."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("east", "north", "west"):
        lines = ["age,sex,seen,label"]
        for row in range(30):
            age, label = ("99.9" if row == 0 else f"{rng.normal(60, 9):.2f}"), "ill" if rng.random() < 0.5 else "well"
            sex = ["f", '"m, or other"', "?", "x"][rng.integers(4)]
            lines.append(f"{'' if row == 5 else age},{sex},20{10 + row % 9}-0{1 + row % 9}-1{row % 9},{label}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    given = {"name": "csv", "root": str(folder / "*.csv"), "schema": SCHEMA, **data}
    return resolve({**tree("fedavg", rounds=1), "model": "table", "data": given})


def read_back(folder: Path, task: Any, separator: str | None = None) -> list[SiteData]:
    """What three sites read of the samples of a task, by its own means."""
    places = [folder / name for name in ("a", "b", "c")]
    for place in places:
        place.mkdir()
    write_samples(task.dataset, task.partition.indices[:3], places, separator)
    more = {} if separator is None else {"separator": separator}
    described = {"name": "csv", "root": "data.csv", "test": "test.csv", **more}
    agreement = Agreement.resolve({"sites": ["a", "b", "c"], **commands._kind(task.dataset)})
    found = []
    for place in places:
        (place / "data.toml").write_text(tomli_w.dumps({"data": described}))
        found.append(SiteData.load(place / "data.toml", agreement))
    return found


def check_same(sites: list[SiteData], task: Any) -> None:
    for site, rows in zip(sites, task.partition.indices, strict=False):
        torch.testing.assert_close(site.inputs, task.dataset.inputs[rows], atol=2e-5, rtol=0)
        assert site.targets.tolist() == task.dataset.targets[rows].tolist()
    assert sum(len(site.test_targets) for site in sites) == len(task.dataset.test_targets)


@pytest.mark.filterwarnings("ignore:.*taken as another one")
def test_sites_read_what_was_divided(tmp_path: Path) -> None:
    task = make_task(clinics(tmp_path / "clinics"), 0)
    check_same(read_back(tmp_path, task), task)
    header, first, *_ = (tmp_path / "a" / "data.csv").read_text().splitlines()
    assert header == "age,seen,sex,label"
    assert first.startswith("99.9,2010-01-10,")


def test_so_they_do_without_a_schema_and_with_several_labels(tmp_path: Path) -> None:
    lines = [f"{at / 7:.3f},{at % 5},{at % 2},{at % 3 // 2},{at % 3}" for at in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(["x,z,Edema,Effusion,site", *lines]) + "\n")
    names = ("Edema", "Effusion")
    said = ["|".join(name for name, has in zip(names, (at % 2, at % 3 // 2), strict=True) if has) for at in range(60)]
    cells = [f"{line.rsplit(',', 3)[0]},{label or 'none'},{line[-1]}" for line, label in zip(lines, said, strict=True)]
    (tmp_path / "cells.csv").write_text("\n".join(["x,z,found,site", *cells]) + "\n")
    for name, given in {"all": {"label": list(names)}, "cells": {"label": "found", "separator": "|"}}.items():
        data = {"name": "csv", "root": str(tmp_path / f"{name}.csv"), "client": "site", **given}
        task = make_task(resolve({**tree("fedavg"), "data": data}), 0)
        (tmp_path / name).mkdir()
        sites = read_back(tmp_path / name, task, given.get("separator"))
        assert all(site.multi_label for site in sites)
        check_same(sites, task)


class Stopped:
    """Stands in for the processes of a federation on this machine."""

    def __init__(self, folder: Path, port: int, names: tuple[str, ...]) -> None:
        self.folder = folder

    @staticmethod
    def free_port() -> int:
        return 9092

    def __enter__(self) -> Stopped:
        (self.folder / "server" / "runs" / "one").mkdir(parents=True)
        (self.folder / "server" / "runs" / "one" / "report.html").touch()
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*taken as another one")
def test_the_command_writes_tables_and_agrees_for_their_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "LocalFederation", Stopped)
    monkeypatch.setattr(commands, "_train", lambda console, federation: ({"final": {"accuracy": 1.0}}, ""))
    monkeypatch.setattr(commands, "_result", lambda summary: "trained")
    config = tmp_path / "run.toml"
    clinics(tmp_path / "clinics").write(config)
    code, said = fedskew("deploy", "local", tmp_path / "trial", "--config", config)
    assert code == 0, said
    assert "3 sites with 72 samples to train on" in said
    agreement = Agreement.read(tmp_path / "trial" / "app" / "deploy.toml")
    assert (agreement.names, agreement.sums_moments) == (("east", "north", "west"), True)  # as deploy init has it
    assert (tmp_path / "trial" / "sites" / "west" / "agreed.toml").exists()
    code, said = fedskew("deploy", "local", tmp_path / "b", "--config", config, "--set", "data.test_share=0.02")
    assert (code, "test samples can't be divided among 3 sites" in said) == (2, True), said


def test_texts_come_back_as_the_same_numbers_in_the_classes_folders(tmp_path: Path) -> None:
    for label, text in enumerate(
        ("the goal , the sport", "the bank's money", "the good film", "the odd", "the bank", "the sport")
    ):
        (tmp_path / "texts" / f"of {label % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / f"of {label % 2}" / f"{label}.txt").write_text(text)
    data = {"name": "folder", "root": str(tmp_path / "texts"), "vocabulary_size": 9, "length": 6}
    read = make_task(resolve({**tree("fedavg"), "data": data, "partition": {"rule": "iid", "clients": 2}}), 0)
    write_samples(read.dataset, read.partition.indices, [tmp_path / "a", tmp_path / "b"])
    for site, rows in zip("ab", read.partition.indices, strict=True):
        found = load("folder", tmp_path / site / "texts", rng=np.random.default_rng(0), encoder=read.dataset.encoder)
        assert sorted(found.inputs.tolist()) == sorted(read.dataset.inputs[rows].tolist())
        assert found.classes == read.dataset.classes
        assert sorted(found.targets.tolist()) == sorted(read.dataset.targets[rows].tolist())


def test_what_is_no_table_and_no_picture_is_refused_by_what_to_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=np.arange(40) % 2)
    data = {"name": "npz", "root": str(tmp_path / "own.npz")}
    task = make_task(resolve({**tree("fedavg"), "data": data, "partition": {"rule": "iid", "clients": 2}}), 0)
    with pytest.raises(
        ConfigError, match="neither images nor a table .csv.; describe each site's data in its data.toml"
    ):
        write_samples(task.dataset, task.partition.indices, [tmp_path, tmp_path])
