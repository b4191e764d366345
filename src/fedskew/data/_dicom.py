"""DICOM files, read by pydicom (the extra `fedskew[dicom]`), as images whose values have the units of the modality.

Stored values are rescaled by slope and intercept (a CT's become Hounsfield units). The window is the file's first
(DICOM PS3.3, C.11.2.1.2: `LINEAR` has its ends at c - 1/2 -+ (w - 1) / 2, `LINEAR_EXACT` at c -+ w / 2), or else the
range of the bits stored, rescaled. `MONOCHROME1` shows low values bright.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedskew.errors import MissingPackageError

SUFFIXES = {".dcm", ".dicom"}


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM: by its suffix, or where it has none but digits, by its first bytes."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES or (suffix and not suffix[1:].isdigit()) or path.name == "DICOMDIR" or not path.is_file():
        return suffix in SUFFIXES
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read(path: Path) -> Image.Image:
    """Return the first image of a file: RGB, or floats with a `window` and whether it is `inverted` in its `info`."""
    try:
        pydicom, pixels = import_module("pydicom"), import_module("pydicom.pixels")
    except ImportError:
        raise MissingPackageError(f"{path}: is DICOM, which pydicom reads: pip install 'fedskew[dicom]'") from None
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
