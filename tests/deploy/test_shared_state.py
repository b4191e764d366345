"""What a site keeps and counts under one app, no other app has: two federations on one state folder, or one later."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w
from federated import FOUR, Federated
from flwr.app import Message
from test_masked import masked
from test_private_sites import config, private, spending

from fedskew.deploy import Terms, agree
from fedskew.experiment import resolve

pytest.importorskip("dp_accounting")
pytest.importorskip("opendp")

NEXT = {"fedskew-session": "next.1", "fedskew-purpose": "train", "server-round": 2}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def share_state(federation: Federated, first: Federated) -> None:
    """Let each site's `data.toml` name the state folder of another federation, and have agreed at another time."""
    for name in FOUR:
        table = {"state": str(first.folder / name / "state"), "data": {"name": "npz", "root": "own.npz"}}
        federation.data_of(name).write_text(tomli_w.dumps(table))
        federation.amend(name, 'agreed = "20', 'agreed = "19')


def masked_in(federation: Federated) -> int:
    """Of how many sums a site keeps what opens them."""
    with closing(sqlite3.connect(federation.folder / "ash" / "state" / "book.db")) as db:
        return len(db.execute("SELECT key FROM entry WHERE kind = 'masked'").fetchall())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, Federated, Message]:
    """A federation with noise, after a round; one without, on the same state folders; a question of that round."""
    tmp_path = tmp_path_factory.mktemp("two")
    noisy = private(tmp_path / "noisy", config(rounds=2))
    grid = noisy.grid()
    noisy.first_rounds(grid)
    plain = {key: value for key, value in config(rounds=2).items() if key != "privacy"}
    other = private(tmp_path / "other", plain)
    share_state(other, noisy)
    return noisy, other, grid.last("train")


@pytest.mark.slow
def test_a_sum_that_one_app_masked_is_opened_through_no_other_and_costs_what_it_did(
    two: tuple[Federated, Federated, Message],
) -> None:
    noisy, other, question = two
    assert noisy.refusal(question, "train", **NEXT) == ""
    assert other.refusal(question, "query.unmask", **NEXT) == "not agreed: opened; its own log says more"
    assert spending(noisy, "ash").noises == (4.0,)
    assert noisy.refusal(question, "query.unmask", **NEXT) == ""
    assert spending(noisy, "ash").noises == (4.0, 4.0)


def test_an_update_that_was_kept_for_one_app_is_masked_for_no_other(two: tuple[Federated, Federated, Message]) -> None:
    _, other, question = two
    later = {**NEXT, "fedskew-session": "next.2"}
    assert other.refusal(question, "query.again", **later) == "RunError in its own log"


@pytest.mark.slow
def test_a_federation_on_the_same_state_makes_no_other_forget_what_it_opened(tmp_path: Path) -> None:
    first = masked(tmp_path / "first", "fedavg", training={"rounds": 2})
    second = masked(tmp_path / "second", "fedavg", training={"rounds": 2})
    share_state(second, first)
    grid = first.grid()
    first.first_rounds(grid)
    question = grid.last("train")
    _, (record,) = second.first_rounds()
    refused = record.deployment
    assert refused is not None  # its sites have other keys, and the untrained model is the same
    assert refused["failed"] == dict.fromkeys(FOUR, "not agreed: members; its own log says more")

    fewer = {"fedskew-members": list(FOUR[:3]), "fedskew-weights": [0.4, 0.3, 0.3], **NEXT, "server-round": 1}
    assert first.refusal(question, "train", **fewer) == "not agreed: opened; its own log says more"
    evaluated = {**NEXT, "fedskew-purpose": "evaluate"}  # what was kept of one that is no longer agreed on
    assert first.refusal(question, "query.again", **evaluated) == "not agreed: evaluation; its own log says more"


@pytest.mark.slow
def test_to_agree_anew_deletes_what_was_kept(tmp_path: Path) -> None:
    """Else the last update with noise could be masked once more without, after no training at all."""
    federation = private(tmp_path, config(rounds=2))
    grid = federation.grid()
    federation.first_rounds(grid)
    question, kept = grid.last("train"), federation.kept("ash")
    assert federation.refusal(question, "train", **NEXT) == ""
    assert masked_in(federation) == 1
    plain = {key: value for key, value in federation.config.tree().items() if key != "privacy"}
    (federation.app / "run.toml").write_text(tomli_w.dumps(resolve(plain).tree()))

    agree(federation.data_of("ash"), federation.app)

    assert Terms.read(federation.folder / "ash" / "agreed.toml").updates_epsilon is None
    assert not list(kept.glob("*.safetensors"))
    assert masked_in(federation) == 0
    later = {**NEXT, "fedskew-session": "next.2"}
    assert federation.refusal(question, "query.again", **later) == "RunError in its own log"


@pytest.mark.parametrize("kind", ["query.again", "query.unmask"])
def test_a_server_does_not_fill_a_site_s_log(
    two: tuple[Federated, Federated, Message], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    noisy, _, question = two
    logging.disable(logging.NOTSET)
    many = {**NEXT, "fedskew-members": ["ash", *("x" * 100 for _ in range(999))]}
    assert noisy.refusal(question, kind, **many) == "not agreed: members; its own log says more"
    (said,) = [record.getMessage() for record in caplog.records if "members:" in record.getMessage()]
    assert len(said) < 300


def test_only_the_owner_enters_a_state_folder(two: tuple[Federated, Federated, Message]) -> None:
    state = two[0].folder / "ash" / "state"
    assert [place.stat().st_mode & 0o777 for place in (state, two[0].kept("ash"))] == [0o700] * 2
