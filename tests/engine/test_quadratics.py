"""Three clients that pull towards points of their own in the plane: where each method comes to rest.

Client k minimises f_k(theta) = 1/2 (theta - b_k) A_k (theta - b_k). Its gradient is linear, so a local training is an
affine map, and where a method rests solves a linear system; nothing is random but who takes part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from common import normaliser
from fedskew.engine import Federation, LocalTraining, LocalWork, PartitionedData, SequentialBackend
from fedskew.engine.contracts import hooked
from fedskew.local_steps import INDEX as STEPS
from fedskew.local_steps import SGD
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.objectives import Objective
from fedskew.selection import Uniform as AnyClients
from fedskew.server_updates import INDEX as UPDATES
from fedskew.server_updates import Plain
from fedskew.weighting import FedAvg, Uniform

FedDyn, FedGF, FedProx, Scaffold = (STEPS[name] for name in ("feddyn", "fedgf", "fedprox", "scaffold"))
FedACG, FedNova, FedDynServer = (UPDATES[name] for name in ("fedacg", "fednova", "feddyn"))

A = np.array([[[1.0, 0.0], [0.0, 0.5]], [[2.0, 0.5], [0.5, 1.0]], [[0.3, 0.0], [0.0, 3.0]]])
B = np.array([[3.0, -1.0], [-2.0, 4.0], [1.0, 2.0]])


class Point(nn.Module):
    """theta. A row is a client's A, as its root, and b; its logits are root (theta - b)."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([5.0, 5.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nij,nj->ni", x[:, :4].reshape(-1, 2, 2), self.theta - x[:, 4:])


@dataclass(frozen=True)
class HalfSquare:
    """1/2 |logits|^2, which is f_k."""

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()

    def value(self, batch, context):
        return batch.logits.square().sum(dim=1).mean() / 2


def at_rest(
    local_step,
    rounds: int,
    *,
    a: np.ndarray = A,
    b: np.ndarray = B,
    steps: Sequence[int] = (1, 1, 1),
    weighting=Uniform(),  # noqa: B008 (frozen)
    server_update=Plain(),  # noqa: B008 (frozen)
    participation: float = 1.0,
    epochs: int = 1,
    lr: float = 0.05,
    momentum: float = 0.0,
) -> np.ndarray:
    """theta after so many rounds. A client takes `steps` local steps an epoch, one for each of its samples."""
    roots = np.linalg.cholesky(a).transpose(0, 2, 1)
    rows = np.repeat(np.concatenate([roots.reshape(-1, 4), b], axis=1), steps, axis=0)
    counts = np.array(steps, dtype=np.float64)[:, None]
    method = Method(AnyClients(), Objective(HalfSquare()), local_step, weighting, server_update)
    model = FlatModel(Point())
    inputs, targets = torch.tensor(rows, dtype=torch.float32), torch.zeros(len(rows), dtype=torch.int64)
    data = PartitionedData(inputs, targets, np.split(np.arange(len(rows)), np.cumsum(steps)[:-1]), counts)
    training = LocalTraining(batch_size=1, lr=lr, momentum=momentum)
    work = LocalWork(data, method.objective, local_step, training, seed=0, hooks=hooked(method))
    backend = SequentialBackend(model, work)
    federation = Federation(method, backend, counts, None, participation, seed=0, epochs=epochs)
    state = federation.start(model.read_state())
    for _ in range(rounds):
        state, _ = federation.run_round(state)
    return state.model.parameters.numpy().astype(np.float64)


def optimum(weights: Sequence[float] = (1, 1, 1), a: np.ndarray = A, b: np.ndarray = B) -> np.ndarray:
    """Where sum_k weights_k f_k is least."""
    scaled = np.array(weights)[:, None, None] * a
    return np.linalg.solve(scaled.sum(axis=0), np.einsum("kij,kj->i", scaled, b))


def trained(k: int, w: np.ndarray, steps: int, lr: float, momentum: float) -> np.ndarray:
    """What client k makes of w, in numpy."""
    theta, buffer = w, np.zeros(2)
    for _ in range(steps):
        buffer = momentum * buffer + A[k] @ (theta - B[k])
        theta = theta - lr * buffer
    return theta


def fixed_point(move: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Where rounds that each add an affine `move` come to rest: solved from its values at three points."""
    origin = move(np.zeros(2))
    slope = np.stack([move(axis) - origin for axis in np.eye(2)], axis=1)
    assert np.abs(np.linalg.eigvals(np.eye(2) + slope)).max() < 1
    return np.linalg.solve(slope, -origin)


def after(rounds: int, move: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """theta after so many rounds that each add `move`, from where `Point` starts."""
    w = np.array([5.0, 5.0])
    for _ in range(rounds):
        w = w + move(w)
    return w


PLAIN, WITH_MOMENTUM = {"lr": 0.1, "momentum": 0.0}, {"lr": 0.02, "momentum": 0.9}
with_and_without_momentum = pytest.mark.parametrize("training", [PLAIN, WITH_MOMENTUM], ids=["plain", "momentum"])


@pytest.mark.slow
@with_and_without_momentum
def test_fedavg_comes_to_rest_beside_the_common_optimum(training):
    def move(w: np.ndarray) -> np.ndarray:
        return sum(trained(k, w, 15, **training) - w for k in range(3)) / 3

    found = at_rest(SGD(), 14, epochs=15, **training)
    np.testing.assert_allclose(found, after(14, move), atol=1e-5)
    np.testing.assert_allclose(found, fixed_point(move), atol=1e-4)
    assert np.linalg.norm(found - optimum()) > 0.15


def only_all(*way) -> object:
    return pytest.param(*way, marks=pytest.mark.whole_product)


ALL, TWO_OF_THREE, ONE_OF_THREE = {}, {"participation": 0.67}, {"participation": 0.34}
UNEVEN = {"steps": (1, 2, 5), "epochs": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "who", "training", "rounds"),
    [
        only_all("one", ALL, PLAIN, 25),
        ("one", ALL, WITH_MOMENTUM, 50),
        only_all("two", ALL, WITH_MOMENTUM, 50),
        ("two", TWO_OF_THREE, PLAIN, 35),
        only_all("one", TWO_OF_THREE, WITH_MOMENTUM, 50),
        only_all("two", ONE_OF_THREE, PLAIN, 65),
        ("two", ONE_OF_THREE, WITH_MOMENTUM, 90),
        only_all("two", UNEVEN, PLAIN, 60),
        ("two", UNEVEN, WITH_MOMENTUM, 60),
    ],
)
def test_scaffold_reaches_it_whoever_takes_part_and_whatever_steps_they_take(option, who, training, rounds):
    found = at_rest(Scaffold(option), rounds, **{"epochs": 5, **who, **training})
    np.testing.assert_allclose(found, optimum(), atol=1e-5)


def dynamic(rounds: int, alpha: float) -> np.ndarray:
    """FedDyn as its paper writes it, with h and g_k and exact local minima, all clients in every round."""
    w, h, g = np.array([5.0, 5.0]), np.zeros(2), np.zeros((3, 2))
    for _ in range(rounds):
        y = [np.linalg.solve(A[k] + alpha * np.eye(2), A[k] @ B[k] + g[k] + alpha * w) for k in range(3)]
        g -= alpha * (np.array(y) - w)
        h -= alpha / 3 * sum(one - w for one in y)
        w = sum(y) / 3 - h / alpha
    return w


@pytest.mark.slow
def test_feddyn_with_exact_local_minima_goes_the_paper_s_way():
    for rounds in (1, 3):
        found = at_rest(FedDyn(alpha=0.5), rounds, epochs=45, lr=0.3, server_update=FedDynServer())
        np.testing.assert_allclose(found, dynamic(rounds, 0.5), atol=1e-4)
    np.testing.assert_allclose(dynamic(400, 0.5), optimum(), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 15), (0.67, 35)])
def test_feddyn_reaches_it_with_all_clients_and_with_some_whatever_their_steps(participation, rounds):
    ways = {"steps": (1, 2, 5), "participation": participation, "epochs": 4, "lr": 0.15}
    found = at_rest(FedDyn(alpha=1.0), rounds, server_update=FedDynServer(), **ways)
    np.testing.assert_allclose(found, optimum(), atol=1e-3)


@pytest.mark.slow
def test_each_half_of_feddyn_alone_rests_elsewhere():
    # Without the server's half, sum_k grad L_k = -alpha K (w - w_0): between the start (5, 5) and the optimum.
    found = at_rest(FedDyn(alpha=0.5), 40, epochs=8, lr=0.2)
    held = np.linalg.solve(A.sum(0) + 1.5 * np.eye(2), np.einsum("kij,kj->i", A, B) + 1.5 * np.array([5.0, 5.0]))
    np.testing.assert_allclose(found, held, atol=1e-3)


@pytest.mark.slow
def test_fedacg_rests_where_fedavg_does():
    def move(w: np.ndarray) -> np.ndarray:
        return sum(trained(k, w, 5, **PLAIN) - w for k in range(3)) / 3

    found = at_rest(SGD(), 30, epochs=5, server_update=FedACG(momentum=0.4), **PLAIN)
    np.testing.assert_allclose(found, fixed_point(move), atol=1e-4)


@dataclass(frozen=True)
class Mixed(Scaffold):
    """The correction inside momentum, and control variates by the number of steps: layouts that don't fit."""

    def end_local(self, end):
        before = end.client["scaffold.client"]
        after = before - end.broadcast["scaffold.server"] + (end.start - end.parameters) / (end.steps * end.lr)
        return {"scaffold.client": after}, {"scaffold.change": after - before}


@pytest.mark.slow
def test_control_variates_that_ignore_momentum_diverge():
    assert np.linalg.norm(at_rest(Mixed(), 20, epochs=5, **PLAIN) - optimum()) < 1e-3
    assert np.linalg.norm(at_rest(Mixed(), 50, epochs=5, **WITH_MOMENTUM) - optimum()) > 50


STEPS = (1, 2, 5)


@pytest.mark.slow
@with_and_without_momentum
def test_fednova_removes_the_bias_of_uneven_step_counts(training):
    shares, momentum = np.array(STEPS) / 8, training["momentum"]
    errors = {}
    for lr in (training["lr"], training["lr"] / 2):
        of = {"lr": lr, "momentum": momentum}
        for name, update, divisors in (
            ("fedavg", Plain(), (1, 1, 1)),
            ("fednova", FedNova(local_momentum=momentum), [normaliser(tau, momentum) for tau in STEPS]),
        ):
            scale = shares @ [normaliser(tau, momentum) for tau in STEPS] if name == "fednova" else 1.0

            def move(w: np.ndarray, of=of, divisors=divisors, scale=scale) -> np.ndarray:
                own = (shares[k] / divisors[k] * (trained(k, w, STEPS[k], **of) - w) for k in range(3))
                return scale * sum(own)

            found = at_rest(SGD(), 15, steps=STEPS, weighting=FedAvg(), server_update=update, **of)
            np.testing.assert_allclose(found, after(15, move), atol=1e-5)
            errors[name, lr] = np.linalg.norm(fixed_point(move) - optimum(shares))
    fine, coarse = sorted({lr for _, lr in errors})
    # What FedNova leaves is drift, which the learning rate takes away; FedAvg rests at another objective's optimum.
    assert errors["fednova", fine] < 0.55 * errors["fednova", coarse]
    assert errors["fedavg", fine] > 0.85 * errors["fedavg", coarse]
    assert errors["fedavg", fine] > 4 * errors["fednova", fine]


@pytest.mark.slow
def test_fedprox_s_fixed_point_is_the_one_computed_by_hand():
    # With mu = 1 a client's own minimum is y_k = (a_k b_k + w) / (a_k + 1) in each coordinate, and the mean of
    # a_k / (a_k + 1) (b_k - w) is 0. First coordinate: a = 1, 1, 3, so weights 1/2, 1/2, 3/4 of b = 0, 4, 8:
    # (2 + 6) / (7/4) = 32/7. Second: weights 3/4, 1/2, 1/2 of 7, 0, 0: (21/4) / (7/4) = 3.
    a = np.array([np.diag([1.0, 3.0]), np.diag([1.0, 1.0]), np.diag([3.0, 1.0])])
    b = np.array([[0.0, 7.0], [4.0, 0.0], [8.0, 0.0]])
    found = at_rest(FedProx(mu=1.0), 20, a=a, b=b, epochs=15, lr=0.35)
    np.testing.assert_allclose(found, [32 / 7, 3], atol=1e-4)
    # Without the pull every client goes all the way, and they meet at the mean of their optima.
    np.testing.assert_allclose(at_rest(FedProx(mu=0.0), 3, a=a, b=b, epochs=20, lr=0.45), [4, 7 / 3], atol=1e-4)
    # The stronger the pull, the nearer the common optimum: (4 + 24) / 5 and 21 / 5.
    stronger = at_rest(FedProx(mu=10.0), 30, a=a, b=b, epochs=8, lr=0.08)
    assert np.linalg.norm(stronger - [5.6, 4.2]) < 0.3 * np.linalg.norm(found - [5.6, 4.2])


@pytest.mark.slow
def test_fedgf_without_reach_is_fedavg_and_with_it_stays_near():
    plain = at_rest(SGD(), 12, epochs=5, **PLAIN)
    np.testing.assert_allclose(at_rest(FedGF(rho=0.0, threshold=100.0), 12, epochs=5, **PLAIN), plain, atol=1e-6)
    for threshold in (0.0, 100.0):
        found = at_rest(FedGF(rho=0.05, threshold=threshold), 12, epochs=5, **PLAIN)
        assert np.linalg.norm(found - plain) < 0.3


@pytest.mark.parametrize("step", [Scaffold("one"), Scaffold("two"), FedGF()], ids=repr)
def test_a_single_client_with_a_single_sample_reaches_its_own_optimum(step):
    found = at_rest(step, 60, a=A[:1], b=B[:1], steps=(1,), lr=0.2)
    np.testing.assert_allclose(found, B[0], atol=0.06)
