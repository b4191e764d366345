"""Samples without labels: as the readers of labelled data would have read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedskew import data
from fedskew.errors import DataError


def picture(path: Path, size: tuple[int, int] = (4, 6), seed: int = 0, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def test_images_are_read_as_the_folder_reader_reads_them(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", seed=number)
    read = data.load("folder", tmp_path / "images", rng=np.random.default_rng(0))
    (found,) = data.unlabelled([tmp_path / "images"], read.in_shape)
    assert [Path(name).name for name in found.names] == [f"{number}.png" for number in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert found.resized == 0
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (read.mean, read.std))
    expected = torch.cat([read.inputs, read.test_inputs])
    assert sorted(((found.inputs - mean) / std).sum(dim=(1, 2, 3)).tolist()) == pytest.approx(
        sorted(expected.sum(dim=(1, 2, 3)).tolist()), abs=1e-4
    )


def test_files_and_folders_in_the_order_given_resized_and_made_grey_where_the_model_wants_that(tmp_path: Path) -> None:
    big = picture(tmp_path / "big.jpg", (8, 12))
    picture(tmp_path / "folder" / "deep" / "one.png", (4, 6))
    picture(tmp_path / "folder" / ".hidden" / "two.png")
    (tmp_path / "folder" / "notes.txt").write_text("no image")
    (found,) = data.unlabelled([big, tmp_path / "folder"], (1, 4, 6))
    assert [Path(name).name for name in found.names] == ["big.jpg", "one.png"]
    assert found.inputs.shape == (2, 1, 4, 6)
    assert found.resized == 1
    assert 0 <= found.inputs.min() < found.inputs.max() <= 1


def test_arrays_in_the_units_of_the_npz_reader_by_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(600 * 4, dtype=np.uint8).reshape(600, 2, 2))
    parts = list(data.unlabelled([tmp_path / "x.npz", picture(tmp_path / "a.png", (2, 2))], (1, 2, 2)))
    assert [len(part.inputs) for part in parts] == [256, 256, 88, 1]
    assert parts[1].names[0] == f"{tmp_path / 'x.npz'}[256]"
    assert parts[0].inputs[0].flatten().tolist() == pytest.approx([0, 1 / 255, 2 / 255, 3 / 255])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    image = picture(tmp_path / "a.png")
    for path, shape, words in (
        (tmp_path / "empty", (1, 2, 2), "empty: holds no images"),
        (tmp_path / "broken.png", (1, 2, 2), "broken.png: can't be read as an image"),
        (tmp_path / "none.png", (1, 2, 2), "none.png: can't be read as an image: there is no such file or folder$"),
        (tmp_path / "y.npz", (1, 2, 2), "y.npz: has no array 'x'"),
        (image, (5,), r"a.png: the model takes samples of shape \(5,\), no images"),
    ):
        with pytest.raises(DataError, match=words):
            list(data.unlabelled([path], shape))
