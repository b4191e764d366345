"""What a client trains, and how, as a config says: the same on one machine and on a real site."""

from __future__ import annotations

import torch
from torch import nn

from fedskew import components, data, models
from fedskew.engine import ClientData, LocalTraining, LocalWork, hooked
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment._config import Config
from fedskew.methods import Method
from fedskew.randomness import Purpose, stream_key


def make_network(config: Config, seed: int, method: Method, num_classes: int, in_shape: tuple[int, ...]) -> nn.Module:
    """The untrained network as the method's components change it, its dropout layers ours, on the CPU.

    torch's global generator is as it was.
    """
    module = _network(config, seed, num_classes, in_shape)
    drawn = torch.Generator().manual_seed(stream_key(seed, Purpose.MODEL_ADAPT))
    for component in hooked(method).values():
        try:
            module = component.adapt(module, drawn)
        except ArgumentError as error:
            name = type(component).__name__
            raise ConfigError(f"model.name: {name} can't adapt {config.model.name}: {error}") from None
    return module


def make_work(
    config: Config, seed: int, method: Method, samples: ClientData, mean: tuple[float, ...], std: tuple[float, ...]
) -> LocalWork:
    """What a client does in a round; `mean` and `std` by channel are what its samples were normalised by."""
    training = config.training
    augment = None
    if training.augmentation is not None:
        augmentation = components.find(data.AUGMENTATIONS, training.augmentation, "training.augmentation")()
        augment = augmentation.bind(mean, std)
    return LocalWork(
        data=samples,
        objective=method.objective,
        local_step=method.local_step,
        training=LocalTraining(
            batch_size=training.batch_size,
            lr=training.lr,
            lr_decay=training.lr_decay,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            persist_momentum=training.persist_momentum,
            teacher_train_mode=training.teacher_train_mode,
            smallest_batch=training.smallest_batch,
        ),
        seed=seed,
        augment=augment,
        hooks=hooked(method),
    )


def _network(config: Config, seed: int, num_classes: int, in_shape: tuple[int, ...]) -> nn.Module:
    make = components.find(models.INDEX, config.model.name, "model.name")
    options, key = config.model.parameters, stream_key(seed, Purpose.MODEL_INIT)
    if ":" not in config.model.name:
        for option in ("num_classes", "in_shape", "generator"):
            if option in options:
                raise ConfigError(f"model.{option}: is no option; data set and seed say it")
        try:
            return models.build(
                config.model.name, num_classes, in_shape, generator=torch.Generator().manual_seed(key), **options
            )
        except ArgumentError as error:
            raise ConfigError(f"model: {error}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        module = make(num_classes=num_classes, in_shape=in_shape, **options)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: {config.model.name} returned {type(module).__name__}, not an nn.Module")
    return models.swap_dropout(module)
