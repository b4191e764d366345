"""Two runs never write one folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.deploy import only_writer
from fedskew.errors import RunError

HOLD = """
import sys, time
from pathlib import Path
from fedskew.files import locked  # what only_writer does, without torch
with locked(Path(sys.argv[1]), 0.0, lambda: None):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_writes_is_left_alone_until_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RunError, match="another run is writing here"), only_writer(tmp_path, patience=0.0):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with only_writer(tmp_path, patience=0.0):
            pass


def test_a_folder_may_be_written_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        with only_writer(tmp_path / "run", patience=0.0):
            (tmp_path / "run" / "rounds.jsonl").write_text("")
