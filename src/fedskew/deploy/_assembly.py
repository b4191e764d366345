"""What config and agreement make before any site is asked: the server's own parts, which `deploy check` makes, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedskew.deploy._agreement import Agreement, method_of
from fedskew.deploy._arrays import Specs
from fedskew.deploy._disclosures import returned_specs, sum_specs
from fedskew.deploy._finish import some_samples, sources_of
from fedskew.engine import Backend, ClientStates, Estimation, Federation, check_finish
from fedskew.engine.sums import FixedPoint, Floats
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment import Config, make_estimation, make_network, make_protection, target_mix
from fedskew.finish import Known
from fedskew.labels import read_target
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.privacy import Protection
from fedskew.randomness import Purpose, generator

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Assembly:
    """The parts of a federation of real sites that need none of them.

    Attributes:
        config: The config, with one seed.
        agreement: What server and sites agree on.
        target: A file with the target mix; None: the config's target.
        method: The method, which knows the number of sites.
        model: The network.
        protection: The noise of the updates, if they have any.
        estimation: How the target's mix is estimated, if it is.
        returned: The arrays that sites return beside the model, after some local steps and after none.
        sums: The integers that they send, where updates are masked.
    """

    config: Config
    agreement: Agreement
    target: Path | None
    method: Method
    model: FlatModel
    protection: Protection | None
    estimation: Estimation | None
    returned: tuple[Specs, Specs]
    sums: Specs

    @property
    def fewest(self) -> int:
        """Fewest sites that a masked sum may be over."""
        return max(self.agreement.sum_sites, (self.protection and self.protection.noise.answers) or 0)

    def mix(self, counts: FloatArray) -> FloatArray | None:
        """Return the target's label mix; None where it is estimated."""
        if self.target is not None:
            return read_target(self.target, self.agreement.classes)
        if self.estimation is not None:
            return None
        return target_mix(self.config.target.mix, counts.shape[1], {"pooled": counts.sum(axis=0)}, {})

    def federation(
        self,
        backend: Backend,
        counts: FloatArray,
        clients: ClientStates,
        announced: Mapping[str, FloatArray] | None = None,
    ) -> Federation:
        """Make what plays the rounds.

        Args:
            backend: Trains the sites.
            counts: Their label counts, `(sites, classes)`.
            clients: What is kept of them.
            announced: What sums of label counts tell all sites, where they are only summed.

        Raises:
            ConfigError: The method does not fit so many sites, their label counts or the target.
        """
        training, mix, finish = self.config.training, self.mix(counts), self.method.finish
        try:
            if finish is not None:
                is_estimated = self.agreement.target_site is not None
                rng = generator(self.config.seeds[0], Purpose.FINISH)
                known = Known(sources_of(self.agreement), mix, is_estimated, rng)
                check_finish(finish, self.model.module, some_samples(self.agreement), known)
        except ArgumentError as error:
            raise ConfigError(str(error)) from None
        told = None if announced is None else dict(announced)
        codec = Floats() if self.agreement.updates == "plain" else FixedPoint(self.protection, told)
        try:
            return Federation(
                method=self.method,
                backend=backend,
                counts=counts,
                target=mix,
                participation=training.participation,
                seed=self.config.seeds[0],
                epochs=training.most_epochs,
                steps=training.steps,
                clients=clients,
                weight_limit=training.weight_limit,
                aim=self.estimation,
                codec=codec,
            )
        except ArgumentError as error:
            raise ConfigError(f"method: {error}") from None


def assemble(config: Config, agreement: Agreement, target: Path | None = None) -> Assembly:
    """Make what needs no site, of a config that `check_config` has found to fit.

    Args:
        config: The config, with one seed.
        agreement: What server and sites agree on.
        target: A file with the target mix; None: the config's target.

    Raises:
        ConfigError: The method or the network can't be made for so many sites or such samples.
    """
    classes = len(agreement.classes)
    method = method_of(config, agreement)
    model = FlatModel(make_network(config, config.seeds[0], method, classes, tuple(agreement.shape)))
    return Assembly(
        config=config,
        agreement=agreement,
        target=target,
        method=method,
        model=model,
        protection=make_protection(config, model, len(agreement.names)),
        estimation=make_estimation(config, classes),
        returned=returned_specs(config, agreement, method),
        sums=sum_specs(config, agreement, method, model) if agreement.updates == "masked" else {},
    )
