"""A user's own images and texts: in a folder of class folders, or without labels, for a trained model."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._huggingface import saved_samples
from fedskew.data._images import DICOM, Picture, Tray, Window, as_floats, is_dicom, opened, read_pictures, upright_size
from fedskew.data._own import RawSamples, hold_out, make, read_inputs
from fedskew.data._schema import Encoder
from fedskew.data._table import is_saved, table_files
from fedskew.data.texts import TEXT, Texts, Vocabulary, read_texts
from fedskew.errors import ArgumentError, DataError, DataWarning
from fedskew.names import SYSTEM_FOLDERS

_BATCH = 256
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"} | DICOM


class _File(NamedTuple):
    path: Path
    label: str
    client: str | None


class Tree(NamedTuple):
    """Images, or else texts, below one folder, and the names of its class and client folders, empty ones included."""

    files: list[_File]
    classes: set[str]
    clients: set[str]

    @property
    def is_text(self) -> bool:
        """Whether the files are texts."""
        return not is_image(self.files[0].path)

    @property
    def owners(self) -> list[str] | None:
        """The client of each file; None: the folders name none."""
        return [file.client or "" for file in self.files] if self.clients else None

    def take(self, rows: Iterable[int]) -> "Tree":
        """Return the tree with some of its files."""
        return self._replace(files=[self.files[row] for row in rows])


@names_clients
def folder(
    root: Path,
    rng: np.random.Generator | None,
    client_level: bool = False,
    size: int | tuple[int, int] | None = None,
    test_share: float = 0.2,
    classes: dict[str, str] | None = None,
    window: tuple[float, ...] = (),
    skip_broken: bool = False,
    vocabulary_size: int = 98_635,
    length: int = 200,
    encoder: Encoder | None = None,
) -> Dataset:
    """Read a user's own images, or texts, from class folders.

    The root holds `CLASS/`, or `CLIENT/CLASS/` with `client_level`; or `train/` and `test/` with such folders in them.
    Files are recognised by their suffix; hidden ones are ignored, and a DataWarning names what else is left out. Images
    are turned as their EXIF data say, grey if every file is, else RGB; transparency is dropped. DICOM is read by
    pydicom (`fedskew[dicom]`). Pixels are scaled to [0, 1], then standardised by channel with mean and deviation of the
    training part. Where no file is an image, those that end in `.txt` are the samples, a text each, in UTF-8; they
    become token ids by a vocabulary of the training part, as for `ag_news`.

    Args:
        client_level: The first level of folders names clients.
        size: Side, or (height, width), to which images are resized (bilinear); by default all must have one size.
        test_share: Share of every class to hold out if there is no test part.
        classes: The class of a folder by the folder's name, where that is another, as of a class "Sci/Tech".
        window: The values that are black and white in grey pictures of more than 8 bits, as [-1000, 400]; without it
            white is the largest of as many bits as the brightest pixel takes, and a DICOM file has its own.
        skip_broken: Leave out files that can't be read, and say which; else they are refused, all in one list.
        vocabulary_size: Number of token ids, for texts.
        length: Number of words kept of each text.
        encoder: A federation's words, in place of those of the training part.
    """
    if not root.is_dir():
        raise DataError(f"{root}: is no folder")
    split = (root / "train").is_dir()
    tops = [root / "train" if split else root, *([root / "test"] if split and (root / "test").is_dir() else [])]
    parts = [tree(top, client_level, classes or {}) for top in tops]
    if len({part.is_text for part in parts}) > 1:
        raise DataError(f"{root}: one of train/ and test/ holds images, and the other texts")
    inputs: list[Tensor]
    more: dict[str, Any]
    if parts[0].is_text:
        if size is not None or window:
            raise ArgumentError(f"size, window: are for images, and {root} holds texts")
        tray = Tray(skip_broken)
        files = [[file.path for file in part.files] for part in parts]
        texts = [read_texts(paths, tray) for paths in files]
        tray.close(sum(len(part.files) for part in parts), "text")
        parts = [
            part._replace(files=[file for file in part.files if file.path in paths])
            for part, paths in zip(parts, map(set, files), strict=True)
        ]
        if len(parts) == 1:
            rows = hold_out([file.label for file in parts[0].files], test_share, rng)
            texts, parts = [[texts[0][row] for row in own] for own in rows], [parts[0].take(own) for own in rows]
        own = encoder if isinstance(encoder, Texts) else Vocabulary.of(texts[0], vocabulary_size, length)
        inputs, more = ([own.encode(part, root) for part in texts], {"encoder": own, "skipped": tuple(tray.broken)})
    else:
        listed = [[(str(path), partial(opened, path)) for path, *_ in part.files] for part in parts]
        read = read_pictures(listed, size, window, skip_broken)
        parts = [part.take(kept) for part, kept in zip(parts, read.kept, strict=True)]
        inputs, more = read.parts, {"window": read.window, "skipped": read.broken}
    train, *test = (
        RawSamples(values, [file.label for file in part.files], part.owners)
        for values, part in zip(inputs, parts, strict=True)
    )
    return make(
        "folder",
        train,
        test[0] if test else None,
        test_share,
        rng,
        classes=set().union(*(part.classes for part in parts)),
        clients=parts[0].clients,
        where=root,
        **more,
    )


def tree(top: Path, client_level: bool, names: Mapping[str, str]) -> Tree:
    """List the images below a folder of class folders, or else the texts; a DataWarning says what is left out. `names`
    has the class of a folder by the folder's name, where that is another."""
    found = Tree([], set(), set())
    skipped: Counter[str] = Counter()
    texts: list[_File] = []
    for client in _folders(top, skipped) if client_level else [None]:
        if client is not None:
            found.clients.add(client.name)
        for label in _folders(client or top, skipped):
            name = names.get(label.name, label.name)
            found.classes.add(name)
            files = sorted(path for path in label.iterdir() if not path.name.startswith("."))
            images = [path for path in files if is_image(path)]
            written = [path for path in files if path.suffix.lower() == TEXT]
            if not images and not written and any(path.is_dir() for path in files):
                raise DataError(
                    f"{label}: holds folders and no images; if the first level names clients, set client_level = true"
                )
            known = {*images, *written}
            skipped.update(_kind(path) for path in files if path not in known)
            owner = None if client is None else client.name
            for kind, of_kind in ((found.files, images), (texts, written)):
                kind.extend(_File(path, name, owner) for path in of_kind)
    if found.files:
        skipped.update({TEXT: len(texts)} if texts else {})
    _warn(top, skipped)
    if not found.files and not texts:
        level = "CLIENT/CLASS" if client_level else "CLASS"
        raise DataError(f"{top}: found no images, and no texts ({TEXT}), in {level} folders below it")
    return found if found.files else found._replace(files=texts)


def is_image(path: Path) -> bool:
    """Return whether a path is a file with the suffix of an image that can be read."""
    return path.is_file() and (path.suffix.lower() in _SUFFIXES or is_dicom(path))


def _folders(top: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the folders below a folder that people made; what else lies there is counted as skipped."""
    for path in sorted(top.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and path.name not in SYSTEM_FOLDERS:
            yield path
        else:
            skipped[_kind(path)] += 1


def _kind(path: Path) -> str:
    """Return the warning about a path that was left out; none for files that operating systems add to folders."""
    if path.is_dir():
        return f"the folder {path.name}"
    if path.name.lower() in {"thumbs.db", "desktop.ini"}:
        return ""
    return path.suffix.lower() or "files without a suffix"


def _warn(top: Path, skipped: Counter[str]) -> None:
    del skipped[""]
    if not skipped:
        return
    listed = ", ".join(f"{kind} ({count:,})" if kind[0] == "." else kind for kind, count in skipped.most_common(5))
    number = skipped.total()
    are = "entry was left out, which is no image in a class folder"
    if number > 1:
        are = "entries were left out, which are no images in class folders"
    warnings.warn(f"{top}: {number:,} {are}: {listed}", DataWarning, stacklevel=2)


class Unlabelled(NamedTuple):
    """A batch of samples without labels, where each was read from, and how many were resized images."""

    names: list[str]
    inputs: Tensor
    resized: int


def unlabelled(
    paths: Sequence[Path],
    in_shape: tuple[int, ...],
    window: Window = (),
    skip_broken: bool = False,
    encoder: Encoder | None = None,
) -> Iterator[Unlabelled]:
    """Read samples without labels in the units that data sets are in before normalisation; of images 256 at a time.

    Args:
        paths: Images; folders, in which images are looked for at any depth; `.npz` files, whose array `x` is read as by
            the reader "npz"; tables of images or arrays that `save_to_disk` wrote. Hidden files and files of other
            kinds in a folder are left out.
        in_shape: Shape of one sample of the model. Images become grey or RGB, as it says, and are resized (bilinear).
        window: What is black and white in pictures of more than 8 bits, as in training.
        skip_broken: Leave out images that can't be read, with a DataWarning; else they are refused, all in one list.
        encoder: Reads the files, or those of a folder, in place of that, but for `.npz`, where the model's samples come
            from an encoder.
    """
    if encoder is not None and any(path.suffix.lower() != ".npz" for path in paths):
        for path in paths:
            files = table_files(path) if encoder.kind == "table" and not is_saved(path) else [path]
            if not files:
                raise DataError(f"{path}: holds no CSV or Parquet file")
            for file in files:
                yield Unlabelled(*encoder.read(file, skip_broken), 0)
        return
    tray, pictures, read = Tray(skip_broken), list[Picture](), 0
    for file in [file for path in paths for file in _images_below(path)]:
        saved = saved_samples(file) if is_saved(file) else None
        inputs = read_inputs(file) if file.suffix.lower() == ".npz" else saved
        if isinstance(inputs, Tensor):
            if inputs.shape[1:] != in_shape:
                raise DataError(f"{file}: the model takes samples of shape {in_shape}, not {tuple(inputs.shape[1:])}")
            yield from _of_pictures(pictures, in_shape, window, tray)
            pictures = []
            for start in range(0, len(inputs), _BATCH):
                part = inputs[start : start + _BATCH]
                yield Unlabelled([f"{file}[{start + row}]" for row in range(len(part))], part, 0)
        else:
            more: list[Picture] = inputs or [(str(file), partial(opened, file))]
            pictures += more
            read += len(more)
    yield from _of_pictures(pictures, in_shape, window, tray)
    tray.close(read)


def _images_below(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if not path.is_dir() or is_saved(path):
        return [path]
    files = [(file, file.relative_to(path).parts) for file in sorted(path.rglob("*")) if is_image(file)]
    found = [file for file, parts in files if not any(one[0] == "." or one in SYSTEM_FOLDERS for one in parts)]
    if not found:
        raise DataError(f"{path}: holds no images")
    return found


def _of_pictures(
    pictures: Sequence[Picture], in_shape: tuple[int, ...], window: Window, tray: Tray
) -> Iterator[Unlabelled]:
    if pictures and (len(in_shape) != 3 or in_shape[0] not in (1, 3)):
        raise DataError(
            f"{pictures[0][0]}: the model takes samples of shape {in_shape}, no images; give an .npz file with an "
            "array x, or call fedskew.load(RUN).predict(array)"
        )
    for start in range(0, len(pictures), _BATCH):
        part, resized, read = [*pictures[start : start + _BATCH]], 0, list[Tensor]()
        for where, open_one in tuple(part):
            with tray.reading(part, (where, open_one)), open_one() as image:
                tray.look(where, image)
                read.append(as_floats(image, (in_shape[0], in_shape[1], in_shape[2]), where, window).expand(in_shape))
                resized += upright_size(image) != in_shape[1:]
        if read:
            yield Unlabelled([where for where, _ in part], torch.stack(read), resized)
