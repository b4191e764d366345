"""Numbers that the authors' code and other libraries give on fixed tensors, and ours on the same ones.

Each was computed once by that program's own function or class, unchanged, at the revision that stands beside it.
`docs/choices.md` says where definitions differ, so that there is nothing to compare.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from common import feddisco, local_end, moved, round_end
from fedskew.aggregation import INDEX as RULES
from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.local_steps import INDEX as STEPS
from fedskew.local_steps import StepSettings
from fedskew.models import FlatModel
from fedskew.objectives import INDEX as LOSSES
from fedskew.objectives import Objective
from fedskew.objectives.functional import cross_entropy, fedlc, fedrs, moon
from fedskew.server_updates import INDEX as UPDATES
from fedskew.server_updates import fedexp_step
from losses import value_by_name as loss

FedBABU = STEPS["fedbabu"]
FedDyn = STEPS["feddyn"]
CrossEntropy = LOSSES["cross_entropy"]
FedNH = LOSSES["fednh"]
FedACG = UPDATES["fedacg"]
FedDynServer = UPDATES["feddyn"]

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
ONES = np.ones(2, dtype=np.int64)


def wave(*shape: int, start: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Sines of start + 1.7 k, the same numbers everywhere."""
    return torch.tensor(scale * np.sin(start + 1.7 * np.arange(np.prod(shape))), dtype=dtype).reshape(shape)


LOGITS, COUNTS = wave(4, 3, start=0.3, scale=2.0), torch.tensor([6.0, 1.0, 9.0], dtype=torch.float64)
TARGETS = torch.tensor([0, 2, 1, 0])


def test_feddisco_is_that_of_its_authors() -> None:
    """MediaBrain-SJTU/FedDisco f3ea299, disco.py: 3 of 4 clients; then another target, a 0.8 and b 0.05."""
    counts = np.array([[30.0, 0, 5], [2, 20, 0], [10, 10, 10]])
    np.testing.assert_allclose(
        feddisco(counts), [0.3376084286648512, 0.1063570885765282, 0.5560344827586207], rtol=1e-9
    )
    by_length = feddisco(counts, distance="l2")
    np.testing.assert_allclose(by_length, [0.2853117066071229, 0.0, 0.714688293392877], rtol=1e-9)
    aimed = feddisco([[30, 2, 5], [2, 20, 1], [3, 4, 9]], [0.2, 0.5, 0.3], a=0.8, b=0.05)
    np.testing.assert_allclose(aimed, [0.05308774936705758, 0.4771930981725306, 0.4697191524604119], rtol=1e-9)


HELD, GAPS = torch.tensor([0, 2, 2, 0]), torch.tensor([6.0, 0.0, 9.0], dtype=torch.float64)
SIMPLEX = torch.tensor(PEERS["fedgela: simplex"], dtype=torch.float64)
FEW = torch.tensor([6.0, 0.0, 10.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ours", "theirs", "rel"),
    [
        # sonhamin/FedUV dd2e3c5, `UVReg`, each term with weight 1; their C^(-1/2) is a float32.
        (lambda: loss("classifier_variance", wave(5, 3, start=0.3, scale=2.0)), 0.2204029146382591, 1e-7),
        (lambda: loss("uniformity", wave(5, 4, start=1.0)), 0.4364767251427458, 1e-9),
        # bytedance/FedDecorr 973e4af, `FedDecorrLoss`.
        (lambda: loss("feddecorr", wave(6, 4, start=1.0)), 2.389266141148798, 1e-9),
        # fluke a0bd26a `BalancedSoftmaxLoss`, FL-bench 06e658b with gamma 1; then ZexiLee/ICCV-2023-FedETF 092ace3.
        (lambda: loss("fedrod", LOGITS, TARGETS, COUNTS), 1.662719984862931, 1e-12),
        (lambda: loss("fedrod", LOGITS, HELD, COUNTS, least=1.0), 0.4482954487129746, 1e-12),
        # MediaBrain-SJTU/FedGELA b5b20d5: `produce_Ew` of 6 samples of the first and 10 of the last class, `get_etf`.
        (lambda: loss("fedgela", F.normalize(LOGITS, dim=1) @ SIMPLEX / 0.2, HELD, FEW), 0.529222678573011, 1e-9),
        # fluke a0bd26a, `CalibratedLoss` (tau 0.7) and `RSLoss` (alpha 0.5, the second class missing).
        (lambda: fedlc(LOGITS, TARGETS, COUNTS, tau=0.7), 1.4739843959711065, 1e-12),
        (lambda: fedrs(LOGITS, HELD, GAPS), 0.6163464297744558, 1e-12),
    ],
)
def test_losses_are_those_of_their_authors_of_fluke_and_of_fl_bench(ours, theirs, rel) -> None:
    assert ours().item() == pytest.approx(theirs, rel=rel)


def test_a_step_with_moon_is_that_of_fl_bench() -> None:
    """FL-bench 06e658b, `MOONClient.fit`: two linear layers, one batch, mu 5, tau 0.5, lr 0.1."""
    inputs, targets = wave(5, 3, start=0.7), torch.tensor([0, 1, 1, 0, 1])
    base, head = wave(4, 3).requires_grad_(), wave(2, 4, start=1.0).requires_grad_()
    features = inputs @ base.T
    sent, previous = (inputs @ wave(4, 3, start=start).T for start in (2.0, 4.0))
    (cross_entropy(features @ head.T, targets) + 5 * moon(features, sent, previous)).backward()
    np.testing.assert_allclose((base - 0.1 * base.grad).detach(), PEERS["moon: base"], rtol=1e-9)
    np.testing.assert_allclose((head - 0.1 * head.grad).detach(), PEERS["moon: head"], rtol=1e-9)


class Small(nn.Module):
    """Two layers, the last with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        with torch.no_grad():
            self.base.weight.copy_(wave(4, 3))
            self.head.weight.copy_(wave(2, 4, start=1.0))
            self.head.bias.copy_(wave(2, start=2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.base(inputs).relu())
        return logits


def test_a_client_of_fedbabu_is_fl_benchs() -> None:
    """FL-bench 06e658b, `FedBabuClient.fit`: three epochs of one batch, lr 0.1, momentum 0.9."""
    inputs, targets = wave(5, 3, start=0.7, dtype=torch.float32), torch.tensor([0, 1, 1, 0, 1])
    step = FedBABU()
    model = FlatModel(step.adapt(Small(), torch.Generator()))
    data = PartitionedData(inputs, targets, [np.arange(5)], np.array([[2.0, 3.0]]))
    settings = LocalTraining(batch_size=5, lr=0.1, momentum=0.9)
    work = LocalWork(data, Objective(CrossEntropy()), step, settings, seed=0)
    update, _ = SequentialBackend(model, work).train_client(1, Assignment(0, 3), Sent(model.read_state()))
    trained = wave(4, 3).flatten() + update.change  # nothing of the last layer is sent
    np.testing.assert_allclose(trained.view(4, 3), PEERS["fedbabu: base"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters"), [("fedadagrad", {"momentum": 0.9}), ("fedyogi", {"lr": 0.1}), ("fedadam", {"lr": 0.1})]
)
def test_adaptive_server_steps_are_those_of_fl_bench(name: str, parameters: dict[str, float]) -> None:
    """FL-bench 06e658b, `AdaptiveOptimizer`: two rounds of two clients of weights 1/4 and 3/4."""
    update, model, weights = UPDATES[name](**parameters, initial=0.0), wave(4), np.array([0.25, 0.75])
    state = update.init(model)
    for round in range(2):
        updates = torch.stack([wave(4, start=5.0 * round + client, scale=0.3) for client in range(2)])
        model, state = moved(update, state, model, updates, weights, ONES)
    np.testing.assert_allclose(model, PEERS[name], rtol=1e-9)


def test_fedexps_step_is_that_of_fluke() -> None:
    """fluke a0bd26a, `_compute_eta` of three clients, in float32."""
    updates = torch.stack([wave(5, start=start, scale=0.3) for start in (0.0, 4.0, 5.0)])
    assert fedexp_step(updates, np.full(3, 1 / 3), eps=1e-4) == pytest.approx(1.28922438621521, rel=1e-6)


def test_fedacgs_rounds_are_those_of_its_authors() -> None:
    """geehokim/FedACG 62b6e95, `ServerM` with its look-ahead: what is sent in three rounds of two clients, and w."""
    update, sent = FedACG(), wave(3)
    state = update.init(sent)
    for round, (expected, average) in enumerate(PEERS["fedacg: sent and average"], 1):
        np.testing.assert_allclose(sent, expected, rtol=1e-9, atol=1e-15)
        updates = torch.stack([wave(3, start=10.0 * round + client, scale=0.3) for client in range(2)])
        sent, state = moved(update, state, sent, updates, np.full(2, 0.5), ONES)
        np.testing.assert_allclose(update.evaluated(state, sent), average, rtol=1e-9)


def test_fednhs_prototypes_are_those_of_its_authors() -> None:
    """Yutong-Dai/FedNH 60c3161, `FedNHServer.aggregate`: clients of 6 and 3, and of 2 samples; no third class."""
    old = F.normalize(wave(3, 4, start=0.5), dim=1)
    replies = []
    for client, counts in enumerate(([6.0, 3.0, 0.0], [2.0, 0.0, 0.0])):
        held = torch.tensor(counts, dtype=torch.float64)
        means = F.normalize(wave(3, 4, start=2.0 + client), dim=1) * (held > 0).unsqueeze(1)
        replies.append({"fednh.means": means, "fednh.counts": held})
    flat = old.flatten()
    end = round_end(replies, flat, clients=2)
    np.testing.assert_allclose(FedNH().next_model(end).view(3, 4), PEERS["fednh: prototypes"], rtol=1e-9)


def test_a_round_of_feddyn_is_that_of_its_authors() -> None:
    """alpemreacar/FedDyn 48a19fa, `train_feddyn_mdl`: two full-batch steps of two of three clients; then w.

    A linear layer of six parameters, alpha 0.3, lr 0.2, and what the three clients have changed before.
    """
    single = torch.float32
    inputs, targets = wave(6, 3, start=0.2, dtype=single), torch.tensor([0, 1, 1, 0, 1, 0])
    start = wave(6, start=1.0, scale=0.5, dtype=single)
    before = [wave(6, start=5.0 + client, scale=0.2, dtype=single) for client in range(3)]
    step, updates = FedDyn(alpha=0.3), []
    for client, expected in zip((0, 2), PEERS["feddyn: clients"], strict=True):
        rows = slice(client, client + 4)

        def gradient(at: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            weight = at.clone().requires_grad_()
            own = cross_entropy(inputs[rows] @ weight.view(2, 3).T, targets[rows])
            return torch.autograd.grad(own, weight)[0]

        settings = StepSettings(start=start, lr=0.2, client={"feddyn.drift": before[client]})
        y = start
        for _ in range(2):
            y, _ = step.step(y, gradient, None, settings)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        end = local_end(start, y, client=settings.client)
        torch.testing.assert_close(step.end_local(end)[0]["feddyn.drift"], before[client] + y - start)
        updates.append(y - start)
    server = FedDynServer(clients=3)
    state = {"drift": torch.stack(before).mean(dim=0)}
    w, _ = moved(server, state, start, torch.stack(updates), np.full(2, 0.5), ONES)
    np.testing.assert_allclose(w, PEERS["feddyn: model"], rtol=1e-5, atol=1e-6)


# Aggregations with equal weights, and adaptive server updates, give what Flower's own strategies give.


Krum, Median, TrimmedMean = (RULES[name] for name in ("krum", "median", "trimmed_mean"))
FedAdagrad, FedAdam, FedYogi = (UPDATES[name] for name in ("fedadagrad", "fedadam", "fedyogi"))


def aggregated(strategy, round: int, models: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """What Flower's strategy makes of replies with models of two arrays, and numbers of samples."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says
    replies = []
    for place, model in enumerate(models):
        asked = Message(RecordDict(), dst_node_id=place + 1, message_type=MessageType.TRAIN)
        arrays = ArrayRecord({"a": Array(model[:6].reshape(2, 3)), "b": Array(model[6:])})
        metrics = MetricRecord({"num-examples": int(samples[place])})
        replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked))
    arrays, _ = strategy.aggregate_train(round, replies)
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


@pytest.mark.parametrize("clients", [7, 10])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Median(), flower.FedMedian()),
        (TrimmedMean(0.2), flower.FedTrimmedAvg(beta=0.2)),
        (Krum(malicious=1), flower.Krum(num_malicious_nodes=1)),
        (Krum(malicious=2, keep=4), flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4)),
    ],
    ids=["median", "trimmed_mean", "krum", "multi_krum"],
)
def test_equal_weights_give_flowers_result(clients, ours, theirs):
    if clients == 7 and isinstance(ours, TrimmedMean):
        ours, theirs = TrimmedMean(2 / 7), flower.FedTrimmedAvg(beta=2 / 7 + 1e-9)  # both cut two clients
    rng = np.random.default_rng(clients)
    sent, models = rng.normal(size=11), rng.normal(size=(clients, 11))
    models[3] *= -3
    rows, shares = ours.combine(torch.from_numpy(models - sent), np.full(clients, 1 / clients))
    expected = aggregated(theirs, 1, models, np.full(clients, 10))
    np.testing.assert_allclose(sent + shares @ rows.numpy(), expected, atol=1e-6, rtol=0)


OTHER = {"initial": 0.0, "corrected": True}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAdagrad(initial=0.0), flower.FedAdagrad),
        (FedAdam(lr=0.1, **OTHER), flower.FedAdam),
        (FedYogi(initial=0.0), flower.FedYogi),
        (
            FedAdam(lr=0.03, momentum=0.5, decay=0.9, tau=0.01, **OTHER),
            partial(flower.FedAdam, eta=0.03, beta_1=0.5, beta_2=0.9, tau=0.01),
        ),
    ],
    ids=["fedadagrad", "fedadam", "fedyogi", "other parameters"],
)
def test_ten_rounds_are_flowers_own(ours, theirs, dtype):
    rng = np.random.default_rng(0)
    model, samples = rng.normal(scale=0.05, size=40).astype(dtype), np.array([10, 30, 5])
    mine, theirs = torch.from_numpy(model), theirs()
    state = ours.init(mine)
    for round in range(1, 11):
        updates = rng.normal(scale=0.1 / round, size=(3, 40)).astype(dtype)
        updates[:, :5] = 0  # parameters that nobody moves
        models = model + updates
        theirs.current_arrays = {"a": model[:6].reshape(2, 3), "b": model[6:]}
        changes = torch.from_numpy(models - model)
        mine, state = moved(ours, state, mine, changes, samples / samples.sum(), np.full(3, 5))
        model = aggregated(theirs, round, models, samples)
        np.testing.assert_allclose(mine.numpy(), model, atol=1e-6, rtol=0)
    assert np.abs(model[5:]).max() > 0
