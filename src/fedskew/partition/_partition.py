"""The result of a partition rule; it can be saved, so that two systems train on the same partition."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, DataError, optional, placed
from fedskew.files import replacing
from fedskew.parameters import IntArray

_FORMAT = "fedskew partition 1"
_ROW = "fedskew row"
_PARTS = ("", "held_out_", "test_")  # prefixes of the arrays in a file: trained on, held out, tested on
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client holds.

    Attributes:
        indices: Of each client, the samples that it trains on.
        counts: Label counts of these, shape `(clients, classes)`, int64.
        held_out: Of each client, the samples that it holds out, to calibrate; empty where nobody does.
        test: Of each client, its own test samples; empty where nobody has such.
    """

    indices: tuple[IntArray, ...]
    counts: IntArray
    rule: str
    held_out: tuple[IntArray, ...] = ()
    test: tuple[IntArray, ...] = ()

    @classmethod
    def of(cls, indices: Sequence[ArrayLike], labels: ArrayLike, num_classes: int, rule: object = "") -> Partition:
        """Make the record of a split: the samples of each client; `rule` is kept as text.

        Labels are class ids, `(samples,)`, or 0 and 1 for each class, `(samples, classes)`.
        """
        labels = np.asarray(labels)
        arrays = tuple(np.asarray(held, dtype=np.int64) for held in indices)
        if not arrays:
            raise ArgumentError("indices: there is no client")
        dealt = np.concatenate(arrays)
        if dealt.size and not (dealt.min() >= 0 and dealt.max() < len(labels)):
            raise ArgumentError(f"indices: must lie between 0 and {len(labels) - 1}, as there are {len(labels)} labels")
        if np.bincount(dealt, minlength=1).max() > 1:
            raise ArgumentError(f"indices: sample {np.bincount(dealt).argmax()} goes to more than one client")
        if labels.ndim == 2:
            return cls(arrays, np.array([labels[held].sum(axis=0) for held in arrays]), str(rule))
        if dealt.size and not (labels[dealt].min() >= 0 and labels[dealt].max() < num_classes):
            raise ArgumentError(f"labels: must be class ids below num_classes, which is {num_classes}")
        client = np.repeat(np.arange(len(arrays)), [len(held) for held in arrays])
        counts = np.bincount(client * num_classes + labels[dealt], minlength=len(arrays) * num_classes)
        return cls(arrays, counts.reshape(len(arrays), num_classes), str(rule))

    @classmethod
    def from_flower(
        cls, partitioner: Any, labels: ArrayLike, num_classes: int, columns: Mapping[str, ArrayLike] | None = None
    ) -> Partition:
        """Divide samples by a partitioner of the package `flwr-datasets`.

            made = DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.1)
            Partition.from_flower(made, dataset.targets, dataset.num_classes).save("clients.npz")

        A config trains on it by `rule = "file"` and `path = "clients.npz"`.

        Args:
            partitioner: The partitioner, to which no data set has been assigned yet.
            labels: Class ids, shape `(samples,)`, integers in [0, num_classes); the partitioner knows them as "label".
            columns: What else the partitioner divides by: values of each sample, by name.
        """
        package = optional("datasets", "a partitioner of Flower needs datasets: pip install 'fedskew[hf]'")
        table = {name: np.asarray(values) for name, values in {"label": labels, **(columns or {})}.items()}
        rows = np.arange(len(table["label"]))
        kind = type(partitioner).__name__
        where = f"partitioner: {kind} can't divide these samples: "
        with placed(where, ArgumentError, of=(AttributeError, TypeError, ValueError, KeyError)):
            partitioner.dataset = package.Dataset.from_dict({**table, _ROW: rows})
            parts = [partitioner.load_partition(client)[_ROW] for client in range(partitioner.num_partitions)]
        indices = [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
        return cls.of(indices, table["label"], num_classes, f"{kind} of flwr-datasets")

    def to_flower(self, label: str = "label") -> Any:
        """Make a partitioner of the package `flwr-datasets` that gives these partitions.

            data = FederatedDataset(dataset="mnist", partitioners={"train": partition.to_flower()})
            data.load_partition(0)

        The data set's labels, in the column `label`, must be those that the partition was made of, in the same order,
        which is checked when the first partition is loaded. MissingPackageError is raised where the package is missing.
        """
        missing = "a partitioner of Flower needs flwr-datasets: pip install flwr-datasets"
        return _as_partitioner(optional("flwr_datasets.partitioner:Partitioner", missing), self, label)

    @property
    def num_classes(self) -> int:
        """Number of classes, held by a client or not."""
        return int(self.counts.shape[1])

    @property
    def sizes(self) -> IntArray:
        """The samples that each client trains on, `(clients,)`."""
        return np.array([len(held) for held in self.indices], dtype=np.int64)

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of the clients' samples in order.

        Computed over little-endian int64: the number of clients, the size of each, then all indices client by client;
        and the same of samples that are held out, and of test samples, where there are such.
        """
        digest = hashlib.sha256()
        for part in self._parts().values():
            digest.update(np.array([len(part), *map(len, part)], dtype="<i8").tobytes())
            for held in part:
                digest.update(held.astype("<i8").tobytes())
        return digest.hexdigest()

    def _parts(self) -> dict[str, tuple[IntArray, ...]]:
        """Return who holds what, by the prefix of its arrays in a file; without what nobody has."""
        parts = zip(_PARTS, (self.indices, self.held_out, self.test), strict=True)
        return {prefix: part for prefix, part in parts if part}

    def check(self, labels: ArrayLike) -> None:
        """Raise DataError unless this partition was made for a data set with these labels."""
        try:
            all_parts = [*self.indices, *self.held_out, *self.test]
            counts = Partition.of(all_parts, labels, self.num_classes).counts[: len(self.indices)]
        except ArgumentError as error:
            raise DataError(f"the partition was made for another data set ({error})") from None
        if not np.array_equal(counts, self.counts):
            raise DataError("the partition was made for another data set, or for its samples in another order")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an `.npz` file, atomically; the same partition gives the same bytes."""
        arrays: dict[str, NDArray[np.generic]] = {
            "format": np.array(_FORMAT),
            "rule": np.array(self.rule),
            "hash": np.array(self.hash),
            "counts": self.counts,
        }
        if not np.array_equal(self.counts.sum(axis=1), self.sizes):
            arrays["several"] = np.array(True)
        for prefix, held in self._parts().items():
            arrays[f"{prefix}sizes"] = np.array([len(own) for own in held], dtype=np.int64)
            arrays[f"{prefix}indices"] = np.concatenate(held)
        # Not numpy.savez: it leaves the time stamps in the archive to the Python version.
        with replacing(Path(path)) as part, zipfile.ZipFile(part, "w") as archive:
            for name, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy", _FIXED_TIME), "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a file that `save` wrote; DataError is raised where it is missing, damaged or of another kind."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
                kind, stored, rule = (str(arrays[name]) for name in ("format", "hash", "rule"))
                held, *apart = (
                    tuple(np.split(arrays[f"{part}indices"], np.cumsum(arrays[f"{part}sizes"])[:-1]))
                    if not part or f"{part}sizes" in arrays
                    else ()
                    for part in _PARTS
                )
                partition = cls(held, arrays["counts"], rule, *apart)
        except FileNotFoundError:
            raise DataError(f"{path}: there is no such partition file") from None
        except Exception as error:  # a damaged archive can raise almost anything
            raise DataError(
                f"{path}: is not a readable partition file ({type(error).__name__}); put it back, or make it anew"
            ) from error
        if kind != _FORMAT:
            raise DataError(f"{path}: is of format {kind!r}, and this version reads {_FORMAT!r}")
        whole = partition.counts.sum(axis=1) == arrays["sizes"]  # not so where a sample has several labels, or none
        possible = (partition.counts <= arrays["sizes"][:, None]).all()
        if partition.hash != stored or not (possible if "several" in arrays else whole.all()):
            raise DataError(f"{path}: its contents don't match its hash; put it back, or make it anew")
        return partition


def _as_partitioner(base: Any, partition: Partition, label: str) -> Any:
    """Return a partitioner of a partition, of a class that inherits from Flower's."""

    class Given(base):  # type: ignore[misc]  # Flower's comes without types
        _checked = False

        @property
        def num_partitions(self) -> int:
            return len(partition.indices)

        def load_partition(self, partition_id: int) -> Any:
            if not 0 <= partition_id < len(partition.indices):
                raise ArgumentError(f"partition_id: must be from 0 to {len(partition.indices) - 1}, not {partition_id}")
            if not self._checked:
                partition.check(self.dataset[label])
                self._checked = True
            return self.dataset.select(partition.indices[partition_id].tolist())

    return Given()
