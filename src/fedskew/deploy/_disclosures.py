"""A list of everything that leaves a site, in words and bytes."""

from __future__ import annotations

from typing import NamedTuple

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._plan import Plan
from fedskew.deploy._site_data import SiteData
from fedskew.experiment import Config
from fedskew.sums import Key


class Disclosure(NamedTuple):
    """An item of data that leaves a site: what, when, and how large.

    Attributes:
        what: The item, in words.
        when: When the item leaves the site, in words.
        bytes: Approximate size in bytes; None: unknown until the app's own code may run.
    """

    what: str
    when: str
    bytes: int | None

    @staticmethod
    def all_of(
        config: Config, agreement: Agreement, data: SiteData | None = None, may_build: bool = True
    ) -> tuple[Disclosure, ...]:
        """List everything that a site sends to the server. No other data leave a site.

        Args:
            config: The config that was simulated.
            agreement: What server and sites agree on.
            data: The site's samples; None: a site that trains, and is not the target site.
            may_build: Whether network and method may be built. If not, what they make a site send is one item of
                unknown size, and the config need not fit the agreement.

        Raises:
            ConfigError: The config can't be deployed under the agreement.
        """
        plan = Plan.of(config, agreement, at_site=True) if may_build else None
        things: list[Disclosure] = []
        if data is None or not data.is_unlabelled:
            things.append(_counts(agreement, 0 if plan is None else plan.most_questions))
            things += [_unknown(agreement)] if plan is None else _masked(plan) if plan.is_masked else _trained(plan)
        things += _evaluations(config, agreement, data)
        if plan is not None:
            things += _finished(plan, data)
            if plan.is_masked:
                things.append(
                    Disclosure("what opens its part of a sum, once", "after each of these", _seeds(agreement))
                )
        return (*things, FAILED)


EACH = "every round that the site takes part in"
FAILED = Disclosure("that it cannot do what it is asked, and the kind of error", "when that happens", 100)
SAMPLES = {"training": "training samples", "held_out": "test samples", "target": "unlabelled samples"}


def _seeds(agreement: Agreement) -> int:
    """Return the bytes that travel beside masked integers."""
    return 2 * Key.SEED * len(agreement.sites)


def _within(agreement: Agreement) -> str:
    """Say of what leaves a site masked what the server learns."""
    if agreement.updates != "masked":
        return ""
    return f"; masked: of it the server learns the sum over {agreement.sum_sites} sites or more"


def _counts(agreement: Agreement, questions: int) -> Disclosure:
    """Say what leaves a site of its label counts; of several masked sums of them one site's may follow."""
    kind, classes, noise = agreement.label_counts, len(agreement.classes), ""
    if agreement.epsilon is not None:
        noise = f", with Laplace noise for epsilon {agreement.epsilon} ({agreement.neighbours}), drawn once"
    if kind == "summed":
        more = "; from several such sums it may work out what one site has" if questions > 1 else ""
        more += ", with its noise" if more and noise else ""
        return Disclosure(
            f"numbers of its training samples of each class{noise}, or what follows from these; masked: of them the "
            f"server learns the sum over all {len(agreement.sites)} sites{more}",
            f"before the first round, each time that the weighting asks{f': {questions} at most' if questions else ''}",
            8 * (classes + 1) ** 2 + _seeds(agreement),
        )
    again = {"exact": "they change", "noisy": "this site says that its data changed", "withheld": "it changes"}[kind]
    what, number = "the number of its training samples", 1
    if kind != "withheld":
        what, number = f"{what} of each of {classes} classes{noise}", classes
    return Disclosure(what, f"before the first round, and again if {again}", 8 * number)


def _unknown(agreement: Agreement) -> Disclosure:
    """Say of a training's results what is known without running an app's own code."""
    masked = f", in masked sums over {agreement.sum_sites} sites or more" if agreement.updates == "masked" else ""
    return Disclosure(
        f"what local training makes of the model{masked}, and whatever the method returns beside it; unknown until "
        "agreed to: it takes the app's own code",
        EACH,
        None,
    )


def _trained(plan: Plan) -> list[Disclosure]:
    """List what leaves a site of its local training."""
    arrays, epochs = plan.layout.specs, plan.config.training.most_epochs
    return [
        Disclosure(
            f"the model after local training of {epochs:g} epochs at most, {len(arrays)} arrays",
            EACH,
            sum(spec.bytes for spec in arrays.values()),
        ),
        Disclosure(
            "its mean training loss, and its number of local steps (which reveals its number of batches)", EACH, 16
        ),
        *(
            Disclosure(f"{name}, {spec}, which the method needs", EACH, spec.bytes)
            for name, spec in plan.returned.items()
        ),
    ]


def _evaluations(config: Config, agreement: Agreement, data: SiteData | None) -> list[Disclosure]:
    """List what leaves a site of what the model makes of its samples."""
    classes, section, things = len(agreement.classes), config.target, list[Disclosure]()
    cells, masked = classes * section.bins, agreement.updates == "masked"
    due = f"after round {section.warmup}, and every {section.every} rounds from then on"
    is_labelled = data is None or not data.is_unlabelled
    if agreement.evaluates and is_labelled:
        things.append(
            Disclosure(
                f"the confusion matrix of its test samples, {classes} x {classes}, and their "
                f"{'loss' if masked else 'mean loss'}{_within(agreement)}",
                f"before the first round, every {config.evaluation.every} rounds, and after the last",
                8 * classes * classes + 8 + (_seeds(agreement) if masked else 0),
            )
        )
    if section.is_estimated and is_labelled:
        things.append(
            Disclosure(
                "the confusion matrix with its columns divided by how sure the model is: how many test samples of each "
                f"class are in each of {cells} cells",
                f"{due}, in place of the confusion matrix",
                8 * classes * cells + 8,
            )
        )
    if section.is_estimated and data is not None and data.unlabelled is not None:
        things.append(
            Disclosure(
                f"how many of its samples without labels are in each of {cells} cells (the class that the model takes "
                "them for, and how sure it is)",
                due,
                8 * cells,
            )
        )
    return things


def _finished(plan: Plan, data: SiteData | None) -> list[Disclosure]:
    """List what leaves a site after the last round."""
    sources = {"training", "held_out"} if data is None or not data.is_unlabelled else set()
    sources |= {"target"} if data is not None and data.unlabelled is not None else set()
    return [
        Disclosure(
            f"sums over its {SAMPLES[question.source]}, for {plan.config.method['finish']['name']}: "
            + ", ".join(f"{key}, {spec}" for key, spec in question.arrays.items()),
            "after the last round, each time that the finish asks",
            sum(spec.bytes for spec in question.arrays.values()),
        )
        for question in plan.questions
        if question.source in sources
    ]


def _masked(plan: Plan) -> list[Disclosure]:
    """List what leaves a site of its local training in masked sums."""
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
