"""A model as one flat vector."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedskew.errors import ArgumentError
from fedskew.models import FlatModel, build

X = torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 2, 1, 0])


def lenet() -> nn.Module:
    return build("lenet5", 3, (1, 16, 16), generator=torch.Generator().manual_seed(0))


def normalised() -> nn.Module:
    """A user's own module with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


every_layout = pytest.mark.parametrize("channels_last", [False, True])
every_network = pytest.mark.parametrize("make", [lenet, normalised])


@every_network
@every_layout
def test_outputs_and_gradients_are_those_of_the_module(make, channels_last):
    module = make()
    alone = copy.deepcopy(module)
    model = FlatModel(module, channels_last=channels_last)
    torch.testing.assert_close(module(X), alone(X))
    for one in (module, alone):
        functional.cross_entropy(one(X), Y).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    gradients = model.views(model.gradient)
    assert list(gradients) == list(model.names) == list(expected)
    torch.testing.assert_close(gradients, expected)
    assert model.vector.dtype == torch.float32
    assert model.vector.shape == model.gradient.shape == (sum(p.numel() for p in alone.parameters()),)


def test_contiguous_order_is_that_of_parameters_to_vector():
    module = lenet()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    assert torch.equal(FlatModel(module, channels_last=False).vector, expected)


def test_channels_last_stores_a_convolution_with_channels_innermost():
    wide = nn.Conv2d(2, 1, 2, bias=False)
    values = [[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]]
    with torch.no_grad():
        wide.weight.copy_(torch.tensor(values))
    assert FlatModel(wide).vector.tolist() == [1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0]
    assert wide.weight.tolist() == values
    one = normalised()  # of one channel in
    flat = one[0].weight.detach().flatten().clone()
    assert torch.equal(FlatModel(one).vector[:36], flat)


def test_backward_adds_to_the_flat_gradient_until_it_is_zeroed():
    model, sums = FlatModel(lenet()), []
    for zeroed in (False, False, True):
        if zeroed:
            model.gradient.zero_()
        model.module(X).sum().backward()
        sums.append(model.gradient.clone())
    assert sums[0].any()
    torch.testing.assert_close(sums[1], 2 * sums[0])
    assert torch.equal(sums[2], sums[0])


def test_writing_moves_the_module_and_reading_copies():
    model = FlatModel(lenet())
    before, copied = model.module(X), model.read()
    model.write(torch.zeros_like(copied))
    assert torch.equal(model.module(X), torch.zeros(6, 3))
    assert not torch.equal(copied, model.vector)
    model.write(copied)
    assert torch.equal(model.module(X), before)
    assert copied.data_ptr() != model.vector.data_ptr()
    model.write(model.vector)
    assert torch.equal(model.vector, copied)


def test_the_vector_and_the_module_are_one():
    model = FlatModel(lenet())
    with torch.no_grad():
        model.vector.mul_(2.0)
        model.module.head.bias.fill_(9.0)
    assert model.views(model.vector)["head.bias"].tolist() == [9.0, 9.0, 9.0]
    torch.optim.SGD(model.module.parameters(), lr=1.0).step()
    model.module(X).sum().backward()
    expected = model.vector - model.gradient
    torch.optim.SGD(model.module.parameters(), lr=1.0).step()
    assert torch.equal(model.read(), expected)


def test_batch_norm_statistics_are_buffers_and_move_with_training():
    model = FlatModel(normalised())
    norm, before = model.module[1], model.read_state()
    assert before.buffers.tolist() == model.buffers.tolist() == [0.0] * 4 + [1.0] * 4
    assert list(model.integer_buffers) == ["1.num_batches_tracked"]
    model.module(X)
    assert torch.equal(model.buffers, torch.cat([norm.running_mean, norm.running_var]))
    assert model.buffers[:4].any()
    after = model.read_state()
    assert (before.integers.tolist(), after.integers.tolist()) == ([0], [1])
    assert not torch.equal(before.buffers, after.buffers)
    model.write_buffers(torch.arange(8.0))
    assert norm.running_var.tolist() == [4.0, 5.0, 6.0, 7.0]
    model.write_state(before)
    assert norm.num_batches_tracked == 0
    assert all(torch.equal(one, other) for one, other in zip(model.read_state(), before, strict=True))


@every_layout
@every_network
def test_a_state_dict_is_canonical_contiguous_and_goes_round(make, channels_last):
    module = make()
    plain = copy.deepcopy(module)
    plain(X)
    model = FlatModel(module, channels_last=channels_last)
    model.load_state_dict(plain.state_dict())
    saved = model.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert all(value.is_contiguous() and not value.requires_grad for value in saved.values())
    for _ in range(2):  # and stays as it is when the model moves
        torch.testing.assert_close(dict(saved), dict(plain.state_dict()), rtol=0, atol=0)
        model.write(torch.zeros_like(model.vector))
    model.load_state_dict(saved)
    torch.testing.assert_close(model.module.eval()(X), plain.eval()(X))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("positions", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.second(self.first(x + self.positions))


def test_a_tied_parameter_counts_once_and_a_constant_not_at_all():
    model = FlatModel(Tied())
    assert model.names == ("first.weight",)
    assert model.vector.shape == (9,)
    assert model.buffers.shape == (0,)
    assert model.module.first.weight is model.module.second.weight
    assert set(model.state_dict()) == {"first.weight", "second.weight"}
    model.module(torch.ones(1, 3)).sum().backward()
    assert model.gradient.any()


def test_views_of_another_vector_serve_a_functional_call_and_a_mapped_one():
    model = FlatModel(lenet())
    vectors = torch.stack([model.vector, 2 * model.vector, torch.zeros_like(model.vector)])

    def logits(vector):
        return torch.func.functional_call(model.module, model.views(vector), (X,))

    expected = [logits(vector) for vector in vectors]
    torch.testing.assert_close(expected[0], model.module(X))
    torch.testing.assert_close(torch.func.vmap(logits)(vectors), torch.stack(expected))


class Forgetful(nn.Module):
    """Assigns its buffer instead of updating it in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x):
        self.centre = 0.9 * self.centre + 0.1 * x.mean(0)
        return self.layer(x - self.centre)


def test_a_model_cut_off_from_its_vector_is_reported():
    model = FlatModel(Forgetful())
    model.module(torch.ones(3, 2))
    with pytest.raises(ArgumentError, match=r"'centre'.* updated in place"):
        model.write_buffers(torch.zeros(2))
    model = FlatModel(lenet())
    model.module.zero_grad()
    with pytest.raises(ArgumentError, match=r"'conv1\.weight' or its \.grad"):
        model.read()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_must_have_run_once():
    with pytest.raises(ArgumentError, match="run the model once"):
        FlatModel(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (nn.Linear(2, 2).double(), "'weight' is float64, not float32"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), "'1.weight' is float16"),
        (nn.Linear(2, 2, device="meta"), "has no values yet"),
    ],
)
def test_a_module_that_can_not_be_one_float32_vector_is_refused(module, message):
    with pytest.raises(ArgumentError, match=message):
        FlatModel(module)


def test_wrong_shapes_and_states_are_refused():
    model = FlatModel(normalised())
    with pytest.raises(ArgumentError, match="vector: expected shape"):
        model.write(torch.zeros(1))
    with pytest.raises(ArgumentError, match="buffers: expected shape"):
        model.write_buffers(torch.zeros(9))
    with pytest.raises(ArgumentError, match=r"state: does not fit.*0\.weight"):
        model.load_state_dict({})


def test_a_step_of_a_model_with_a_large_layer_is_that_along_its_gradient():
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256), nn.Linear(256, 3))
    module[1].bias.requires_grad_(False)
    stepped = FlatModel(module)
    expected, x = stepped.copy(), X.repeat(2, 1, 1, 1)

    def loss(outputs):
        return outputs.logits.square().mean() + outputs.features.mean()  # of steps that lead nowhere, rounding grows

    for model in (stepped, expected):
        model.network.train()
    assert FlatModel(lenet()).descend(0.01, X, loss) is None
    for _ in range(2):
        found = stepped.descend(0.1, x, loss)
        value, outputs = expected.differentiate(x, loss)
        assert found is not None
        torch.testing.assert_close((found[0], *found[1]), (value, *outputs))
        expected.vector.sub_(expected.gradient, alpha=0.1)
        torch.testing.assert_close(stepped.vector, expected.vector, rtol=1e-6, atol=5e-7)
    before = stepped.read()
    with pytest.raises(ZeroDivisionError):
        stepped.descend(0.01, x, lambda outputs: 1 / 0)
    stepped.differentiate(x, loss)  # moves nothing
    assert torch.equal(stepped.vector, before)


def test_a_large_layer_alone_takes_a_step_too():
    stepped = FlatModel(nn.Linear(1024, 1024, bias=False))
    before, x = stepped.read(), torch.eye(1024)[:2]
    assert stepped.descend(0.5, x, lambda outputs: outputs.logits.sum()) is not None
    torch.testing.assert_close(stepped.vector.view(1024, -1) - before.view(1024, -1), -0.5 * x.sum(0).expand(1024, -1))
