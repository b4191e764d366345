"""One side is upgraded first: a site of another version is left out with a line on both sides, and comes back."""

import json
from pathlib import Path

import pytest
from federated import federate, tree
from flwr.app import ConfigRecord, Message

from fedskew import __version__

VERSION = "fedskew-version"


def test_every_question_tells_the_servers_version(tmp_path: Path) -> None:
    _, grid = federate(tmp_path, tree("fedavg", rounds=1)).played()
    assert {message.metadata.message_type for message in grid.asked} >= {"query", "train", "evaluate"}
    assert {dict(message.content["config"])[VERSION] for message in grid.asked} == {__version__}


@pytest.mark.slow
def test_a_site_of_another_version_is_left_out_and_both_sides_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    grid = federation.grid()
    older = federation.node("birch")
    answer = grid._answer

    def upgraded(message: Message) -> Message | None:
        """As a site finds it whose own fedskew is older than the server's, in round 1."""
        config = message.content["config"]
        assert isinstance(config, ConfigRecord)
        if message.metadata.dst_node_id == older and config["server-round"] == 1:
            config[VERSION] = "99.0"
        return answer(message)

    grid._answer = upgraded  # type: ignore[method-assign]
    federation.run(grid).run(resume=True)
    records = federation.records()
    assert [sorted(record["answered"]) for record in records[1:]] == [[0, 2], [0, 1, 2]]
    assert f"another version: it runs fedskew {__version__}" in json.dumps(records[1]["deployment"])
    assert f"the server runs fedskew 99.0, and this site {__version__}; install the server's version" in caplog.text
