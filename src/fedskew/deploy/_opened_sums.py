"""The answers without noise that a site has opened in sums, so that it adds each to no sum over other sites.

Two sums of the same answers over different sites tell their difference: one site's update or confusion matrix. The file
outlives runs and agreements, as the ledgers of label counts and of noise on updates do.
"""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock

from fedskew.deploy._ledger import NotAgreedError
from fedskew.errors import RunError
from fedskew.files import private_folder, write_text, writing

FILE = "opened.json"


class OpenedSums:
    """The answers that a site has opened, by hash, each with the sites of its sum; mode 0600 in its state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FILE

    def check(self, answer: str, among: str) -> None:
        """Refuse an answer that was opened in a sum over other sites, or with other weights.

        Args:
            answer: Hash of the answer.
            among: Hash of the sites and weights of the sum that it is now for.

        Raises:
            NotAgreedError: It was.
            RunError: The file can't be read.
        """
        if self._read().get(answer, among) != among:
            raise NotAgreedError(
                "members",
                "members: this site has opened its evaluation of this model, or the same training of it, in a sum over "
                "other sites or with other weights; two such sums would tell single sites' parts",
            )

    def add(self, answer: str, among: str) -> None:
        """Write down that an answer is opened, before it is.

        Args:
            answer: See `check`.
            among: See `check`.

        Raises:
            NotAgreedError: See `check`.
            RunError: The file can't be read or written.
        """
        private_folder(self._folder)
        with FileLock(self._folder / f"{FILE}.lock", mode=0o600):
            self.check(answer, among)
            with writing(self._path):
                write_text(self._path, json.dumps(self._read() | {answer: among}, indent=1), private=True)

    def _read(self) -> dict[str, str]:
        if not self._path.exists():
            return {}
        try:
            return {str(answer): str(among) for answer, among in json.loads(self._path.read_text("utf-8")).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise RunError(
                f"{self._path}: can't be read ({type(error).__name__}), so no sum is opened; restore it. Without it, "
                "what was opened is forgotten"
            ) from None
