"""Files that ask for more than there is end a command in one line that names them, and so does a class called ../x."""

import io
import struct
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedskew import data
from fedskew.cli import main
from fedskew.data import Dataset, unlabelled
from fedskew.deploy import Agreement, renamed_folders, write_samples
from fedskew.errors import ConfigError, DataError
from fedskew.experiment import read
from fedskew.trees import parse_change

DEEP = "a = " + "[" * 100_000
TERABYTES = (10**6, 10**7)


def bomb(path: Path) -> Path:
    """A PNG of 100 bytes that says that it is 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    return path


def promise(path: Path, name: str = "x") -> Path:
    """An .npz file whose array says that it has 10**13 numbers."""
    header = io.BytesIO()
    said = {"descr": "<f8", "fortran_order": False, "shape": TERABYTES}
    np.lib.format.write_array_header_1_0(header, said)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.npy", header.getvalue())
    return path


@pytest.mark.parametrize("text", [DEEP, "a" + ".a" * 200 + " = 1", "a = " + "{a = " * 40 + "1" + "}" * 40])
def test_toml_that_is_nested_too_deeply(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    for reader in (read, Agreement.read):
        with pytest.raises(ConfigError, match=r"run\.toml: .*nested more than 32 deep"):
            reader(path)


def test_a_value_on_the_command_line_that_is_nested_too_deeply():
    with pytest.raises(ConfigError, match="--set a: .*nested more than 32 deep"):
        parse_change(f"a={'[' * 100_000}")


def test_an_image_that_would_fill_the_memory(tmp_path):
    for part in ("no", "yes"):
        (tmp_path / part).mkdir()
        bomb(tmp_path / part / "1.png")
    with pytest.raises(DataError, match=r"1\.png: .*60000|1\.png: .*decompression bomb"):
        data.load("folder", tmp_path, rng=np.random.default_rng(0))
    with pytest.raises(DataError, match=r"1\.png: .*decompression bomb"):
        list(unlabelled([tmp_path / "no" / "1.png"], (3, 8, 8)))


def test_an_array_whose_header_promises_terabytes(tmp_path):
    path = promise(tmp_path / "own.npz")
    with pytest.raises(DataError, match=r"own\.npz: can't be read as an \.npz file"):
        data.load("npz", path, rng=np.random.default_rng(0))
    with pytest.raises(DataError, match=r"own\.npz: can't be read as an \.npz file"):
        list(unlabelled([path], (64,)))


def test_a_table_of_very_many_columns_is_looked_through_once(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(",".join(f"a{column}" for column in range(60_000)) + ",a59999\n")
    began = time.process_time()
    with pytest.raises(DataError, match="the column 'a59999' occurs twice"):
        data.load("csv", path, rng=np.random.default_rng(0))
    assert time.process_time() - began < 10


GIVEN, WHERE = "fedskew: what was given ", "; --debug, before the command, shows where"


@pytest.mark.parametrize(
    ("error", "begins", "ends"),
    [
        (MemoryError(), GIVEN, WHERE),
        (RecursionError("maximum recursion depth exceeded"), GIVEN, WHERE),
        (BlockingIOError(11, "Resource temporarily unavailable"), "fedskew: can't go on: BlockingIOError: ", WHERE),
        (UnicodeEncodeError("ascii", "é", 0, 1, "not in range"), "fedskew: can't go on: ", "PYTHONIOENCODING=utf-8"),
    ],
)
def test_whatever_else_is_too_large_too_deep_or_refused_by_the_system_is_one_line(
    monkeypatch, capsys, error, begins, ends
):
    def read_compared(*given: object) -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["fedskew", "report", "."])
    monkeypatch.setattr("fedskew.experiment.RunFolder.read_compared", read_compared)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(begins)
    assert line.endswith(ends)


NAMES = (
    "../../x",
    "Sci/Tech",
    "..",
    ".hidden",
    "class-0",
    "plain",
    "lost+found",
    "a\\b",
    "nul\x00",
    "é" * 90,
    "/etc",
    "b.",
)


def test_classes_with_names_that_no_folder_has_are_written_and_read_back(tmp_path):
    inputs = torch.rand(len(NAMES), 1, 4, 4)
    labels = torch.arange(len(NAMES))
    dataset = Dataset(
        name="own",
        inputs=inputs,
        targets=labels,
        test_inputs=inputs,
        test_targets=labels,
        classes=NAMES,
        mean=(),
        std=(),
    )
    site = tmp_path / "a" / "b" / "images"
    write_samples(dataset, [np.arange(len(NAMES))], [site.parent])
    assert {path.parents[2] for path in tmp_path.rglob("*.png")} == {site}
    renamed = renamed_folders(NAMES)
    assert "plain" not in renamed.values()
    back = data.load("folder", site, rng=np.random.default_rng(0), classes=renamed)
    assert set(back.classes) == set(NAMES)
    for name, sample in zip(NAMES, inputs, strict=True):
        (row,) = (back.targets == back.classes.index(name)).nonzero().ravel().tolist()
        pixels = back.inputs[row] * torch.tensor(back.std).view(-1, 1, 1) + torch.tensor(back.mean).view(-1, 1, 1)
        assert torch.allclose(pixels, sample, atol=1 / 255)
