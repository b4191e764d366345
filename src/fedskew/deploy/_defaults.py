"""A federation as it begins: what `deploy init` and `deploy local` alike make of a config and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedskew import components, methods
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import LARGEST_SHARE, Agreement
from fedskew.deploy.keys import key_line
from fedskew.engine import cohort_size
from fedskew.errors import CombinationError
from fedskew.experiment import Config
from fedskew.sums import Key, SumContext
from fedskew.weighting import AFL

CLIPPING = {"name": "norm_clipping"}


class Draft(NamedTuple):
    """What a federation's folder is written from.

    Attributes:
        config: The config, with what it left open.
        agreement: What server and sites agree on.
        mask_keys: The sites' keys of masked sums; None where updates are plain.
        notes: What the operator should know of it, a line each.
    """

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
    ) -> Draft:
        """Make a federation's config, agreement and keys from the options of `deploy init` and `deploy local`.

        Args:
            config: The config that was simulated.
            sites: Names of the sites that train.
            samples: The agreement's keys that describe samples: `classes`, `shape` and so on.
            label_counts: See `Agreement`.
            epsilon: See `Agreement`.
            updates: See `Agreement`; None: masked where label counts are summed, else as the config says.
            target_site: See `Agreement`.

        Returns:
            The draft; whether it can be played, `write_federation` checks.

        Raises:
            ConfigError: A value is wrong.
        """
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
        if config.privacy is not None and label_counts == "exact":
            tree["evaluation"] = "none"
            notes.append(
                "evaluation = 'none' is written to deploy.toml, as confusion matrices would have no noise; with "
                "'confusion' there, before sites agree, sums of these are known"
            )
        return Draft(config, Agreement.resolve(tree), keys, tuple(notes))


def with_defences(config: Config, sites: int) -> Config:
    """Fill in what bounds a site that lies, where a config leaves it open.

    `training.weight_limit` becomes half of the weight at most, and at most twice an equal share of a round, so that it
    can hold while half of its sites answer. Masked updates take less than half: with the limit 1 / n no sum is in
    effect one over fewer than n sites. Of one or two sites in a round a limit would make all weights equal: there is
    none. Plain updates are clipped to the median length of a round where the config has no robust aggregation, unless
    the method takes none, or lengths are part of it (AFL, FedEXP, FedNova): clipping cost these 4 to 7 points.
    """
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
