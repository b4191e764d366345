"""What a site has to agree to before it can take part, worked out from the app, its data and its book."""

from __future__ import annotations

from pathlib import Path

from fedskew.deploy._agreement import Agreement, read_agreement
from fedskew.deploy._app_files import app_hash, read_app, running
from fedskew.deploy._book import Book, cost, now
from fedskew.deploy._disclosures import disclosures
from fedskew.deploy._mask_keys import read_mask_key
from fedskew.deploy._releases import CountsRequest, converted
from fedskew.deploy._site_data import SiteData, load_site
from fedskew.deploy._terms import Terms, read_terms, terms_path
from fedskew.experiment import Config, read
from fedskew.files import writing
from fedskew.privacy import most_rounds
from fedskew.sums import LEAST


def propose_terms(app: str, config: Config, agreement: Agreement, data: SiteData, before: Terms | None = None) -> Terms:
    """Work out what a site has to agree to, so that it can take part.

    Rounds are those that the config needs. The total of epsilon is what was spent, plus one release if there is none
    yet for these classes, if the data have changed since, or if the last is too noisy for the server. That of updates
    is what was spent, plus what the config's `[privacy]` allows one run; to agree to the same app once more does not
    raise it.

    Args:
        app: Hash of the app's files.
        config: The app's config.
        agreement: The app's `deploy.toml`.
        data: The site's samples.
        before: What the site agreed to last.
    """
    epsilon, total, mark = agreement.epsilon, None, now() if before is None else before.data
    if epsilon is not None and data.state is not None:
        book, request = Book(data.state), CountsRequest.of(agreement)
        kept, total = book.covering(agreement.classes), book.spent(agreement.neighbours)
        if kept is not None:
            mark = now() if book.why_another(request, data.counts) else kept.data
        if kept is None or kept.data != mark:
            total += epsilon
        if before is not None and before.epsilon_total is not None:
            total = max(total, converted(before.epsilon_total, before.neighbours, agreement.neighbours))
    return Terms(
        schema=1,
        agreed=now(),
        app=app,
        rounds=config.training.rounds,
        sum_sites=max(agreement.sum_sites, LEAST if before is None else before.sum_sites),
        updates_epsilon=_epsilon_of_updates(app, config, data, before),
        updates_delta=None if config.privacy is None else config.privacy.delta,
        data=mark,
        epsilon=epsilon,
        epsilon_total=total,
        neighbours=agreement.neighbours,
    )


def _epsilon_of_updates(app: str, config: Config, data: SiteData, before: Terms | None) -> float | None:
    """Return the most that updates with noise may cost; None where they have none."""
    section = config.privacy
    if section is None or data.is_unlabelled:
        return None
    if before is not None and before.app == app and before.updates_epsilon is not None:
        return before.updates_epsilon
    charged = () if data.state is None else Book(data.state).noises
    if not charged:
        return section.epsilon
    most = most_rounds(section.noise, section.epsilon, section.delta)
    return cost([*charged, *[section.noise] * most], section.delta)


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
        for path in before.folder(state).glob("*.safetensors"):
            with writing(path):
                path.unlink(missing_ok=True)
        Book(state).forget_masked(before.app)
    terms.write(terms_path(data))


def agree(data: Path, app: Path) -> Terms:
    """Agree to an app as it stands, for a site: write `agreed.toml` beside its `data.toml`.

    Raises:
        FedskewError: The app or the data can't be read, or do not fit each other.
    """
    files, agreement = read_app(app), read_agreement(app / "deploy.toml")
    if agreement.updates == "masked":
        read_mask_key(data, agreement.keys)
    path, site = terms_path(data), load_site(data, agreement)
    before = read_terms(path) if path.exists() else None
    with running(files) as folder:
        config = read(folder / "run.toml")
        disclosures(config, agreement, site)  # which works out all that would leave, or says why it can't be deployed
    terms = propose_terms(app_hash(files), config, agreement, site, before)
    accept_terms(terms, data, site.state, before)
    return terms
