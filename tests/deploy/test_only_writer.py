"""Two runs never write one folder."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.errors import RunError
from fedskew.files import locked

HOLD = """
import sys, time
from pathlib import Path
from fedskew.files import locked
with locked(Path(sys.argv[1]), 0.0, lambda: None):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_writes_is_left_alone_until_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RunError, match="another run is writing here"), locked(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with locked(tmp_path):
            pass


def test_a_folder_may_be_written_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "run"):
            (tmp_path / "run" / "rounds.jsonl").write_text("")
