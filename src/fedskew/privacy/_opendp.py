"""The package opendp, whose noise is exact and comes from the system's randomness."""

from __future__ import annotations

from typing import Any

from fedskew.errors import MissingPackageError


def secure_noise() -> Any:
    """Import opendp's mechanisms, which draw the noise of real sites.

    Raises:
        MissingPackageError: opendp is not installed.
    """
    try:
        import opendp.prelude as dp
    except ImportError:
        raise MissingPackageError(
            "opendp is not installed; pip install 'fedskew[dp]', or pass a seeded rng (for simulation only)"
        ) from None
    dp.enable_features("contrib")
    return dp
