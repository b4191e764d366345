"""Builds network and local training from a config, the same in a simulation and at a real site."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, nn

from fedskew import components, data, models
from fedskew.engine import ClientData, LocalTraining, LocalWork, adapting, cohort_size, hooked
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment._config import Config
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.privacy import Protection, UpdateNoise
from fedskew.randomness import Purpose, stream_key


def make_network(
    config: Config,
    seed: int,
    method: Method,
    num_classes: int,
    in_shape: tuple[int, ...],
    samples: Tensor | None = None,
) -> nn.Module:
    """Build the untrained network on the CPU.

    The method's components may change it, and its dropout layers are replaced by `models.Dropout`. PyTorch's global
    generator is left as it was.

    Args:
        config: The config.
        seed: Seed of the initial weights.
        method: The method.
        num_classes: Number of classes.
        in_shape: Shape of one sample.
        samples: Some samples, `(batch, *in_shape)`, by which a network of the user's own is checked; None: it is not.

    Returns:
        The network.

    Raises:
        ConfigError: The network can't be built, or does not go with the data or the method.
    """
    module = _network(config, seed, num_classes, in_shape, samples)
    drawn = torch.Generator().manual_seed(stream_key(seed, Purpose.MODEL_ADAPT))
    for component in adapting(method):
        try:
            module = component.adapt(module, drawn)
        except ArgumentError as error:
            name = type(component).__name__
            raise ConfigError(f"model.name: {name} can't adapt {config.model.name}: {error}") from None
    return module


def make_work(
    config: Config, seed: int, method: Method, samples: ClientData, mean: tuple[float, ...], std: tuple[float, ...]
) -> LocalWork:
    """Build the local training of a config.

    Args:
        config: The config.
        seed: Seed of all random draws.
        method: The method.
        samples: Gives the samples of a client.
        mean: Mean by channel by which the samples were normalised, for augmentation.
        std: Standard deviation by channel, likewise.

    Returns:
        The local training.

    Raises:
        ConfigError: The config names no such augmentation.
    """
    training = config.training
    augment = None
    if training.augmentation is not None:
        augmentation = components.find(data.AUGMENTATIONS, training.augmentation, "training.augmentation")()
        augment = partial(augmentation.apply, mean=mean, std=std)
    return LocalWork(
        data=samples,
        objective=method.objective,
        local_step=method.local_step,
        training=local_training(config),
        seed=seed,
        augment=augment,
        hooks=hooked(method),
    )


def local_training(config: Config) -> LocalTraining:
    """Return the settings of a config's local training.

    Args:
        config: The config.
    """
    return LocalTraining(**{field.name: getattr(config.training, field.name) for field in fields(LocalTraining)})


def make_protection(config: Config, model: FlatModel, clients: int) -> Protection | None:
    """Make what is done to updates for differential privacy.

    Args:
        config: The config.
        model: The network.
        clients: Number of clients of the federation.

    Returns:
        It; None where that is nothing.

    Raises:
        ConfigError: The network, the weight limit or the number of clients do not go with it.
    """
    section, limit = config.privacy, config.training.weight_limit
    if section is None:
        return None
    if section.delta * clients >= 1:
        raise ConfigError(
            f"privacy.delta: {section.delta:g} has to be below 1 / {clients}, one divided by the number of clients: "
            "with that chance anything may become known of a client"
        )
    cohort = cohort_size(config.training.participation, clients)
    assert limit is not None, "the config has been checked"
    if model.read_state().buffers.numel():
        raise ConfigError(
            f"privacy: {config.model.name} has buffers (batch norm's statistics), which clients would send without "
            "noise; take a network without"
        )
    if limit * cohort < 1:
        raise ConfigError(
            f"training.weight_limit: {limit:g} can't hold for {cohort} clients in a round, and the noise is made for "
            f"it; set {1 / cohort:.2g} or more"
        )
    if section.answers is not None and section.answers > cohort:
        raise ConfigError(f"privacy.answers: {section.answers} are more than the {cohort} clients of a round")
    noise = UpdateNoise(section.clip, section.noise, limit, section.answers)
    try:
        noise.share(model.read_state().parameters.numel(), cohort)
    except ArgumentError as error:
        raise ConfigError(f"privacy.{error}") from None
    return Protection(noise, section.epsilon, section.delta)


def _network(
    config: Config, seed: int, num_classes: int, in_shape: tuple[int, ...], samples: Tensor | None
) -> nn.Module:
    make = components.find(models.INDEX, config.model.name, "model.name")
    options, key = config.model.parameters, stream_key(seed, Purpose.MODEL_INIT)
    if ":" not in config.model.name:
        for option in ("num_classes", "in_shape", "generator"):
            if option in options:
                raise ConfigError(f"model.{option}: not an option; it follows from the data set and the seed")
        try:
            return models.build(
                config.model.name, num_classes, in_shape, generator=torch.Generator().manual_seed(key), **options
            )
        except ArgumentError as error:
            option = str(error).partition(":")[0]
            raise ConfigError(f"model{'.' if option in options else ': '}{error}") from None
    known = {"num_classes": num_classes, "in_shape": in_shape}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        module = components.call(make, config.model.name, "model", known, options)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model.name: {config.model.name} returned {type(module).__name__}, not an nn.Module")
        if samples is not None:
            try:
                models.check_outputs(module, samples, num_classes)
            except ArgumentError as error:
                raise ConfigError(f"model.name: {config.model.name} does not fit: {error}") from None
    return models.swap_dropout(module)
