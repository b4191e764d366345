"""Dropout by key."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import Dropout, build
from hashing import hashed


def keyed(layer: Dropout, key: int) -> Dropout:
    layer.key.fill_(key)
    layer.uses = 0
    return layer


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_the_mask_is_the_hash_of_layer_use_key_and_place(p):
    layer = keyed(Dropout(p), 12345)
    layer.layer = 2
    for use in range(2):
        kept = [[hashed(2, use, 12345, 3 * row + column) >= p for column in range(3)] for row in range(400)]
        out = layer(torch.ones(400, 3))
        torch.testing.assert_close(out, torch.tensor(kept) / (1 - p))
        assert (out == 0).float().mean() == pytest.approx(p, abs=0.05)


@pytest.mark.parametrize("p", [2.0**-24, 0.1, 1 / 3, 0.5, 1 - 2.0**-24])
def test_a_mask_is_the_same_where_there_is_no_kernel(monkeypatch, p):
    layer, x = Dropout(p), torch.ones(70, 333)
    ours = [keyed(layer, key).mask(x) for key in (5, 2**31 - 1)]
    monkeypatch.setattr("fedskew.models._dropout.has_kernels", lambda: False)
    assert all(torch.equal(keyed(layer, key).mask(x), own) for key, own in zip((5, 2**31 - 1), ours, strict=True))


def test_a_mask_has_the_type_of_what_it_is_for():
    torch.set_default_dtype(torch.float64)
    try:
        assert keyed(Dropout(0.5), 5)(torch.ones(3, dtype=torch.float32)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_whole_channels_are_dropped():
    out = keyed(Dropout.swap(nn.Dropout2d(0.5)), 11)(torch.ones(50, 8, 3, 4))
    flat = out.flatten(2)
    assert torch.equal(flat, flat[:, :, :1].expand_as(flat))
    assert set(flat.unique().tolist()) == {0.0, 2.0}
    kept = torch.tensor([[hashed(0, 0, 11, 8 * row + channel) >= 0.5 for channel in range(8)] for row in range(50)])
    assert torch.equal(out[:, :, 0, 0], kept * 2.0)


def test_nothing_is_dropped_in_eval_mode_or_at_zero_and_everything_at_one():
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros_like(x))


def test_a_mapped_key_gives_each_client_its_own_mask():
    model = build("cnn_mnist", 5, (1, 16, 16))
    names = Dropout.keys_of(model)
    assert names == ["drop1.key", "drop2.key"]
    x = torch.randn(3, 4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([1, 99, 2**31 - 1])

    def client(key, x):
        return torch.func.functional_call(model, dict.fromkeys(names, key), (x,))

    mapped = torch.func.vmap(client)(keys, x)
    torch.testing.assert_close(mapped, torch.stack([client(key, rows) for key, rows in zip(keys, x, strict=True)]))
    assert not torch.allclose(mapped[0], client(keys[1], x[0]))


class Twice(nn.Module):
    """A model of a user's own that uses one dropout layer twice."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.stack([self.drop(x), self.drop(x)])


def test_a_layer_used_twice_has_two_masks_the_same_in_every_pass():
    model = Dropout.swap(Twice())
    for one in (model, copy.deepcopy(model)):
        first, second = one(torch.ones(10, 10))
        assert not torch.equal(first, second)
        assert torch.equal(one(torch.ones(10, 10)), torch.stack([first, second]))


def test_a_users_dropout_layers_are_replaced_in_place_and_numbered():
    shared = nn.Dropout(0.2)
    model = nn.Sequential(
        nn.Linear(4, 4), shared, nn.Sequential(nn.Dropout2d(0.3), nn.Dropout1d(0.1)), shared, Dropout(0.4)
    ).eval()
    names = list(model.state_dict())
    assert Dropout.swap(model) is model
    assert list(model.state_dict()) == names
    assert model[1] is model[3]
    found = [model[1], model[2][0], model[2][1], model[4]]
    assert [type(layer) is Dropout for layer in found] == [True, False, False, True]
    assert [layer.p for layer in found] == [0.2, 0.3, 0.1, 0.4]
    assert [layer.layer for layer in found] == [0, 1, 2, 3]
    assert not any(layer.training for layer in found)
    assert Dropout.keys_of(model) == ["1.key", "2.0.key", "2.1.key", "4.key"]
    layers = list(model.modules())
    assert list(Dropout.swap(model).modules()) == layers
    assert len(model._forward_pre_hooks) == 1


def test_a_model_that_is_a_dropout_layer_is_returned_replaced_and_one_without_is_left_as_it_is():
    model = Dropout.swap(nn.Dropout(0.5))
    assert isinstance(model, Dropout)
    assert Dropout.keys_of(model) == ["key"]
    plain = nn.Sequential(nn.Linear(3, 2))
    assert Dropout.keys_of(Dropout.swap(plain)) == []
    assert not plain._forward_pre_hooks


class Called(nn.Module):
    """Drops by a call of PyTorch's."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("layer", [nn.AlphaDropout(), nn.RReLU(), Called()])
def test_what_draws_from_the_global_generator_is_seeded_by_the_key_and_leaves_it_as_it_was(layer):
    x = torch.linspace(-1, 1, 600).view(2, 300)
    model = Dropout.swap(nn.Sequential(nn.Identity(), layer), x)
    (draws,) = (one for one in model.modules() if isinstance(one, Dropout))
    assert not model.state_dict()
    before = torch.get_rng_state()
    made = {}
    for key in (7, 8, 7):
        draws.key.fill_(key)
        out = model.train()(x)
        assert key not in made or torch.equal(made[key], out)
        made[key] = out
    assert not torch.equal(made[7], made[8])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        torch.testing.assert_close(made[7], layer(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.eval()(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(model))).train()(x), made[7])


def test_layers_of_pytorch_s_that_draw_inside_are_known_without_samples():
    for layer in (nn.LSTM(3, 3, num_layers=2, dropout=0.1), nn.MultiheadAttention(4, 2, dropout=0.1)):
        assert Dropout.keys_of(Dropout.swap(nn.Sequential(layer))) == ["fedskew_draws.key"]
    assert Dropout.keys_of(Dropout.swap(nn.Sequential(nn.MultiheadAttention(4, 2)))) == []


def test_a_pass_that_fails_leaves_the_global_generator_as_it_was():
    model, before = (
        Dropout.swap(nn.Sequential(nn.Linear(3, 3), Called()), torch.ones(2, 3)).train(),
        torch.get_rng_state(),
    )
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_probability_outside_the_unit_interval_and_channels_that_are_not_there_are_refused():
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ArgumentError, match="p:"):
            Dropout(p)
    with pytest.raises(ArgumentError, match="channel dropout"):
        Dropout.swap(nn.Dropout2d(0.5))(torch.ones(3))
