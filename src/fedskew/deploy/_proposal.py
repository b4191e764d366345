"""A look at an app before a site agrees to it: what would leave the site, what it has to agree to, and that it does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedskew import __version__
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._app_files import APP, OFFERED, AppFiles, app_changes, app_hash, read_app, running, take_offered
from fedskew.deploy._disclosures import Disclosure
from fedskew.deploy._folder import asked_of_site, other_code
from fedskew.deploy._log import utc_now
from fedskew.deploy._site_data import SiteData
from fedskew.deploy._terms import Terms, terms_path
from fedskew.deploy.book import Book, cost
from fedskew.deploy.keys import key_fingerprint, read_mask_key
from fedskew.deploy.releases import CountsRequest, converted
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import Config, read
from fedskew.files import writing
from fedskew.own_code import refused
from fedskew.privacy import COVERED, most_rounds
from fedskew.sums import SumContext

NOT_YET = "it takes the app's own code, which nothing runs before the app is agreed to"
"""Why a name is not imported while an app is only looked at."""


@dataclass(frozen=True)
class Look:
    """A site's look at an app, in which nothing of the app is run.

    Attributes:
        place: The site's `data.toml`.
        app: The app folder.
        files: The app's files.
        config: The app's config.
        agreement: The app's `deploy.toml`.
        data: The site's samples.
        before: What the site agreed to last; None: nothing yet.
        terms: What it has to agree to.
        leaves: All that will leave it.
        needs_code: Whether part of that is unknown until the app's own code may run.
    """

    place: Path
    app: Path
    files: AppFiles
    config: Config
    agreement: Agreement
    data: SiteData
    before: Terms | None
    terms: Terms
    leaves: tuple[Disclosure, ...]
    needs_code: bool

    @classmethod
    def at(cls, place: Path, app: Path | None = None) -> Look:
        """Look at an app: the given one, or else what the server sent last, or what came with the site's folder.

        Args:
            place: The site's `data.toml`.
            app: An app folder.

        Raises:
            FedskewError: The app or the data can't be read, or do not fit each other.
        """
        if not place.is_file():
            raise ConfigError(f"{place}: there is no such file; every site's folder has a data.toml")
        if app is None:
            offered = place.parent / OFFERED
            app = offered if offered.is_dir() else place.parent / APP
        files = read_app(app)
        agreement, config = Agreement.read(app / "deploy.toml"), Config.outline(app / "run.toml")
        data, path = SiteData.load(place, agreement), terms_path(place)
        if agreement.updates == "masked":
            read_mask_key(place, agreement.keys)
        before = Terms.read(path) if path.exists() else None
        may_build = not asked_of_site(config.model_dump())
        with refused(NOT_YET):
            config = read(app / "run.toml") if may_build else config
            terms = _terms(app_hash(files), config, agreement, data, before)
            leaves = Disclosure.all_of(config, agreement, data, may_build)
        if read_app(app) != files:
            raise RunError(f"{app}: has changed while it was looked at, as the server sent another app; look again")
        return cls(place, app, files, config, agreement, data, before, terms, leaves, not may_build)

    @property
    def is_agreed(self) -> bool:
        """Whether the site has agreed to these terms already."""
        before = self.before
        return before is not None and before == self.terms.model_copy(update={"agreed": before.agreed})

    @property
    def code(self) -> list[str]:
        """What the app brings that fedskew did not write, and that would run at the site."""
        return other_code(self.files)

    def lines(self) -> list[str]:
        """Say with whose keys the site masks, which app it looks at, and what changed since it agreed."""
        agreement, before, lines = self.agreement, self.before, []
        if agreement.updates == "masked":
            name, _ = read_mask_key(self.place, agreement.keys)
            lines += [
                f"Updates are masked among {', '.join(agreement.names)}: a sum is over {agreement.sum_sites} of these "
                "or more, and this site opens one of a round.",
                f"Their keys are {key_fingerprint(agreement.keys)}: compare this with the other sites, by telephone. "
                "Where it differs, somebody was given another's key.",
                f"It masks with {self.place.with_name('mask.key')}, whose public half deploy.toml has for {name}. "
                "Whoever has the private half, as who ran deploy init may, can open what this site masks; "
                "docs/deploy.md says how to make another.",
            ]
        home = self.place.parent
        known = {
            home / OFFERED: " (the server sent it last, and has not been allowed to run it)",
            home / APP: " (the server has sent no other)",
        }.get(self.app, "")
        lines.append(
            f"The app is that in {self.app}{known}. Agreed to, it is the only one that this site runs: the hash of its "
            "files is compared."
        )
        if before is not None and before.app != self.terms.app and (home / APP).is_dir():
            changes = app_changes(read_app(home / APP), self.files)
            lines += [f"changed since {before.agreed}: {line}" for line in changes]
        return lines

    def notes(self) -> list[str]:
        """Say what the site has done and spent so far."""
        assert self.data.state is not None, "data.toml always has one"
        book, terms, privacy, notes = Book(self.data.state), self.terms, self.config.privacy, list[str]()
        if self.before is not None:
            notes.append(f"Since {self.before.agreed} it has trained in {book.rounds(self.before)} rounds.")
        if terms.epsilon is not None:
            released = sum(release.epsilon is not None for release in book.releases)
            spent = book.releases.spent(terms.neighbours)
            notes.append(f"Releases of noisy label counts so far: {released}, with a sum of epsilons of {spent:g}.")
            if why := book.releases.why_another(CountsRequest.of(self.agreement), self.data.counts):
                notes.append(f"{why}: if you agree, the counts are released once more.")
        if privacy is not None:
            before, following = cost(book.noises, privacy.delta), cost([*book.noises, privacy.noise], privacy.delta)
            notes.append(
                f"Sums opened with noise on updates so far: {len(book.noises)}, with an epsilon of {before:.3g}; one "
                f"more makes it {following:.3g}. It is about {COVERED}."
            )
        return notes

    def run_code(self) -> Look:
        """Run the app's own code, after the site agreed to it, to find out all that will leave."""
        with running(self.files) as folder:
            return replace(self, leaves=Disclosure.all_of(read(folder / "run.toml"), self.agreement, self.data))

    def accept(self) -> Terms:
        """Write `agreed.toml`, delete what was kept to mask under the terms before, and take an app that was offered.

        Raises:
            RunError: The files can't be written or deleted.
        """
        before, state = self.before, self.data.state
        if before is not None and state is not None:
            for path in before.folder(state).glob("*.safetensors"):
                with writing(path):
                    path.unlink(missing_ok=True)
            Book(state).forget_masked(before.app)
        self.terms.write(terms_path(self.place))
        if self.app == self.place.parent / OFFERED:
            take_offered(self.place.parent)
        return self.terms


def agree(data: Path, app: Path) -> Terms:
    """Agree to an app as it stands, for a site: write `agreed.toml` beside its `data.toml`.

    Raises:
        FedskewError: The app or the data can't be read, or do not fit each other.
    """
    look = Look.at(data, app)
    return (look.run_code() if look.needs_code else look).accept()


def _terms(app: str, config: Config, agreement: Agreement, data: SiteData, before: Terms | None = None) -> Terms:
    """Work out what a site has to agree to, so that it can take part.

    Rounds are those that the config needs. The total of epsilon is what was spent, plus one release if there is none
    yet for these classes, if the data have changed since, or if the last is too noisy for the server. That of updates
    is what was spent, plus what the config's `[privacy]` allows one run; to agree to the same app once more does not
    raise it.
    """
    epsilon, total, mark = agreement.epsilon, None, utc_now() if before is None else before.data
    if epsilon is not None and data.state is not None:
        releases, request = Book(data.state).releases, CountsRequest.of(agreement)
        kept, total = releases.covering(agreement.classes), releases.spent(agreement.neighbours)
        if kept is not None:
            mark = utc_now() if releases.why_another(request, data.counts) else kept.data
        if kept is None or kept.data != mark:
            total += epsilon
        if before is not None and before.epsilon_total is not None:
            total = max(total, converted(before.epsilon_total, before.neighbours, agreement.neighbours))
    return Terms(
        schema=1,
        agreed=utc_now(),
        app=app,
        fedskew=__version__,
        rounds=config.training.rounds,
        sum_sites=max(agreement.sum_sites, SumContext.LEAST if before is None else before.sum_sites),
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
