"""The epsilon that a site's updates with noise have cost: each sum is recorded on its disk before its opening leaves.

The file outlives runs and agreements, as the ledger of label counts does: epsilon adds up over all federations that
name the same state folder. Each sum costs its Gaussian mechanism, whatever becomes of it at the server, so that a round
that is lost, and another on the same model, are paid for, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pydantic
from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from fedskew.deploy._ledger import ROUNDING, NotAgreedError, now
from fedskew.errors import RunError
from fedskew.experiment import Config
from fedskew.files import private_folder, write_text, writing
from fedskew.parameters import Positive
from fedskew.privacy import Protection, epsilon, most_rounds, together

FILE = "updates.json"


class OpenedSum(BaseModel):
    """A sum that a site opened, in which its update had noise.

    Attributes:
        at: When, UTC.
        sum: Which one, in words.
        noise: The noise multiplier.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: str
    sum: str
    noise: Positive


class Spent(NamedTuple):
    """A site's spending.

    Attributes:
        sums: Number of sums that it opened.
        epsilon: Their epsilon together.
        following: The same with one more.
    """

    sums: int
    epsilon: float
    following: float


class Spending:
    """The sums that a site opened with noise on updates, in a file of mode 0600 in its state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / FILE

    @property
    def noises(self) -> tuple[float, ...]:
        """The noise multiplier of each sum that was opened, the oldest first."""
        return tuple(entry.noise for entry in self._read())

    def spent(self, noise: float, delta: float) -> Spent:
        """Compute what the site has spent, and what one more sum would make of it.

        Args:
            noise: That sum's noise multiplier.
            delta: The delta.

        Raises:
            MissingPackageError: dp-accounting is not installed.
            RunError: The file can't be read.
        """
        noises = self.noises
        return Spent(len(noises), cost(noises, delta), cost([*noises, noise], delta))

    def check(self, protection: Protection) -> None:
        """Refuse a sum that the site could not open within its budget.

        Args:
            protection: The noise of its updates, and the budget that it agreed to.

        Raises:
            NotAgreedError: It would be beyond the budget.
            MissingPackageError: dp-accounting is not installed.
            RunError: The file can't be read.
        """
        noise, found = protection.noise.noise, self.spent(protection.noise.noise, protection.delta)
        if found.following > protection.epsilon * ROUNDING:
            raise NotAgreedError(
                "updates_epsilon",
                f"updates_epsilon: with one more sum of updates with noise {noise:g} this site would have spent "
                f"{found.following:.4g}, and it agreed to {protection.epsilon:.4g} (delta {protection.delta:g}); it "
                f"has opened {found.sums}, for {found.epsilon:.4g}",
            )

    def charge(self, sum: str, protection: Protection) -> None:
        """Write down that the site opens a sum, before the answer leaves.

        Args:
            sum: Which one, in words.
            protection: See `check`.

        Raises:
            NotAgreedError: It would be beyond the budget.
            MissingPackageError: dp-accounting is not installed.
            RunError: The file can't be read or written.
        """
        private_folder(self._folder)
        with FileLock(self._folder / f"{FILE}.lock", mode=0o600):
            self.check(protection)
            entries = [*self._read(), OpenedSum(at=now(), sum=sum, noise=protection.noise.noise)]
            with writing(self.path):
                text = json.dumps({"sums": [entry.model_dump() for entry in entries]}, indent=1)
                write_text(self.path, text, private=True)

    def _read(self) -> list[OpenedSum]:
        if not self.path.exists():
            return []
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            return [OpenedSum.model_validate(entry) for entry in kept["sums"]]
        except (OSError, ValueError, KeyError, TypeError, pydantic.ValidationError) as error:
            raise RunError(
                f"{self.path}: can't be read ({type(error).__name__}), so no update leaves this site; restore it. "
                "Without it, what was spent is forgotten"
            ) from None


def cost(noises: Sequence[float], delta: float) -> float:
    """Compute the epsilon of several sums together.

    Args:
        noises: Their noise multipliers.
        delta: The delta.

    Raises:
        MissingPackageError: dp-accounting is not installed.
    """
    return epsilon(together(noises), 1, delta) if noises else 0.0


def noise_in_words(config: Config) -> list[str]:
    """Say what the noise on updates costs a site.

    Args:
        config: The config.

    Returns:
        A line; none where updates have no noise.
    """
    section, rounds = config.privacy, config.training.rounds
    if section is None:
        return []
    all_rounds = epsilon(section.noise, rounds, section.delta)
    most = most_rounds(section.noise, section.epsilon, section.delta)
    return [
        f"privacy.noise = {section.noise:g}: a site that takes part in all {rounds} rounds spends epsilon "
        f"{all_rounds:.3g} (delta {section.delta:g}), and in {min(most, rounds)} of them at most, for an epsilon of "
        f"{section.epsilon:g}"
    ]
