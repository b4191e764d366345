"""What leaves a site, said before it joins."""

from __future__ import annotations

from typing import NamedTuple

from fedskew import methods
from fedskew.deploy._agreement import Agreement, check_config
from fedskew.deploy._layout import ModelLayout
from fedskew.deploy._returned import returned_forms
from fedskew.experiment._config import Config
from fedskew.experiment._work import make_network
from fedskew.models import FlatModel


class Leaving(NamedTuple):
    """One thing that leaves a site: what it is, in words; when; and its size in bytes, about."""

    what: str
    when: str
    bytes: int


def leaving(config: Config, agreement: Agreement) -> tuple[Leaving, ...]:
    """Everything that a site sends to the server; nothing else leaves it.

    Raises ConfigError where the config can't be deployed under the agreement.
    """
    check_config(config, agreement, has_target=True)
    classes, training = len(agreement.classes), config.training
    method = methods.build(config.method, training.momentum)
    network = make_network(config, config.seeds[0], method, classes, tuple(agreement.shape))
    arrays = ModelLayout(FlatModel(network)).forms
    returned, _ = returned_forms(config, agreement, method)
    once, each = "once, before the first round", "every round that the site takes part in"
    told = {
        "exact": Leaving(f"the number of its training samples of each of {classes} classes", once, 8 * classes),
        "noisy": Leaving(
            f"the number of its training samples of each of {classes} classes, with Laplace noise for epsilon "
            f"{agreement.epsilon} ({agreement.neighbours}), drawn once",
            once,
            8 * classes,
        ),
        "withheld": Leaving("the number of its training samples", once, 8),
    }
    things = [
        told[agreement.label_counts],
        Leaving(
            f"the model after local training, {len(arrays)} arrays", each, sum(form.bytes for form in arrays.values())
        ),
        Leaving("its mean training loss, and its number of local steps (which tells its number of batches)", each, 16),
    ]
    things += [Leaving(f"{name}, {form}, which the method needs", each, form.bytes) for name, form in returned.items()]
    if agreement.evaluates:
        things.append(
            Leaving(
                f"the confusion matrix of its test samples, {classes} x {classes}, and their mean loss",
                f"before the first round, every {config.evaluation.every} rounds, and after the last",
                8 * classes * classes + 8,
            )
        )
    things.append(Leaving("when it can't do what it is asked: that it can't, and the kind of error", "then", 100))
    return tuple(things)
