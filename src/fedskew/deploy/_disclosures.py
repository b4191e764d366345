"""A list of everything that leaves a site, in words and bytes, and the arrays that a method's clients return."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedskew.deploy._agreement import Agreement, check_config, method_of
from fedskew.deploy._arrays import HEADER, ArraySpec, ModelLayout, specs_of
from fedskew.deploy._finish import questions_of
from fedskew.deploy._replies import bytes_needed
from fedskew.deploy._site_data import SiteData
from fedskew.engine import Assignment, LocalWork, Sent, SequentialBackend, Update
from fedskew.engine.sums import encode_update
from fedskew.experiment import Config, make_network, make_protection, make_work
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.sums import SEED
from fedskew.weighting import BySums


class Disclosure(NamedTuple):
    """An item of data that leaves a site.

    Attributes:
        what: The item, in words.
        when: When the item leaves the site, in words.
        bytes: Approximate size in bytes; None: unknown until the app's own code may run.
    """

    what: str
    when: str
    bytes: int | None


EACH = "every round that the site takes part in"
FAILED = Disclosure("that it cannot do what it is asked, and the kind of error", "when that happens", 100)


def disclosures(
    config: Config, agreement: Agreement, data: SiteData | None = None, may_build: bool = True
) -> tuple[Disclosure, ...]:
    """List everything that a site sends to the server. No other data leave a site.

    Args:
        config: The config that was simulated.
        agreement: What server and sites agree on.
        data: The site's samples; None: a site that trains, and is not the target site.
        may_build: Whether network and method may be built. If not, what they make a site send is one item of unknown
            size, and the config need not fit the agreement.

    Returns:
        The items.

    Raises:
        ConfigError: The config can't be deployed under the agreement.
    """
    if not may_build:
        return (_counts(agreement), _unknown(agreement), *_evaluations(config, agreement, data), FAILED)
    check_config(config, agreement, has_target=True)
    method = method_of(config, agreement)
    model = FlatModel(make_network(config, config.seeds[0], method, len(agreement.classes), tuple(agreement.shape)))
    if agreement.updates == "masked":
        several = isinstance(method.weighting, BySums) and method.weighting.most_questions > 1
        return (_counts(agreement, several), *_masked(config, agreement, method, model))
    trains = data is None or not data.is_unlabelled
    return (
        *((_counts(agreement), *_trained(config, agreement, method, model)) if trains else ()),
        *_evaluations(config, agreement, data),
        *_finished(config, agreement, method, model, data),
        FAILED,
    )


def _counts(agreement: Agreement, several: bool = False) -> Disclosure:
    """Say what leaves a site of its label counts; `several`: in masked sums from which one site's may follow."""
    classes, once = len(agreement.classes), "before the first round, and again if they change"
    laplace = f", with Laplace noise for epsilon {agreement.epsilon} ({agreement.neighbours}), drawn once"
    noise = "" if agreement.epsilon is None else laplace
    more = "; from several such sums it may work out what one site has" if several else ""
    more += ", with its noise" if several and agreement.epsilon is not None else ""
    return {
        "exact": Disclosure(f"the number of its training samples of each of {classes} classes", once, 8 * classes),
        "noisy": Disclosure(
            f"the number of its training samples of each of {classes} classes{noise}",
            "before the first round, and again if this site says that its data changed",
            8 * classes,
        ),
        "withheld": Disclosure("the number of its training samples", once.replace("they change", "it changes"), 8),
        "summed": Disclosure(
            f"numbers of its training samples of each class{noise}, or what follows from these; masked: of them the "
            f"server learns the sum over all {len(agreement.sites)} sites{more}",
            "before the first round, each time that the weighting asks: most_questions in agreed.toml",
            8 * (classes + 1) ** 2 + 2 * SEED * len(agreement.sites),
        ),
    }[agreement.label_counts]


def _unknown(agreement: Agreement) -> Disclosure:
    """Say of a training's results what is known without running an app's own code."""
    masked = f", in masked sums over {agreement.sum_sites} sites or more" if agreement.updates == "masked" else ""
    return Disclosure(
        f"what local training makes of the model{masked}, and whatever the method returns beside it; unknown until "
        "agreed to: it takes the app's own code",
        EACH,
        None,
    )


def _trained(config: Config, agreement: Agreement, method: Method, model: FlatModel) -> list[Disclosure]:
    """List what leaves a site of its local training."""
    arrays = ModelLayout(model).specs
    returned, _ = returned_specs(config, agreement, method)
    return [
        Disclosure(
            f"the model after local training, {len(arrays)} arrays", EACH, sum(spec.bytes for spec in arrays.values())
        ),
        Disclosure(
            "its mean training loss, and its number of local steps (which reveals its number of batches)", EACH, 16
        ),
        *(Disclosure(f"{name}, {spec}, which the method needs", EACH, spec.bytes) for name, spec in returned.items()),
    ]


def _evaluations(config: Config, agreement: Agreement, data: SiteData | None) -> list[Disclosure]:
    """List what leaves a site of what the model makes of its samples, where evaluations are not masked."""
    classes, section, things = len(agreement.classes), config.target, list[Disclosure]()
    cells = classes * section.bins
    due = f"after round {section.warmup}, and every {section.every} rounds from then on"
    if agreement.evaluates and (data is None or not data.is_unlabelled):
        things.append(
            Disclosure(
                f"the confusion matrix of its test samples, {classes} x {classes}, and their mean loss",
                f"before the first round, every {config.evaluation.every} rounds, and after the last",
                8 * classes * classes + 8,
            )
        )
    if section.is_estimated and (data is None or not data.is_unlabelled):
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


def _finished(
    config: Config, agreement: Agreement, method: Method, model: FlatModel, data: SiteData | None
) -> list[Disclosure]:
    """List what leaves a site after the last round."""
    if method.finish is None:
        return []
    sources = {"training", "held_out"} if data is None or not data.is_unlabelled else set()
    sources |= {"target"} if data is not None and data.unlabelled is not None else set()
    whose = {"training": "training samples", "held_out": "test samples", "target": "unlabelled samples"}
    name = config.method["finish"]["name"]
    return [
        Disclosure(
            f"sums over its {whose[asked.source]}, for {name}: "
            + ", ".join(f"{key}, {spec}" for key, spec in asked.arrays.items()),
            "after the last round, each time that the finish asks",
            sum(spec.bytes for spec in asked.arrays.values()),
        )
        for asked in questions_of(method.finish, model, agreement)
        if asked.source in sources
    ]


def _masked(config: Config, agreement: Agreement, method: Method, model: FlatModel) -> list[Disclosure]:
    """List what leaves a site in masked sums."""
    specs, least = sum_specs(config, agreement, method, model), agreement.sum_sites
    seeds, classes = 2 * SEED * len(agreement.sites), len(agreement.classes)
    beside = "".join(f", {name.removeprefix('reply.')}" for name in specs if name.startswith("reply."))
    within = f"masked: of it the server learns the sum over {least} sites or more"
    hers = "the site's own weight, that weight" if agreement.label_counts == "summed" else "a weight"
    change = f"the change of the model by local training times {hers}, its training loss and local steps{beside}"
    if config.privacy is not None:
        change = (
            f"the change of the model by local training, clipped to length {config.privacy.clip:g}, times a weight, "
            f"with its share of the sum's noise ({config.privacy.noise:g} times the most that one site changes it)"
        )
    things = [
        Disclosure(
            f"{change}; {within}",
            "every round that the site takes part in; masked anew where another site does not answer",
            sum(spec.bytes for spec in specs.values()) + seeds,
        )
    ]
    if agreement.evaluates:
        things.append(
            Disclosure(
                f"the confusion matrix of its test samples, {classes} x {classes}, and their loss; {within}",
                f"before the first round, every {config.evaluation.every} rounds, and after the last",
                8 * classes * classes + 8 + seeds,
            )
        )
    things.append(Disclosure("what opens its part of a sum, once", "after each of these", seeds))
    return [*things, FAILED]


def sum_specs(config: Config, agreement: Agreement, method: Method, model: FlatModel) -> dict[str, ArraySpec]:
    """Return shapes and dtypes of the integers that a site sends of a training, where updates are masked.

    Raises:
        ConfigError: The network can't be trained with the noise that the config asks for.
    """
    state = model.read_state()
    if make_protection(config, model, len(agreement.sites)) is not None:
        return {"update": ArraySpec((state.parameters.numel(),), "int32")}  # with noise nothing else is sent
    returned, _ = returned_specs(config, agreement, method)
    nothing = Update(
        client=0,
        change=torch.zeros_like(state.parameters),
        norm=torch.zeros(()),
        buffers=state.buffers,
        integers=state.integers,
        steps=1,
        loss=0.0,
        reply={name: torch.zeros(spec.shape) for name, spec in returned.items()},
    )
    encoded = encode_update(method, nothing, 0.0, len(agreement.sites), own_weight=agreement.label_counts == "summed")
    return {name: ArraySpec(array.shape, str(array.dtype)) for name, array in encoded.items()}


def reply_limit(config: Config, agreement: Agreement) -> int:
    """Return how many bytes a server should let a site push in reply to one message.

    That is four times what the method needs (or `max_reply`), as parts of a reply may have to be sent again.

    Args:
        config: The config that was simulated.
        agreement: What server and sites agree on.
    """
    classes = len(agreement.classes)
    method = method_of(config, agreement)
    network = make_network(config, config.seeds[0], method, classes, tuple(agreement.shape))
    returned, _ = returned_specs(config, agreement, method)
    model, bins = FlatModel(network), config.target.bins if config.target.is_estimated else 1
    tables = 10 * classes * (classes + 1) * bins  # a confusion matrix, or a table of outcomes and cells
    needed = bytes_needed(ModelLayout(model).specs, returned) + tables
    asked = [] if method.finish is None else questions_of(method.finish, model, agreement)
    if agreement.updates == "masked":
        needed = max(needed, masked_bytes(sum_specs(config, agreement, method, model), agreement))
    return 4 * max(agreement.max_reply or needed, *(bytes_needed(one.arrays) for one in asked), 0)


def masked_bytes(specs: Mapping[str, ArraySpec], agreement: Agreement) -> int:
    """Return how large a reply in masked sums can be, in bytes."""
    classes = len(agreement.classes)
    values = max(sum(spec.bytes + HEADER for spec in specs.values()), 8 * (classes + 1) ** 2 + 3 * HEADER)
    return values + len(agreement.sites) * (SEED + 200)


def returned_specs(
    config: Config, agreement: Agreement, method: Method
) -> tuple[dict[str, ArraySpec], dict[str, ArraySpec]]:
    """Find the arrays that clients return beside the model, after some local steps and after none.

    A client is trained on samples of zeros to find them.
    """
    return _returned(config, agreement, method, 2), _returned(config, agreement, method, 0)


def _returned(config: Config, agreement: Agreement, method: Method, samples: int) -> dict[str, ArraySpec]:
    seed, classes, shape = config.seeds[0], len(agreement.classes), tuple(agreement.shape)
    model = FlatModel(make_network(config, seed, method, classes, shape))
    inputs = torch.zeros(samples, *shape, dtype=torch.int64 if agreement.tokens else torch.float32)
    targets = torch.arange(samples) % classes
    data = SiteData(inputs, targets, inputs[:0], targets[:0], classes, Path())
    work = make_work(config, seed, method, data, tuple(agreement.mean), tuple(agreement.std))
    return returned_by(model, work, len(agreement.sites))


def returned_by(model: FlatModel, work: LocalWork, clients: int) -> dict[str, ArraySpec]:
    """Find the arrays that a client returns beside the model, by training it."""
    start = model.read_state()
    sent: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for hooks in work.hooks.values():
        sent |= hooks.broadcast(hooks.init_server(start.parameters, clients))
        kept |= hooks.init_client(start.parameters)
    (update,) = SequentialBackend(model, work).train(1, [Assignment(0, 1, kept)], Sent(start, sent))
    return specs_of(update.reply)
