"""Numbers as integers that can be added exactly, modulo 2**32 or 2**64.

    encode(x, a) = round(a * min(max(x, -limit), limit) * 2**fraction)          at each site
    decode(n, a) = n / 2**fraction / a                                          of the sum, a = the sum of the weights

Rounding is to the nearest, ties to even, of a product in float64: it is the same on every machine. A site's integer is
off by at most 1/2, so a sum over n sites by n / 2 units of 2**-fraction, and each unit of the decoded sum is 1 / a
times as large.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError

IntArray = NDArray[Any]  # int32 or int64
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class FixedPoint:
    """Numbers with a fixed number of bits after the point.

    Attributes:
        bits: Length of an integer: 32 or 64.
        fraction: How many of them are after the point.
        limit: Each number is clipped to +- this.
    """

    bits: Literal[32, 64]
    fraction: int
    limit: float

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integers' type."""
        return np.dtype(f"int{self.bits}")

    @property
    def largest_weights(self) -> int:
        """The largest sum of the sites' weights for which no sum of encoded numbers can overflow."""
        return int(2.0 ** (self.bits - 1 - self.fraction) / self.limit) - 1

    def error(self, members: int, weight: float = 1.0) -> float:
        """Bound how far a decoded sum is from the sum of the clipped numbers, but for float64's own rounding."""
        return members * 2.0 ** -(self.fraction + 1) / weight

    def encode(self, values: ArrayLike, weight: float = 1.0) -> IntArray:
        """Turn a site's numbers into integers.

        Args:
            weight: What they are multiplied by, from 0. The weights of all members of a sum together are at most
                `largest_weights`; they sum to 1 as a rule.

        Raises:
            ArgumentError: A number is not finite, or the weight is not usable.
        """
        if not 0 <= weight <= self.largest_weights:
            raise ArgumentError(f"weight: must be from 0 to {self.largest_weights}, not {weight!r}")
        wide = np.array(values, dtype=np.float64)
        if not np.isfinite(wide).all():
            raise ArgumentError("values: must be finite")
        np.clip(wide, -self.limit, self.limit, out=wide)
        wide *= weight
        wide *= 2.0**self.fraction
        return np.rint(wide, out=wide).astype(self.dtype)

    def decode(self, total: IntArray, weight: float = 1.0) -> FloatArray:
        """Turn a sum of encoded numbers into numbers.

        Args:
            weight: What to divide it by: the sum of the weights of those in it, for a weighted mean.

        Raises:
            ArgumentError: The weight is not above 0.
        """
        if not weight > 0:
            raise ArgumentError(f"weight: must be above 0, not {weight!r}")
        found: FloatArray = np.asarray(total).astype(np.float64)
        found *= 2.0**-self.fraction
        found /= weight
        return found


UPDATES = FixedPoint(32, 24, 8.0)
"""For updates and other vectors of the model's size, as many bytes as float32; weights sum to 1."""
NUMBERS = FixedPoint(64, 40, 65536.0)
"""For a few numbers of moderate size, such as mean losses and weighted scalars: up to 127 sites with weight 1."""
AMOUNTS = FixedPoint(64, 20, 2.0**36)
"""For amounts of samples that need not be whole, such as sums of label mixes times numbers of samples."""
SHARES = FixedPoint(64, 50, 64.0)
"""For weights of sites times label mixes, where a solver needs nearly all digits of a float64."""
COUNTS = FixedPoint(64, 0, 2.0**40)
"""For whole numbers, such as confusion matrices and numbers of samples or steps: up to 2**22 sites, exact."""


def add(rows: Iterable[IntArray]) -> IntArray:
    """Add encoded vectors as masked sums do: modulo 2**32 or 2**64. ArgumentError for none, or different forms."""
    total: IntArray | None = None
    for row in rows:
        if total is None:
            total = row.copy()
        else:
            add_to(total, row)
    if total is None:
        raise ArgumentError("rows: there is none")
    return total


def add_to(total: IntArray, row: IntArray) -> None:
    """Add an encoded vector to a sum, in place; see `add`."""
    if row.dtype != total.dtype or row.shape != total.shape:
        raise ArgumentError(f"rows: must be alike, not {total.dtype} {total.shape} and {row.dtype} {row.shape}")
    np.add(unsigned(total), unsigned(row), out=unsigned(total))


def unsigned(values: IntArray) -> IntArray:
    """View int32 or int64 as integers that wrap around."""
    return values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint64)
