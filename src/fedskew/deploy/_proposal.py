"""A look at an app before a site agrees to it: what would leave the site, what it has to agree to, and that it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fedskew import __version__
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._folder import NOT_YET, asked_of_site, other_code
from fedskew.deploy._log import utc_now
from fedskew.deploy._plan import Plan
from fedskew.deploy._replies import MOST_TESTED
from fedskew.deploy.app_files import APP, OFFERED, AppFiles, app_changes, app_hash, read_app, running, take_offered
from fedskew.deploy.book import Book, cost
from fedskew.deploy.keys import key_fingerprint, read_mask_key
from fedskew.deploy.site_data import SiteData
from fedskew.deploy.terms import CountsRequest, Terms, converted, terms_path
from fedskew.errors import RunError
from fedskew.experiment import Config, read
from fedskew.files import check_writable, writing
from fedskew.metrics import Tally
from fedskew.own_code import refused
from fedskew.privacy import COVERED, most_rounds
from fedskew.sums import Key, SumContext
from fedskew.tables import counted


class Disclosure(NamedTuple):
    """An item of data that leaves a site: what, when, and about how many bytes (None: the app's own code decides)."""

    what: str
    when: str
    bytes: int | None

    @staticmethod
    def all_of(
        config: Config, agreement: Agreement, data: SiteData | None = None, may_build: bool = True
    ) -> tuple[Disclosure, ...]:
        """List everything that a site with such data (None: one that trains) sends; ConfigError where it can't be
        deployed. Where network and method may not be built, what they make it send is one item of unknown size."""
        plan = Plan.of(config, agreement, at_site=True) if may_build else None
        things, trains = list[Disclosure](), data is None or not data.is_unlabelled
        if trains:
            things.append(_counts(config, agreement, 0 if plan is None else plan.most_questions))
            things += _moments(agreement)
            things += _profile(agreement, plan)
            things += [_unknown(agreement)] if plan is None else _masked(plan) if plan.is_masked else _trained(plan)
        things += _evaluations(config, agreement, data, trains)
        if agreement.site_figures == "summed" and trains:
            things.append(_figures(agreement))
        if plan is not None:
            things += _finished(plan, data, trains)
            if trains:
                things.append(Disclosure("that it keeps the trained model, for itself", "after the last round", 20))
            if plan.is_masked:
                opens = "what opens its part of a sum, once"
                things.append(Disclosure(opens, "after each of these", _seeds(agreement)))
        return (*things, FAILED)


EACH = "every round that the site takes part in"
FAILED = Disclosure("that it cannot do what it is asked, and the kind of error", "when that happens", 100)
SAMPLES = {"training": "training samples", "held_out": "test samples", "target": "unlabelled samples"}


def _seeds(agreement: Agreement) -> int:
    return 2 * Key.SEED * len(agreement.sites)


def _within(agreement: Agreement) -> str:
    if agreement.updates != "masked":
        return ""
    return f"; masked: of it the server learns the sum over {agreement.sum_sites} sites or more"


def _over_all(agreement: Agreement) -> str:
    over = f"; masked: the server learns the sums over all {len(agreement.sites)} sites"
    return over if agreement.updates == "masked" else ""


def _counts(config: Config, agreement: Agreement, questions: int) -> Disclosure:
    """Say what leaves a site of its label counts; of several masked sums of them one site's may follow."""
    kind, classes, noise = agreement.label_counts, len(agreement.classes), ""
    if agreement.epsilon is not None:
        noise = f", with Laplace noise for epsilon {agreement.epsilon} ({agreement.neighbours}), drawn once"
    if kind == "summed":
        more = "; from several such sums it may work out what one site has" if questions > 1 else ""
        more += ", with its noise" if more and noise else ""
        balances = "once for class weights, and " if config.training.balances else ""
        return Disclosure(
            f"numbers of its training samples of each class{noise}, or what follows from these; masked: of them the "
            f"server learns the sum over all {len(agreement.sites)} sites{more}",
            f"before the first round, {balances}each time that the weighting asks"
            f"{f': {questions} at most' if questions else ''}",
            8 * (classes + 1) ** 2 + _seeds(agreement),
        )
    again = {"exact": "they change", "noisy": "this site says that its data changed", "withheld": "it changes"}[kind]
    what, number = "the number of its training samples", 1
    if kind != "withheld":
        each = "labels, and in all" if agreement.multi_label else "classes"
        what, number = f"{what} of each of {classes} {each}{noise}", classes + agreement.multi_label
    return Disclosure(what, f"before the first round, and again if {again}", 8 * number)


def _moments(agreement: Agreement) -> list[Disclosure]:
    if not agreement.sums_moments or (table := agreement.table) is None:
        return []
    own = _over_all(agreement)
    what = f"of each of {table.numbers} columns of numbers how many there are, their sum and the sum of their squares"
    size = 24 * table.numbers + (_seeds(agreement) if own else 0)
    return [Disclosure(f"{what}, of the training samples{own}", "once, before the first round", size)]


def _profile(agreement: Agreement, plan: Plan | None) -> list[Disclosure]:
    if not agreement.sums_profile or (plan is not None and not plan.profile_size):
        return []
    of = f"each of {', '.join(agreement.input_cells)}" if agreement.input_cells else "each number"
    more = "" if agreement.input_cells else ", missing or of each category"
    what = f"how many training samples are in each of ten cells of {of}{more}, and how "
    what += f"each two numbers go together{_over_all(agreement)}"
    size = None if plan is None else 8 * plan.profile_size + _seeds(agreement)
    return [Disclosure(what, "once, before the first round", size)]


def _unknown(agreement: Agreement) -> Disclosure:
    masked = f", in masked sums over {agreement.sum_sites} sites or more" if agreement.updates == "masked" else ""
    return Disclosure(
        f"what local training makes of the model{masked}, and whatever the method returns beside it; unknown until "
        "agreed to: it takes the app's own code",
        EACH,
        None,
    )


def _trained(plan: Plan) -> list[Disclosure]:
    arrays, epochs = plan.layout.specs, plan.config.training.most_epochs
    model = f"the model after local training (epochs: {epochs:g} at most), {len(arrays)} arrays"
    beside = "its mean training loss, and its number of local steps (which reveals its number of batches)"
    return [
        Disclosure(model, EACH, sum(spec.bytes for spec in arrays.values())),
        Disclosure(beside, EACH, 16),
        *(
            Disclosure(f"{name}, {spec}, which the method needs", EACH, spec.bytes)
            for name, spec in plan.returned.items()
        ),
    ]


def _evaluations(config: Config, agreement: Agreement, data: SiteData | None, trains: bool) -> Iterator[Disclosure]:
    classes, section = len(agreement.classes), config.target
    cells, masked = classes * section.bins, agreement.updates == "masked"
    due = f"after round {section.warmup}, and every {counted(section.every, 'round')} from then on"
    if agreement.evaluates and trains:
        table = f"the confusion matrix of its test samples, {classes} x {classes}"
        if agreement.multi_label:
            table = f"of each of {classes} labels how many of its test samples have it and are taken to, how many are "
            table += "right in all"
        if agreement.tally.scores:
            of = "" if agreement.multi_label else ", and how many are right by how sure the model is"
            table += (
                f"; of each how many of its samples, and of the others, have scores in each of {Tally.BINS} bins{of}"
            )
        yield Disclosure(
            f"{table}, and their {'loss' if masked else 'mean loss'}{_within(agreement)}",
            f"before the first round, every {counted(config.evaluation.every, 'round')}, and after the last",
            8 * agreement.tally.size + 8 + (_seeds(agreement) if masked else 0),
        )
    if section.is_estimated and trains:
        yield Disclosure(
            "the confusion matrix with its columns divided by how sure the model is: how many test samples of each "
            f"class are in each of {cells} cells",
            f"{due}, in place of the confusion matrix",
            8 * classes * cells + 8,
        )
    if section.is_estimated and data is not None and data.unlabelled is not None:
        yield Disclosure(
            f"how many of its samples without labels are in each of {cells} cells (the class that the model takes "
            "them for, and how sure it is)",
            due,
            8 * cells,
        )


def _figures(agreement: Agreement) -> Disclosure:
    names = ", ".join(agreement.summed_figures).replace("_", " ")
    return Disclosure(
        f"{names} of the models that it has (alone, common, personal) on its test samples, and whether they are better "
        f"than alone{_within(agreement)}; not with own_figures = false in agreed.toml",
        "after the last round, once",
        8 * 6 * len(agreement.summed_figures) + _seeds(agreement),
    )


def _finished(plan: Plan, data: SiteData | None, trains: bool) -> list[Disclosure]:
    sources = {"training", "held_out"} if trains else set()
    sources |= {"target"} if data is not None and data.unlabelled is not None else set()
    finish = plan.config.method["finish"]["name"] if "finish" in plan.config.method else "a calibration"
    return [
        Disclosure(
            f"sums over its {SAMPLES[question.source]}, for {finish}: "
            + ", ".join(f"{key}, {spec}" for key, spec in question.arrays.items()),
            "after the last round, each time that the finish asks",
            sum(spec.bytes for spec in question.arrays.values()),
        )
        for question in plan.questions
        if question.source in sources
    ]


def _masked(plan: Plan) -> list[Disclosure]:
    config, agreement = plan.config, plan.agreement
    beside = "".join(f", {name.removeprefix('reply.')}" for name in plan.sums if name.startswith("reply."))
    weight = "the site's own weight, that weight" if agreement.label_counts == "summed" else "a weight"
    change = f"the change of the model by local training times {weight}, its training loss and local steps{beside}"
    if config.privacy is not None:
        change = (
            f"the change of the model by local training, clipped to length {config.privacy.clip:g}, times a weight, "
            f"with its share of the sum's noise ({config.privacy.noise:g} times the most that one site changes it)"
        )
    size = sum(spec.bytes for spec in plan.sums.values()) + _seeds(agreement)
    when = f"{EACH}; masked anew where another site does not answer"
    return [Disclosure(f"{change}{_within(agreement)}", when, size)]


@dataclass(frozen=True)
class Look:
    """A site's look at an app, in which nothing of the app is run: what it agreed to `before`, the `terms` that it has
    to agree to, all that `leaves` it, and whether part of that takes the app's own code to be known."""

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
        """Look at an app: the given one, or else what the server sent last, or what came with the site's folder."""
        if app is None:
            offered = place.parent / OFFERED
            app = offered if offered.is_dir() else place.parent / APP
        files = read_app(app)
        agreement, config = Agreement.read(app / "deploy.toml"), Config.outline(app / "run.toml")
        data, path = SiteData.load(place, agreement), terms_path(place)
        if agreement.updates == "masked":
            read_mask_key(place, agreement.keys)
        assert data.state is not None, "data.toml always has one"
        check_writable(data.state)
        before = Terms.read(path) if path.exists() else None
        may_build = not asked_of_site(config.model_dump())
        with refused(NOT_YET):
            config = read(app / "run.toml").weights_in(place.parent) if may_build else config
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
        """Say what the site has done and spent so far, and whether the server will refuse its evaluations."""
        assert self.data.state is not None, "data.toml always has one"
        book, terms, privacy, notes = Book(self.data.state), self.terms, self.config.privacy, list[str]()
        tests, most = len(self.data.test_targets), MOST_TESTED * len(self.data.targets)
        if self.agreement.evaluates and tests > most:
            notes.append(
                f"The server will refuse this site's evaluations: of its {tests} test samples {most:.0f} are plausible "
                "beside those that it trains on; leave some out."
            )
        if self.before is not None:
            notes.append(f"Since {self.before.agreed} it has trained in {counted(book.rounds(self.before), 'round')}.")
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
            config = read(folder / "run.toml").weights_in(self.place.parent)
            return replace(self, leaves=Disclosure.all_of(config, self.agreement, self.data))

    def accept(self) -> Terms:
        """Write `agreed.toml`, delete what was kept to mask under the terms before, and take an offered app."""
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
    """Agree to an app as it stands, for a site: write `agreed.toml` beside its `data.toml`."""
    look = Look.at(data, app)
    return (look.run_code() if look.needs_code else look).accept()


def _terms(app: str, config: Config, agreement: Agreement, data: SiteData, before: Terms | None = None) -> Terms:
    """Work out what a site has to agree to, so that it can take part. The total of epsilon is what was spent, plus one
    release if there is none yet for these classes, if the data have changed since, or if the last is too noisy for the
    server; that of updates is what was spent, plus what the config's `[privacy]` allows one run. Own models are trained
    where the app has any, or their figures are summed. To agree to the same app again raises, and changes neither."""
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
    same = before if before is not None and before.app == app else None
    summed = agreement.site_figures == "summed"
    return Terms(
        schema=1,
        agreed=utc_now(),
        app=app,
        fedskew=__version__,
        rounds=config.training.rounds,
        sum_sites=max(agreement.sum_sites, SumContext.LEAST if before is None else before.sum_sites),
        updates_epsilon=_epsilon_of_updates(app, config, data, before),
        updates_delta=None if config.privacy is None else config.privacy.delta,
        own_models=same.own_models if same is not None else "personal" in config.method or summed,
        own_figures=same.own_figures if same is not None else summed,
        data=mark,
        epsilon=epsilon,
        epsilon_total=total,
        neighbours=agreement.neighbours,
    )


def _epsilon_of_updates(app: str, config: Config, data: SiteData, before: Terms | None) -> float | None:
    if (section := config.privacy) is None or data.is_unlabelled:
        return None
    if before is not None and before.app == app and before.updates_epsilon is not None:
        return before.updates_epsilon
    charged = () if data.state is None else Book(data.state).noises
    if not charged:
        return section.epsilon
    most = most_rounds(section.noise, section.epsilon, section.delta)
    return cost([*charged, *[section.noise] * most], section.delta)
