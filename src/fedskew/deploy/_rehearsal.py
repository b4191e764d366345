"""A federation played on paper before it runs: what it would refuse, what its weight limit does, and what a loss stops.

Nothing is trained: rounds are selected and weighed with label counts of a run before, or made-up ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedskew import methods
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._disclosures import noise_in_words
from fedskew.deploy._plan import FloatArray, Plan
from fedskew.engine import Assignment, Backend, ClientStates, Cohort, Federation, Sent, ServerState, Update
from fedskew.engine.contracts import shortage
from fedskew.experiment import Config, read
from fedskew.partition import DirichletByClass
from fedskew.randomness import Purpose, generator
from fedskew.tables import counted

ROUNDS = 20


class Rehearsal(NamedTuple):
    """A federation on paper: its plan, what plays its rounds, and what becomes of it without a site.

    `losses` has the sites by the share of the rounds that stand still without one of them, and the reason.
    """

    plan: Plan
    federation: Federation
    losses: Mapping[tuple[float, str], Sequence[str]]

    def limit_in_words(self) -> str:
        """Say what the weight limit does in this federation, in one line."""
        federation, masked = self.federation, self.plan.agreement.updates == "masked"
        limit, cohort, of = federation.weight_limit, federation.cohort_size, len(federation.counts)
        if limit is None:
            return "training.weight_limit: none; one site may have all of the weight"
        if limit * cohort <= 1 + 1e-9:
            name = methods.key_of("weighting", federation.method.weighting).removeprefix("weighting.")
            return (
                f"training.weight_limit = {limit:g} makes all weights equal, as {cohort} of {of} sites take part in a "
                f"round: {name} never acts; take one above {1 / cohort:.3g}{'' if masked else ', or none'}"
            )
        whose, most = "an honest site" if masked else "a site", int(1 / limit + 1e-9)
        said = f"training.weight_limit = {limit:g}: the largest share of the weight that {whose} can have"
        fewest = self.plan.fewest
        if masked and wire.over_few([*[limit] * most, max(0.0, 1 - most * limit)], fewest):
            said += (
                ". Where sites have so much, a sum can be in effect one over too few, and its round stands still; up "
                f"to {wire.even(fewest):.3g} it never is"
            )
        return said

    def losses_in_words(self, harmless: bool = True) -> list[str]:
        """Say what the loss of each site does, a line for all sites with the same outcome; the graver first.

        `harmless` sites, without which rounds go on, may be left out.
        """
        agreement, found = self.plan.agreement, []
        if agreement.label_counts == "summed":
            found.append("training begins once label counts are summed over all sites: until then none may be lost")
        elif agreement.min_sites == len(agreement.sites):
            found.append(f"training begins once all sites are there (min_sites = {agreement.min_sites} in deploy.toml)")
        for (share, reason), names in sorted(self.losses.items(), key=lambda outcome: -outcome[0][0]):
            if not (harmless or reason):
                continue
            whom = f"any of {', '.join(names)}" if len(names) > 1 else names[0]
            rounds = "every round stands still" if share == 1 else f"{share:.0%} of the rounds stand still"
            found.append(f"without {whom}: {f'{rounds}, as {reason}' if reason else 'rounds go on with the others'}")
        return found


def rehearse(
    config: Config, agreement: Agreement, target: Path | None = None, counts: FloatArray | None = None
) -> Rehearsal:
    """Make a federation as its server will, and play the loss of each of its sites; ConfigError where the run would be
    refused. Without a file with the target mix the config's target is taken, and without label counts made-up ones."""
    if counts is None:
        counts = example_counts(len(agreement.names), len(agreement.classes))
    plan = Plan.of(config, agreement, target)
    federation = plan.federation(Nobody(), counts, ClientStates(), plan.mix(counts, target))
    losses: dict[tuple[float, str], list[str]] = {}
    for client, name in enumerate(agreement.names):
        losses.setdefault(_loss(plan, federation, client), []).append(name)
    return Rehearsal(plan, federation, losses)


def example_counts(sites: int, classes: int) -> FloatArray:
    """Make label counts `(sites, classes)` of sites that hold few classes: a Dirichlet partition (beta 0.3) of 100
    samples a site."""
    labels = np.arange(100 * sites) % classes
    rows = DirichletByClass(0.3, min_size=5).split(labels, sites, generator(0, Purpose.PARTITION), num_classes=classes)
    return np.array([np.bincount(labels[own], minlength=classes) for own in rows], dtype=np.float64)


def check_folder(folder: Path) -> list[str]:
    """Check that a federation's folder can be played; say what bounds its sites, and what the loss of each stops.

    The label counts are those of the newest run, where there is one, else made-up ones.

    Raises:
        ConfigError: The run would be refused.
    """
    config, agreement = read(folder / "app" / "run.toml"), Agreement.read(folder / "app" / "deploy.toml")
    target = folder / "server" / "target.csv"
    place = target if target.exists() else None
    runs = sorted((folder / "server" / "runs").glob("*/deployment.json"), key=lambda path: path.stat().st_mtime)
    counts, whose = None, "made-up label counts"
    if runs and agreement.label_counts in ("exact", "noisy"):
        counts = np.array(json.loads(runs[-1].read_text(encoding="utf-8"))["label_counts"], dtype=np.float64)
        whose = f"the label counts of {runs[-1].parent.name}"
    played = rehearse(config, agreement, place, counts)
    leaves_out = agreement.norm_action == "leave_out"
    bound = (
        f"norm_limit = {agreement.norm_limit:g}, norm_action = {agreement.norm_action}: what is so many times as large "
        f"as is likely is {'left out' if leaves_out else 'counted, and only reported'}"
    )
    if agreement.updates == "masked":
        bound = (
            f"updates = masked: the server sees sums over {agreement.sum_sites} sites at least, one of a round, so "
            "that nothing bounds what a site that lies sends, and a round is lost with a site that masks and does not "
            "open"
        )
    compared = agreement.updates == "plain" and agreement.label_counts == "exact"
    return [
        f"{folder}: can be played, by {counted(len(agreement.sites), 'site')}, with {whose}",
        bound,
        played.limit_in_words(),
        f"method.aggregation: {config.method.get('aggregation', {'name': 'mean'})['name']}",
        *played.losses_in_words(),
        "directions: updates are compared with those of sites that told the same labels, from four sites in a round"
        if compared
        else "directions: not compared, as that takes exact label counts and updates that are not masked",
        *noise_in_words(config),
        *target_site_in_words(config, agreement),
    ]


def target_site_in_words(config: Config, agreement: Agreement) -> list[str]:
    """Say who the target site is, what it sends, and what bounds it if it lies; nothing where there is none."""
    name, section = agreement.target_site, config.target
    if name is None or not section.is_estimated:
        return []
    cells = len(agreement.classes) * section.bins
    labels = "it trains, too" if name in agreement.sites else "it does not train, and sends no model"
    return [
        f"target_site = {name}: after round {section.warmup} and every {section.every} rounds it sends how many of "
        f"its samples without labels are in each of {cells} cells (class and confidence of the model); {labels}",
        f"what {name} sends decides towards which label mix sites are weighed; training.weight_limit, the weighting's "
        f"effective_clients, and target.on_misfit = {section.on_misfit} bound that (docs/threats.md of fedskew)",
    ]


def _loss(plan: Plan, federation: Federation, client: int) -> tuple[float, str]:
    """Play rounds without a site; return the share of those that stand still, and why."""
    state, reasons = federation.start(plan.model.read_state()), []
    for _ in range(ROUNDS):
        cohort, state = federation.select(state)
        reasons.append(_why_still(plan, federation, state, cohort, cohort.ids != client))
    still = [reason for reason in reasons if reason]
    return len(still) / ROUNDS, still[0] if still else ""


def _why_still(plan: Plan, federation: Federation, state: ServerState, cohort: Cohort, there: NDArray[np.bool_]) -> str:
    """Return why a round of the sites that are there would move nothing; empty if it would."""
    number = int(there.sum())
    if plan.agreement.updates == "masked":
        weighed = number >= plan.fewest and plan.agreement.label_counts != "summed"  # else each site weighs itself
        weights = [0.0] * number
        if weighed:
            weights = federation.codec.weigh(federation, state, cohort.take(there)).values.tolist()
        return wire.why_no_sum(weights, plan.fewest, federation.weight_limit if weighed else None, len(cohort.ids))
    if not number:
        return "nobody else takes part in them"
    return "" if number >= federation.method.aggregation.least else shortage(federation.method.aggregation, number)


class Nobody(Backend):
    """A backend of sites that are not asked."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        return []
