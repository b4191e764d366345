"""A federation before it runs: what `deploy init` and `deploy local` make of a config, and how it plays on paper.

Nothing is trained: rounds are selected and weighed with label counts of a run before, or made-up ones, to say what
would be refused, what the weight limit does, and what the loss of a site stops.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedskew import components, methods
from fedskew.data import TableSchema, encoder_of
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import LARGEST_SHARE, Agreement
from fedskew.deploy._arrays import FloatArray
from fedskew.deploy._plan import Plan
from fedskew.deploy.keys import key_line
from fedskew.engine import Assignment, Backend, ClientStates, Cohort, Federation, Sent, ServerState, Update, cohort_size
from fedskew.engine.contracts import shortage
from fedskew.errors import CombinationError
from fedskew.experiment import Config
from fedskew.partition import DirichletByClass
from fedskew.randomness import Purpose, generator
from fedskew.sums import Key, SumContext
from fedskew.tables import grouped
from fedskew.weighting import AFL

ROUNDS = 20
CLIPPING = {"name": "norm_clipping"}


class Draft(NamedTuple):
    """What a federation's folder is written from: config, agreement, keys of masked sums, notes for the operator."""

    config: Config
    agreement: Agreement
    mask_keys: dict[str, Key] | None
    notes: tuple[str, ...]

    @staticmethod
    def of(
        config: Config,
        sites: Sequence[str],
        samples: Mapping[str, Any],
        label_counts: str = "exact",
        epsilon: float | None = None,
        updates: str | None = None,
        target_site: str | None = None,
    ) -> "Draft":
        """Make a federation's config, agreement and keys from the options of `deploy init` and `deploy local`;
        ConfigError for a wrong value. `samples` are the agreement's keys that describe these."""
        notes, keys = [], None
        if (updates or ("masked" if label_counts == "summed" else config.engine.updates)) == "masked":
            keys = {name: Key.generate() for name in sites}
            config = config.with_value("engine.updates", "masked")  # so that the same config simulates the same
        if label_counts == "summed":
            config = config.with_value("engine.label_counts", "summed")
        config = with_defences(config, len(sites))
        tree = dict(samples) | {"sites": list(sites), "label_counts": label_counts, "updates": updates or "plain"}
        tree |= {key: value for key, value in (("epsilon", epsilon), ("target_site", target_site)) if value is not None}
        if keys is not None:
            tree |= {"updates": "masked", "keys": {name: key_line(key.public) for name, key in keys.items()}}
        table = None if samples.get("encoder") is None else encoder_of(samples["encoder"])
        if isinstance(table, TableSchema) and (config.privacy is not None or epsilon is not None):
            (middle, half), others = table.middles(), len(table.slots) - table.numbers
            tree |= {"mean": [*middle.tolist(), *[0.0] * others], "std": [*(half / 2).tolist(), *[1.0] * others]}
            notes.append(
                "mean and std in deploy.toml are of the schema's ranges, a quarter of each as its deviation, as sums "
                "of the sites' numbers would have no noise"
            )
        if config.privacy is not None and label_counts == "exact":
            tree["evaluation"] = "none"
            notes.append(
                "evaluation = 'none' is written to deploy.toml, as confusion matrices would have no noise; with "
                "'confusion' there, before sites agree, sums of these are known"
            )
        return Draft(config, Agreement.resolve(tree), keys, tuple(notes))


def with_defences(config: Config, sites: int) -> Config:
    """Fill in what bounds a site that lies, where a config leaves it open. `training.weight_limit` becomes half of the
    weight at most, and at most twice an equal share of a round, so that it can hold while half of its sites answer; of
    masked updates less than half, as with 1 / n no sum is in effect one over fewer than n sites; of one or two sites
    none, as all weights would be equal. Plain updates are clipped to a round's median length where the config has no
    robust aggregation, unless the method takes none, or lengths are part of it (AFL, FedEXP, FedNova: it cost these 4
    to 7 points)."""
    cohort, masked = cohort_size(config.training.participation, sites), config.engine.updates == "masked"
    if cohort <= 2:
        return config
    if config.training.weight_limit is None:
        most = wire.even(SumContext.LEAST) if masked else LARGEST_SHARE
        config = config.with_value("training.weight_limit", float(f"{min(most, 2 / cohort):.3g}"))
    if masked or config.method.get("aggregation", {"name": "mean"})["name"] != "mean":
        return config
    try:
        method = methods.build(config.method | {"aggregation": CLIPPING}, config.training.momentum)
    except CombinationError:
        return config
    if components.has(method.server_update, "reads_each_update") or isinstance(method.weighting, AFL):
        return config
    return config.with_value("method.aggregation", CLIPPING)


class Rehearsal(NamedTuple):
    """A federation on paper: its plan, what plays its rounds, and sites by how many rounds stand still without one."""

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
            name = methods.named("weighting", federation.method.weighting)
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
        """Say what the loss of each site does, the graver first, without what is `harmless` if that is False."""
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
    """Make a federation as its server will (ConfigError if it won't), and play the loss of each of its sites."""
    if counts is None:
        counts = example_counts(len(agreement.names), len(agreement.classes))
    plan = Plan.of(config, agreement, target)
    federation = plan.federation(Nobody(), counts, ClientStates(), plan.mix(counts, target))
    losses = grouped(agreement.names, lambda name: _loss(plan, federation, agreement.names.index(name)))
    return Rehearsal(plan, federation, losses)


def example_counts(sites: int, classes: int) -> FloatArray:
    """Make label counts `(sites, classes)` by a Dirichlet partition (beta 0.3) of 100 samples a site."""
    labels = np.arange(100 * sites) % classes
    rows = DirichletByClass(0.3, min_size=5).split(labels, sites, generator(0, Purpose.PARTITION), num_classes=classes)
    return np.array([np.bincount(labels[own], minlength=classes) for own in rows], dtype=np.float64)


def _loss(plan: Plan, federation: Federation, client: int) -> tuple[float, str]:
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
            weights = federation.codec.weigh(federation, state, cohort.only(cohort.ids[there].tolist())).values.tolist()
        return wire.why_no_sum(weights, plan.fewest, federation.weight_limit if weighed else None, len(cohort.ids))
    if not number:
        return "nobody else takes part in them"
    return "" if number >= federation.method.aggregation.least else shortage(federation.method.aggregation, number)


class Nobody(Backend):
    """A backend of sites that are not asked."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        return []
