"""Picture files of a published data set: decoded batch by batch, or once, into one file of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew.data._files import damaged, missing
from fedskew.data._pixels import normalised
from fedskew.data._stored import Mapped, Stored
from fedskew.errors import DataError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_SUFFIXES = (".png", ".jpg", ".jpeg")
_ROWS_AT_ONCE = 1000
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pictures:
    """Files decoded when a batch asks for them, by as many threads as torch uses.

    `names`: paths below `root`. Each becomes RGB, resized (bilinear) to (height, width) where it has another size,
    scaled to [0, 1] and normalised by channel. `page`: where the authors publish them. Raises DataError for a file that
    is missing or damaged.
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

    def to(self, device: torch.device | str, /) -> Pictures:
        """See `Stored.to`."""
        return Pictures(self.root, self.names, self.size, self.mean, self.std, self.page, torch.device(device))

    def decode(self, rows: Iterable[int]) -> NDArray[np.uint8]:
        """`(rows, 3, height, width)` uint8."""
        paths = [self.root / self.names[row] for row in rows]
        pixels = np.empty((len(paths), 3, *self.size), dtype=np.uint8)

        def read(place: int) -> None:
            pixels[place] = _decoded(paths[place], self.size, self.page).transpose(2, 0, 1)

        workers = min(torch.get_num_threads(), len(paths))
        if workers > 1:
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(read, range(len(paths))))
        else:
            for place in range(len(paths)):
                read(place)
        return pixels


def stored(pictures: Pictures, part: str, packed: bool) -> Stored:
    """The pictures as they are, or `packed`: decoded once into a memory-mapped file.

    The file lies in `.packed/` beside the pictures, or in the folder that the environment variable FEDSKEW_CACHE names.
    Its name has `part`, the size and a hash of the pictures' names and sizes in bytes, so that other pictures never
    pass for these. It is written aside and renamed. Raises DataError where it can't be written.
    """
    if not packed:
        return pictures
    folder = Path(os.environ.get("FEDSKEW_CACHE") or pictures.root / ".packed")
    path = folder / f"{part}-{pictures.size[0]}x{pictures.size[1]}-{_hash(pictures)}.npy"
    if not path.exists():
        _pack(pictures, path)
    try:
        return Mapped(path, pictures.mean, pictures.std)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); delete it, and it is made again") from None


def _pack(pictures: Pictures, path: Path) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # written, not memory-mapped: on a full disk that would end the process without an error
        with aside.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": pictures.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(pictures), _ROWS_AT_ONCE):
                rows = range(start, min(start + _ROWS_AT_ONCE, len(pictures)))
                file.write(pictures.decode(rows).data)
        aside.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: decoded pictures can't be kept there ({error.strerror}); set FEDSKEW_CACHE to a folder that can "
            "be written, or packed = false to decode them batch by batch"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _hash(pictures: Pictures) -> str:
    digest = hashlib.sha256()
    for name in pictures.names:
        try:
            size = (pictures.root / name).stat().st_size
        except OSError:
            raise missing(pictures.root / name, "a picture", pictures.page) from None
        digest.update(f"{name} {size}\n".encode())
    return digest.hexdigest()[:16]


def listed(root: Path, folder: str, page: str) -> list[str]:
    """The picture files of one folder below `root`, as paths below `root`, by name. Raises DataError without it."""
    path = root / folder
    if not path.is_dir():
        raise missing(path, "a folder of pictures", page)
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(_SUFFIXES))
    return [f"{folder}/{name}" for name in names]


def check_count(path: Path, found: int, expected: int, page: str) -> None:
    """Raises DataError where a part of a data set is not as large as published."""
    if found != expected:
        raise damaged(path, f"it holds {found:,} pictures, expected {expected:,}", page)


def _decoded(path: Path, size: tuple[int, int], page: str) -> NDArray[np.uint8]:
    """`(height, width, 3)`."""
    try:
        with Image.open(path) as image:
            flat = image.convert("RGB")
    except FileNotFoundError:
        raise missing(path, "a picture", page) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise damaged(path, f"it can't be read as a picture ({error})", page) from None
    if flat.size != size[::-1]:
        flat = flat.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(flat)
