"""Who the sites are, and what they told of their labels: asked once, and kept in the run folder for good."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._check import check_counts, check_only_samples
from fedskew.deploy._exchange import exchange
from fedskew.deploy._instruction import CONFIG, ROUND
from fedskew.deploy._refusal import RefusedError
from fedskew.errors import RunError
from fedskew.experiment._folder import plain_json
from fedskew.files import write_text
from fedskew.labels._release import SENSITIVITY

LOG = logging.getLogger("flwr")
FILE = "deployment.json"
PAUSE = 2.0
ASK_AGAIN = 30.0
"""Seconds after which a site is asked again that did not tell."""

NOISE_SPREAD = 40.0
"""Laplace noise is beyond so many times its scale once in 10^17 draws."""


class Roster:
    """The sites of one run, as `deployment.json` in its folder has them.

    Client k is the k-th of the agreement's sorted names. A site is the node whose key is registered under its name at
    the SuperLink; nothing that a message says of its sender is read.
    """

    def __init__(self, grid: Grid, agreement: Agreement, folder: Path) -> None:
        self._grid, self._agreement, self._path = grid, agreement, folder / FILE
        self.names = agreement.names
        kept = self._read()
        self.run: str = kept["run"] if kept else secrets.token_hex(8)
        self._told: dict[str, dict[str, Any]] = kept["sites"] if kept else {}
        self._nodes: dict[int, int] = {}
        self._ask_again: dict[int, float] = {}

    @property
    def counts(self) -> NDArray[np.float64]:
        """Label counts as the server knows them, `(sites, classes)`.

        0 for a site that has told nothing yet; of one that withholds them, its samples in equal parts.
        """
        classes = len(self._agreement.classes)
        rows = np.zeros((len(self.names), classes))
        for row, name in zip(rows, self.names, strict=True):
            told = self._told.get(name)
            if told is not None:
                row[:] = told["counts"] if told["counts"] is not None else told["samples"] / classes
        return rows

    @property
    def shown(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Class names and label counts for a report: of labels that are withheld and not evaluated, one class."""
        counts, agreement = self.counts, self._agreement
        if agreement.label_counts == "withheld" and not agreement.evaluates:
            return ("labels withheld",), np.rint(counts.sum(axis=1, keepdims=True)).astype(np.int64)
        return tuple(agreement.classes), np.rint(counts).astype(np.int64)

    @property
    def slack(self) -> float:
        """Samples that a site may have beyond what it told, where that was noisy."""
        if self._agreement.epsilon is None:
            return 0.0
        scale = SENSITIVITY[self._agreement.neighbours] / self._agreement.epsilon
        return float(NOISE_SPREAD * scale * len(self._agreement.classes))

    def online(self) -> dict[int, int]:
        """The node of each site that is there now, by client index."""
        nodes: dict[int, list[int]] = {}
        for node in self._grid.get_nodes():
            if node.name in self.names:
                nodes.setdefault(self.names.index(node.name), []).append(node.node_id)
        for client, found in nodes.items():
            if len(found) > 1:
                LOG.warning("%s: %d nodes are registered by this name; none is asked", self.names[client], len(found))
        there = {client: found[0] for client, found in nodes.items() if len(found) == 1}
        for client, now in there.items():
            if self._nodes.get(client, now) != now:
                LOG.warning("%s: its key has been replaced at the SuperLink; the new one is used", self.names[client])
        self._nodes |= there
        return there

    def gather(self) -> None:
        """Ask for label counts until all sites have told, or the agreement's time is over and enough have.

        Writes down what came, with how it was released. Sites that told in an earlier run of this folder aren't asked
        again: every release costs privacy.
        """
        agreement = self._agreement
        deadline, said = time.monotonic() + agreement.start_timeout, 0.0
        while missing := [name for name in self.names if name not in self._told]:
            self.ask_newcomers()
            missing = [name for name in self.names if name not in self._told]
            enough = len(self._told) >= agreement.min_sites
            if not missing or (enough and time.monotonic() >= deadline):
                break
            if time.monotonic() - said >= 60.0:
                LOG.info("waiting for the label counts of %s", ", ".join(missing))
                said = time.monotonic()
            time.sleep(PAUSE)
        if missing:
            LOG.warning("beginning without %s; a site that comes later joins then", ", ".join(missing))
        self._write()

    def ask_newcomers(self) -> bool:
        """Ask the sites that are there and have told nothing yet; whether any told."""
        online = self.online()
        now = time.monotonic()
        asked = {
            node: self.names[client]
            for client, node in online.items()
            if self.names[client] not in self._told and now >= self._ask_again.get(client, now)
        }
        if not asked:
            return False
        self._ask_again |= {client: now + ASK_AGAIN for client, node in online.items() if node in asked}
        content = RecordDict({CONFIG: ConfigRecord({ROUND: 0})})
        answers = exchange(
            self._grid, dict.fromkeys(asked, content), MessageType.QUERY, self._agreement.start_timeout, "0"
        )
        for node, reason in answers.failures.items():
            LOG.warning("%s did not tell its label counts: %s", asked[node], reason)
        before = len(self._told)
        for node, reply in answers.contents.items():
            try:
                self._told[asked[node]] = self._believed(reply) | {"node": str(node)}
            except RefusedError as error:
                LOG.warning("refused the label counts of %s: %s", asked[node], error)
        if len(self._told) == before:
            return False
        self._write()
        return True

    def _believed(self, reply: RecordDict) -> dict[str, Any]:
        agreement = self._agreement
        if agreement.label_counts == "withheld":
            return {"counts": None, "samples": check_only_samples(reply), "label_counts": "withheld"}
        counts = check_counts(reply, len(agreement.classes), whole=agreement.label_counts == "exact")
        told: dict[str, Any] = {"counts": counts.tolist(), "label_counts": agreement.label_counts}
        if agreement.epsilon is not None:
            told |= {"epsilon": agreement.epsilon, "neighbours": agreement.neighbours}
        return told

    def _read(self) -> Mapping[str, Any] | None:
        if not self._path.exists():
            return None
        try:
            kept: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            agreed = kept["agreement"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{self._path}: can't be read ({type(error).__name__}); restore it, or begin anew") from None
        now = self._agreement.tree()
        for key in ("sites", "classes", "shape", "tokens", "mean", "std", "label_counts", "epsilon", "neighbours"):
            if agreed.get(key) != now.get(key):
                raise RunError(
                    f"{self._path}: this run began with {key} = {agreed.get(key)}, and deploy.toml now says "
                    f"{now.get(key)}; begin another run elsewhere, or put it back"
                )
        return kept

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "run": self.run,
            "agreement": self._agreement.tree(),
            "sites": self._told,
            "label_counts": self.shown[1].tolist(),
        }
        write_text(self._path, plain_json(kept))
