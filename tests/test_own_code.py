"""Whose code a name means, and what stays of code that was run for a while."""

import gc
import sys
from pathlib import Path
from types import ModuleType

from fedskew.own_code import importable


class Late:
    """Imports something when it is collected, as the report of an unclosed file does."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sys.modules.setdefault("imported_late", ModuleType("imported_late"))


def test_what_is_imported_while_a_folder_is_forgotten_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "app_of_a_while.py").write_text("")
    thresholds = gc.get_threshold()
    assert len(sys.modules) > 400
    gc.collect()
    gc.disable()
    try:
        with importable(tmp_path):
            __import__("app_of_a_while")
            Late()
            gc.set_threshold(300)  # so that a list of all modules is long enough for a collection in its middle
            gc.enable()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
        gc.collect()
        assert sys.modules.pop("imported_late", None) is not None
    assert "app_of_a_while" not in sys.modules
