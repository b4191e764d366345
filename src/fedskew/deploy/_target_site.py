"""Counts of a model's outcomes on samples at sites, from which the target's label mix is estimated.

Sites send how many test samples of each class are in each outcome cell, in place of the confusion matrix, whose columns
these cells divide. The target site sends how many of its samples without labels are in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._evaluations import SiteEvaluation
from fedskew.experiment import Config
from fedskew.report import SeedRun

IntArray = NDArray[np.int64]
NAMED = 10
"""Most classes whose shares are logged."""


def tables_of(evaluations: Mapping[int, SiteEvaluation], reduced: tuple[int, float] | None) -> dict[int, IntArray]:
    """Return the tables that an estimate is made from: those of sites that sent one with a sample in it.

    Args:
        evaluations: Evaluations by client index.
        reduced: The site whose samples count less than it said, and the factor (see `Together`), here too.
    """
    tables = {client: one.outcomes for client, one in evaluations.items() if one.outcomes is not None and one.samples}
    if reduced is not None and reduced[0] in tables:
        client, factor = reduced
        tables[client] = np.rint(tables[client] * factor).astype(np.int64)
    return tables


def target_site_in_words(config: Config, agreement: Agreement) -> list[str]:
    """Say who the target site is, what it sends, and what bounds it if it lies; nothing where there is none.

    Args:
        config: The config that was simulated.
        agreement: What server and sites agree on.
    """
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


def target_line(run: SeedRun) -> str | None:
    """Say what came of the last estimate of the target's mix in a run; None where there was none yet.

    Args:
        run: The run, finished or not.
    """
    records = [record for record in run.rounds if record.target is not None]
    if not records:
        return None
    good = [record for record in records if record.target is not None and record.target["mix"] is not None]
    shown = (good or records)[-1]
    assert shown.target is not None, "chosen by that"
    said = f"round {shown.round}: {in_words(shown.target, tuple(run.class_names), 'the target site')}"
    last = records[-1].target
    if last is None or records[-1] is shown:
        return said
    return f"{said}; not estimated in round {records[-1].round}: {last['skipped']}"


def in_words(record: Mapping[str, Any], classes: tuple[str, ...], site: str) -> str:
    """Describe the estimate of a round in one line.

    Args:
        record: What the round's record has of it (`RoundRecord.target`).
        classes: Class names.
        site: Name of the target site.
    """
    unused = f"; not used: {record['unused']}" if record["unused"] else ""
    if record["mix"] is None:
        return f"the target's label mix is not estimated: {record['skipped']}{unused}"
    shares = sorted(zip(record["mix"], record["se"], classes, strict=True), key=lambda share: -share[0])
    said = ", ".join(f"{name} {100 * mix:.1f} ± {100 * error:.1f} %" for mix, error, name in shares[:NAMED])
    more = f" and {len(shares) - NAMED} more classes" if len(shares) > NAMED else ""
    p = "" if record["p"] is None else f" (p = {record['p']:.2g})"
    return (
        f"the target's label mix, by {record['samples']} samples of {site} and {record['held_out']} test samples: "
        f"{said}{more}{p}{unused}"
    )
