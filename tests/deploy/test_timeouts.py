"""A round lasts as long as agreed, whatever a site announces and withholds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from federated import LocalGrid, federate, tree
from flwr.app import Message


@dataclass
class WithholdingGrid(LocalGrid):
    """Flower waits for a reply that a node announced and does not send: here for as long as the test lasts."""

    withheld: set[int] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        questions = {message.metadata.message_id: message.metadata for message in self.asked}
        for name in names:
            if questions[name].dst_node_id in self.withheld and questions[name].message_type == "train":
                self.released.wait()
        return super().pull_messages(names)


def test_a_reply_that_is_announced_and_withheld_does_not_hold_up_the_round(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), round_timeout=0.5, evaluation="none")
    honest = federation.grid()
    grid = WithholdingGrid(honest.apps, withheld={federation.node("birch")})
    held = threading.Timer(60.0, grid.released.set)  # so that a round that waits for it ends too, late
    held.start()
    try:
        federation.run(grid).run(resume=True)
        assert not grid.released.is_set()
    finally:
        held.cancel()
        grid.released.set()
    record = json.loads((federation.run_folder / "rounds.jsonl").read_text().splitlines()[1])
    assert sorted(record["answered"]) == [0, 2]
    assert record["deployment"]["silent"] == ["birch"]
