"""The server's watch over its own model: a round that ruins it is undone, and who took part in it is left out.

A round's model is judged by the sites' losses on their own test samples, or, where sites don't evaluate, by the losses
of the next round's training, each compared with that site's own before. One site alone has no round undone, unless
it is half of those that evaluate.
"""

import json
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedskew.deploy._arrays import FloatArray, IntArray
from fedskew.engine import ServerState
from fedskew.errors import RunError
from fedskew.files import write_text

FILE = "operator.json"
LONGEST_SKIP = 64
"""Most rounds for which a site that does not answer is skipped."""


@dataclass
class Watch:
    """What the watch keeps between rounds, as tensors of its own in the server's state; methods change it in place.

    The last state whose model was judged to be fine stands beside it, under "good". Arrays are by client index,
    `(clients,)`, but for two.

    Attributes:
        good: The round of that state, `()`.
        undone: Rounds that were undone, `(rounds,)`.
        best: The lowest loss of each site so far; infinite if none is known.
        left_out: The round for which a site is left out; 0 if it takes part.
        since: The last round after `good` in which a site's update was aggregated; 0 if none was. `counted`: up to it.
        lengths: Norm of the longest update of a site after `good`.
        misses: How many times in a row a site was asked and did not answer.
        resumes: The round from which a site that did not answer is asked again.
    """

    good: IntArray
    undone: IntArray
    best: FloatArray
    left_out: IntArray
    since: IntArray
    counted: IntArray
    lengths: FloatArray
    misses: IntArray
    resumes: IntArray

    @staticmethod
    def start(state: ServerState, clients: int) -> ServerState:
        """Return a state before the first round, as watched."""
        none = np.zeros(clients, dtype=np.int64)
        best, empty = np.full(clients, math.inf), np.zeros(0, dtype=np.int64)
        watch = Watch(np.zeros((), dtype=np.int64), empty, best, none, none, none, np.zeros(clients), none, none)
        return watch.with_good(state, state, {})

    @classmethod
    def of(cls, state: ServerState) -> "Watch":
        """Return what a state holds of the watch."""
        return cls(**{name: part.numpy().copy() for name, part in state.of("watch").items()})

    def within(self, state: ServerState) -> ServerState:
        """Return a state with this watch."""
        return state.having("watch", {name: torch.from_numpy(array) for name, array in vars(self).items()})

    def skipped(self, round: int) -> frozenset[int]:
        """Return the sites that are not asked in a round, as they did not answer before."""
        return frozenset(np.flatnonzero(self.resumes > round).tolist())

    def out(self) -> frozenset[int]:
        """Return the sites that are left out after a round that was undone."""
        return frozenset(np.flatnonzero(self.left_out).tolist())

    def count(self, round: int, lengths: Mapping[int, float]) -> None:
        """Record whose updates moved the model in a round, and their norms."""
        self.since[[*lengths]] = round
        for client, length in lengths.items():
            self.lengths[client] = max(self.lengths[client], length)

    def with_good(self, state: ServerState, good: ServerState, losses: Mapping[int, float]) -> ServerState:
        """Return a state that goes back to another, with that one's losses by client index."""
        for client, loss in losses.items():
            self.best[client] = min(self.best[client], loss)
        self.counted = np.where(self.since > 0, self.since, self.counted)
        self.good[...] = good.round
        self.since[:], self.lengths[:] = 0, 0.0
        own = {name: part for name, part in good.tensors.items() if not name.startswith(("good/", "watch/"))}
        return self.within(state.having("good", own))

    def with_undone(self, state: ServerState, sites: Collection[int]) -> ServerState:
        """Return the good state in place of another, whose round is undone, and for which these sites are left out."""
        self.left_out[list(sites)] = state.round
        self.undone = np.append(self.undone, state.round)
        self.since[:], self.lengths[:] = 0, 0.0
        good = state.of("good")
        return self.within(ServerState(state.round, good).having("good", good))

    def answered(self, round: int, asked: Collection[int], silent: Collection[int]) -> None:
        """Record who answered: after k misses in a row a site is skipped for 2^(k - 1) rounds."""
        for client in asked:
            if client in silent:
                self.misses[client] += 1
                self.resumes[client] = round + 1 + min(2 ** min(int(self.misses[client]) - 1, 32), LONGEST_SKIP)
            else:
                self.misses[client] = self.resumes[client] = 0


def ruined(
    losses: Mapping[int, float], best: FloatArray, limit: float, chance: float, evaluated: bool = True
) -> str | None:
    """Say why a model is to be taken as ruined, by its losses at sites, infinite where not finite; None if it isn't.
    Each site's loss is compared with its own lowest so far (`best`, infinite if it has none), as sites hold other
    labels. A loss below `chance`, of a model that knows nothing, ruins none; for `limit` see `Agreement.loss_limit`.
    Where sites evaluated the model that they had trained, half of them decide, so that a liar can't hide among two that
    it ruined it. Training in the next round judges others' work: then it takes more than half, and two at least, so
    that of two no liar can accuse the other."""
    known = [client for client in losses if math.isfinite(best[client])]
    infinite = [client for client, loss in losses.items() if not math.isfinite(loss)]
    risen = [client for client in known if not losses[client] <= max(chance, limit * float(best[client]))]
    for said, asked, what in (
        (infinite, list(losses), "is not finite"),
        (risen, known, f"is above {limit:g} times their lowest so far"),
    ):
        enough = math.ceil(len(asked) / 2) if evaluated else max(2, len(asked) // 2 + 1)
        if asked and len(said) >= enough:
            figure = statistics.median_high(losses[client] for client in asked)
            return f"the model's loss is {figure:.4g}; at {len(said)} of {len(asked)} sites it {what}"
    return None


def to_leave_out(suspects: Collection[int], active: Collection[int], lengths: FloatArray) -> list[int]:
    """Choose the sites to leave out after a round that was undone: all suspects if at least half of the `active` sites
    remain, else the one whose update is the longest, unless it is the only site."""
    suspects = sorted(set(suspects) & set(active))
    if 2 * (len(active) - len(suspects)) >= len(active):
        return suspects
    return [max(suspects, key=lambda client: lengths[client])] if len(active) > 1 else []


def remedy(notes: Mapping[str, Any], folder: Path) -> str:
    """Say what the operator can do about the sites that a round was without, by the notes of its record."""
    away, out, wrong = (
        ", ".join(sorted({name for kind in kinds for name in notes[kind]}))
        for kinds in (("offline", "silent", "skipped"), ("left_out",), ("failed", "refused"))
    )
    todo = (
        away and f"bring back {away}",
        out and f"look at {out}, and give fedskew deploy readmit {folder} NAME",
        wrong and f"see to {wrong}, whose own log says more",
    )
    return "; ".join(filter(None, todo)) or "mend what that names"


@dataclass(frozen=True)
class Decisions:
    """The operator's decisions, `operator.json` in the run folder: sites that may take part again, with the round for
    which they were left out; and the last round at the last look, up to which undone rounds no longer count."""

    readmitted: dict[str, int]
    looked: int

    @classmethod
    def read(cls, folder: Path) -> "Decisions":
        """Read the operator's decisions, none if there is no file; RunError where it can't be read."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            readmitted = {str(name): int(round) for name, round in found.get("readmitted", {}).items()}
            return cls(readmitted, int(found.get("looked", 0)))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: can't be read ({type(error).__name__}); remove it, and give fedskew deploy readmit again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the decisions."""
        write_text(folder / FILE, json.dumps({"looked": self.looked, "readmitted": self.readmitted}) + "\n")

    def readmits(self, name: str, left_out: int) -> bool:
        """Return whether a site that is left out for a round may take part again."""
        return self.readmitted.get(name, 0) >= left_out > 0

    def counting(self, undone: IntArray) -> list[int]:
        """Return the undone rounds since the operator's last look."""
        return [round for round in undone.tolist() if round > self.looked]
