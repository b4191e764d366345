"""A site's part in masked sums: what it masks, what it opens, and what it refuses.

What a site answered in a round is kept until the next round, in the folder of the app that it agreed to: where another
site does not answer, the same answer is masked anew before anything is opened. No other app has it masked or opened, as
that may take less noise, and to agree anew deletes it. What is masked and opened stands in the site's `Book`.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy import _wire as wire
from fedskew.deploy._plan import Plan
from fedskew.deploy.book import Book, MaskedSum
from fedskew.deploy.keys import public_keys, read_mask_key
from fedskew.deploy.terms import NotAgreedError, Terms, refuse_unless
from fedskew.engine import Update
from fedskew.engine.sums import encode_update
from fedskew.errors import RunError, placed
from fedskew.files import load_tensors, private_folder, save_tensors
from fedskew.privacy import Protection
from fedskew.sums import Key, mask
from fedskew.sums.fixed_point import COUNTS as WHOLE

PATIENCE = 60.0
"""Seconds for which a site still opens a sum beyond the two exchanges that it may take."""

MOST_SAID = 200
"""Longest list of the server's that a refusal names."""
ROUNDING = 1e-6
LIMIT_ROUNDING = 1e-9
"""By how much of the limit a weight may be above it, as in `UpdateNoise.protect`."""

TENSORS = ("change", "norm", "buffers", "integers")
"""The tensors of an update that is kept, but for what the method returns beside it."""

FORMS = {wire.EVALUATE: {"counts": WHOLE, "losses": wire.LOSSES}, wire.SITES: {wire.FIGURES: wire.FIGURES_FORM}}
"""How the parts of an evaluation, and of figures of a site's models, are encoded."""


@dataclass(frozen=True)
class Masks:
    """A site's part in masked sums: its name and key, its peers' public keys, and the noise of its updates, if any."""

    plan: Plan
    terms: Terms
    book: Book
    folder: Path
    name: str
    key: Key
    peers: Mapping[str, bytes]
    protection: Protection | None

    @classmethod
    def of(cls, plan: Plan, terms: Terms, state: Path, place: Path) -> "Masks":
        """Make what a site masks with; NotAgreedError where updates are to have noise that it did not agree to."""
        keys = plan.agreement.keys
        name, key = read_mask_key(place, keys)
        protection, epsilon, delta = plan.protection, terms.updates_epsilon, terms.updates_delta
        if protection is not None:
            if epsilon is None or delta is None:
                raise NotAgreedError("updates_epsilon", "agreed to none; look, and agree: fedskew deploy site --check")
            protection = Protection(protection.noise, epsilon, delta)
        return cls(plan, terms, Book(state), terms.folder(state), name, key, public_keys(keys), protection)

    @property
    def limit(self) -> float:
        """Largest weight of one site's update."""
        limit = self.plan.config.training.weight_limit
        assert limit is not None, "checked with the config"
        return limit

    @property
    def least(self) -> int:
        """Fewest sites that a sum may be over."""
        return max(self.plan.agreement.sum_sites, self.terms.sum_sites)

    def check(self, asked: wire.SumAsked | None, purpose: str) -> wire.SumAsked:
        """Raise NotAgreedError unless this site agreed to be in a sum."""
        if asked is None:
            raise NotAgreedError("updates", "the server asks for an answer without masks; this site agreed to none")
        config, round = self.plan.config, asked.round
        if purpose == wire.EVALUATE:
            is_evaluated = 0 <= round <= config.training.rounds and config.is_evaluated(round)
            why = f"the server asks for an evaluation after round {round}, where the config has none"
            refuse_unless(is_evaluated, "rounds", why)
        self._check_figures(purpose)
        members = len(self._members(asked))
        why = f"a sum over {members} sites; this site agreed to {self.least} at least"
        refuse_unless(members >= self.least, "members", why)
        if purpose in wire.OVER_ALL:
            why = f"sums of {purpose} are over all {len(self.peers)} sites, not {members}: two over different sites "
            refuse_unless(members == len(self.peers), "members", why + "tell their difference")
            return asked
        if purpose == wire.TRAIN:
            self._check_weights(asked.weights, members)
            if self.protection is not None:
                answers = self.protection.noise.answers or 0
                why = f"a sum over {members} sites; this site's share of the noise is for {answers}"
                refuse_unless(members >= answers, "members", why)
                self.book.check_affordable(self.protection)
        self.book.check_open(self.terms, purpose, round)
        return asked

    def keep_update(self, round: int, training: str, about: str, update: Update, weight: float) -> None:
        """Keep an update until the next round; RunError if it is not finite. Of one `training` updates are the same."""
        parts = {
            **{name: getattr(update, name) for name in TENSORS},
            **{name: torch.tensor(getattr(update, name), dtype=torch.float64) for name in ("steps", "loss")},
            "weight": torch.tensor(weight, dtype=torch.float64),
            **{f"{wire.REPLY}.{name}": values for name, values in update.reply.items()},
        }
        for name, part in parts.items():
            if part.is_floating_point() and not part.isfinite().all():
                raise RunError(f"the {name} of this site's update is NaN or infinite, so it takes no part in the sum")
        self._keep(wire.TRAIN, round, training, about, parts)

    def keep_evaluation(self, round: int, model: str, about: str, counts: NDArray[np.int64], loss: float) -> None:
        """Keep an evaluation until the next one: what is counted, and the sum of the losses."""
        losses = torch.tensor([loss if np.isfinite(loss) else wire.LOSSES.limit], dtype=torch.float64)
        parts = {"counts": torch.from_numpy(counts), "losses": losses}
        self._keep(wire.EVALUATE, round, model, about, parts)

    def keep_figures(self, round: int, about: str, figures: NDArray[np.float64]) -> None:
        """Keep figures of the site's models until it agrees anew. Under one app, agreed to again or not, they are in
        sums over the same sites only: what it trains alone is nearly the same, and two others tell their difference."""
        self._keep(wire.SITES, round, self.terms.app, about, {wire.FIGURES: torch.from_numpy(figures)})

    @property
    def has_figures(self) -> bool:
        """Whether there are any since the site agreed."""
        return self._path(wire.SITES).exists()

    def answer(self, asked: wire.SumAsked, client: int | None = None) -> RecordDict:
        """Mask the answer that was kept last for a purpose."""
        path = self._path(asked.purpose)
        with placed(f"{path}: ", RunError, of=RunError):
            parts, notes = load_tensors(path)
        if notes["round"] != asked.round:
            raise RunError(f"asked for round {asked.round} again, and this site last answered round {notes['round']}")
        weights, weight = dict(zip(asked.members, asked.weights, strict=False)), 0.0
        if asked.purpose == wire.TRAIN:
            weight = weights.get(self.name, float(parts["weight"]))
            values = self._encoded(parts, weight, len(asked.members))
        else:
            values = {name: form.encode(parts[name].numpy()) for name, form in FORMS[asked.purpose].items()}
        sites = sorted([self.peers[name].hex(), weights.get(name, 0.0).hex()] for name in asked.members)
        among = hashlib.sha256(json.dumps([sites, weight.hex()]).encode()).hexdigest()
        return self._masked(values, asked, notes["about"], client, notes["answer"], among)

    def answer_over_all(self, asked: wire.SumAsked, about: str, values: NDArray[Any]) -> RecordDict:
        """Mask an answer about this site's label counts or numbers."""
        return self._masked({wire.ANSWER: values}, asked, about)

    def unmask(self, asked: wire.SumAsked) -> RecordDict:
        """Open this site's part of a sum, once, and only over the members and weights that it masked for."""
        self._members(asked)
        self._check_figures(asked.purpose)
        sum = MaskedSum(asked.purpose, asked.round, _name(asked))
        own = self.book.open(self.terms, sum, self._noise_of(asked.purpose), closes=asked.purpose not in wire.OVER_ALL)
        return RecordDict({wire.OPENING: ConfigRecord({wire.OWN: own})})

    def _noise_of(self, purpose: str) -> Protection | None:
        """Return the noise of a sum, which is drawn anew and charged each time; None: the sum has none."""
        return self.protection if purpose == wire.TRAIN else None

    def _members(self, asked: wire.SumAsked) -> set[str]:
        """Return the members of a sum, sites of this federation with this one among them, each named once."""
        members = set(asked.members)
        if self.name not in members or not members <= self.peers.keys() or len(members) < len(asked.members):
            names = ", ".join(asked.members)
            raise NotAgreedError("members", f"a sum over {names:.{MOST_SAID}} is none of this federation's")
        return members

    def _check_figures(self, purpose: str) -> None:
        is_agreed = self.terms.own_figures and self.plan.agreement.site_figures == "summed"
        why = "the server asks for figures of its models; agreed to none"
        refuse_unless(is_agreed or purpose != wire.SITES, "own_figures", why)

    def _check_weights(self, values: Sequence[float], members: int) -> None:
        if self.plan.by_sums is not None:
            return refuse_unless(not values, "weights", "the server tells some, and each site computes its own")
        is_share = all(0 <= value <= 1 for value in values) and abs(sum(values) - 1) <= ROUNDING
        why = "expected one from 0 to 1 for each site that is asked, sum 1"
        refuse_unless(len(values) == members and is_share, "weights", why)
        why = f"one site would have {max(values):.3g} of the weight, so that the sum would be nearly its update; "
        why += f"this site agreed to {self.limit:g} at most"
        refuse_unless(max(values) <= self.limit * (1 + LIMIT_ROUNDING), "weights", why)
        reason = wire.over_few(values, self.least)
        return refuse_unless(not reason, "weights", reason)

    def _encoded(self, parts: Mapping[str, Tensor], weight: float, members: int) -> dict[str, NDArray[Any]]:
        before = f"{wire.REPLY}."
        tensors: dict[str, Any] = {name: parts[name] for name in TENSORS}
        update = Update(
            client=0,
            **tensors,
            steps=int(parts["steps"]),
            loss=float(parts["loss"]),
            reply={name.removeprefix(before): part for name, part in parts.items() if name.startswith(before)},
        )
        noise = None if self.protection is None else self.protection.noise
        return encode_update(self.plan.method, update, weight, members, noise, own_weight=self.plan.by_sums is not None)

    def _masked(
        self,
        values: Mapping[str, NDArray[Any]],
        asked: wire.SumAsked,
        about: str,
        client: int | None = None,
        answer: str = "",
        among: str = "",
    ) -> RecordDict:
        agreement = self.plan.agreement  # with means that the server tells: all are to have the same
        context = asked.context(f"{self.terms.app} {wire.fingerprint([*agreement.mean, *agreement.std])} {about}")
        masked, own = mask(values, self.key, self.peers, context)
        sum = MaskedSum(asked.purpose, asked.round, _name(asked), answer, among)
        deadline = time.time() + PATIENCE + 2 * self.plan.agreement.round_timeout
        self.book.mask(self.terms, sum, own, deadline, noisy=self._noise_of(asked.purpose) is not None)
        return wire.masked_content(asked, masked, client)

    def _keep(self, purpose: str, round: int, answer: str, about: str, parts: Mapping[str, Tensor]) -> None:
        private_folder(self.folder)
        same = hashlib.sha256(f"{purpose} {answer}".encode()).hexdigest()
        save_tensors(self._path(purpose), parts, {"round": round, "answer": same, "about": about})

    def _path(self, purpose: str) -> Path:
        return self.folder / f"{purpose}.safetensors"


def _name(asked: wire.SumAsked) -> str:
    whole = [asked.session, asked.round, asked.attempt, asked.purpose, sorted(asked.members)]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()
