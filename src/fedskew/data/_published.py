"""Shared by the readers of published data sets: files held against their checksums, and image files.

An error says what is expected of a file, and where its authors publish it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew.data._images import normalised
from fedskew.data._stored import MappedImages
from fedskew.errors import DataError
from fedskew.files import replacing

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Means and deviations by channel."""

_SUFFIXES = (".png", ".jpg", ".jpeg")
_ROWS_AT_ONCE = 1000
_CPU = torch.device("cpu")


def read(path: Path, expected: str, page: str) -> bytes:
    """Read a file of which no checksum is known."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing(path, expected, page) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None


def read_checked(path: Path, md5: str | None, page: str) -> bytes:
    """Read a file whose MD5 must be as published; with `md5` None, any file."""
    if md5 is None:
        return read(path, "a file with any checksum", page)
    content = read(path, f"MD5 {md5}", page)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise damaged(path, f"its MD5 is {found}, expected MD5 {md5}", page)
    return content


def unpacked(path: Path, content: bytes, expected: str, page: str) -> bytes:
    """Gunzip what must be a complete gzip file, and not empty."""
    try:
        if plain := gzip.decompress(content):
            return plain
        reason = "it is empty"
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error)
    raise damaged(path, f"{reason}; expected {expected}", page)


def missing(path: Path, expected: str, page: str) -> DataError:
    """Return the error for a file or folder that does not exist."""
    return DataError(f"{path} is missing (expected {expected}); its authors publish it at {page}")


def damaged(path: Path, what: str, page: str) -> DataError:
    """Return the error for a file whose content is wrong."""
    return DataError(f"{path} is damaged: {what}; its authors publish it at {page}")


@dataclass(frozen=True)
class ImageFiles:
    """Image files that are decoded when a batch needs them, by as many threads as torch uses.

    Each becomes RGB, resized (bilinear) to `size`, (height, width), if needed, scaled to [0, 1] and normalised by
    channel. One that is missing or damaged raises DataError, which names the authors' `page`.
    """

    root: Path
    names: tuple[str, ...]
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    page: str
    device: torch.device = _CPU

    @property
    def shape(self) -> tuple[int, ...]:
        """`(samples, 3, height, width)`."""
        return len(self.names), 3, *self.size

    def __len__(self) -> int:
        return len(self.names)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        pixels = torch.from_numpy(self.decode(index.tolist()))
        return normalised(pixels.to(self.device), self.mean, self.std)

    def to(self, device: torch.device | str, /) -> ImageFiles:
        """See `Stored.to`."""
        return replace(self, device=torch.device(device))

    def decode(self, rows: Iterable[int]) -> NDArray[np.uint8]:
        """Return the pixels of some files, `(rows, 3, height, width)` uint8."""
        paths = [self.root / self.names[row] for row in rows]
        pixels = np.empty((len(paths), 3, *self.size), dtype=np.uint8)

        def read(place: int) -> None:
            pixels[place] = _decoded(paths[place], self.size, self.page).transpose(2, 0, 1)

        with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), len(paths)))) as pool:
            list(pool.map(read, range(len(paths))))
        return pixels

    def pack(self, part: str) -> MappedImages:
        """Decode all files once into a memory-mapped file, or open the one that an earlier call wrote.

        The file lies in `.packed/` below `root`, or in the folder that the environment variable FEDSKEW_CACHE names.
        Its name has `part`, the size and a hash of the images' names and sizes in bytes, so that it never serves other
        images. DataError is raised where it can't be written or read.
        """
        folder = Path(os.environ.get("FEDSKEW_CACHE") or self.root / ".packed")
        path = folder / f"{part}-{self.size[0]}x{self.size[1]}-{_hash(self)}.npy"
        if not path.exists():
            _pack(self, path)
        try:
            return MappedImages(path, self.mean, self.std)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} can't be read ({error}); delete it, and it is written again") from None


def _pack(images: ImageFiles, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written, not memory-mapped: with a memory map, a full disk would end the process without an error.
        with replacing(path, shared=True) as part, part.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": images.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(images), _ROWS_AT_ONCE):
                rows = range(start, min(start + _ROWS_AT_ONCE, len(images)))
                file.write(images.decode(rows).data)
    except OSError as error:
        raise DataError(
            f"{path}: decoded images can't be stored there ({error.strerror}); set FEDSKEW_CACHE to a "
            "writable folder, or packed = false to decode them batch by batch"
        ) from None


def _hash(images: ImageFiles) -> str:
    digest = hashlib.sha256()
    for name in images.names:
        try:
            size = (images.root / name).stat().st_size
        except OSError:
            raise missing(images.root / name, "an image", images.page) from None
        digest.update(f"{name} {size}\n".encode())
    return digest.hexdigest()[:16]


def listed(root: Path, folder: str, page: str) -> list[str]:
    """List the image files of one folder as sorted paths below `root`."""
    path = root / folder
    if not path.is_dir():
        raise missing(path, "a folder of images", page)
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(_SUFFIXES))
    return [f"{folder}/{name}" for name in names]


def class_folders(
    root: Path, folders: Sequence[str], page: str, each: int | None = None
) -> tuple[list[str], list[int]]:
    """Return the image files of class folders, each of which must hold `each` (None: any number), and class ids."""
    names: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = listed(root, folder, page)
        if each is not None:
            check_count(root / folder, len(found), each, page)
        names += found
        labels += [label] * len(found)
    return names, labels


def check_count(path: Path, found: int, expected: int, page: str) -> None:
    """Refuse a part of a data set that is not as large as published."""
    if found != expected:
        raise damaged(path, f"it holds {found:,} images, expected {expected:,}", page)


def _decoded(path: Path, size: tuple[int, int], page: str) -> NDArray[np.uint8]:
    """Return RGB pixels, `(height, width, 3)`."""
    try:
        with Image.open(path) as image:
            flat = image.convert("RGB")
    except FileNotFoundError:
        raise missing(path, "an image", page) from None
    except Exception as error:  # a damaged file, or a bomb, can raise almost anything
        raise damaged(path, f"it can't be read as an image ({error})", page) from None
    if flat.size != size[::-1]:
        flat = flat.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(flat)
