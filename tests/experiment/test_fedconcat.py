"""FedConcat as a run: against a loop written by hand, on disk, after a kill, and where it has little to work with."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import fedskew
from common import records_of, rng, stop_at
from fedskew import weighting
from fedskew.errors import ArgumentError, CombinationError, ConfigError
from fedskew.experiment import RunFolder, TrainingLoop, make_task, make_training_loop, resolve
from fedskew.models import Concatenated, build
from fedskew.pipelines import FedConcat
from fedskew.randomness import Purpose, generator

WIDTH, CLASSES = 6, 10
TASK: dict[str, Any] = {
    "name": "concat",
    "data": {"name": "digits"},
    "partition": {"rule": "quantity", "clients": 10, "labels_per_client": 2},
    "model": {"name": "mlp3", "width": WIDTH},
    "method": {"preset": "fedconcat", "pipeline": {"clusters": 3, "encoder_rounds": 4}},
    "training": {"rounds": 7, "participation": 0.3, "batch_size": 100, "epochs": 2, "lr": 0.1, "momentum": 0.9},
}


def changed(**sections: Any) -> dict[str, Any]:
    """The task with some keys of its sections replaced."""
    tables = {name: {**TASK.get(name, {}), **keys} for name, keys in sections.items()}
    if "pipeline" in sections:
        del tables["pipeline"]
        pipeline = {**TASK["method"]["pipeline"], **sections["pipeline"]}
        tables["method"] = {**tables.get("method", TASK["method"]), "pipeline": pipeline}
    return {**TASK, **tables}


def played(tree: dict[str, Any]) -> tuple[TrainingLoop, list[Any]]:
    """A run, and its state before the first round and after each."""
    run = make_training_loop(resolve(tree), 0)
    states = [run.runner.start(run.untrained)]
    for _ in range(run.config.training.rounds):
        state, record = run.runner.run_round(states[-1])
        states.append(state)
        run.records.append(record)
    return run, states


@pytest.fixture(scope="module")
def whole() -> tuple[TrainingLoop, list[Any]]:
    """The task's run, and its states."""
    return played(TASK)


Parts = list[torch.Tensor]


def encoder_of(run: TrainingLoop, state: Any, cluster: int) -> Parts:
    """A cluster's network."""
    return [*run.runner.network.views(run.runner.encoder(state, cluster).model.parameters).values()]


def head_of(run: TrainingLoop, state: Any) -> Parts:
    """The head's weight and bias."""
    return [*run.model.views(state.model.parameters).values()]


class ByHand:
    """FedConcat in plain PyTorch; a model is a list of tensors: weight and bias of fc1, fc2 and the head."""

    def __init__(self, run: TrainingLoop, untrained: Parts, head: Parts) -> None:
        task = make_task(run.config, 0)
        self.inputs, self.targets = task.dataset.inputs, task.dataset.targets
        self.clients = task.partition.indices
        self.clusters = [list(untrained) for _ in range(3)]
        self.head = head

    def features(self, model: Parts, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(functional.linear(x.flatten(1), model[0], model[1]))
        return functional.relu(functional.linear(hidden, model[2], model[3]))

    def trained(self, client: int, round: int, epochs: int, steps: int | None, start: Parts, logits):
        model = [part.clone().requires_grad_() for part in start]
        optimiser = torch.optim.SGD(model, lr=0.1, momentum=0.9)
        rng, batches = generator(0, Purpose.SHUFFLE, round, client), []
        for _ in range(epochs):
            order = rng.permutation(self.clients[client])
            batches += [order[at : at + 100] for at in range(0, len(order), 100)]
        for batch in batches[:steps]:
            optimiser.zero_grad()
            functional.cross_entropy(logits(model, self.inputs[batch]), self.targets[batch]).backward()
            optimiser.step()
        return [part.detach() for part in model]

    def encoder_round(self, round: int, cohort: list[int], cluster_of: np.ndarray) -> None:
        def logits(model, x):
            return functional.linear(self.features(model, x), model[4], model[5])

        for cluster, start in enumerate(self.clusters):
            members = [client for client in cohort if cluster_of[client] == cluster]
            sizes = [len(self.clients[client]) for client in members]
            models = [self.trained(client, round, 2, None, start, logits) for client in members]
            if members:
                self.clusters[cluster] = [
                    sum(size / sum(sizes) * part for size, part in zip(sizes, parts, strict=True))
                    for parts in zip(*models, strict=True)
                ]

    def head_round(self, round: int, cohort: list[int]) -> None:
        def logits(head, x):
            with torch.no_grad():
                concatenated = torch.cat([self.features(model, x) for model in self.clusters], dim=1)
            return functional.linear(concatenated, *head)

        heads = [self.trained(client, round, 3, 3, self.head, logits) for client in cohort]
        self.head = [torch.stack(parts).mean(0) for parts in zip(*heads, strict=True)]


@pytest.mark.slow
def test_every_round_is_that_of_a_loop_written_by_hand(whole):
    run, states = whole
    hand = ByHand(run, encoder_of(run, states[0], 0), head_of(run, states[0]))
    cluster_of = FedConcat(3).divide(run.task().counts, generator(0, Purpose.CLUSTERS))
    skipped = 0
    for round, record in enumerate(run.records, start=1):
        if round <= 4:
            hand.encoder_round(round, record.cohort, cluster_of)
            skipped += 3 - len(set(cluster_of[record.cohort]))
        else:
            hand.head_round(round, record.cohort)
        for cluster, expected in enumerate(hand.clusters):
            torch.testing.assert_close(encoder_of(run, states[round], cluster), expected)
        torch.testing.assert_close(head_of(run, states[round]), hand.head)
    assert skipped > 0, "some cluster should have nobody in some round"


def test_under_the_head_clients_with_few_batches_and_stragglers_take_as_many_steps_as_others():
    run, _ = played(changed(training={"batch_size": 1000, "epochs": 5}, conditions={"stragglers": 1.0}))
    assert len({steps for record in run.records[:4] for steps in record.steps}) > 1  # an epoch is one batch
    assert [record.steps for record in run.records[4:]] == [[3] * 3] * 3


def test_records_say_what_happened_in_both_parts():
    result = fedskew.simulate(TASK)
    assert [record["round"] for record in result.rounds] == list(range(8))
    assert [record["evaluation"] is not None for record in result.rounds] == [False] * 5 + [True] * 3
    network = 64 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
    head = 3 * WIDTH * CLASSES + CLASSES
    for record in result.rounds[1:]:
        assert len(record["cohort"]) == len(record["answered"]) == 3
        assert record["answered"] == record["cohort"]
        assert sum(record["weights"]) == pytest.approx(1.0)
        assert np.isfinite([record["loss"], record["drift"], record["entropy"], record["ess"]]).all()
        sent = network if record["round"] <= 4 else head
        assert record["bytes_up"] == record["bytes_down"] == 3 * 4 * sent
    sizes = result.runs[0].counts.sum(axis=1)
    for record in result.rounds[1:5]:  # FedAvg's weights, though in several models
        np.testing.assert_allclose(record["weights"], sizes[record["cohort"]] / sizes[record["cohort"]].sum())
    for record in result.rounds[5:]:
        assert record["steps"] == [3] * 3
        np.testing.assert_allclose(record["weights"], 1 / 3)
    assert result.summary["final"]["accuracy"] == result.rounds[-1]["evaluation"]["accuracy"]
    accuracies = [record["evaluation"]["accuracy"] for record in result.rounds[5:]]
    assert result.summary["last10"]["accuracy"] == pytest.approx(np.mean(accuracies))
    assert result.summary["max"]["accuracy"] == max(accuracies)


@pytest.mark.slow
def test_with_one_cluster_the_encoder_is_fedavgs_model():
    alone, states = played(changed(pipeline={"clusters": 1}))
    plain, expected = played({**TASK, "method": "fedavg"})
    assert torch.equal(alone.runner.encoder(states[4], 0).model.parameters, expected[4].model.parameters)
    for ours, theirs in zip(alone.records[:4], plain.records[:4], strict=True):
        assert replace(ours, seconds=0) == replace(theirs, seconds=0)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "rounds"), [("fresh", (1, 4, 5)), ("clusters", (3, 6))])
def test_stopped_at_any_round_it_ends_with_the_same_bytes(head, rounds, tmp_path):
    tree = changed(
        data={"validation": 0.2},
        method={
            "preset": "fedconcat+fedentopt+fedlc+fedprox+fedla+fedexp",
            "server_update": {"average_last_two": True},  # kept for every cluster
        },
        pipeline={"head": head},
        conditions={"dropout": 0.3, "dropout_rule": "bernoulli", "stragglers": 0.5, "count_epsilon": 1.0},
        training={"participation": 0.5},
        evaluation={"clients": True},
    )
    config = resolve(tree)
    make_training_loop(config, 0, tmp_path / "whole").run()
    for round in rounds:
        folder = tmp_path / f"stopped-{round}"
        with pytest.raises(KeyboardInterrupt):
            make_training_loop(config, 0, folder).run(progress=stop_at(round))
        make_training_loop(config, 0, folder).run(resume=True)
        assert records_of(folder) == records_of(tmp_path / "whole")
        for file in ("model.safetensors", "best.safetensors"):
            assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.slow
def test_its_model_file_holds_everything_and_is_read_back(tmp_path):
    result = fedskew.simulate(changed(data={"validation": 0.2}), out=tmp_path)
    encoder = 64 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH
    stored = load_file(result.folder / "model.safetensors")
    assert sum(value.numel() for value in stored.values()) == 3 * encoder + 3 * WIDTH * CLASSES + CLASSES
    model = Concatenated(build("mlp3", CLASSES, (1, 8, 8), width=WIDTH), 3).eval()
    model.load_state_dict(stored)
    task = make_task(resolve(changed(data={"validation": 0.2})), 0)
    right = model(task.dataset.test_inputs).argmax(1) == task.dataset.test_targets
    assert float(right.double().mean()) == result.rounds[-1]["evaluation"]["accuracy"]
    best = load_file(result.folder / "best.safetensors")
    assert torch.equal(best["encoders.2.fc1.weight"], stored["encoders.2.fc1.weight"])
    assert "Accuracy on the test set" in (result.folder / "report.html").read_text()
    assert RunFolder.read_runs(result.folder)[0].config["method"]["pipeline"]["clusters"] == 3
    assert fedskew.simulate(result.folder / "config.toml").rounds[-1]["evaluation"] == result.rounds[-1]["evaluation"]


@pytest.mark.slow
def test_a_head_from_the_clusters_begins_with_the_sum_of_their_logits():
    run, states = played(changed(pipeline={"head": "clusters"}))
    x = make_task(run.config, 0).dataset.test_inputs[:50]
    network, logits = run.runner.network, 0
    for cluster in range(3):
        network.write_state(run.runner.encoder(states[4], cluster).model)
        logits = logits + network.module(x).detach()
    assert run.runner.evaluated_model(states[5]) is not None  # the encoders are in place
    run.model.write_state(states[4].model)
    torch.testing.assert_close(run.model.module(x), logits)
    assert torch.equal(states[3].model.parameters, states[0].model.parameters)
    assert not torch.equal(states[4].model.parameters, states[0].model.parameters)


def test_what_is_evaluated_depends_on_the_state_alone(whole):
    run, states = whole
    runner, inside = run.runner, run.model.module.encoders
    trained = runner.evaluated_model(states[-1])
    weight = inside[0].fc1.weight.clone()
    untrained = {name: part for name, part in states[0].tensors.items() if name.startswith("encoder")}
    runner.evaluated_model(replace(states[-1], tensors={**states[-1].tensors, **untrained}))
    torch.testing.assert_close(inside[0].fc1.weight, encoder_of(run, states[0], 0)[0], check_stride=False)
    assert torch.equal(runner.evaluated_model(states[-1]).parameters, trained.parameters)
    assert torch.equal(inside[0].fc1.weight, weight)


@dataclass(frozen=True)
class OnlyFirst:
    """Asks clients of the first cluster alone, which hold the first client's classes."""

    def init(self, counts):
        return None

    def select(self, state, counts, size, rng, first=None):
        return np.array([0]), None


def test_a_cluster_that_is_never_drawn_keeps_the_untrained_encoder():
    run, states = played(changed(method={"preset": "fedconcat", "selection": OnlyFirst()}, pipeline={}))
    for state in states:
        for cluster in (1, 2):
            assert torch.equal(run.runner.encoder(state, cluster).model.parameters, run.untrained.parameters)
    assert not torch.equal(run.runner.encoder(states[4], 0).model.parameters, run.untrained.parameters)
    assert torch.isfinite(states[-1].model.parameters).all()


def test_clusters_begin_with_copies(whole):
    run, states = whole
    addresses = {run.runner.encoder(states[0], cluster).model.parameters.data_ptr() for cluster in range(3)}
    assert len(addresses) == 3


@pytest.mark.slow
def test_weights_are_the_methods_own_inside_a_cluster_and_plain_under_the_head():
    run, _ = played(changed(method={"preset": "fedconcat+fedla"}, training={"participation": 1.0}))
    counts, cluster_of = run.task().counts, run.runner.cluster_of
    for record in run.records:
        answered, weights = np.array(record.answered), np.array(record.weights)
        if record.round > 4:
            np.testing.assert_allclose(weights, 1 / 10)
            continue
        for cluster in range(3):
            members = cluster_of[answered] == cluster
            inside = weighting.fedla(counts[answered[members]])
            share = counts[answered[members]].sum() / counts.sum()
            np.testing.assert_allclose(weights[members], share * inside)


def test_rounds_in_which_nobody_answers_and_clients_without_samples_change_nothing():
    tree = changed(
        partition={"rule": "dirichlet_by_class", "clients": 9, "beta": 0.05, "min_size": 0, "balance": False},
        conditions={"dropout": 0.7, "dropout_rule": "bernoulli"},
        training={"rounds": 20, "participation": 0.3},
    )
    del tree["partition"]["labels_per_client"]
    run, states = played(tree)
    silent = [at for at, record in enumerate(run.records) if not record.answered]
    assert {at < 4 for at in silent} == {True, False}, "in both parts"
    for at in silent:
        assert run.records[at].loss is run.records[at].drift is None
        assert torch.equal(states[at].model.parameters, states[at + 1].model.parameters)
        for cluster in range(3):
            before, after = (run.runner.encoder(state, cluster).model for state in states[at : at + 2])
            assert torch.equal(before.parameters, after.parameters)


def test_clients_are_looked_at_in_both_parts():
    result = fedskew.simulate(changed(evaluation={"clients": True, "every": 3}))
    assert [record["round"] for record in result.rounds if record["clients"]] == [3, 6, 7]
    for at in (3, 6):
        assert [entry["client"] for entry in result.rounds[at]["clients"]] != []
        assert all(np.sum(entry["confusion"]) > 300 for entry in result.rounds[at]["clients"])


def test_noisy_counts_are_what_is_clustered(whole):
    noisy, _ = played(changed(conditions={"count_epsilon": 0.01}))
    seen = noisy.runner.encoders.seen
    expected = FedConcat(3).divide(seen, generator(0, Purpose.CLUSTERS))
    assert noisy.runner.cluster_of.tolist() == expected.tolist()
    assert whole[0].runner.cluster_of.tolist() != expected.tolist()


@dataclass(frozen=True)
class ByParity(FedConcat):
    """Clusters of one's own."""

    def divide(self, counts, rng):
        return np.arange(len(counts)) % self.clusters


def test_clusters_of_ones_own():
    run, _ = played({**TASK, "method": {"pipeline": ByParity(clusters=2)}})
    assert run.runner.cluster_of.tolist() == [0, 1] * 5
    assert run.config.method["pipeline"]["name"] == "test_fedconcat:ByParity"


class Headless(nn.Module):
    """A network that does not name its head."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(in_shape)), num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Normed(Headless):
    """One that does, and has batch statistics and dropout."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(8, in_shape)
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.layers(x))))


@pytest.mark.slow
def test_a_network_of_ones_own_with_statistics(tmp_path):
    result = fedskew.simulate({**TASK, "model": Normed}, out=tmp_path)
    stored = load_file(result.folder / "model.safetensors")
    means = [stored[f"encoders.{cluster}.norm.running_mean"] for cluster in range(3)]
    assert not torch.equal(means[0], means[1])
    head = 4 * (3 * 8 * CLASSES + CLASSES)
    assert [record["bytes_up"] for record in result.rounds[5:]] == [3 * head] * 3
    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate({**TASK, "model": Normed}, out=tmp_path / "stopped", progress=stop_at(5))
    again = fedskew.simulate({**TASK, "model": Normed}, out=tmp_path / "stopped", resume=True)
    assert (again.folder / "model.safetensors").read_bytes() == (result.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (changed(pipeline={"clusters": 11}), "^method.pipeline.clusters: 11, and at most 10: no more"),
        (changed(pipeline={"encoder_rounds": 7}), "^method.pipeline.encoder_rounds: 7 of rounds = 7"),
        (changed(pipeline={"encoder_round": 7}), "method.pipeline.encoder_round: .*did you mean 'encoder_rounds'"),
        (changed(pipeline={"clusters": 2.5}), "method.pipeline.clusters: .*got 2.5"),
        (changed(pipeline={"head": "warm"}), "method.pipeline.head: .*fresh"),
        (changed(training={"rounds": 1}), "^method.pipeline.encoder_rounds: "),
        ({**TASK, "method": {"pipeline": {"clusters": 2}}}, "method.pipeline.name: missing .known: fedconcat"),
        ({**TASK, "model": Headless}, "^model.name: FedConcat can't use test_fedconcat:Headless: .* self.head"),
    ],
)
def test_what_cannot_run_is_refused_before_it_does(tree, says):
    with pytest.raises(ConfigError, match=says):
        make_training_loop(resolve(tree), 0)


def test_a_teacher_is_refused_with_the_reason():
    with pytest.raises(CombinationError, match=r"fedconcat doesn't go with objective.fedntd: it compares with another"):
        resolve({**TASK, "method": "fedconcat+fedntd"})


# Clusters


# Three kinds of clients, whatever their sizes: mostly class 2, classes 0 and 1 alike, mostly class 3.
KINDS = np.array(
    [[0, 1, 9, 0], [5, 5, 0, 0], [0, 0, 0, 3], [1, 0, 40, 1], [0, 0, 5, 95], [60, 50, 0, 2], [0, 0, 1, 30]]
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_clients_of_one_kind_share_a_cluster_numbered_by_its_first_client(seed):
    assert FedConcat(3).divide(KINDS, rng(seed)).tolist() == [0, 1, 2, 0, 2, 1, 2]


def test_sizes_play_no_part():
    sizes = np.array([[1], [1000], [3], [7], [2], [500], [9]])
    assert FedConcat(3).divide(KINDS * sizes, rng()).tolist() == FedConcat(3).divide(KINDS, rng()).tolist()


def test_one_cluster_is_everybody_and_as_many_as_clients_are_one_each():
    assert FedConcat(1).divide(KINDS, rng()).tolist() == [0] * 7
    assert FedConcat(7).divide(KINDS, rng()).tolist() == list(range(7))


def test_a_client_without_samples_goes_to_the_most_even_centre_and_moves_none():
    # The centres' squared lengths: 1 for a single class, 1/2 for two halves.
    counts = np.array([[0, 0, 0], [4, 0, 0], [0, 3, 3], [9, 0, 0], [0, 2, 2], [0, 0, 0]])
    assert FedConcat(2).divide(counts, rng()).tolist() == [0, 1, 0, 1, 0, 0]


def test_it_is_a_local_optimum_of_k_means():
    counts = rng(1).integers(0, 50, (40, 6))
    shares = counts / counts.sum(axis=1, keepdims=True)
    found = FedConcat(4).divide(counts, rng())
    centres = np.stack([shares[found == cluster].mean(axis=0) for cluster in range(4)])
    distances = ((shares[:, None] - centres) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == found).all()


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (KINDS[:2], "clusters: 3, and at most 2: no more of the clients with samples, 2 of 2, hold different"),
        ([[1, 1], [2, 2], [0, 0], [3, 1]], "at most 2: .* samples, 3 of 4"),
    ],
)
def test_more_clusters_than_different_clients_are_refused(counts, says):
    with pytest.raises(ArgumentError, match=says):
        FedConcat(3).divide(counts, rng())


def test_counts_are_checked():
    with pytest.raises(ArgumentError, match="counts"):
        FedConcat(2).divide([[1, -1], [2, 3]], rng())


@pytest.mark.parametrize(("given", "rounds", "first"), [(None, 2, 1), (None, 5, 2), (None, 980, 490), (480, 980, 480)])
def test_encoders_have_half_the_rounds_or_what_they_are_given(given, rounds, first):
    assert FedConcat(encoder_rounds=given).split(rounds) == first


@pytest.mark.parametrize(("given", "rounds"), [(None, 0), (None, 1), (5, 5), (6, 5)])
def test_each_part_needs_a_round(given, rounds):
    with pytest.raises(ArgumentError, match="encoder_rounds: .*; encoders need one at least, and the head one"):
        FedConcat(encoder_rounds=given).split(rounds)


@pytest.mark.parametrize("wrong", [{"clusters": 0}, {"encoder_rounds": 0}, {"batches": 0}, {"head": "warm"}])
def test_a_wrong_parameter_is_named(wrong):
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: input should be"):
        FedConcat(**wrong)
