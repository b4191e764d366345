"""Shared by the readers of published data sets: files held against their checksums, and image files."""

import gzip
import hashlib
import os
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew.data._dataset import MappedImages, Moments
from fedskew.data._images import normalised
from fedskew.errors import DataError
from fedskew.files import replacing

IMAGENET: Moments = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS = tuple("0123456789")

Rows = list[tuple[str, int, int]]
"""Images by name, class id and source: a domain, or a camera."""

_SUFFIXES = (".png", ".jpg", ".jpeg")
_ROWS_AT_ONCE = 1000
_CPU = torch.device("cpu")


@cache
def _published() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Source:
    """Where a published data set lies, and the page where its authors publish it; every error names both.

    Checksums and sizes are those published, as `facts` says; without `verify`, others will do.
    """

    folder: Path
    page: str
    verify: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, root: Path, verify: bool) -> "Source":
        """Return where the data set of a name lies below `root`, and what `published.toml` says of it."""
        facts = _published()[name]
        return cls(root / facts["folder"], facts["page"], verify, facts)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(self.facts["classes"])

    @property
    def moments(self) -> Moments:
        """By what pixels are normalised."""
        mean, std = self.facts["moments"]
        return tuple(mean), tuple(std)

    def missing(self, name: str, expected: str) -> DataError:
        """Return the error for a file or folder that does not exist."""
        return DataError(
            f"{self.folder / name} is missing (expected {expected}); its authors publish it at {self.page}"
        )

    def damaged(self, name: str, what: str) -> DataError:
        """Return the error for a file whose content is wrong."""
        return DataError(f"{self.folder / name} is damaged: {what}; its authors publish it at {self.page}")

    def read(self, name: str, expected: str = "a file with any checksum") -> bytes:
        """Read a file; its MD5 must be as published, if it is."""
        md5 = self.facts.get("md5", {}).get(name) if self.verify else None
        expected = expected if md5 is None else f"MD5 {md5}"
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise self.missing(name, expected) from None
        except OSError as error:
            raise DataError(f"{self.folder / name} can't be read: {error.strerror}") from None
        if md5 is not None and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
            raise self.damaged(name, f"its MD5 is {found}, expected {expected}")
        return content

    def unpacked(self, name: str, expected: str) -> bytes:
        """Read what must be a complete gzip file, and not empty."""
        try:
            if plain := gzip.decompress(self.read(name, expected)):
                return plain
            reason = "it is empty"
        except (OSError, EOFError, zlib.error) as error:
            reason = str(error)
        raise self.damaged(name, f"{reason}; expected {expected}")

    def lines(self, name: str) -> list[str]:
        """Read a text file."""
        return self.read(name, "a text file").decode("utf-8", "replace").splitlines()

    def class_folders(self, folders: Sequence[str], each: int | None = None, source: int = 0) -> Rows:
        """Return the image files of class folders; `each` is how many a folder must hold."""
        rows = Rows()
        for label, folder in enumerate(folders):
            path = self.folder / folder
            if not path.is_dir():
                raise self.missing(folder, "a folder of images")
            with os.scandir(path) as entries:
                found = sorted(entry.name for entry in entries if entry.name.lower().endswith(_SUFFIXES))
            if each is not None:
                self.check_count(folder, len(found), each)
            rows += [(f"{folder}/{name}", label, source) for name in found]
        return rows

    def check_count(self, name: str, found: int, expected: int) -> None:
        """Refuse a part of a data set that is not as large as published."""
        if self.verify and found != expected:
            raise self.damaged(name, f"it holds {found:,} images, expected {expected:,}")


@dataclass(frozen=True)
class ImageFiles:
    """Image files that are decoded when a batch needs them, by as many threads as torch uses: to RGB, `size` (height,
    width; bilinear), [0, 1], normalised by channel. One that is missing or damaged raises DataError."""

    source: Source
    names: tuple[str, ...]
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
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

    def to(self, device: torch.device | str, /) -> "ImageFiles":
        """See `Stored.to`."""
        return replace(self, device=torch.device(device))

    def decode(self, rows: Iterable[int]) -> NDArray[np.uint8]:
        """Return the pixels of some files, `(rows, 3, height, width)` uint8."""
        names = [self.names[row] for row in rows]
        pixels = np.empty((len(names), 3, *self.size), dtype=np.uint8)

        def read(place: int) -> None:
            pixels[place] = _decoded(self.source, names[place], self.size).transpose(2, 0, 1)

        with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), len(names)))) as pool:
            list(pool.map(read, range(len(names))))
        return pixels

    def pack(self, part: str) -> MappedImages:
        """Decode all files once into a memory-mapped file, or open the one that an earlier call wrote: in `.packed/`
        beside the images, or in FEDSKEW_CACHE, named by `part`, size and a hash of the images' names and sizes in
        bytes, so that it never serves other images. DataError where it can't be written or read."""
        folder = Path(os.environ.get("FEDSKEW_CACHE") or self.source.folder / ".packed")
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
            size = (images.source.folder / name).stat().st_size
        except OSError:
            raise images.source.missing(name, "an image") from None
        digest.update(f"{name} {size}\n".encode())
    return digest.hexdigest()[:16]


def _decoded(source: Source, name: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return RGB pixels, `(height, width, 3)`."""
    try:
        with Image.open(source.folder / name) as image:
            flat = image.convert("RGB")
    except FileNotFoundError:
        raise source.missing(name, "an image") from None
    except Exception as error:  # a damaged file, or a bomb, can raise almost anything
        raise source.damaged(name, f"it can't be read as an image ({error})") from None
    if flat.size != size[::-1]:
        flat = flat.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(flat)
