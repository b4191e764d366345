"""Builds network, local training and evaluation from a config; the first two are the same at a real site."""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew import components, data, engine, metrics, models, own_code
from fedskew.data import Inputs
from fedskew.data.features import MOST_BYTES, Features
from fedskew.engine.contracts import adapting, called, calling, checked_private, hooked, name_in
from fedskew.engine.target import logits_of
from fedskew.errors import ArgumentError, ComponentError, ConfigError, DataError, in_one_line, placed
from fedskew.experiment._config import Config
from fedskew.experiment._task import FloatArray, Task
from fedskew.files import file_hash
from fedskew.methods import Method
from fedskew.models import FlatModel, ModelState
from fedskew.models.adapters import with_adapters
from fedskew.models.body import cut, quickened
from fedskew.models.frozen import freeze
from fedskew.models.sources import TextClassifier, from_source
from fedskew.models.weights import load_weights
from fedskew.personal import Names, Personal
from fedskew.privacy import Protection, UpdateNoise
from fedskew.randomness import Purpose, stream_key

Shape = tuple[int, ...]


def make_network(
    config: Config, seed: int, method: Method, num_classes: int, in_shape: Shape, some: Tensor | None = None
) -> nn.Module:
    """Build the untrained network on the CPU; ConfigError where it can't be, or does not go with data or method. A
    network of the user's own is tried on `some` samples. PyTorch's global generator is left as it was."""
    module = _prepared(config, seed, _network(config, seed, num_classes, in_shape, some), in_shape, some)
    drawn = torch.Generator().manual_seed(stream_key(seed, Purpose.MODEL_ADAPT))
    for place, component in adapting(method):
        name = type(component).__name__
        if config.model.adapters is not None:
            raise ConfigError(f"model.adapters: {name} changes the network itself; leave out one of them")
        with placed(f"model.name: {name} can't adapt {config.model.name}: "), calling(place, component, "adapt"):
            module = component.adapt(module, drawn)
        if not isinstance(module, nn.Module):
            raise ComponentError(f"{name_in(place, component)}: adapt() must return a network, not {module!r:.50}")
    return module


def make_work(
    config: Config,
    seed: int,
    method: Method,
    model: FlatModel,
    samples: engine.ClientData,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    classes: int,
    counts: FloatArray | None = None,
    size: float | None = None,
) -> engine.LocalWork:
    """Build the local training of a config; ConfigError where the network lacks layers that clients are to keep.

    Samples were normalised by `mean` and `std`, by channel, which augmentation needs. `counts` are the label counts of
    the federation, `(classes,)`, where they are known, and `size` its samples where these may have several labels.
    """
    training, local = config.training, config.training.local()
    with placed("training."):
        local.check_groups(model.names)
    augment = None
    if training.augmentation is not None:
        augmentation = components.find(data.AUGMENTATIONS, training.augmentation, "training.augmentation")()
        augment = partial(augmentation.apply, mean=mean, std=std)
    step = method.local_step
    return engine.LocalWork(
        data=samples,
        objective=replace(method.objective, class_weights=_class_weights(config, classes, counts, size)),
        local_step=step if method.personal is None else called("personal", method.personal, "local_step", step),
        training=local,
        seed=seed,
        augment=augment,
        hooks=hooked(method),
        private=None if method.personal is None else _private(method.personal, model, classes),
    )


def _class_weights(config: Config, classes: int, counts: FloatArray | None, size: float | None) -> tuple[float, ...]:
    """Return what a sample of each class counts for; balanced as scikit-learn has it, n / (classes held x n_c).

    Of several labels a sample, what having each label counts for; balanced (n - n_c) / n_c, and 1 where that is none.
    """
    wanted = config.training.class_weights
    if wanted is None:
        return ()
    if wanted != "balanced":
        if len(wanted) != classes or not any(wanted):
            raise ConfigError(
                f"training.class_weights: expected {classes} weights, one for each class in their order, and one at "
                f"least above 0; got {wanted}"
            )
        return tuple(wanted)
    if counts is None:  # not told yet, at real sites
        return ()
    held = counts > 0
    if size is not None:
        return tuple(np.where(held & (counts < size), (size - counts) / np.where(held, counts, 1), 1.0).tolist())
    weights = counts.sum() / np.maximum(held.sum(), 1) / np.where(held, counts, np.inf)
    return tuple(np.where(held, weights, weights.max() or 1.0).tolist())  # counts with noise may miss a class


def _private(personal: Personal, model: FlatModel, classes: int) -> engine.Private | None:
    """Mark what never leaves a client; None where that is nothing."""
    known = Names.of(model.module, model.names, model.buffer_names, classes)
    with placed("method.personal."):
        names = checked_private(personal, called("personal", personal, "private", known), known)
    return engine.Private.of(model, names, personal.head_epochs) if names else None


def make_protection(config: Config, model: FlatModel, clients: int) -> Protection | None:
    """Make what protects updates of so many clients, if anything; ConfigError where network or limit forbid it."""
    section, limit = config.privacy, config.training.weight_limit
    if section is None:
        return None
    if section.delta * clients >= 1:
        raise ConfigError(
            f"privacy.delta: {section.delta:g} has to be below 1 / {clients}, one divided by the number of clients: "
            "with that chance anything may become known of a client"
        )
    cohort = engine.cohort_size(config.training.participation, clients)
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
        raise ConfigError(f"privacy.answers: {section.answers} are more than take part in a round ({cohort})")
    noise = UpdateNoise(section.clip, section.noise, limit, section.answers)
    with placed("privacy."):
        noise.share(model.read_state().parameters.numel(), cohort)
    return Protection(noise, section.epsilon, section.delta)


def _network(config: Config, seed: int, num_classes: int, in_shape: Shape, samples: Tensor | None) -> nn.Module:
    source = config.model.name.partition(":")[0] in own_code.SOURCES
    make = None if source else components.find(models.INDEX, config.model.name, "model.name")
    options, key = config.model.parameters, stream_key(seed, Purpose.MODEL_INIT)
    if ":" not in config.model.name:
        for option in ("num_classes", "in_shape", "generator"):
            if option in options:
                raise ConfigError(f"model.{option}: not an option; it follows from the data set and the seed")
        takes_texts = config.model.name == "fasttext"
        if samples is not None and takes_texts == samples.is_floating_point():
            kinds = ("texts", "numbers") if takes_texts else ("numbers", "texts, as token ids; take fasttext")
            raise ConfigError(f"model.name: {config.model.name} takes {kinds[0]}, and these samples are {kinds[1]}")
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
        if source:
            module = _of_source(config, num_classes, in_shape, samples)
        else:
            module = components.call(make, config.model.name, "model", known, options)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model.name: {config.model.name} returned {type(module).__name__}, not an nn.Module")
        if samples is not None:
            with placed(f"model.name: {config.model.name} does not fit: "):
                models.check_outputs(module, samples, num_classes)
    return module


def _of_source(config: Config, num_classes: int, in_shape: Shape, samples: Tensor | None) -> nn.Module:
    """Make a network of another package; texts are for transformers alone."""
    section, options = config.model, config.model.parameters
    if section.architecture is not None:
        options = {"architecture": section.architecture} | options
    if samples is not None and (section.architecture is not None) == samples.is_floating_point():
        said = "token ids (data.tokenizer)" if section.architecture is not None else "numbers"
        raise ConfigError(f"model.name: {section.name} takes {said}, and these samples are of another kind")
    with placed("model."):
        return from_source(section.name, num_classes, in_shape, options)


def _prepared(config: Config, seed: int, module: nn.Module, in_shape: Shape, samples: Tensor | None) -> nn.Module:
    """Give a network the weights of a config's file, and freeze what the config names."""
    section, weights, drawn = config.model, config.model.weights, list[str]()
    try:
        if weights is not None:
            path = Path(config.place(weights))
            if file_hash(path) != section.weights_hash:
                raise ArgumentError(f"weights: {path} is another file than that of weights_hash; put that one there")
            drawn = load_weights(module, path, torch.zeros(1, *in_shape) if samples is None else samples)
        inner = module.network if isinstance(module, TextClassifier) else module
        if section.adapters is not None:
            inner = with_adapters(inner, section.adapters, stream_key(seed, Purpose.MODEL_ADAPT))
        elif section.freezes:
            freeze(inner, section.freeze, section.train)
        _check_trained(inner, drawn, section.adapters is not None)
    except ArgumentError as error:
        raise ConfigError(f"model.{error}") from None
    except (DataError, OSError) as error:
        said = f"{weights}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(f"model.weights: {said}") from None
    if isinstance(module, TextClassifier):
        module.network = inner
    else:
        module = inner
    start = "starts as it was drawn" if len(drawn) == 1 else "start as they were drawn"
    said = f"{', '.join(drawn)} {start}: {Path(weights or '').name} has no such layer of these classes"
    vars(module)["fedskew_note"] = said if drawn else None
    return models.Dropout.swap(module, samples) if ":" in section.name or section.adapters is not None else module


def _check_trained(module: nn.Module, drawn: list[str], adapted: bool) -> None:
    """Raise ArgumentError where layers that a weights file lacks would stay as they were drawn for ever."""
    trained = [f".{name}" for name, parameter in module.named_parameters() if parameter.requires_grad]
    if drawn and not any(f".{layer}." in name for layer in drawn for name in trained):
        key, last = ("adapters.modules_to_save", drawn[-1]) if adapted else ("train", f"{drawn[-1]}.*")
        raise ArgumentError(
            f"weights: it has no layer {drawn[-1]} of these classes, and it is not trained; add {last!r} to {key}"
        )


@dataclass(frozen=True)
class LabelledData:
    """Samples to evaluate on: `inputs`, `(samples, ...)`, and their class ids `targets`, `(samples,)`."""

    inputs: Inputs
    targets: Tensor


@dataclass(frozen=True)
class LocalEvaluator:
    """Evaluates models on a test set, and on a validation set where some is held out, on this machine; an `Evaluator`.
    `target` is the target's label mix, `chosen_by` the one that the server is told, by which validation chooses models.
    Its `backend` may help. With `multi_label` samples may have several labels; with `ranks` AUROC is known."""

    model: FlatModel
    test: LabelledData
    validation: LabelledData | None
    classes: int
    target: FloatArray | None
    chosen_by: FloatArray | None
    backend: engine.Backend | None = None
    multi_label: bool = False
    ranks: bool = True

    def __call__(self, round: int, state: ModelState) -> tuple[engine.Evaluation | None, engine.Evaluation | None]:
        """Evaluate a model on the test and the validation set."""
        self.model.write_state(state)
        tested = self._evaluate(state, self.test, self.target)
        return tested, None if self.validation is None else self._evaluate(state, self.validation, self.chosen_by)

    def scores(self, state: ModelState, validation: bool = False) -> metrics.Scores | metrics.FindingScores | None:
        """Return a model's logits of the test set, or of the validation set; None where there are no such samples."""
        data = self.validation if validation else self.test
        if data is None or not len(data.targets):
            return None
        self.model.write_state(state)
        if self.multi_label:
            logits = logits_of(self.model.network, data.inputs, finite=False)
            return metrics.FindingScores(logits, data.targets.cpu().numpy())
        return metrics.Scores.of(self._predicted(state, data).logits, data.targets)

    def _predicted(self, state: ModelState, data: LabelledData) -> Any:
        of_all = data.inputs, data.targets, self.classes
        found = None if self.backend is None else self.backend.predict(state, *of_all)
        return engine.predict(self.model.network, *of_all) if found is None else found

    def _evaluate(self, state: ModelState, data: LabelledData, target: FloatArray | None) -> engine.Evaluation:
        if self.multi_label:
            logits = logits_of(self.model.network, data.inputs, finite=False)
            return engine.Evaluation.of_findings(logits, data.targets.cpu().numpy())
        found = self._predicted(state, data)
        scores = metrics.Scores.of(found.logits, data.targets) if self.ranks and len(data.targets) else None
        return engine.Evaluation.of(found.confusion, found.loss, target, scores)


@dataclass(frozen=True)
class ClientEvaluations:
    """Evaluates each client's model right after its local training, by groups of its classes; an `engine.Observer`."""

    config: Config
    test: LabelledData
    counts: FloatArray

    def __call__(self, round: int, client: int, module: nn.Module) -> engine.ClientEvaluation | None:
        """Evaluate one client's model; None in a round without evaluation."""
        if not self.config.is_evaluated(round):
            return None
        confusion = engine.predict(module, self.test.inputs, self.test.targets, self.counts.shape[1]).confusion
        accuracy = metrics.per_class_accuracy(confusion)
        groups = np.array([metrics.mean_known(accuracy[ids]) for ids in metrics.class_groups(self.counts[client])])
        return engine.ClientEvaluation(client, engine.plain(accuracy), confusion.tolist(), *engine.plain(groups))


def behind_body(
    config: Config, method: Method, task: Task, module: nn.Module, samples: Tensor
) -> tuple[nn.Module, Task, str]:
    """Cut a network behind its frozen body and make the body's features the task's inputs, where that can be done;
    return the network that trains, its task, and a note for the run on what its features are."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return module, task, ""
    kept = "The features of the frozen layers are computed anew in every step: "
    for reason, holds in (
        ("engine.keep_features is off", not config.engine.keep_features),
        ("training.augmentation changes the samples", config.training.augmentation is not None),
        ("FedConcat trains a network for each cluster", method.pipeline is not None),
    ):
        if holds:
            return module, task, kept + reason
    try:
        body, rest = cut(module, samples)
        shape = tuple(quickened(body)(samples).shape[1:])
    except Exception as error:  # whatever a network of the user's raises where it is computed in parts
        return module, task, kept + in_one_line(error)
    dataset, unlabelled, device = task.dataset, task.unlabelled, samples.device
    number = len(dataset.targets) + len(dataset.test_targets) + (0 if unlabelled is None else len(unlabelled))
    if number * prod(shape) * 4 > MOST_BYTES:
        return module, task, f"{kept}{prod(shape):,} numbers for each of {number:,} samples are too many"
    groups = [*task.partition.indices, *task.held_out, *task.client_test, task.validation]
    seen = replace(
        dataset,
        inputs=Features(dataset.inputs.to(device), body, [rows for rows in groups if len(rows)]),
        test_inputs=Features(dataset.test_inputs.to(device), body, []),
        mean=(),
        std=(),
    )
    if unlabelled is not None:
        unlabelled = Features(unlabelled.to(device), body, [])
    numbers = " x ".join(map(str, shape))
    note = f"The features of the frozen layers, {numbers} numbers a sample, are computed once at each client"
    return rest, replace(task, loaded=replace(task.loaded, dataset=seen), unlabelled=unlabelled), note
