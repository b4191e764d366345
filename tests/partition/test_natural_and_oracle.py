"""Clients of the data's own, clients that have the target's mix, and what a client holds out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import counts_of

import fedskew
from fedskew.errors import ArgumentError, ConfigError, PartitionError
from fedskew.partition import DirichletByClient, grouped, hold_out, natural_split, oracle


def test_samples_go_to_the_client_that_their_id_names() -> None:
    split = natural_split(["b", "a", "b", "c", "a"])
    assert [held.tolist() for held in split] == [[1, 4], [0, 2], [3]]


def test_numbers_are_ids_too() -> None:
    split = natural_split(np.array([7, 3, 7], dtype=np.uint64))
    assert [held.tolist() for held in split] == [[1], [0, 2]]


def test_with_a_number_of_clients_an_absent_id_is_an_empty_client() -> None:
    split = natural_split([2, 0, 2], clients=4)
    assert [held.tolist() for held in split] == [[1], [], [0, 2], []]
    assert all(held.dtype == np.int64 for held in split)


def cameras(*sizes: int) -> list[np.ndarray]:
    return natural_split(np.repeat(np.arange(len(sizes)), sizes), len(sizes))


def test_whole_cameras_are_put_together_from_the_largest_to_the_smallest() -> None:
    # 9 | 7 | then 5 joins 7 (12), 4 joins 9 (13), 3 joins 12 (15), 1 joins 13 (14), an empty one joins 14.
    split = grouped(cameras(5, 9, 1, 7, 0, 4, 3), 2)
    assert [len(held) for held in split] == [14, 15]
    ids = np.repeat(np.arange(7), (5, 9, 1, 7, 0, 4, 3))
    assert [sorted(set(ids[held].tolist())) for held in split] == [[1, 2, 5], [0, 3, 6]]
    assert all(np.all(np.diff(held) > 0) for held in split)


def test_equal_cameras_go_to_the_first_of_equal_clients() -> None:
    assert [held.tolist() for held in grouped(cameras(1, 1, 1, 1), 3)] == [[0, 3], [1], [2]]


def test_as_many_clients_as_cameras_keep_them_apart() -> None:
    assert [len(held) for held in grouped(cameras(2, 5, 3), 3)] == [5, 3, 2]


@pytest.mark.parametrize("clients", [0, 4])
def test_refuses_to_cut_cameras_up(clients: int) -> None:
    with pytest.raises(PartitionError, match=f"names, 3, can't be merged into {clients}"):
        grouped(cameras(2, 5, 3), clients)


@pytest.mark.parametrize(
    ("ids", "clients", "message"),
    [
        ([], None, "one id per sample"),
        ([[1]], None, "one id per sample"),
        ([0.5], None, "must be integers or strings, not float64"),
        (["a"], 1, "must be integers, not <U1"),
        ([0, 3], 3, "must be from 0 to 2, but 0 to 3 occur"),
        ([-1, 0], 3, "must be from 0 to 2, but -1 to 0 occur"),
    ],
)
def test_refuses_other_ids(ids, clients, message) -> None:
    with pytest.raises(ArgumentError, match=f"client_ids: .*{message}"):
        natural_split(ids, clients)


# Clients that already have the target's mix.


@pytest.mark.parametrize(("target", "counts"), [([1.0, 3.0], [[3, 9], [7, 21]]), ([0.5, 0.5], [[3, 3], [7, 7]])])
def test_sizes_stay_where_every_class_suffices_and_shrink_by_one_factor_where_one_runs_short(target, counts):
    # 10 samples of class 0 and 30 of class 1; 1 : 3 is the pool's own mix. Half and half of 40 samples would be 20 of
    # class 0, and there are 10: everybody keeps half of its size.
    labels = np.repeat([0, 1], [10, 30])
    dealt = oracle([12, 28], np.arange(40), labels, target, np.random.default_rng(0))
    assert counts_of(dealt, labels, 2).tolist() == counts
    assert sorted(np.concatenate(dealt).tolist()) == sorted({*range(40)} & {*np.concatenate(dealt).tolist()})


def test_where_rounding_asks_for_too_much_somebody_gets_one_less():
    # Sizes 3, 3 and 4 want 1.5, 1.5 and 2 of class 0; rounded up that is 6, and there are 5.
    labels = np.repeat([0, 1], 5)
    dealt = oracle([3, 3, 4], np.arange(10), labels, [0.5, 0.5], np.random.default_rng(0))
    assert counts_of(dealt, labels, 2).tolist() == [[1, 1], [2, 1], [2, 2]]


def test_a_class_outside_the_target_is_dealt_to_nobody_and_an_empty_client_stays_empty():
    labels = np.repeat([0, 1, 2], 10)
    counts = counts_of(oracle([20, 0, 10], np.arange(30), labels, [1, 1, 0], np.random.default_rng(0)), labels, 3)
    # Two thirds of 20 and of 10, rounded down: 13 and 6.
    assert counts.tolist() == [[7, 6, 0], [0, 0, 0], [3, 3, 0]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 8))
def test_mixes_are_exact_up_to_rounding_and_no_sample_is_used_twice(seed, clients, classes):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.choice(classes, 400, p=rng.dirichlet(np.ones(classes)))])
    pool = np.array_split(rng.permutation(len(labels)), np.sort(rng.integers(0, len(labels), clients - 1)))
    target = rng.dirichlet(np.ones(classes))
    before = np.array([len(own) for own in pool])
    dealt = oracle(before, np.concatenate(pool), labels, target, rng)
    everyone = np.concatenate(dealt)
    assert len(np.unique(everyone)) == len(everyone)
    assert set(everyone.tolist()) <= set(np.concatenate(pool).tolist())
    factor = min(1, (np.bincount(labels) / (target * before.sum())).min())
    exact = np.floor(factor * before + 1e-9)[:, None] * target
    assert np.abs(counts_of(dealt, labels, classes) - exact).max() < 1
    assert all((np.diff(own) > 0).all() for own in dealt)


def test_the_same_generator_deals_the_same():
    labels = np.random.default_rng(0).integers(0, 3, 90)
    one, two, other = (
        oracle([30, 30, 30], np.arange(90), labels, [1, 2, 1], np.random.default_rng(seed)) for seed in (5, 5, 6)
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ([1.0, 0.0, 0.5], PartitionError, "there is no training sample of class 2, which the target has"),
        ([1.0, -1.0], ArgumentError, "target: .*negative"),
        ([0.0, 0.0], ArgumentError, "target: its shares must have a positive sum"),
        ([1.0], ArgumentError, "target: has 1 classes, and class 1 occurs"),
    ],
)
def test_a_target_that_can_not_be_met_is_refused(target, error, says):
    with pytest.raises(error, match=says):
        oracle([4], np.arange(4), np.array([0, 0, 1, 1]), target, np.random.default_rng(0))


TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_client", "clients": 6, "beta": 0.3, "target_client": True, "oracle": True},
    "model": "logistic",
    "training": {"rounds": 2, "batch_size": 64},
}


@pytest.mark.slow
def test_a_run_with_an_oracle_leaves_the_target_client_alone(tmp_path):
    plain = fedskew.simulate({**TASK, "partition": {**TASK["partition"], "oracle": False}}, out=tmp_path)
    result = fedskew.simulate(TASK, out=tmp_path)
    before, after = (fedskew.partition.Partition.load(run.folder / "partition.npz") for run in (plain, result))
    assert np.array_equal(before.indices[-1], after.indices[-1])
    target = after.counts[-1] / after.counts[-1].sum()
    sizes = after.counts[:-1].sum(axis=1)
    assert np.abs(after.counts[:-1] - sizes[:, None] * target).max() < 1.5
    assert (sizes <= before.counts[:-1].sum(axis=1)).all()
    assert after.rule == f"{DirichletByClient(beta=0.3, target_client=True)}, dealt again with the target's mix"
    distances = [run.rounds[-1]["target_distance"] for run in (plain, result)]
    assert distances[1] < 0.01 * distances[0]
    replayed = fedskew.simulate(result.folder / "config.toml")
    assert [record["loss"] for record in replayed.rounds] == [record["loss"] for record in result.rounds]


def test_an_oracle_holds_what_the_target_has_where_no_client_that_trains_did():
    # Of 10 digits, 3 clients hold 2 labels each, and with seed 0 the target has one that none of them holds.
    partition = {"rule": "sparsity", "clients": 3, "labels_per_client": 2, "oracle": True}
    training = {"rounds": 0}
    plain = fedskew.simulate({**TASK, "partition": {**partition, "oracle": False}, "training": training})
    target = plain.runs[0].target
    assert target[plain.runs[0].counts.sum(axis=0) == 0].sum() > 0
    counts = fedskew.simulate({**TASK, "partition": partition, "training": training}).runs[0].counts
    assert np.abs(counts - counts.sum(axis=1, keepdims=True) * target).max() < 1.5


def test_an_oracle_without_a_target_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"partition.oracle: .* set target.mix"):
        fedskew.simulate({**TASK, "partition": {**TASK["partition"], "target_client": False}})


def test_an_oracle_of_any_rule_meets_a_target_that_is_written_down():
    partition = {"rule": "quantity", "clients": 10, "labels_per_client": 2, "oracle": True}
    result = fedskew.simulate({**TASK, "partition": partition, "target": {"mix": "uniform"}})
    counts = result.runs[0].counts
    assert np.abs(counts - counts.sum(axis=1, keepdims=True) / 10).max() < 1.5


# A share of one client's samples that it does not train on.


LABELS = np.repeat([0, 1, 2], [40, 9, 1])
ROWS = np.arange(50)


def test_every_sample_is_on_one_side_and_every_class_has_its_share_up_to_one():
    kept, held = hold_out(ROWS, LABELS, 0.2, np.random.default_rng(0))
    assert sorted([*kept, *held]) == ROWS.tolist()
    assert (np.diff(kept) > 0).all()
    assert (np.diff(held) > 0).all()
    assert (np.abs(np.bincount(LABELS[held], minlength=3) - [8, 1.8, 0.2]) < 1).all()


def test_every_sample_is_held_out_equally_often_also_of_a_class_of_one():
    # Standard error of a share of 2000 draws: sqrt(.2 * .8 / 2000) = .009.
    held = [hold_out(ROWS, LABELS, 0.2, np.random.default_rng(seed))[1] for seed in range(2000)]
    times = np.bincount(np.concatenate(held), minlength=50) / 2000
    assert np.abs(times - 0.2).max() < 0.04


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_one_sample_at_least_stays(samples):
    for seed in range(20):
        kept, held = hold_out(ROWS[:samples], LABELS, 0.9, np.random.default_rng(seed))
        assert len(kept) + len(held) == samples
        assert len(kept) >= min(samples, 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_one_sample_of_every_class_stays_where_that_is_asked_for(share):
    for seed in range(20):
        kept, held = hold_out(ROWS, LABELS, share, np.random.default_rng(seed), every_class=True)
        assert sorted([*kept, *held]) == ROWS.tolist()
        assert set(LABELS[kept]) == {0, 1, 2}
        assert abs(np.bincount(LABELS[held], minlength=3)[0] - 40 * share) < 1 + (share == 0.95)
    assert [part.tolist() for part in hold_out(ROWS[:0], LABELS, 0.3, np.random.default_rng(0), True)] == [[], []]


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ArgumentError, match="share: input should be less than 1 .got 1.0."):
        hold_out(ROWS, LABELS, 1.0, np.random.default_rng(0))
