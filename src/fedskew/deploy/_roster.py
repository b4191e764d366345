"""The sites' label counts: queried once and stored in the run folder, or only ever summed over all sites."""

import json
import math
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict

from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import FloatArray, IntArray, RefusedError
from fedskew.deploy._ask import PAUSE, Members
from fedskew.deploy._log import LOG, utc_now
from fedskew.deploy._replies import MOST_SAMPLES, check_counts, check_only_samples, only
from fedskew.deploy.terms import NOISIEST, CountsRequest, is_too_noisy
from fedskew.errors import EndedEarlyError, RunError
from fedskew.files import write_text
from fedskew.labels import SENSITIVITY
from fedskew.tables import json_text

FILE = "deployment.json"
ABOUT = "label counts"
RETRY = 30.0
"""Seconds before a site that did not report its label counts is queried again."""

NOISE_SPREAD = 40.0
"""Laplace noise exceeds this multiple of its scale once in 10^17 draws."""

FIXED = {"sites", "target_site", "classes", "shape", "tokens", "multi_label", "mean", "std", "window", "encoder"} | {
    *("label_counts", "epsilon", "neighbours", "updates", "keys", "input_profile", "input_cells")
}
"""Keys of an agreement that stay as they were when the run began."""


class Roster:
    """The sites of one run and their label counts, stored in `deployment.json` in the run folder. The run is named by
    hex digits, and the session by that and how often the server was started: of a round that is played again, sites
    mask nothing twice under one name. `unreported` says why the last query got no counts from a site, by name;
    `samples` is how many all hold, where counts are only ever summed."""

    def __init__(self, members: Members, agreement: Agreement, folder: Path) -> None:
        self.members, self._agreement, self._path = members, agreement, folder / FILE
        self.names = agreement.names
        stored = self._read()
        self.run: str = stored["run"] if stored else secrets.token_hex(8)
        self._starts = int(stored.get("starts", 0)) + 1 if stored else 1
        self.session = f"{self.run}.{self._starts}"
        self._reports: dict[str, dict[str, Any]] = stored["sites"] if stored else {}
        self._retry_at: dict[int, float] = {}
        self.unreported: dict[str, str] = {}
        self._outdated: set[str] = set()
        self._asked_again: dict[str, float] = {}
        self.samples = float(len(self.names))

    @property
    def counts(self) -> FloatArray:
        """Label counts as the server knows them, `(sites, classes)`: 0 before a site's report; spread evenly over
        classes where they are withheld, and over sites too where they are only ever summed."""
        classes = len(self._agreement.classes)
        if self.is_summed:
            return np.full((len(self.names), classes), self.samples / (len(self.names) * classes))
        rows = np.zeros((len(self.names), classes))
        for row, name in zip(rows, self.names, strict=True):
            if (report := self._reports.get(name)) is not None:
                row[:] = report["counts"] if report["counts"] is not None else report["samples"] / classes
        return rows

    @property
    def sizes(self) -> FloatArray:
        """Samples of each site as far as the server knows them, `(sites,)`; of several labels, counts sum to others."""
        sizes: FloatArray = self.counts.sum(axis=1)
        if self._agreement.multi_label and not self.is_summed:
            sizes = np.array([self._reports.get(name, {}).get("samples", 0.0) for name in self.names])
        return sizes

    @property
    def is_summed(self) -> bool:
        """Whether label counts are only ever summed, so that no site is asked for its own."""
        return self._agreement.label_counts == "summed"

    @property
    def shown(self) -> tuple[tuple[str, ...], IntArray]:
        """Class names and label counts for a run's report; a single class if labels are withheld."""
        counts, agreement = self.counts, self._agreement
        if agreement.label_counts in ("withheld", "summed") and not agreement.evaluates:
            return (f"labels {agreement.label_counts}",), np.rint(counts.sum(axis=1, keepdims=True)).astype(np.int64)
        return tuple(agreement.classes), np.rint(counts).astype(np.int64)

    def reported(self, client: int) -> str:
        """Return the hash of what a site reported (see `fingerprint`), by which it notices that its counts changed."""
        report = self._reports.get(self.names[client])
        if report is None:
            return ""
        samples = [report["samples"]] if "samples" in report else []
        return wire.fingerprint([*(report["counts"] or ()), *samples])

    def slack(self, client: int) -> float:
        """Return by how many samples a site may differ from its reported counts; above 0 only if these are noisy."""
        if self.is_summed:
            return MOST_SAMPLES if self._agreement.multi_label else self.samples  # labels don't tell how many there are
        epsilon = self._reports.get(self.names[client], {}).get("epsilon", self._agreement.epsilon)
        if epsilon is None:
            return 0.0
        request = CountsRequest.of(self._agreement)
        scale = SENSITIVITY[request.neighbours] * request.each / epsilon
        return float(NOISE_SPREAD * scale * len(self._agreement.classes))

    def ask_again(self, name: str) -> None:
        """Query the label counts of a site once more before the next round; until it replies, the old ones hold."""
        now = time.monotonic()
        if now < self._asked_again.get(name, now):
            return
        LOG.info("%s: its label counts have changed; they are asked for again", name)
        self._outdated.add(name)
        self._asked_again[name] = now + RETRY
        self._retry_at.pop(self.names.index(name), None)

    def gather(self) -> None:
        """Query label counts until all sites have reported, or enough have when the start timeout has passed, and store
        them with their privacy parameters. A resumed run asks nobody twice: each release of counts costs privacy."""
        agreement, start = self._agreement, self._agreement.start_timeout
        began, logged = time.monotonic(), 0.0
        while not self.is_summed:
            self.query_newcomers(max(min(RETRY, start), start - (time.monotonic() - began)))
            missing = ", ".join(name for name in self.names if name not in self._reports)
            waited, reported = time.monotonic() - began, len(self._reports)
            if not missing or (reported >= agreement.min_sites and waited >= start):
                if missing:
                    LOG.warning("training begins without %s; a site that connects later joins then", missing)
                break
            if waited >= max(agreement.idle_timeout, start):
                raise EndedEarlyError(
                    f"{reported} of {len(self.names)} sites have reported their label counts after {waited:.0f} s, and "
                    f"training needs {agreement.min_sites}; start again when {missing} can be reached"
                )
            if time.monotonic() - logged >= 60.0:
                LOG.info("waiting for the label counts of %s", missing)
                logged = time.monotonic()
            time.sleep(min(PAUSE, start - waited) if waited < start else PAUSE)
        self._write()

    def query_newcomers(self, timeout: float, without: Collection[int] = ()) -> bool:
        """Query connected sites that have not reported yet, or whose counts changed; return whether any reported."""
        if self.is_summed:
            return False
        now, current = time.monotonic(), self._reports.keys() - self._outdated
        clients = [
            client
            for client in self.members.online()
            if client not in without and self.names[client] not in current and now >= self._retry_at.get(client, now)
        ]
        if not clients:
            return False
        self._retry_at |= dict.fromkeys(clients, now + RETRY)
        contents = {client: RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 0})}) for client in clients}
        replies = self.members.ask(MessageType.QUERY, contents, self._report, ABOUT, timeout)
        self.unreported |= {self.names[client]: reason for client, reason in replies.missing.items()}
        for client, report in replies.valid.items():
            name = self.names[client]
            self._reports[name] = report | {"node": str(self.members.nodes[client]), "at": utc_now()}
            self.unreported.pop(name, None)
            self._outdated.discard(name)
        if replies.valid:
            self._write()
        return bool(replies.valid)

    def _report(self, reply: RecordDict, client: int) -> dict[str, Any]:
        agreement = self._agreement
        if agreement.label_counts == "withheld":
            return {"counts": None, "samples": check_only_samples(reply), "label_counts": "withheld"}
        several, classes = agreement.multi_label, len(agreement.classes)
        counts = check_counts(reply, classes, whole=agreement.label_counts == "exact", several=several)
        report: dict[str, Any] = {"counts": counts[:classes].tolist(), "label_counts": agreement.label_counts}
        if several:
            report["samples"] = counts[-1]
        if agreement.epsilon is not None:
            own = only(MetricRecord, reply).get("epsilon")  # another one, if the site answers from an earlier release
            epsilon = own if isinstance(own, int | float) and 0 < own < math.inf else agreement.epsilon
            if is_too_noisy(epsilon, agreement.epsilon):
                raise RefusedError(
                    f"its release has epsilon {epsilon:g}, over {NOISIEST:g} times noisier than the agreed "
                    f"{agreement.epsilon:g}; the site can make a new one: fedskew deploy site --check data.toml"
                )
            report |= {"epsilon": epsilon, "neighbours": agreement.neighbours}
        return report

    def _read(self) -> Mapping[str, Any] | None:
        if not self._path.exists():
            return None
        try:
            stored: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            began = stored["agreement"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(
                f"{self._path}: can't be read ({type(error).__name__}); restore it, or begin a new run elsewhere"
            ) from None
        now = self._agreement.tree()
        for key in sorted(FIXED):
            if began.get(key) != now.get(key):
                raise RunError(
                    f"{self._path}: this run began with {key} = {began.get(key)}, but deploy.toml now says "
                    f"{now.get(key)}; change it back, or begin a new run elsewhere"
                )
        return stored

    def _write(self) -> None:
        content = {
            "run": self.run,
            "starts": self._starts,
            "agreement": self._agreement.tree(),
            "sites": self._reports,
            "label_counts": self.shown[1].tolist(),
        }
        write_text(self._path, json_text(content), private=True)
