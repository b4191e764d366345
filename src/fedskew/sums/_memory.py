"""A site's memory of its masks, so that it opens each of them at most once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import RunError, SumsError
from fedskew.files import locked, private_folder, write_text
from fedskew.sums._context import LEAST, SumContext
from fedskew.sums._masking import Opening, Pending, answer

_FILE = "sums.json"


@dataclass(frozen=True)
class Memory:
    """A site's memory of its masks, a file that outlives the process.

        memory = Memory(state / "sums")
        memory.keep(pending, deadline=time.time() + 600)         # before the masked values are sent
        opening = memory.answer(context, arrived)                # at most once, whoever asks

    It opens a sum over all of its members, and no other: if a server told two sites different `arrived`, their answers
    together would open masks that neither would open alone. Where a site is lost, the server starts a new attempt
    without it (`attempt + 1`), of which nothing has been opened yet.

    A sum is identified by run, purpose, round and attempt. For each, only one mask is ever kept and one answer given;
    the seeds are deleted before the answer leaves. A new attempt deletes the seeds of earlier ones of the same run and
    purpose, answered or not, and `forget` those of any; which sums there were is never forgotten, as two masks of one
    sum would show their difference. So a server that goes back to an earlier round,
    because it was killed, uses a new run id (`SumContext.run`).

    Attributes:
        folder: Where the file is (`sums.json`, mode 0600); made if it is missing.
        least: Fewest members that the site lets a sum be over.
    """

    folder: Path
    least: int = LEAST

    def keep(self, pending: Pending, deadline: float) -> None:
        """Keep what `mask` returned.

        Args:
            deadline: The time after which the site opens it no more, in seconds since 1970 (`time.time`).

        Raises:
            SumsError: There was a mask for this sum already, or for a later one of the same run and purpose.
            RunError: The file is damaged, or can't be written.
        """
        context = pending.context
        private_folder(self.folder)
        with locked(self.folder, patience=30.0):
            sums = self._read()
            place = (context.round, context.attempt)
            before = sums.get(_series(context))
            if before is not None and tuple(before["last"]) >= place:
                round, attempt = before["last"]
                raise SumsError(
                    f"{context.name}: asked for values, and {pending.site} has masked some for round {round}, attempt "
                    f"{attempt} already"
                )
            sums[_series(context)] = {"last": place, "deadline": deadline, "pending": pending.to_json()}
            self._write(sums)

    def forget(self, before: float = math.inf) -> None:
        """Delete the seeds of what is not open yet; which sums there were stays known.

        Args:
            before: Only of what has its deadline before this time, in seconds since 1970.

        Raises:
            RunError: The file is damaged, or can't be written.
        """
        if not (self.folder / _FILE).exists():
            return
        with locked(self.folder, patience=30.0):
            sums = self._read()
            over = {series: one | {"pending": None} for series, one in sums.items() if one["deadline"] < before}
            if any(sums[series] != one for series, one in over.items()):
                self._write(sums | over)

    def answer(self, context: SumContext, arrived: Collection[str], now: float | None = None) -> Opening:
        """Answer a request to open a mask, and forget its seeds.

        Args:
            context: The sum. Only run, purpose, round and attempt are read; the rest is what the site remembers.
            arrived: Members that the sum is over, as the server says.
            now: The time, in seconds since 1970; None: by the clock.

        Raises:
            SumsError: It was answered already, the deadline is over, there is no mask for this sum, not all of its
                members arrived, or `answer` refuses. In the last two cases a later request may still be answered.
            RunError: The file is damaged, or can't be written.
        """
        with locked(self.folder, patience=30.0):
            sums = self._read()
            kept = sums.get(_series(context))
            if kept is None or tuple(kept["last"]) < (context.round, context.attempt):
                raise SumsError(f"{context.name}: asked to open a mask, and no values were masked for it")
            if tuple(kept["last"]) > (context.round, context.attempt) or kept["pending"] is None:
                raise SumsError(f"{context.name}: asked to open a mask that was opened or given up already")
            if (time.time() if now is None else now) > kept["deadline"]:
                raise SumsError(f"{context.name}: asked to open a mask after the site's deadline")
            pending = Pending.from_json(kept["pending"])
            opening = answer(pending, arrived, self.least)
            if lost := sorted(set(pending.context.members) - set(arrived)):
                raise SumsError(
                    f"{context.name}: asked to open a sum without {', '.join(lost)}, which was asked for values, too; "
                    "a site opens a sum over all members, and masks anew for another attempt without who is lost"
                )
            self._write(sums | {_series(context): kept | {"pending": None}})
        return opening

    def _read(self) -> dict[str, Any]:
        path = self.folder / _FILE
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: can't be read, so no mask is made or opened: {error}") from None

    def _write(self, sums: dict[str, Any]) -> None:
        path = self.folder / _FILE
        try:
            write_text(path, json.dumps(sums), private=True)
        except OSError as error:
            raise RunError(f"{path}: can't be written: {error.strerror or error}") from None


def _series(context: SumContext) -> str:
    return json.dumps([context.run, context.purpose])
