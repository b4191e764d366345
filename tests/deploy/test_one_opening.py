"""Masked sums tell sums, once: one opening of a round at each site, and no answer in sums over different sites."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import FOUR, Federated, LocalGrid
from flwr.app import Array, ArrayRecord, Message
from test_masked import a_round_of, after_one, masked, silent_at

from fedskew import __version__
from fedskew.deploy import Book, Terms, agree
from fedskew.deploy._arrays import unpack
from fedskew.deploy.book import MaskedSum
from fedskew.deploy.terms import NotAgreedError
from fedskew.errors import ConfigError, StandstillError
from fedskew.privacy import Protection, UpdateNoise
from fedskew.sums import Masked, SumContext, unmask

EVALUATED: dict[str, Any] = {"evaluation": "confusion"}
AGAIN = "not agreed: opened; its own log says more"
OTHERS = "not agreed: members; its own log says more"
WHOLE_BATCH: dict[str, Any] = {"rounds": 3, "batch_size": 512}
"""A site's training of one model is then the same in every round."""


def later(round: int, **entries: Any) -> dict[str, Any]:
    return {"server-round": round, "fedskew-session": f"later.{round}", **entries}


class Deaf(LocalGrid):
    """A server that was killed before it asked sites to open."""

    def _answer(self, message: Message) -> Message | None:
        return None if message.metadata.message_type == "query.unmask" else super()._answer(message)


def over(members: tuple[str, ...], weights: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"fedskew-members": list(members)} | ({"fedskew-weights": list(weights)} if weights else {})


def opened(
    federation: Federated, grid: LocalGrid, kind: str, members: tuple[str, ...], entries: dict[str, Any]
) -> dict[str, np.ndarray] | str:
    """The sum that a server gets which has sites mask, and then open; or the first refusal."""
    said = {**grid.last(kind).content["config"], "fedskew-purpose": kind, **entries}
    context = SumContext(said["fedskew-session"], said["server-round"], said["fedskew-attempt"], kind, members)
    masks, openings = {}, {}
    for step, name in itertools.product((kind, "query.unmask"), members):
        question = grid.last(kind, name)
        answer = federation.again(question, step, name, **{"fedskew-purpose": kind, **entries})
        if answer.has_error():
            return str(answer.error.reason)
        if step == kind:
            content = unpack(answer.content)
            arrays = {key: array.numpy() for key, array in content["sums"].items()}
            masks[name] = Masked(arrays, dict(content["commitments"]))
        else:
            openings[name] = answer.content["opening"]["own"]
    found: dict[str, np.ndarray] = unmask(masks, openings, context)
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, LocalGrid]:
    return after_one(tmp_path_factory.mktemp("played"), "fedavg", training={"rounds": 9}, **EVALUATED)


@pytest.mark.parametrize("attempt", [2, 3])
@pytest.mark.parametrize("session", ["the same", "other.1"])
@pytest.mark.parametrize("kind", ["train", "query.again"])
def test_no_second_sum_of_a_round_opens_with_permuted_weights_or_over_others(
    played: tuple[Federated, LocalGrid], kind: str, session: str, attempt: int
) -> None:
    """Three such sums of three sites, or four over triples of four, are equations for every single update."""
    federation, grid = played
    entries: dict[str, Any] = {"fedskew-attempt": attempt, "fedskew-purpose": "train"}
    entries |= {} if session == "the same" else {"fedskew-session": session}
    book, agreed = Book(federation.folder / "ash" / "state"), Terms.read(federation.folder / "ash" / "agreed.toml")
    trained = book.rounds(agreed)

    for members, weights in ((FOUR, (0.3, 0.2, 0.3, 0.2)), (FOUR[:3], (0.4, 0.3, 0.3)), (FOUR[:3], (0.3, 0.4, 0.3))):
        question = grid.last("train")
        assert (
            federation.refusal(question, kind, **entries, **over(members, weights), **{"fedskew-counted": 1}) == AGAIN
        )

    assert book.rounds(agreed) == trained  # nothing was trained, either


def test_of_two_sums_that_are_masked_only_the_last_opens(tmp_path: Path) -> None:
    federation, grid = after_one(tmp_path, "fedavg", training={"rounds": 3})
    question = grid.last("train")
    four = later(2, **{"fedskew-session": "a.1", "fedskew-purpose": "train"})
    three = {**four, "fedskew-session": "b.1", **over(FOUR[:3], (0.4, 0.3, 0.3))}
    assert federation.refusal(question, "train", **four) == ""
    assert federation.refusal(question, "train", **three) == ""

    assert federation.refusal(question, "query.unmask", **four) == AGAIN
    assert federation.refusal(question, "query.unmask", **three) == ""
    for entries in (four, three):
        assert federation.refusal(question, "query.again", **entries, **{"fedskew-attempt": 2}) == AGAIN


def terms(agreed: str = "now", **more: Any) -> Terms:
    return Terms(schema=1, agreed=agreed, app="0" * 64, fedskew=__version__, rounds=9, data="now", **more)


LATER = 1e12
"""A deadline."""


def test_what_is_opened_is_written_down_before_and_once(tmp_path: Path) -> None:
    book, agreed = Book(tmp_path / "state"), terms()
    book.mask(agreed, MaskedSum("train", 1, "first", "answer", "all"), b"one" * 9, LATER)
    book.mask(agreed, MaskedSum("evaluate", 1, "tables", "table", "all"), b"two" * 9, LATER)
    book.mask(agreed, MaskedSum("train", 1, "second", "answer", "three"), b"last" * 9, LATER)
    assert (b"one" * 9).hex().encode() not in book.path.read_bytes()

    with pytest.raises(NotAgreedError, match="has masked another one after"):
        book.open(agreed, MaskedSum("train", 1, "first"))
    assert book.open(agreed, MaskedSum("train", 1, "second")) == b"last" * 9
    assert (b"last" * 9).hex().encode() not in book.path.read_bytes()
    for again in (
        lambda: book.open(agreed, MaskedSum("train", 1, "second")),
        lambda: book.mask(agreed, MaskedSum("train", 1, "third", "x", "y"), b"", LATER),
        lambda: book.check_open(agreed, "train", 1),
    ):
        with pytest.raises(NotAgreedError, match="opened"):
            again()
    book.check_open(agreed, "train", 2)
    assert book.open(agreed, MaskedSum("evaluate", 1, "tables")) == b"two" * 9
    assert book.path.stat().st_mode & 0o777 == 0o600


def test_an_answer_is_in_sums_over_the_same_sites_alone(tmp_path: Path) -> None:
    book = Book(tmp_path)
    for round in (1, 2):  # the same sum again tells nothing more
        book.mask(terms(), MaskedSum("train", round, f"sum {round}", "answer", "all"), b"own", LATER)
        book.open(terms(), MaskedSum("train", round, f"sum {round}"))

    with pytest.raises(NotAgreedError, match="two such sums would tell single sites' parts"):
        book.mask(terms(), MaskedSum("train", 3, "sum 3", "answer", "three"), b"own", LATER)
    book.mask(terms(), MaskedSum("train", 3, "sum 3", "another", "three"), b"own", LATER)


def test_a_sum_is_opened_once_whatever_is_agreed_to(tmp_path: Path) -> None:
    """Two masks of one sum have the same seeds of pairs, so that both opened would tell the difference."""
    book = Book(tmp_path)
    for agreed in ("monday", "tuesday"):
        book.mask(terms(agreed), MaskedSum("train", 1, "sum", "answer", "all"), b"own", LATER)
        if agreed == "monday":
            book.open(terms(agreed), MaskedSum("train", 1, "sum"))
    with pytest.raises(NotAgreedError, match="opened this sum before it agreed once more"):
        book.open(terms("tuesday"), MaskedSum("train", 1, "sum"))


def test_what_is_too_old_opens_no_more_and_is_deleted(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.mask(terms(), MaskedSum("train", 1, "sum"), b"past its time", 1.0)
    with pytest.raises(NotAgreedError, match="too old"):
        book.open(terms(), MaskedSum("train", 1, "sum"))
    book.mask(terms(), MaskedSum("evaluate", 1, "sum"), b"own", LATER)
    assert b"past its time".hex().encode() not in book.path.read_bytes()


PAYS = Protection(UpdateNoise(0.5, 4.0, 0.5), 8.0, 1e-3)


@pytest.mark.parametrize("end", ["refused", "killed"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_opening_that_is_not_finished_has_not_begun(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a sum that was never opened would be closed, or paid for twice."""
    pytest.importorskip("dp_accounting")
    book = Book(tmp_path)
    book.mask(terms(), MaskedSum("train", 1, "sum"), b"own", LATER, noisy=True)
    if end == "refused":
        with pytest.raises(NotAgreedError, match="updates_epsilon: with one more sum"):
            book.open(terms(), MaskedSum("train", 1, "sum"), dataclasses.replace(PAYS, epsilon=1e-3))
    else:
        child = os.fork()
        if not child:
            monkeypatch.setattr("fedskew.deploy.book._check_affordable", lambda *_: os._exit(9))
            try:
                Book(tmp_path).open(terms(), MaskedSum("train", 1, "sum"), PAYS)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    book.check_open(terms(), "train", 1)
    assert book.noises == ()
    assert book.open(terms(), MaskedSum("train", 1, "sum"), PAYS) == b"own"
    assert book.noises == (4.0,)


@pytest.mark.slow
def test_a_round_is_lost_with_a_site_that_masks_and_does_not_open(tmp_path: Path) -> None:
    federation = masked(tmp_path, training={"rounds": 2})
    grid = federation.grid({"birch": silent_at("query.unmask")})
    loop = federation.run(grid)
    state, first = a_round_of(loop)
    _, second = loop.runner.run_round(loop.server)

    assert first.unmoved == "the round's sum is lost, as birch masked and did not open it"
    assert (first.answered, state.model) == ([], loop.untrained)
    assert first.deployment["silent"] == ["birch"]
    assert grid.kinds("ash").count("query.again") == 0
    assert sorted(second.answered) == [0, 2, 3]  # other batches, so that it is another training


@pytest.mark.slow
def test_a_server_that_was_killed_before_the_opening_plays_its_round_again(tmp_path: Path) -> None:
    federation = masked(tmp_path, "fedavg")
    (state, _), _ = federation.first_rounds(Deaf(federation.grid().apps))

    _, record = federation.run(federation.grid()).runner.run_round(state)

    assert sorted(record.answered) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_server_that_was_killed_after_the_opening_goes_on_with_the_next_round(tmp_path: Path) -> None:
    federation = masked(tmp_path, training={"rounds": 3})
    (state, _), _ = federation.first_rounds()  # and is killed before it writes that down
    grid = federation.grid()

    again = federation.run(grid).runner
    following, lost = again.run_round(state)
    _, second = again.run_round(following)

    assert lost.unmoved == (
        "a masked sum is over 3 sites at least, and 0 of 4 answered; ash, birch, cedar, dogwood opened a sum of this "
        "round before"
    )
    assert (lost.answered, following.model, following.round) == ([], state.model, 1)
    assert grid.kinds("ash") == ["train", "train", "query.unmask"]
    assert sorted(second.answered) == [0, 1, 2, 3]


@pytest.mark.slow
def test_an_update_that_is_the_same_in_every_round_is_in_sums_over_the_same_sites_alone(tmp_path: Path) -> None:
    """Where one batch holds all samples, two rounds on one model would tell the update of the site that was lost."""
    federation = masked(tmp_path, "fedavg", training=WHOLE_BATCH)
    grid = federation.grid({"birch": silent_at("query.unmask")})

    with pytest.raises(StandstillError, match="rounds 1 and 2 left the model as it was"):
        federation.run(grid).run(resume=True)
    _, lost, without, with_birch = federation.run(grid).run(resume=True).rounds

    assert "birch masked and did not open" in str(lost.unmoved)
    assert without.deployment["failed"] == dict.fromkeys(("ash", "cedar", "dogwood"), OTHERS)
    assert sorted(with_birch.answered) == [0, 1, 2, 3]  # it is back, and the sum is the one that was lost
    assert grid.kinds("ash").count("query.unmask") == 2  # in the second round nothing was masked


@pytest.mark.slow
def test_one_evaluation_of_a_model_whoever_agrees_to_it_again(tmp_path: Path) -> None:
    federation, grid = after_one(tmp_path, "fedavg", training={"rounds": 4}, **EVALUATED)
    fewer, all_four = over(FOUR[:3]), over(FOUR)

    assert opened(federation, grid, "evaluate", FOUR[:3], {**later(2), **fewer}) == OTHERS
    whole = opened(federation, grid, "evaluate", FOUR, {**later(3), **all_four})
    assert not isinstance(whole, str)
    assert whole["counts"].sum() == 445  # the same sum again tells nothing more
    for name in FOUR:
        agree(federation.data_of(name), federation.app)
    assert opened(federation, grid, "evaluate", FOUR[:3], {**later(4), **fewer}) == OTHERS


@pytest.mark.slow
def test_a_server_asks_for_one_evaluation_of_a_model(tmp_path: Path) -> None:
    federation = masked(tmp_path, "fedavg", training={"rounds": 2}, **EVALUATED)
    grid = federation.grid({"birch": silent_at("query.unmask")})
    untrained, lost, _ = federation.run(grid).run(resume=True).rounds

    assert lost.unmoved is not None
    assert grid.kinds("ash").count("evaluate") == 2
    assert lost.evaluation == untrained.evaluation


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("train", {"server-round": 10}),
        ("train", {"server-round": 10**15}),
        ("train", {"server-round": 0}),
        ("evaluate", {"server-round": 10}),
    ],
)
@pytest.mark.parametrize("updates", ["masked", "plain"])
def test_a_site_takes_part_in_the_rounds_of_the_config(
    tmp_path_factory: pytest.TempPathFactory, played: Any, updates: str, kind: str, entries: dict[str, Any]
) -> None:
    federation, grid = played
    if updates == "plain":
        plain = {"training": {"rounds": 9}, "updates": "plain"}
        federation, grid = after_one(tmp_path_factory.mktemp("plain"), "fedavg", **EVALUATED, **plain)
    assert federation.refusal(grid.last(kind), kind, **entries) == "not agreed: rounds; its own log says more"


@pytest.mark.slow
def test_a_model_is_evaluated_after_the_rounds_that_the_config_says(tmp_path: Path) -> None:
    federation, grid = after_one(tmp_path, "fedavg", training={"rounds": 4}, evaluation="confusion", every=3)
    question = grid.last("evaluate")
    arrays = {name: Array(array.numpy() * (1 + 1e-6)) for name, array in question.content["arrays"].items()}
    question.content["arrays"] = ArrayRecord(arrays)

    said = {round: federation.refusal(grid.last("evaluate"), "evaluate", **later(round)) for round in range(5)}

    never = "not agreed: rounds; its own log says more"
    assert said == {0: AGAIN, 1: never, 2: never, 3: "", 4: ""}


@pytest.mark.slow
def test_a_site_may_ask_for_larger_sums(tmp_path: Path) -> None:
    federation = masked(tmp_path, "fedavg", training={"rounds": 2})
    federation.amend("ash", "sum_sites = 3", "sum_sites = 4")

    _, (record,) = federation.first_rounds(federation.grid({"cedar": silent_at("train")}))

    assert record.unmoved == "a masked sum is over 3 sites at least, and 2 of 3 answered"
    assert agree(federation.data_of("ash"), federation.app).sum_sites == 4
    federation.amend("ash", "sum_sites = 4", "sum_sites = 2")
    with pytest.raises(ConfigError, match="sum_sites: .* greater than or equal to 3"):
        Terms.read(federation.folder / "ash" / "agreed.toml")
