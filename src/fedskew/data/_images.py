"""Images as tensors: decoded by Pillow or pydicom, upright, scaled to [0, 1], normalised by channel.

What is black and white in pictures of more than 8 bits is one rule for training, prediction and sites, the `window`:

    (low, high)   given by a user: these values become 0 and 1, what lies beyond is clipped
    (white,)      found where none is given: 2^b - 1, with the b bits that the brightest pixel of all pictures takes,
                  8 at least; a picture that is brighter is refused
    ()            no picture had more than 8 bits

A DICOM file, which pydicom reads (the extra `fedskew[dicom]`), brings its own, the first that it has (PS3.3,
C.11.2.1.2: `LINEAR` has its ends at c - 1/2 -+ (w - 1) / 2, `LINEAR_EXACT` at c -+ w / 2), or else the range of its
stored bits; a user's goes before that. Values are rescaled by slope and intercept (a CT's become Hounsfield units), and
`MONOCHROME1` shows low ones bright.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedskew.data._dataset import Arrays, Dataset, Inputs, Moments
from fedskew.errors import ArgumentError, DataError, DataWarning, FedskewError, in_one_line, optional
from fedskew.tables import counted

Picture = tuple[str, Callable[[], AbstractContextManager[Any]]]
"""An image by its place, for messages, and what opens it."""

Window = tuple[float, ...]
Size = int | tuple[int, int] | None

_GREY = {"1", "L", "LA", "La"}
_DEEP = {"I", "I;16", "I;16L", "I;16B", "I;16N", "F"}
_SIXTEEN = 65535.0
_LISTED = 100  # broken pictures that a message names

DICOM = {".dcm", ".dicom"}


class BrokenFileError(DataError):
    """A picture or text that can't be read, which may be left out."""


@contextmanager
def opened(path: Path, source: Any = None) -> Iterator[Image.Image]:
    """Open an image file, or the bytes of one; whatever is wrong with it inside the block is a BrokenFileError."""
    try:
        if source is None and is_dicom(path):
            yield _read_dicom(path)
            return
        # As a stream: Pillow (13.0) maps a file into memory in a wrong shape, where a TIFF is stored turned.
        with path.open("rb") if source is None else nullcontext(source) as file, Image.open(file) as image:
            yield image
    except FedskewError:
        raise
    except FileNotFoundError:
        raise BrokenFileError(f"{path}: there is no such file or folder") from None
    except UnidentifiedImageError:
        empty = source is None and not path.stat().st_size
        reason = "the file is empty" if empty else "what it holds is in no format of images"
        raise BrokenFileError(f"{path}: {reason}") from None
    except Exception as error:  # a damaged file, or a bomb, can raise almost anything
        reason = str(error) if isinstance(error, OSError | SyntaxError | AttributeError) else in_one_line(error)
        raise BrokenFileError(f"{path}: {reason}") from None


def is_grey(mode: str) -> bool:
    """Return whether images of this Pillow mode have one channel, apart from transparency."""
    return mode in _GREY | _DEEP


def sides(size: Size) -> tuple[int, int] | None:
    """Return (height, width) from the option `size`: a side, or both."""
    if size is None:
        return None
    found = (size, size) if isinstance(size, int) else tuple(size)
    if len(found) != 2 or not all(isinstance(side, int) and side > 0 for side in found):
        raise ArgumentError(f"size: must be a side or (height, width) in pixels, got {size!r}")
    return found


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of an image once it is turned as its EXIF data say; nothing is decoded for that."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return image.height, image.width  # of TIFF Pillow has turned it, and a PNG it would decode to look for them
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (image.width, image.height) if turned else (image.height, image.width)


class Pictures(NamedTuple):
    """Images of some parts, the rows of each part that could be read, the window, and what could not be read."""

    parts: list[Tensor]
    kept: list[list[int]]
    window: Window
    broken: tuple[str, ...]


def read_pictures(
    parts: Sequence[Sequence[Picture]], size: Size, window: Window = (), skip_broken: bool = False
) -> Pictures:
    """Decode the images of some parts as values in [0, 1], (1 or 3 channels, height, width), grey if all are; of one
    size, unless a `size`, a side or (height, width), is wanted."""
    wanted, ends, tray = sides(size), tuple(map(float, window)), Tray(skip_broken)
    if len(ends) > 2 or (ends and not 0 < ends[-1] - (ends[0] if len(ends) == 2 else 0) < np.inf):
        raise ArgumentError(f"window: must be [low, high], the stored values that are black and white, got {window!r}")
    window = ends
    places = [[(row, *picture) for row, picture in enumerate(part)] for part in parts]
    sizes: dict[tuple[int, int], list[str]] = {}
    channels = 1
    for part in places:
        for row, where, open_one in list(part):
            with tray.reading(part, (row, where, open_one)), open_one() as image:
                sizes.setdefault(upright_size(image), []).append(where)
                channels = channels if is_grey(image.mode) else 3
                tray.look(where, image)
    if len(window) == 2 and not tray.deep and sizes:
        said = "window: no picture has more than 8 bits, so it changes nothing"
        warnings.warn(said, DataWarning, stacklevel=2)
    if not wanted and len(sizes) > 1:
        listed = ", ".join(f"{high} x {wide} ({len(own):,}, such as {own[0]})" for (high, wide), own in sizes.items())
        raise DataError(f"pictures are of {len(sizes)} sizes: {listed}; set size to resize all to one")
    common = wanted or next(iter(sizes), (0, 0))
    read = [torch.empty(len(part), channels, *common) for part in parts]
    brightest, deep = 0, list[Tensor]()
    for inputs, part in zip(read, places, strict=True):
        for row, where, open_one in list(part):
            with tray.reading(part, (row, where, open_one)), open_one() as image:
                inputs[row] = as_floats(image, (channels, *common), where, window or (_SIXTEEN,))
                if image.mode in _DEEP and not window and "window" not in image.info:
                    brightest = max(brightest, int(np.asarray(image).max()))
                    deep.append(inputs[row])
    tray.close(sum(map(len, parts)))
    if deep:
        window = (float(2 ** max(brightest.bit_length(), 8) - 1),)
        for values in deep:
            values.mul_(_SIXTEEN / window[0])
    kept = [[row for row, *_ in part] for part in places]
    read = [inputs if len(rows) == len(inputs) else inputs[rows] for inputs, rows in zip(read, kept, strict=True)]
    return Pictures(read, kept, window, tuple(tray.broken))


class Tray:
    """Collects what could not be read, or not as it is, so that all of it is said at once."""

    def __init__(self, skips: bool) -> None:
        self.skips, self.broken, self.odd, self.deep = skips, list[str](), dict[str, list[str]](), False

    @contextmanager
    def reading(self, part: list[Any], one: Any) -> Iterator[None]:
        """Take a picture out of its part where the block finds it broken."""
        try:
            yield
        except BrokenFileError as error:
            self.broken.append(str(error))
            part.remove(one)

    def look(self, where: str, image: Image.Image) -> None:
        """Note what is not read of an image; a phone's second one in a file, a preview, does not count."""
        self.deep |= image.mode in _DEEP
        if (getattr(image, "is_animated", False) and image.format != "MPO") or image.info.get("frames", 1) > 1:
            said = "several images (animated, or of several pages): the first one is read"
            self.odd.setdefault(said, []).append(where)
        if not is_grey(image.mode) and any("16" in str(tile[3]) for tile in getattr(image, "tile", ())):
            self.odd.setdefault("16 bits a colour: the upper 8 are read", []).append(where)

    def close(self, total: int, what: str = "picture") -> None:
        """Refuse what is broken, or say that it is left out."""
        for said, found in self.odd.items():
            warnings.warn(f"{counted(len(found), 'file')}, such as {found[0]}: {said}", DataWarning, stacklevel=3)
        if not self.broken:
            return
        more = f"; and {len(self.broken) - _LISTED:,} more" if len(self.broken) > _LISTED else ""
        listed = "; ".join(self.broken[:_LISTED]) + more
        said = f"{len(self.broken):,} of {counted(total, what)} can't be read: {listed}"
        if not self.skips or len(self.broken) == total:
            raise DataError(f"{said}. Mend or remove them; --skip-broken (data.skip_broken = true) leaves them out")
        warnings.warn(f"{said}. They are left out (skip_broken)", DataWarning, stacklevel=3)


def as_floats(image: Image.Image, shape: tuple[int, int, int], where: object, window: Window) -> Tensor:
    """Return values in [0, 1] of `shape`, (1 or 3 channels, height, width), upright, resized (bilinear) if needed."""
    channels, height, width = shape
    upright = ImageOps.exif_transpose(image)
    if deep := image.mode in _DEEP:
        flat = Image.fromarray(_windowed(upright, where, window))
    else:
        flat = upright.convert("L" if channels == 1 else "RGB")
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(flat, dtype=np.float32) / np.float32(1 if deep else 255))
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels.unsqueeze(0)


def _windowed(image: Image.Image, where: object, window: Window) -> NDArray[np.float32]:
    """Return the values of an image of more than 8 bits as a window has them, in [0, 1]."""
    values: NDArray[np.float32] = np.asarray(image.convert("F"))
    if np.isnan(values).any():
        raise BrokenFileError(f"{where}: has a pixel that is NaN")
    if len(window) != 2:
        window = image.info.get("window", window)
    if len(window) == 2:
        shown = ((values - window[0]) / (window[1] - window[0])).clip(0, 1)
        return (1 - shown if image.info.get("inverted") else shown).astype(np.float32)
    least, most = values.min(), values.max()
    if not window:
        wrong = "has more than 8 bits, and the pictures of training have 8"
    elif image.mode == "F":
        wrong = "holds fractions"
    elif least < 0 or most > window[0]:
        wrong = f"has values from {least:.0f} to {most:.0f}, and black is 0 and white {window[0]:.0f}"
    else:
        return values / np.float32(window[0])
    raise DataError(f"{where}: {wrong}: set window = [low, high], the values that are black and white")


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale uint8 images, `(samples, channels, height, width)`, to [0, 1], then normalise them by channel."""
    shift, scale = (torch.tensor(list(values), device=pixels.device).view(-1, 1, 1) for values in (mean, std))
    return pixels.float().div_(255).sub_(shift).div_(scale)


def of_bytes(
    name: str,
    arrays: Arrays,
    classes: tuple[str, ...],
    moments: Moments | None = None,
    held: Callable[..., Inputs] = normalised,
    **more: Any,
) -> Dataset:
    """Return a data set of uint8 images, normalised by `moments`, means and deviations, or by their own where None."""
    pixels, labels, test_pixels, test_labels = arrays
    mean, std = moments or statistics(pixels)
    inputs, test_inputs = held(pixels, mean, std), held(test_pixels, mean, std)
    return Dataset(name, inputs, labels, test_inputs, test_labels, classes, mean, std, **more)


def statistics(pixels: Tensor) -> Moments:
    """Return exact mean and deviation by channel of uint8 images scaled to [0, 1], from the counts of each level."""
    levels, means, deviations = np.arange(256) / 255, [], []
    for channel in range(pixels.shape[1]):
        shares = np.zeros(256)
        for part in torch.split(pixels[:, channel], 10_000):
            shares += np.bincount(part.numpy().ravel(), minlength=256)
        shares /= shares.sum()
        means.append(float(shares @ levels))
        deviations.append(float(np.sqrt(shares @ (levels - means[-1]) ** 2)) or 1.0)
    return tuple(means), tuple(deviations)


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM: by its suffix, or where it has none but digits, by its first bytes."""
    suffix = path.suffix.lower()
    if suffix in DICOM or (suffix and not suffix[1:].isdigit()) or path.name == "DICOMDIR" or not path.is_file():
        return suffix in DICOM
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _read_dicom(path: Path) -> Image.Image:
    """Return the first image of a file: RGB, or floats with a `window` and whether it is `inverted` in its `info`."""
    missing = f"{path}: is DICOM, which pydicom reads: pip install 'fedskew[dicom]'"
    pydicom, pixels = optional("pydicom", missing), optional("pydicom.pixels", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom's, of entries that nobody needs here
        file = pydicom.dcmread(path)
        stored, kind = pixels.pixel_array(file, index=0), str(file.PhotometricInterpretation)
        if kind == "PALETTE COLOR":
            stored = pixels.apply_color_lut(stored, file)
        if stored.ndim == 3:
            shift = 8 * (stored.itemsize - 1) if kind == "PALETTE COLOR" else max(file.BitsStored - 8, 0)
            image = Image.fromarray((stored >> shift).astype(np.uint8))
        else:
            values = pixels.apply_modality_lut(stored, file)
            image = Image.fromarray(np.asarray(values, dtype=np.float32))
            image.info |= {"window": _window(file), "inverted": kind == "MONOCHROME1"}
    image.info["frames"] = int(file.get("NumberOfFrames") or 1)
    return image


def _window(file: Any) -> tuple[float, float]:
    """Return the values that are black and white."""
    centre, width = (np.ravel(file.get(name) or [0])[0] for name in ("WindowCenter", "WindowWidth"))
    exact = file.get("VOILUTFunction") == "LINEAR_EXACT"
    if width > (0 if exact else 1):
        middle, reach = (centre, width / 2) if exact else (centre - 0.5, (width - 1) / 2)
        return float(middle - reach), float(middle + reach)
    least = -(2 ** (file.BitsStored - 1)) if file.PixelRepresentation else 0
    slope, intercept = float(file.get("RescaleSlope") or 1), float(file.get("RescaleIntercept") or 0)
    ends = sorted(slope * value + intercept for value in (least, least + 2**file.BitsStored - 1))
    return ends[0], ends[1]
