import hashlib
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fedskew.errors import ArgumentError, DataError, MissingPackageError
from fedskew.labels import LabelCounts
from fedskew.partition import Partition, Quantity

LABELS = np.array([0, 1, 2, 0, 1, 2, 0])
INDICES = [[0, 3], [1, 5], []]


@pytest.fixture
def partition() -> Partition:
    return Partition.of(INDICES, LABELS, 4, "by hand")


def test_counts_say_how_many_of_each_class_a_client_holds(partition: Partition) -> None:
    np.testing.assert_array_equal(partition.counts, [[2, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert partition.counts.dtype == np.int64
    assert partition.num_classes == 4
    assert partition.rule == "by hand"


def test_hash_is_sha256_of_sizes_and_indices(partition: Partition) -> None:
    numbers = [3, 2, 2, 0, 0, 3, 1, 5]  # clients; size of each; indices
    assert partition.hash == hashlib.sha256(struct.pack("<8q", *numbers)).hexdigest()


def test_comes_back_as_it_was_saved(partition: Partition, tmp_path: Path) -> None:
    partition.save(tmp_path / "partition.npz")
    loaded = Partition.load(tmp_path / "partition.npz")
    assert loaded.hash == partition.hash
    assert loaded.rule == partition.rule
    np.testing.assert_array_equal(loaded.counts, partition.counts)
    assert [held.tolist() for held in loaded.indices] == INDICES
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"]


def test_the_same_partition_gives_the_same_bytes(partition: Partition, tmp_path: Path, monkeypatch) -> None:
    partition.save(tmp_path / "one.npz")
    monkeypatch.setattr("time.time", lambda: 2e9)
    Partition.of(INDICES, LABELS, 4, "by hand").save(tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def test_numpy_alone_can_read_it(partition: Partition, tmp_path: Path) -> None:
    partition.save(tmp_path / "partition.npz")
    with np.load(tmp_path / "partition.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["counts"], partition.counts)
        np.testing.assert_array_equal(archive["indices"], [0, 3, 1, 5])
        np.testing.assert_array_equal(archive["sizes"], [2, 2, 0])


def test_no_damaged_byte_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    labels = np.repeat(np.arange(3), 20)
    partition = Partition.of(Quantity(1).split(labels, 3, np.random.default_rng(0)), labels, 3, Quantity(1))
    partition.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    messages = []
    for place in rng.choice(len(whole), 400, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            loaded = Partition.load(path)
        except DataError as error:
            messages.append(str(error))
        else:  # a byte of the archive that means nothing, such as a time stamp
            assert loaded.hash == partition.hash
            np.testing.assert_array_equal(loaded.counts, partition.counts)
    assert len(messages) > 200
    assert all(str(path) in message and "\n" not in message for message in messages)


def test_a_cut_file_is_refused(partition: Partition, tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    partition.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is not a readable partition file"):
            Partition.load(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.npz: there is no such partition file"):
        Partition.load(tmp_path / "nowhere.npz")
    np.savez(tmp_path / "other.npz", x=np.arange(3))
    with pytest.raises(DataError, match=r"other\.npz: is not a readable partition file"):
        Partition.load(tmp_path / "other.npz")
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(DataError, match=r"array\.npy: is not a readable partition file"):
        Partition.load(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("indices", np.array([0, 3, 1, 4]), "don't match its hash"),
        ("sizes", np.array([1, 3, 0]), "don't match its hash"),
        ("counts", np.zeros((3, 4), dtype=np.int64), "don't match its hash"),
        ("format", np.array("fedskew partition 99"), "this version reads"),
        ("rule", np.array([{"a pickle": "that is never read"}], dtype=object), "is not a readable partition file"),
    ],
)
def test_other_contents_are_refused(partition: Partition, tmp_path: Path, name: str, value, says: str) -> None:
    path = tmp_path / "partition.npz"
    partition.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **{**arrays, name: value})
    with pytest.raises(DataError, match=says):
        Partition.load(path)


def test_check_notices_another_data_set(partition: Partition) -> None:
    partition.check(LABELS)
    with pytest.raises(DataError, match="made for another data set, or for its samples in another order"):
        partition.check(np.roll(LABELS, 1))
    with pytest.raises(DataError, match="made for another data set"):
        partition.check(LABELS[:3])


@pytest.mark.parametrize(
    ("indices", "classes", "message"),
    [
        ([], 3, "indices: there is no client"),
        ([[0, 1], [1]], 3, "indices: sample 1 goes to more than one client"),
        ([[0, 7]], 3, "indices: must lie between 0 and 6, as there are 7 labels"),
        ([[-1]], 3, "indices: must lie between 0 and 6"),
        ([[2]], 2, "labels: must be class ids below num_classes, which is 2"),
    ],
)
def test_refuses_what_is_no_partition(indices, classes, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        Partition.of(indices, LABELS, classes)


class EveryThird:
    """A partitioner as those of flwr-datasets are: told the data set once, asked for one part after the other."""

    num_partitions = 3

    def __init__(self) -> None:
        self._table = None

    @property
    def dataset(self):
        return self._table

    @dataset.setter
    def dataset(self, table) -> None:
        if self._table is not None:
            raise ValueError("The dataset should be assigned only once to the partitioner.")
        self._table = table

    def load_partition(self, client: int):
        return self._table.shard(num_shards=3, index=client, contiguous=False)


class ByWriter(EveryThird):
    num_partitions = 2

    def load_partition(self, client: int):
        return self._table.select([row for row, writer in enumerate(self._table["writer"]) if writer == "ab"[client]])


@pytest.mark.slow
def test_a_partitioner_of_flower_gives_a_partition(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    made = Partition.from_flower(EveryThird(), LABELS, 3)
    assert [held.tolist() for held in made.indices] == [[0, 3, 6], [1, 4], [2, 5]]
    assert made.counts.tolist() == [[3, 0, 0], [0, 2, 0], [0, 0, 2]]
    assert made.rule == "EveryThird of flwr-datasets"
    made.save(tmp_path / "clients.npz")
    assert Partition.load(tmp_path / "clients.npz").hash == made.hash
    by_writer = Partition.from_flower(ByWriter(), LABELS, 3, {"writer": list("aabbaba")})
    assert [held.tolist() for held in by_writer.indices] == [[0, 1, 4, 6], [2, 3, 5]]


def test_a_partitioner_that_has_its_data_already_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    used = EveryThird()
    Partition.from_flower(used, LABELS, 3)
    with pytest.raises(ArgumentError, match="EveryThird can't divide these samples: The dataset should be"):
        Partition.from_flower(used, LABELS, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["DirichletPartitioner", "PathologicalPartitioner", "ShardPartitioner"])
def test_flowers_own_partitioners(name: str) -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    options = {"alpha": 0.5} if name.startswith("D") else {"num_classes_per_partition": 2} if name[0] == "P" else {}
    options |= {"num_shards_per_partition": 2} if name[0] == "S" else {}
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    made = Partition.from_flower(
        getattr(partitioners, name)(num_partitions=5, partition_by="label", **options), labels, 10
    )
    assert made.counts.sum() <= 2000
    assert len(made.indices) == 5


class Base:
    """What `flwr_datasets.partitioner.Partitioner` is to who inherits from it."""

    dataset: object = None


def _flower_s_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own where it is installed, else its shape."""
    try:
        import flwr_datasets.partitioner  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "flwr_datasets", types.ModuleType("flwr_datasets"))
        module = types.ModuleType("flwr_datasets.partitioner")
        module.Partitioner = Base  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", module)


@pytest.mark.filterwarnings("ignore")
def test_a_partition_is_a_partitioner_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pytest.importorskip("datasets").Dataset
    _flower_s_base(monkeypatch)
    partition = Partition.of([[0, 3], [], [5, 1]], LABELS, 3)
    made = partition.to_flower()
    assert made.num_partitions == 3
    made.dataset = table.from_dict({"label": LABELS.tolist()})
    assert [list(made.load_partition(place)["label"]) for place in range(3)] == [
        LABELS[held].tolist() for held in ([0, 3], [], [5, 1])
    ]
    with pytest.raises(ArgumentError, match="partition_id: must be from 0 to 2, not 3"):
        made.load_partition(3)
    other = partition.to_flower()
    other.dataset = table.from_dict({"label": np.roll(LABELS, 1).tolist()})
    with pytest.raises(DataError):
        other.load_partition(0)
    counted = LabelCounts.of_partitions(made)
    np.testing.assert_array_equal(counted.counts, partition.counts[:, partition.counts.any(axis=0)])


def test_without_flower_s_package_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(MissingPackageError, match="pip install flwr-datasets"):
        Partition.of([[0]], LABELS, 3).to_flower()
