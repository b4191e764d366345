"""The picture of who holds what: it is drawn at every size, and without matplotlib's global state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts
from fedskew.labels.picture import draw


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 4), (60, 10), (2500, 100)])
@pytest.mark.parametrize("aimed", [False, True])
def test_few_and_many_clients_are_drawn(tmp_path: Path, clients: int, classes: int, aimed: bool) -> None:
    rng = np.random.default_rng(0)
    counts = LabelCounts(rng.integers(0, 4, (clients, classes)) + np.eye(clients, classes))
    path = tmp_path / "who.png"
    draw(counts, path, np.ones(classes) if aimed else None)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_empty_federation_and_long_names_are_drawn_as_svg(tmp_path: Path) -> None:
    draw(LabelCounts([[0, 0]], ["a client with a very long name"], ["x$y_z", "[b]"]), tmp_path / "who.svg")
    assert "<svg" in (tmp_path / "who.svg").read_text()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "who.xyz", tmp_path / "none" / "who.png"):
        with pytest.raises(ArgumentError, match="the picture can't be written") as caught:
            draw(LabelCounts([[1]]), path)
        assert "\n" not in str(caught.value)


def test_labels_and_weights_import_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys, fedskew.labels, fedskew.weighting; "
        "print([name for name in ('torch', 'matplotlib', 'sklearn', 'scipy', 'opendp') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
