"""Clients that the data set itself names: writers, cameras, hospitals."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.parameters import IntArray, component
from fedskew.partition._rule import Rule
from fedskew.tables import balanced


def natural_split(client_ids: ArrayLike, clients: int | None = None) -> list[IntArray]:
    """Return the samples of each client, by the client id that comes with every sample.

    Ids are integers or strings, shape `(samples,)`; there is one ascending index array per id, in the order of
    `numpy.unique(client_ids)`. With `clients`, ids are numbers from 0 to clients - 1, and one that does not occur is an
    empty client. ArgumentError is raised for any other shape, type or value.
    """
    ids = np.asarray(client_ids)
    if ids.ndim != 1 or ids.size == 0:
        raise ArgumentError(f"client_ids: must be one id per sample, not of shape {ids.shape}")
    if ids.dtype.kind not in ("iu" if clients is not None else "iuUS"):
        raise ArgumentError(f"client_ids: must be integers{'' if clients else ' or strings'}, not {ids.dtype}")
    if clients is None:
        ids = np.unique(ids, return_inverse=True)[1]
    elif ids.min() < 0 or ids.max() >= clients:
        raise ArgumentError(f"client_ids: must be from 0 to {clients - 1}, but {ids.min()} to {ids.max()} occur")
    ids = ids.astype(np.int64)
    sizes = np.bincount(ids, minlength=clients or 0)
    return np.split(np.argsort(ids, kind="stable"), np.cumsum(sizes)[:-1])


def grouped(shares: Sequence[IntArray], clients: int) -> list[IntArray]:
    """Merge natural clients into fewer ones of similar size; none is divided.

    From the largest to the smallest, each goes to the client with the fewest samples so far (of several such, the
    first). This is how the FedDG benchmark (Bai et al., 2024; "NonIIDSplitter" with iid 0) makes 100 clients of the 243
    cameras of iWildCam's training part.

    `shares` has the samples of each natural client; what is returned has one ascending index array per client. Where
    there are fewer natural clients than `clients` (the benchmark would divide them), PartitionError is raised.
    """
    if not 1 <= clients <= len(shares):
        raise PartitionError(
            f"the clients that the data set names, {len(shares)}, can't be merged into {clients}: lower clients, or "
            "leave it out"
        )
    members = balanced([len(share) for share in shares], clients)
    return [np.sort(np.concatenate([shares[place] for place in own])) for own in members]


@component
class Natural(Rule):
    """The data set's own clients; a run divides samples by their client ids, with `natural_split` and `grouped`."""

    def _counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        raise PartitionError("the data set does not name the client of each sample: choose another partition rule")
