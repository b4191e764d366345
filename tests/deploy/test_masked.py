"""Masked updates at sites: a server sees one sum of a round, over the sites that answer; sites open nothing else."""

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import torch
from federated import (
    FOUR,
    Federated,
    LocalGrid,
    Tamper,
    agreed_at,
    check_models,
    federate,
    fedskew,
    figures,
    initiated,
    on,
    silent_on,
    times,
    tree,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from fedskew.deploy import Agreement
from fedskew.deploy.keys import key_fingerprint, key_line, public_keys, read_mask_key, write_mask_key
from fedskew.engine import RoundRecord, Update
from fedskew.engine.sums import add_up, encode_update
from fedskew.errors import ConfigError
from fedskew.experiment import TrainingLoop, read, resolve
from fedskew.files import load_tensors
from fedskew.methods import build
from fedskew.sums import Key
from fedskew.sums.fixed_point import UPDATES

LIMITED: dict[str, Any] = {"weight_limit": 0.5, "rounds": 1}


def masked(folder: Path, method: Any = "fedla", names: tuple[str, ...] = FOUR, **agreed: Any) -> Federated:
    training = {**LIMITED, **agreed.pop("training", {})}
    more = {"target": {"mix": "uniform"}, "evaluation": {"every": agreed.pop("every", 1)}}
    agreed = {"round_timeout": 0.3, "updates": "masked", "evaluation": "none", **agreed}
    return federate(folder, {**tree(method, **training), **more}, names, **agreed)


def silent_at(kind: str, purpose: str = "train") -> Tamper:
    """A site that does not answer the first question of this kind, for this purpose."""
    return silent_on(kind, last=0, purpose=purpose)


@dataclasses.dataclass(frozen=True)
class OfAll:
    """A server update of a user's own, whose sums need the number of all clients; its model is the plain mean's."""

    clients: int | None = None

    reads_each_update: ClassVar[bool] = True

    def init(self, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def share(self, update: torch.Tensor, steps: int, weight: float) -> tuple[float, dict[str, float]]:
        assert self.clients is not None
        return 1 / self.clients, {"clients": weight * self.clients}

    def move(self, state: Any, parameters: Any, change: Any, extras: Any) -> tuple[torch.Tensor, Any]:
        return (parameters + extras["clients"] * change).to(parameters.dtype), state


@pytest.mark.slow
def test_a_server_update_of_ones_own_knows_the_number_of_sites_at_a_site_too(tmp_path: Path) -> None:
    own = {"preset": "fedavg", "server_update": {"name": "test_masked:OfAll"}}
    ours = masked(tmp_path / "own", own)
    theirs = masked(tmp_path / "plain", "fedavg")

    record = ours.run(ours.grid()).run(resume=True).rounds[1]
    theirs.run(theirs.grid()).run(resume=True)

    assert (len(record.answered), record.unmoved) == (4, None)
    check_models(ours.run_folder, theirs.run_folder, rtol=0, atol=2e-6)


def a_round_of(loop: TrainingLoop) -> tuple[Any, RoundRecord]:
    """The state after the first round, whose model is evaluated, and the record."""
    loop.begin(resume=True)
    state, record = loop.runner.run_round(loop.server)
    loop.advance(state, record)
    return state, record


def after_one(folder: Path, *method: Any, **agreed: Any) -> tuple[Federated, LocalGrid]:
    """A federation of four after its first round, and what its sites were asked."""
    federation = masked(folder, *method, **agreed)
    grid = federation.grid()
    a_round_of(federation.run(grid))
    return federation, grid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("scaffold", 4e-7),
        ("fednova", 5e-5),  # which multiplies it by its steps
        pytest.param("fedla", 4e-7, marks=pytest.mark.whole_product),
        pytest.param("fedexp", 1e-6, marks=pytest.mark.whole_product),
    ],
)
def test_masked_rounds_are_the_plain_ones(tmp_path: Path, method: str, error: float) -> None:
    told = {"evaluation": "confusion", "training": {"rounds": 2}}
    ours = masked(tmp_path / "masked", method, **told)
    theirs = masked(tmp_path / "plain", method, updates="plain", norm_action="report", **told)

    here, there = (  # dogwood is lost in the first round, and not asked in the next
        sites.run(sites.grid({"dogwood": silent_at("train")})).run(resume=True) for sites in (ours, theirs)
    )

    assert [sorted(one.answered) for one in here.rounds] == [[], [0, 1, 2], [0, 1, 2]]
    for one, other in zip(here.rounds, there.rounds, strict=True):
        assert one.answered == other.answered
        np.testing.assert_allclose(one.weights, other.weights, rtol=1e-12)
        assert one.loss == (None if other.loss is None else pytest.approx(other.loss, abs=1e-6))
        assert np.abs(np.subtract(one.evaluation.confusion, other.evaluation.confusion)).sum() <= 2
        assert one.evaluation.loss == pytest.approx(other.evaluation.loss, abs=1e-5)
    # two rounds, and each begins where the last one ended
    check_models(ours.run_folder, theirs.run_folder, rtol=0, atol=error)


@pytest.mark.slow
def test_what_opens_is_the_sum_of_what_the_sites_kept_to_the_last_integer(tmp_path: Path) -> None:
    federation = masked(tmp_path, "fedavg")
    grid = federation.grid()
    (untrained, following), _ = federation.first_rounds(grid)

    config = grid.last("train").content["config"]
    method, encoded = build(federation.config.method, 0.5), []
    for name, weight in zip(config["fedskew-members"], config["fedskew-weights"], strict=True):
        kept, _ = load_tensors(federation.kept(name) / "train.safetensors")
        of_site = Update(0, kept["change"], kept["norm"], kept["buffers"], kept["integers"], 1, float(kept["loss"]))
        encoded.append(encode_update(method, of_site, weight, len(FOUR)))
    change = UPDATES.decode(add_up(encoded)["update"], sum(config["fedskew-weights"]))  # as a simulation adds them

    expected = (torch.from_numpy(change) + untrained.model.parameters).float()
    assert torch.equal(following.model.parameters, expected)


@pytest.mark.slow
def test_no_answer_of_a_site_is_the_same_twice_and_none_holds_its_model(tmp_path: Path) -> None:
    seen: list[list[dict[str, np.ndarray]]] = []
    for place in ("one", "two"):
        answers: list[dict[str, np.ndarray]] = []

        def look(question: Message, answer: Message, answers: list = answers) -> None:
            assert set(answer.content) == {"sums", "commitments", "metrics"}
            assert set(answer.content["metrics"]) == {"server-round", "fedskew-attempt", "fedskew-client"}
            answers.append({name: array.numpy() for name, array in answer.content["sums"].items()})

        masked(tmp_path / place).play(dict.fromkeys(FOUR, on("train", look)))
        seen.append(answers)
    for first, second in zip(*seen, strict=True):
        words = first["update"].view(np.uint32)
        assert not (first["update"] == second["update"]).mean() > 0.01
        # Uniform: the mean of n words is within five standard errors of the middle.
        assert abs(words.mean() / 2.0**32 - 0.5) < 5 * (1 / 12 / words.size) ** 0.5


@pytest.mark.slow
def test_without_a_site_that_does_not_answer_the_others_mask_anew(tmp_path: Path) -> None:
    federation = masked(tmp_path)
    grid = federation.grid({"cedar": silent_at("train")})

    first = federation.run(grid).run(resume=True).rounds[1]

    assert sorted(first.answered) == [0, 1, 3]
    assert sum(first.weights) == pytest.approx(1)
    assert first.deployment["silent"] == ["cedar"]
    assert grid.kinds("ash").count("query.again") == 1
    assert grid.kinds("ash").count("train") == 1  # nobody trained twice in a round


@pytest.mark.slow
def test_with_fewer_than_three_sites_the_model_stays(tmp_path: Path) -> None:
    federation = masked(tmp_path)
    grid = federation.grid({"cedar": silent_on("train")}, away={"ash"})
    loop = federation.run(grid)
    grid.offline = set()  # label counts were told by the others; now there are four, two of which don't train
    grid.tamper[federation.node("birch")] = grid.tamper[federation.node("cedar")]

    state = loop.runner.start(loop.untrained)
    following, record = loop.runner.run_round(state)

    assert record.unmoved == "a masked sum is over 3 sites at least, and 2 of 4 answered"
    assert record.answered == []
    assert following.model.parameters is state.model.parameters


@pytest.mark.slow
def test_where_the_lost_ones_leave_too_much_to_one_site_it_is_weighed_anew(tmp_path: Path) -> None:
    limited = masked(tmp_path, "fedavg", training={"weight_limit": 0.4})
    grid = limited.grid({"dogwood": silent_at("train")})

    first = limited.run(grid).run(resume=True).rounds[1]

    # 210 of 570 is .368, within the limit; of the three that answer it is .467, and the limit gives .4, .375, .225
    weights = dict(zip(first.answered, first.weights, strict=True))
    assert [weights[client] for client in (0, 1, 2)] == pytest.approx([0.375, 0.225, 0.4])
    assert grid.kinds("ash").count("query.again") == 1


def test_a_sum_that_is_in_effect_over_two_sites_is_not_taken(tmp_path: Path) -> None:
    federation = masked(tmp_path, "fedavg")
    told = {name: [samples] + [0] * 9 for name, samples in zip(FOUR, (500, 500, 5, 5), strict=True)}
    lies = {name: on("query", figures(label_counts=counts)) for name, counts in told.items()}

    _, (record,) = federation.first_rounds(federation.grid(lies))

    assert record.answered == []
    assert "in effect one over 2.04, and 2.50 are the least: lower training.weight_limit" in str(record.unmoved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "amount", "reason"),
    [
        ("update", 2**29, "the mean update reaches .*, and each was clipped to 8"),
        ("loss", -(2**50), "the mean loss is -1"),
        ("steps", 10**6, "there are 10.* local steps in all"),
    ],
)
def test_a_sum_that_honest_sites_can_not_have_moves_nothing(
    tmp_path: Path, part: str, amount: int, reason: str
) -> None:
    def add(question: Message, answer: Message) -> None:
        arrays = {name: array.numpy().copy() for name, array in answer.content["sums"].items()}
        arrays[part] += amount
        answer.content["sums"] = ArrayRecord({name: Array(values) for name, values in arrays.items()})

    federation = masked(tmp_path)
    (state, following), (record,) = federation.first_rounds(federation.grid({"cedar": on("train", add)}))

    assert re.search(f"the sum is refused: {reason}", str(record.unmoved))
    assert (record.answered, following.model) == ([], state.model)


@pytest.mark.slow
def test_a_site_that_masks_and_opens_something_else_is_skipped(tmp_path: Path) -> None:
    def false(question: Message, answer: Message) -> None:
        answer.content["opening"] = ConfigRecord({"own": bytes(32)})

    federation = masked(tmp_path, training={"rounds": 2})
    grid = federation.grid({"birch": on("query.unmask", false)})

    _, first, second = federation.run(grid).run(resume=True).rounds

    assert "opened another mask" in first.deployment["refused"]["birch"]
    assert second.deployment["skipped"] == ["birch"]


@pytest.mark.slow
def test_a_site_that_lies_about_one_other_takes_that_one_not_out_alone(tmp_path: Path) -> None:
    def false(question: Message, answer: Message) -> None:
        commitments = dict(answer.content["commitments"])
        answer.content["commitments"] = ConfigRecord(commitments | {"ash": bytes(32)})

    federation = masked(tmp_path, names=(*FOUR, "elm"))
    grid = federation.grid({"dogwood": on("train", false)})

    first = federation.run(grid).run(resume=True).rounds[1]

    assert sorted(first.deployment["refused"]) == ["ash", "dogwood"]
    assert sorted(first.answered) == [1, 2, 4]


class Busy(LocalGrid):
    """A SuperLink that answers some requests with this HTTP status."""

    status: int = 503
    left: int = 3

    def pull_messages(self, message_ids: Any) -> Any:
        if self.left:
            self.left -= 1
            request = httpx.Request("POST", "http://localhost")
            raise httpx.HTTPStatusError("", request=request, response=httpx.Response(self.status, request=request))
        return super().pull_messages(message_ids)


@pytest.mark.slow
def test_a_server_whose_database_is_busy_is_asked_again(tmp_path: Path) -> None:
    federation = masked(tmp_path)
    grid = Busy(federation.grid().apps)
    assert sorted(federation.run(grid).run(resume=True).rounds[1].answered) == [0, 1, 2, 3]
    refused = masked(tmp_path / "refused")
    gone = Busy(refused.grid().apps)
    gone.status = 403
    with pytest.raises(httpx.HTTPStatusError):
        refused.run(gone)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, LocalGrid]:
    return after_one(tmp_path_factory.mktemp("played"), evaluation="confusion", training={"rounds": 2})


@pytest.mark.parametrize(
    ("kind", "entries", "reason"),
    [
        ("query.unmask", {}, "not agreed: opened"),  # it has opened it
        ("train", {"fedskew-members": ["ash", "birch"], "fedskew-weights": [0.5, 0.5]}, "not agreed: members"),
        ("evaluate", {"fedskew-members": ["ash", "birch"]}, "not agreed: members"),
        ("train", {"fedskew-members": ["birch", "cedar", "dogwood"]}, "not agreed: members"),
        ("train", {"fedskew-members": ["ash", "birch", "eve"]}, "not agreed: members"),
        ("train", {"fedskew-members": ["ash", "ash", "birch", "cedar"]}, "not agreed: members"),
        ("train", {"fedskew-weights": [0.7, 0.1, 0.1, 0.1]}, "not agreed: weights"),
        ("train", {"fedskew-weights": [0.55, 0.15, 0.15, 0.15]}, "not agreed: weights"),  # above the limit alone
        ("train", {"fedskew-weights": [0.5, 0.0, 0.0, 0.0]}, "not agreed: weights"),
        ("train", {"fedskew-weights": [-0.05, 0.35, 0.35, 0.35]}, "not agreed: weights"),
        ("train", {"fedskew-weights": [0.34, 0.33, 0.33]}, "not agreed: weights"),
        ("train", {"fedskew-weights": [0.49, 0.49, 0.01, 0.01]}, "not agreed: weights"),
        ("query.again", {"fedskew-purpose": "train"}, "RunError"),  # it has trained in no such round yet
        ("query.again", {"fedskew-purpose": "counts"}, "RunError"),
        ("evaluate", {"fedskew-members": ["birch", "cedar", "dogwood"]}, "not agreed: members"),
    ],
)
def test_a_site_refuses_what_would_show_more_than_a_sum(
    played: tuple[Federated, LocalGrid], kind: str, entries: dict[str, Any], reason: str
) -> None:
    federation, grid = played
    later = {} if kind == "query.unmask" else {"server-round": 2}
    question = grid.last("train" if kind == "query.again" else kind)
    assert re.search(reason, federation.refusal(question, kind, **{**later, **entries}))


def test_a_site_sends_nothing_without_masks(played: tuple[Federated, LocalGrid]) -> None:
    federation, grid = played
    for kind in ("train", "evaluate"):
        content = grid.last(kind).content
        plain = {key: value for key, value in content["config"].items() if key != "fedskew-members"}
        answer = federation.ask(kind, {**content, "config": ConfigRecord(plain)})
        assert answer.error.reason == "not agreed: updates; its own log says more"


@pytest.mark.slow
def test_a_sum_with_other_weights_or_without_some_that_were_asked_stays_closed(tmp_path: Path) -> None:
    federation, grid = after_one(tmp_path, training={"rounds": 2})
    sent = grid.last("train", "ash")
    asked = {"fedskew-purpose": "train", "server-round": 2}
    assert federation.refusal(sent, "train", **asked) == ""  # masked with these weights and members

    named = {"fedskew-members": ["ash", "birch", "cedar"], "fedskew-arrived": ["ash", "birch", "cedar"]}
    refused = "not agreed: opened; its own log says more"
    assert federation.refusal(sent, "query.unmask", **asked, **named) == refused  # it masked for all four
    assert federation.refusal(sent, "query.again", **asked, **{"fedskew-weights": [0.25] * 4}) == ""
    assert federation.refusal(sent, "query.unmask", **asked) == ""  # with the weights that it was told last
    assert federation.refusal(sent, "query.unmask", **asked) == refused


@pytest.mark.slow
def test_sites_that_are_told_to_train_otherwise_have_other_masks(tmp_path: Path) -> None:
    federation, grid = after_one(tmp_path, training={"rounds": 9})

    def hashes(run: str, session: str, name: str, other: str) -> bytes:
        entries = {"fedskew-run": run, "fedskew-session": session, "server-round": 2}
        answer = federation.again(grid.last("train", name), "train", name, **entries)
        return bytes(answer.content["commitments"][other])

    assert hashes("aa", "one", "ash", "birch") == hashes("aa", "one", "birch", "ash")
    assert hashes("aa", "two", "ash", "birch") != hashes("bb", "two", "birch", "ash")


@pytest.mark.slow
def test_a_site_that_was_sent_another_model_is_in_no_sum(tmp_path: Path) -> None:
    def mislead(name: str, question: Message) -> None:
        if (name, question.metadata.message_type) == ("birch", "train"):
            times(0, question)

    federation = masked(tmp_path)
    grid = federation.grid()
    grid.mislead = mislead

    first = federation.run(grid).run(resume=True).rounds[1]

    assert sorted(first.answered) == [0, 2, 3]
    assert list(first.deployment["refused"]) == ["birch"]
    assert "don't cancel" in first.deployment["refused"]["birch"]


def agreement_of(names: tuple[str, ...] = FOUR, **given: Any) -> Agreement:
    keys = {name: key_line(Key.generate().public) for name in names}
    plain = {"sites": list(names), "classes": ["a", "b"], "shape": [64], "updates": "masked", "keys": keys}
    return Agreement.resolve({**plain, **given})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"norm_limit": 5.0}, "norm_limit: can't be held with updates = 'masked'"),
        ({"names": FOUR[:2]}, "updates = 'masked' takes 3 sites or more"),
        ({"keys": {"ash": "x", "birch": "y", "cedar": "z"}}, "keys: .* dogwood has none"),
        ({"updates": "plain"}, "keys are allowed only with updates = 'masked'"),
        ({"sum_sites": 2}, "sum_sites: "),
        ({"attempts": 1}, "attempts: no such key"),
    ],
)
def test_agreements_that_no_sum_can_keep_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        agreement_of(**given)


@pytest.mark.parametrize(
    ("method", "more", "reason"),
    [
        ("afl", {}, "updates: the weighting afl|updates: afl"),
        (
            "seol_kim",
            {"participation": 0.75},
            "updates: seol_kim says on how many samples of each class a client trains",
        ),
        ({"preset": "fedavg", "aggregation": {"name": "median"}}, {}, "works on each client's update"),
        ({"preset": "fedavg", "finish": {"name": "ccvr"}}, {}, "method.finish: its sums over sites are not masked yet"),
        ("fedavg", {"weight_limit": 0.6}, "training.weight_limit: updates = 'masked' needs one"),
        ("fedavg", {"participation": 0.5}, "training.participation: 2 of 4 sites"),
    ],
)
def test_methods_that_sums_are_too_little_for_are_refused(method: Any, more: dict[str, Any], reason: str) -> None:
    config = resolve({**tree(method, **{**LIMITED, **more}), "data": {"name": "digits"}})

    with pytest.raises(ConfigError, match=reason):
        agreement_of().check_config(config)


def test_a_config_for_masked_updates_is_not_deployed_without(tmp_path: Path) -> None:
    config = resolve({**tree("fedavg", **LIMITED), "engine": {"updates": "masked"}})

    with pytest.raises(ConfigError, match=r"engine\.updates: .* deploy init --updates masked"):
        agreement_of(updates="plain", keys={}).check_config(config)


def test_keys_that_are_none_are_refused() -> None:
    key = key_line(Key.generate().public)

    assert list(public_keys({"ash": key})) == ["ash"]
    with pytest.raises(ConfigError, match=r"keys\.birch: another site has the same key"):
        public_keys({"ash": key, "birch": key})
    with pytest.raises(ConfigError, match=r"keys\.ash: expected the middle line"):
        public_keys({"ash": "MCowBQYDK2VwAyEAcnVi"})


@pytest.mark.slow
def test_init_writes_a_key_for_each_site_and_a_site_is_told_with_whose_it_masks(tmp_path: Path) -> None:
    status, said = initiated(tmp_path, tree("scaffold", rounds=1), "--sites", "a,b,c", "--updates", "masked")

    assert status == 0, said
    app, site = tmp_path / "clinics" / "app", tmp_path / "clinics" / "sites" / "b"
    config, agreed = read(app / "run.toml"), Agreement.read(app / "deploy.toml")
    assert (config.engine.updates, config.training.weight_limit) == ("masked", 0.4)
    for name in "abc":
        found, key = read_mask_key(site.with_name(name) / "data.toml", agreed.keys)
        assert (found, key_line(key.public)) == (name, agreed.keys[name])
    assert "norm_limit" not in (app / "deploy.toml").read_text()

    site, words_said = agreed_at(tmp_path, "b")
    assert "whose public half deploy.toml has for b" in words_said
    assert "masked among a, b, c: a sum is over 3 of these or more, and this site opens one of a round." in words_said
    checked = " ".join(fedskew("deploy", "check", tmp_path / "clinics")[1].split())
    assert "a round is lost with a site that masks and does not open" in checked
    assert f"Their keys are {key_fingerprint(agreed.keys)}: compare this with the other sites" in words_said
    swapped = {**agreed.keys, "c": key_line(Key.generate().public)}
    assert key_fingerprint(swapped) != key_fingerprint(agreed.keys)
    assert "of it the server learns the sum over 3 sites or more" in words_said
    assert (site / "mask.key").stat().st_mode & 0o777 == 0o600

    other = Key.generate()
    (site / "mask.key").unlink()
    write_mask_key(site, other)
    status, said = fedskew("deploy", "site", "--check", site / "data.toml", "--agree")
    assert status == 2
    assert f"it is {key_line(other.public)}" in said


@pytest.mark.slow
def test_what_was_simulated_is_what_sites_train(tmp_path: Path) -> None:
    config = {**tree("scaffold", **LIMITED | {"rounds": 2}), "engine": {"updates": "masked"}}
    federation = federate(tmp_path, config, FOUR, updates="masked", round_timeout=0.3)

    simulated, deployed = federation.as_simulated(rtol=0, atol=1e-5)

    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        assert (there.answered, there.steps) == (here.answered, here.steps)
        np.testing.assert_allclose(there.weights, here.weights, rtol=1e-12)
