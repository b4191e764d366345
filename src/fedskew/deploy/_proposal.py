"""The terms that a site has to agree to before it can take part, worked out from the app and the site's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fedskew.deploy._agreement import Agreement, method_of, read_agreement
from fedskew.deploy._app_files import app_hash, read_app, running
from fedskew.deploy._arrays import HEADER, ModelLayout
from fedskew.deploy._disclosures import masked_bytes, returned_specs, sum_specs
from fedskew.deploy._finish import questions_of
from fedskew.deploy._ledger import CountsAsked, Ledger, converted, now
from fedskew.deploy._mask_keys import read_mask_key
from fedskew.deploy._masks import forget_kept
from fedskew.deploy._site_data import SiteData, load_site
from fedskew.deploy._spending import Spending, cost
from fedskew.deploy._terms import Terms, read_terms, terms_path
from fedskew.experiment import Config, make_network, read
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.privacy import most_rounds
from fedskew.sums import LEAST
from fedskew.weighting import BySums


def propose_terms(
    app: str,
    config: Config,
    agreement: Agreement,
    data: SiteData,
    before: Terms | None = None,
    may_build: bool = True,
) -> Terms:
    """Work out what a site has to agree to, so that it can take part.

    Rounds, epochs and bytes are those that the config needs. The total of epsilon is what was spent, plus one release
    if there is none yet for these classes, if the data have changed since, or if the last is too noisy for the server.
    That of updates is what was spent, plus what the config's `[privacy]` allows one run; to agree to the same app once
    more does not raise it.

    Args:
        app: Hash of the app's files.
        config: The app's config.
        agreement: The app's `deploy.toml`.
        data: The site's samples.
        before: What the site agreed to last.
        may_build: Whether network and method may be built. If not, what follows from them is what the site agreed to
            for the same app, or else unknown: `bytes` is 0.

    Returns:
        The terms.
    """
    if may_build:
        replies = _replies(config, agreement)
    elif before is not None and before.app == app:
        replies = before.model_dump(include={"returns", "finish", "questions", "most_questions", "bytes"})
    else:
        replies = {"bytes": 0}
    epsilon, total, mark = agreement.epsilon, None, now() if before is None else before.data
    if epsilon is not None and data.state is not None:
        ledger = Ledger(data.state)
        kept, total = ledger.covering(agreement.classes), ledger.spent(agreement.neighbours)
        if kept is not None:
            release = CountsAsked(agreement.label_counts, tuple(agreement.classes), epsilon, agreement.neighbours)
            mark = now() if ledger.why_another(release, data.counts) else kept.data
        if kept is None or kept.data != mark:
            total += epsilon
        if before is not None and before.epsilon_total is not None:
            total = max(total, converted(before.epsilon_total, before.neighbours, agreement.neighbours))
    return Terms(
        schema=1,
        agreed=now(),
        app=app,
        label_counts=agreement.label_counts,
        evaluation=_evaluation(config, agreement, data),
        cells=config.target.is_estimated and data.unlabelled is not None,
        rounds=config.training.rounds,
        epochs=config.training.most_epochs,
        updates=agreement.updates,
        sum_sites=max(agreement.sum_sites, LEAST if before is None else before.sum_sites),
        updates_epsilon=_epsilon_of_updates(app, config, data, before),
        updates_delta=None if config.privacy is None else config.privacy.delta,
        data=mark,
        epsilon=epsilon,
        epsilon_total=total,
        neighbours=agreement.neighbours,
        **replies,
    )


def _replies(config: Config, agreement: Agreement) -> dict[str, Any]:
    """Work out the terms about a site's replies, which take network and method."""
    method = method_of(config, agreement)
    classes = len(agreement.classes)
    model = FlatModel(make_network(config, config.seeds[0], method, classes, tuple(agreement.shape)))
    returned, _ = returned_specs(config, agreement, method)
    bins = config.target.bins if config.target.is_estimated else 1
    specs = [*ModelLayout(model).specs.values(), *returned.values()]
    asked = [] if method.finish is None else questions_of(method.finish, model, agreement)
    sums = [sum(spec.bytes + HEADER for spec in one.arrays.values()) for one in asked]
    reply = sum(spec.bytes + HEADER for spec in specs) + 8 * classes * (classes + 1) * bins + HEADER
    if agreement.updates == "masked":
        reply = masked_bytes(sum_specs(config, agreement, method, model), agreement)
    return {
        "returns": sorted(returned),
        "finish": config.method["finish"]["name"] if "finish" in config.method else "",
        "questions": sorted({str(one) for one in asked}),
        "most_questions": _most_questions(method, agreement),
        "bytes": max([reply, *sums]),
    }


def _most_questions(method: Method, agreement: Agreement) -> int:
    """Return how many questions a site answers after the last round, or about its label counts before the first."""
    if agreement.label_counts == "summed":
        assert isinstance(method.weighting, BySums), "checked with the config"
        return method.weighting.most_questions
    return 0 if method.finish is None else method.finish.most_questions


def _epsilon_of_updates(app: str, config: Config, data: SiteData, before: Terms | None) -> float | None:
    """Return the most that updates with noise may cost; None where they have none."""
    section = config.privacy
    if section is None or data.is_unlabelled:
        return None
    if before is not None and before.app == app and before.updates_epsilon is not None:
        return before.updates_epsilon
    opened = () if data.state is None else Spending(data.state).noises
    if not opened:
        return section.epsilon
    most = most_rounds(section.noise, section.epsilon, section.delta)
    return cost([*opened, *[section.noise] * most], section.delta)


def _evaluation(config: Config, agreement: Agreement, data: SiteData) -> Literal["outcomes", "confusion", "none"]:
    if data.is_unlabelled or not agreement.evaluates:
        return "none"
    return "outcomes" if config.target.is_estimated else "confusion"


def accept_terms(terms: Terms, data: Path, state: Path | None, before: Terms | None = None) -> None:
    """Write `agreed.toml` beside a site's `data.toml`, and delete what the site kept to mask under the one before.

    Args:
        terms: What the site agrees to.
        data: The site's `data.toml`.
        state: The site's state folder.
        before: What the site agreed to last.

    Raises:
        RunError: The files can't be written or deleted.
    """
    if before is not None and state is not None:
        forget_kept(before.folder(state))
    terms.write(terms_path(data))


def agree(data: Path, app: Path) -> Terms:
    """Agree to an app as it stands, for a site: write `agreed.toml` beside its `data.toml`.

    Args:
        data: The site's `data.toml`.
        app: The app folder.

    Returns:
        What the site agreed to.

    Raises:
        FedskewError: The app or the data can't be read, or do not fit each other.
    """
    files, agreement = read_app(app), read_agreement(app / "deploy.toml")
    if agreement.updates == "masked":
        read_mask_key(data, agreement.keys)
    path, site = terms_path(data), load_site(data, agreement)
    before = read_terms(path) if path.exists() else None
    with running(files) as folder:
        terms = propose_terms(app_hash(files), read(folder / "run.toml"), agreement, site, before)
    accept_terms(terms, data, site.state, before)
    return terms
