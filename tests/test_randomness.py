"""Draws are functions of what they are for."""

import numpy as np
import pytest
import torch

from fedskew.randomness import Purpose, fold, generator, hashed, mix, stream_key, uniform


def test_a_generator_depends_on_every_one_of_its_four_numbers():
    base = (3, Purpose.SHUFFLE, 5, 7)
    same = generator(*base).random(4)
    np.testing.assert_array_equal(same, generator(*base).random(4))
    for other in [(4, *base[1:]), (3, Purpose.SELECTION, 5, 7), (3, base[1], 6, 7), (3, base[1], 5, 8)]:
        assert not np.array_equal(same, generator(*other).random(4))


def test_a_generator_is_numpy_s_philox_with_its_documented_key_and_counter():
    ours = generator(-1, Purpose.SHUFFLE, 2**40, 9)
    key = np.array([2**64 - 1, Purpose.SHUFFLE], dtype=np.uint64)
    numpys = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 2**40, 9], dtype=np.uint64)))
    np.testing.assert_array_equal(ours.random(9), numpys.random(9))
    np.testing.assert_array_equal(ours.permutation(50), numpys.permutation(50))


def test_streams_of_neighbouring_rounds_and_clients_do_not_overlap():
    draws = [
        generator(0, Purpose.SHUFFLE, round, client).integers(2**63, size=100)
        for round in range(5)
        for client in range(5)
    ]
    assert len(np.unique(np.concatenate(draws))) == 2500


def test_no_global_generator_is_read_or_set():
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    stream_key(1, Purpose.DATA)
    uniform(torch.arange(10), 3)
    assert torch.equal(before_torch, torch.get_rng_state())
    np.testing.assert_array_equal(before_numpy, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("words", [(0,), (5, 0, 2**31 - 1), (2**40 + 3, 7)])
def test_plain_numbers_have_the_hash_of_tensors(words):
    tensors = [torch.tensor([word]) for word in words]
    assert hashed(*words) == mix(*tensors).item()
    assert fold(*words) == mix(torch.tensor([0]), *tensors).item()


def test_hashed_numbers_are_uniform_and_uncorrelated_along_either_word():
    table = uniform(torch.arange(1000)[:, None], torch.arange(1000)[None, :]).double()
    assert abs(table.mean() - 0.5) < 0.002
    counts = torch.histc(table, bins=100, min=0, max=1)
    # 1e6 draws in 100 bins: 10,000 each, standard deviation 99.5; chi-square of 99 degrees stays below 160
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 160
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.005


def test_hashing_is_the_same_one_by_one_and_mapped():
    keys = torch.arange(50)
    together = mix(keys, 7)
    mapped = torch.func.vmap(lambda key: mix(key, 7))(keys)
    assert torch.equal(mapped, together)
    assert torch.equal(torch.stack([mix(key, 7) for key in keys]), together)


def test_golden_values_never_change_since_runs_rest_on_them():
    assert mix(torch.tensor([0, 1, 2]), 3).tolist() == [3607140493, 2277737663, 1695049881]
    assert stream_key(0, Purpose.SHUFFLE, 1, 2) == 268045282
    assert fold(5, 7) == 1528733204
