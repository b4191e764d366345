"""A site's part in masked sums: what it masks, what it opens, and what it refuses.

Of each round a site opens one sum of updates and one of evaluations. What it has opened it adds to no sum over other
sites (`OpenedSums`): its evaluation of a model, and its training of one in a round, or in any round where one batch
holds all of its samples. What it answered in a round is kept until the next round, in the folder of the app that it
agreed to: where another site does not answer, the same answer is masked anew before anything is opened. No other app
has it masked or opened, as that may take less noise, and to agree anew deletes it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._ledger import NotAgreedError
from fedskew.deploy._messages import CONFIG
from fedskew.deploy._opened_sums import OpenedSums
from fedskew.deploy._spending import Spending
from fedskew.deploy._sum_messages import (
    ANSWER,
    COUNTS,
    EVALUATE,
    LOSSES,
    TRAIN,
    SumAsked,
    masked_content,
    opening_content,
    over_few,
)
from fedskew.deploy._terms import Used
from fedskew.engine import Update
from fedskew.engine.sums import encode_update
from fedskew.errors import RunError
from fedskew.files import load_tensors, private_folder, save_tensors, writing
from fedskew.methods import Method
from fedskew.privacy import Protection
from fedskew.sums import COUNTS as WHOLE
from fedskew.sums import Key, Masked, Memory, mask
from fedskew.weighting import BySums

FOLDER = "sums"
MOST_SAID = 200
"""Longest list of the server's that a refusal names."""
ROUNDING = 1e-6
LIMIT_ROUNDING = 1e-9
"""By how much of the limit a weight may be above it, as in `UpdateNoise.protect`."""


@dataclass(frozen=True)
class Masks:
    """A site's part in masked sums: its key, and the limits that it agreed to.

    Attributes:
        name: The site's name.
        key: Its own key.
        peers: Public keys of all sites, by name, as it agreed to them.
        app: Hash of the app that it agreed to: masks depend on it.
        folder: Where it keeps what it masked under this app (`Terms.folder`).
        state: Its state folder, with the ledgers of what it has opened, and what that has cost, under all apps.
        least: Fewest sites that a sum may be over.
        evaluated: Numbers of the rounds after which the model is evaluated.
        limit: Largest weight of one site's update.
        seconds: How long after its answer the site is still willing to open it.
        method: The method.
        used: What it has masked and opened since it agreed.
        by_sums: The weighting by which the site computes its own weight, which the server does not know; None: the
            server tells it.
        protection: The noise of its updates, and the budget that it agreed to; None: they have no noise.
    """

    name: str
    key: Key
    peers: Mapping[str, bytes]
    app: str
    folder: Path
    state: Path
    least: int
    evaluated: Collection[int]
    limit: float
    seconds: float
    method: Method
    used: Used
    by_sums: BySums | None = None
    protection: Protection | None = None

    def check(self, asked: SumAsked | None, purpose: str) -> SumAsked:
        """Check that this site agreed to be in a sum.

        Args:
            asked: The sum; None: the server asks for the answer itself.
            purpose: What the answer is for.

        Returns:
            The sum.

        Raises:
            NotAgreedError: The site did not agree to it.
        """
        if asked is None:
            raise NotAgreedError(
                "updates", "updates: the server asks for an answer without masks; this site agreed to none"
            )
        if purpose == EVALUATE and asked.round not in self.evaluated:
            raise NotAgreedError(
                "rounds",
                f"rounds: the server asks for an evaluation after round {asked.round}, where the config has none",
            )
        members = self._members(asked)
        if len(members) < self.least:
            raise NotAgreedError(
                "members", f"members: a sum over {len(members)} sites; this site agreed to {self.least} at least"
            )
        if purpose == COUNTS and len(members) < len(self.peers):
            raise NotAgreedError(
                "members",
                f"members: sums of label counts are over all {len(self.peers)} sites, not {len(members)}: two over "
                "different sites tell their difference",
            )
        if purpose == TRAIN:
            self._check_weights(asked.weights, len(members))
            if self.protection is not None:
                self._check_noise(self.protection, len(members))
        if purpose != COUNTS:
            self.used.check_closed(purpose, asked.round)
        return asked

    def keep_update(self, round: int, training: str, about: str, update: Update, weight: float = 0.0) -> None:
        """Keep an update until the next round.

        Args:
            round: Number of the round.
            training: Names the training: where it is the same, so is the update, but for rounding.
            about: See `about_of`.
            update: The update.
            weight: Its weight, where the site computes that itself.

        Raises:
            RunError: It is not finite.
        """
        parts = {
            "change": update.change,
            "norm": update.norm.reshape(1),
            "buffers": update.buffers,
            "integers": update.integers,
            "steps": torch.tensor([update.steps]),
            "loss": torch.tensor([update.loss], dtype=torch.float64),
            "weight": torch.tensor([weight], dtype=torch.float64),
            **{f"reply.{name}": values for name, values in update.reply.items()},
        }
        odd = next(
            (name for name, part in parts.items() if part.is_floating_point() and not part.isfinite().all()), None
        )
        if odd is not None:
            raise RunError(f"the {odd} of this site's update is NaN or infinite, so it takes no part in the sum")
        self._keep(TRAIN, round, training, about, parts)

    def keep_evaluation(self, round: int, model: str, about: str, confusion: NDArray[np.int64], loss: float) -> None:
        """Keep an evaluation until the next one.

        Args:
            round: Number of the round.
            model: Hash of the model.
            about: See `about_of`.
            confusion: Confusion matrix, `(classes, classes)`.
            loss: Mean loss.
        """
        whole = loss * float(confusion.sum())
        summed = torch.tensor([whole if np.isfinite(whole) else LOSSES.limit], dtype=torch.float64)
        parts = {"confusion": torch.from_numpy(confusion.reshape(-1)), "loss": summed}
        self._keep(EVALUATE, round, model, about, parts)

    def answer(self, asked: SumAsked, client: int | None = None) -> RecordDict:
        """Mask the answer that was kept last for a purpose.

        Args:
            asked: The sum.
            client: The site's client index, if it knows it.

        Returns:
            The reply's records.

        Raises:
            NotAgreedError: It has opened a sum of this round, or has opened the same answer in one over other sites.
            SumsError: The site has masked something for this sum already.
        """
        parts, notes = self._kept(asked.purpose)
        if notes["round"] != asked.round:
            raise RunError(
                f"asked for round {asked.round} again, and this site last answered in round {notes['round']}"
            )
        weight = float(parts["weight"]) if "weight" in parts else 0.0
        if asked.weights:
            weight = dict(zip(asked.members, asked.weights, strict=True))[self.name]
        among = self._among(asked, weight)
        if self._noise_of(asked.purpose) is None:
            OpenedSums(self.state).check(notes["answer"], among)
        self.used.masked(asked.purpose, asked.round, _name(asked), notes["answer"], among)
        if asked.purpose == TRAIN:
            values = self._encoded(parts, weight, len(asked.members))
        else:
            values = {
                "counts": WHOLE.encode(parts["confusion"].numpy()),
                "losses": LOSSES.encode(parts["loss"].numpy()),
            }
        return masked_content(asked, self._masked(values, asked, notes["about"]), client)

    def answer_of_counts(self, asked: SumAsked, about: str, values: NDArray[Any]) -> RecordDict:
        """Mask an answer about this site's label counts.

        Args:
            asked: The sum.
            about: See `about_of`.
            values: The answer, encoded.

        Returns:
            The reply's records.

        Raises:
            SumsError: The site has masked something for this sum already.
        """
        return masked_content(asked, self._masked({ANSWER: values}, asked, about))

    def unmask(self, content: RecordDict) -> RecordDict:
        """Open this site's part of a sum, once, and only over the members and weights that it masked for.

        Args:
            content: The message's records.

        Returns:
            The reply's records.

        Raises:
            NotAgreedError: It is over others than this federation's sites, or the site has opened one of this round.
            SumsError: It is refused for another reason (see `sums.Memory.answer`).
        """
        config = content.get(CONFIG)
        assert isinstance(config, ConfigRecord), "it says which sum"
        asked = SumAsked.parse(config)
        if asked is None:
            raise RunError("the server's request to open a sum does not say which")
        self._members(asked)
        opening = self._memory.answer(asked.context(""), asked.members)
        if asked.purpose != COUNTS:  # the same question has the same sum, over all sites
            answer, among = self.used.opened(asked.purpose, asked.round, _name(asked))
            protection = self._noise_of(asked.purpose)
            if protection is None:
                OpenedSums(self.state).add(answer, among)
            else:
                Spending(self.state).charge(f"round {asked.round} of {asked.session}", protection)
        return opening_content(opening)

    def _noise_of(self, purpose: str) -> Protection | None:
        """Return the noise of a sum, which is drawn anew and charged each time; None: the sum has none."""
        return self.protection if purpose == TRAIN else None

    def _among(self, asked: SumAsked, weight: float) -> str:
        """Hash which sites a sum is over, known by their keys, and with what weights."""
        weights = dict(zip(asked.members, asked.weights, strict=False))
        sites = sorted([self.peers[name].hex(), weights.get(name, 0.0).hex()] for name in asked.members)
        return hashlib.sha256(json.dumps([sites, weight.hex()]).encode()).hexdigest()

    def _members(self, asked: SumAsked) -> set[str]:
        """Return the members of a sum, sites of this federation with this one among them, each named once."""
        members = set(asked.members)
        if self.name not in members or not members <= self.peers.keys() or len(members) < len(asked.members):
            said = ", ".join(asked.members)
            raise NotAgreedError("members", f"members: a sum over {said:.{MOST_SAID}} is none of this federation's")
        return members

    def _check_noise(self, protection: Protection, members: int) -> None:
        answers = protection.noise.answers
        if answers is not None and members < answers:
            raise NotAgreedError(
                "members", f"members: a sum over {members} sites; this site's share of the noise is for {answers}"
            )
        Spending(self.state).check(protection)

    def _check_weights(self, values: Sequence[float], members: int) -> None:
        if self.by_sums is not None:
            if values:
                raise NotAgreedError("weights", "weights: the server tells some, and each site computes its own")
            return
        if len(values) != members or not all(0 <= value <= 1 for value in values) or abs(sum(values) - 1) > ROUNDING:
            raise NotAgreedError("weights", "weights: expected one from 0 to 1 for each site that is asked, sum 1")
        if max(values) > self.limit * (1 + LIMIT_ROUNDING):
            raise NotAgreedError(
                "weights",
                f"weights: one site would have {max(values):.3g} of the weight, so that the sum would be nearly its "
                f"update; this site agreed to {self.limit:g} at most",
            )
        if reason := over_few(values, self.least):
            raise NotAgreedError("weights", f"weights: {reason}")

    def _encoded(self, parts: Mapping[str, Tensor], weight: float, members: int) -> dict[str, NDArray[Any]]:
        update = Update(
            client=0,
            change=parts["change"],
            norm=parts["norm"][0],
            buffers=parts["buffers"],
            integers=parts["integers"],
            steps=int(parts["steps"]),
            loss=float(parts["loss"]),
            reply={name.removeprefix("reply."): part for name, part in parts.items() if name.startswith("reply.")},
        )
        noise = None if self.protection is None else self.protection.noise
        return encode_update(self.method, update, weight, members, noise, own_weight=self.by_sums is not None)

    def _masked(self, values: Mapping[str, NDArray[Any]], asked: SumAsked, about: str) -> Masked:
        """Mask values, and keep what opens them until the deadline."""
        masked, pending = mask(values, self.key, self.peers, asked.context(f"{self.app} {about}"))
        now, memory = time.time(), self._memory
        memory.forget(before=now)
        memory.keep(pending, now + self.seconds)
        return masked

    @property
    def _memory(self) -> Memory:
        return Memory(self.folder / FOLDER, self.least)

    def _keep(self, purpose: str, round: int, answer: str, about: str, parts: Mapping[str, Tensor]) -> None:
        path = self._path(purpose)
        private_folder(path.parent)
        tensors = {name: part.detach().cpu().contiguous() for name, part in parts.items()}
        same = hashlib.sha256(f"{purpose} {answer}".encode()).hexdigest()
        save_tensors(path, tensors, {"round": round, "answer": same, "about": about})

    def _kept(self, purpose: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            return load_tensors(self._path(purpose))
        except RunError as error:
            raise RunError(f"{self._path(purpose)}: {error}") from None

    def _path(self, purpose: str) -> Path:
        return self.folder / FOLDER / f"{purpose}.safetensors"


def _name(asked: SumAsked) -> str:
    """Name a sum by hash: its session, round and attempt."""
    return hashlib.sha256(json.dumps([asked.session, asked.round, asked.attempt]).encode()).hexdigest()


def forget_kept(folder: Path) -> None:
    """Delete what a site kept under an app: its last update and evaluation, and the seeds of what is not open yet.

    Args:
        folder: The app's folder (`Terms.folder`).

    Raises:
        RunError: It can't be deleted.
    """
    for path in (folder / FOLDER).glob("*.safetensors"):
        with writing(path):
            path.unlink(missing_ok=True)
    Memory(folder / FOLDER).forget()
