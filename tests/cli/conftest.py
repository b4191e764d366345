"""The command line inside this process: a command that only prints need not import PyTorch anew."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DIGITS = """
name = "my"
data = {name = "digits"}
partition = {rule = "iid", clients = 10}
model = {name = "logistic"}
training = {rounds = 1}
"""


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A config that trains in no time."""
    path = tmp_path / "my.toml"
    path.write_text(DIGITS)
    return path


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `fedskew WORDS` in the test's folder, with environment variables, to an exit status; return what it printed.

    Without an expected status (None), every one will do.
    """

    def run(*words: str | Path, status: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        from fedskew.__main__ import main

        with monkeypatch.context() as here:
            here.chdir(tmp_path)
            here.setattr(sys, "argv", ["fedskew", *map(str, words)])
            here.setattr(sys, "path", [*sys.path])
            for name, value in ({"COLUMNS": "200"} | environment).items():
                here.setenv(name, value)
            capfd.readouterr()
            code: object = 0
            try:
                main()
            except SystemExit as end:
                code = end.code
            out, err = capfd.readouterr()
        assert status in (None, int(str(code or 0))), err
        if status == 2:
            assert err.count("\n") == 1, err
        return subprocess.CompletedProcess(list(words), int(str(code or 0)), out, err)

    return run
