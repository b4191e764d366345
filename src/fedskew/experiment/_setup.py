"""Builds a simulation from a config, a seed and their task: network, federation, backend, training loop."""

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedskew import components, engine, findings, methods, models, torchrun
from fedskew.children import are_safe
from fedskew.data import take
from fedskew.engine.cohort import CohortBackend
from fedskew.engine.contracts import called
from fedskew.engine.fedconcat import FedConcatRunner
from fedskew.engine.sums import FixedPoint, Floats, answers_in_sum, stand_ins, summable
from fedskew.errors import BackendWarning, ConfigError, placed
from fedskew.executors import cores
from fedskew.experiment import _work
from fedskew.experiment._config import Config
from fedskew.experiment._folder import RunFolder, TaskInfo
from fedskew.experiment._identity import Identity
from fedskew.experiment._loop import TrainingLoop
from fedskew.experiment._model_info import ModelInfo
from fedskew.experiment._progress import TRACKERS
from fedskew.experiment._sections import TrainingSection
from fedskew.experiment._site_models import SiteModels
from fedskew.experiment._target import make_finisher, make_watch, noisy_target
from fedskew.experiment._task import FloatArray, IntArray, Task, make_task, some_samples
from fedskew.labels import ClassPairs, SkewReport, privatize
from fedskew.methods import Method, named
from fedskew.models import FlatModel, ModelState
from fedskew.models.frozen import hold_still
from fedskew.pipelines import FedConcat
from fedskew.randomness import Purpose, generator, stream_key
from fedskew.server_updates import Plain
from fedskew.tables import filled
from fedskew.weighting import BySums, Facts, Uniform

_STEP, _RATE = 3e-4, 5e10
"""Seconds that a step takes whatever the network, and operations a second."""

_WORTH_IT = 15.0
"""Seconds of a run for which starting processes, of 2 to 4 seconds each, is worth it."""

_BatchNorm = nn.modules.batchnorm._BatchNorm


def make_training_loop(
    config: Config, seed: int, folder: Path | None = None, task: Task | None = None, ranks: bool = True
) -> TrainingLoop:
    """Make the training loop of a simulation: one seed of one config on this machine.

    `folder` is where the run is written (None: in memory), `task` the data, if made already; without `ranks` no AUROC
    and the like are computed but to choose models. DataError, PartitionError, ConfigError: parts don't fit together.
    """
    config = config.for_seed(seed)
    device = choose_device(config.engine.device)
    whole_task = task or make_task(config, seed)
    raw = whole_task.dataset
    method = methods.build(config.method, config.training.momentum)
    if raw.multi_label:
        method = methods.for_findings(method, config.engine.label_counts == "summed")
    some = some_samples(raw)
    network = _work.make_network(config, seed, method, raw.num_classes, raw.in_shape, some.cpu()).to(device)
    module, task, features = _work.behind_body(config, method, whole_task, network, some.to(device))
    dataset, held_out = task.dataset, torch.from_numpy(task.validation)
    trained = FlatModel.of(module, some_samples(dataset).to(device), entire=network)
    test = _work.LabelledData(dataset.test_inputs.to(device), dataset.test_targets.to(device))
    validation = None
    if len(held_out):
        validation = _work.LabelledData(take(dataset.inputs, held_out).to(device), dataset.targets[held_out].to(device))
    clients = engine.ClientStates(None if folder is None else folder / "checkpoint" / "clients")
    observe = _work.ClientEvaluations(config, test, task.counts) if config.evaluation.clients else None
    runner, untrained, model, sites = _make_runner(
        config, seed, method, task, trained, clients, observe, folder, validation
    )
    if refuses_one(model.module, dataset.inputs.index_select(0, torch.tensor([0]))):
        check_batches(config, task.client_names, task.sizes)
    if config.evaluation.measure == "target_accuracy" and task.target is None:
        raise ConfigError("evaluation.measure: there is no target; set target.mix, or take balanced_accuracy")
    notes = run_notes(config, method, task, network, features)
    info = TaskInfo(task.counts.astype(np.int64), task.client_names, dataset.classes, task.target, notes, task.sizes)
    files = None
    if folder is not None:
        kept = model.frozen() if config.model.freezes and method.pipeline is None else {}
        files = RunFolder(folder, task.partition, Identity.of(config, whole_task.loaded.content(config)), kept)
    targets, backend = (task.target, task.server_target), getattr(runner, "backend", None)
    ranks = ranks or config.evaluation.reads_scores
    evaluator = _work.LocalEvaluator(
        model, test, validation, dataset.num_classes, *targets, backend, dataset.multi_label, ranks
    )
    return TrainingLoop(
        config=config,
        runner=runner,
        untrained=untrained,
        model=model,
        info=ModelInfo.of(raw),
        evaluate=evaluator,
        task=lambda: info,
        clients=clients,
        folder=files,
        watch=make_watch(seed, runner, model, task),
        beside=sites,
        at_sites=sites,
        finisher=make_finisher(config, seed, task, model),
        profile=partial(ModelInfo.of(raw).profile, raw.inputs),
        scores=evaluator.scores,
    )


def try_out(config: Config, seed: int, folder: Path, task: Task | None = None) -> None:
    """Set a run up as far as its first round, on the CPU and without writing, to raise now for what can't be made."""
    choose_device(config.engine.device)
    for name in config.output.trackers:
        TRACKERS[name](folder)
    engine = config.engine.model_copy(update={"device": "cpu"})
    loop = make_training_loop(config.model_copy(update={"engine": engine}), seed, folder, task)
    loop.runner.start(loop.untrained)  # where an optional package is missing, a component says so here


def choose_device(name: str) -> torch.device:
    """Return the device of a config; ConfigError where it asks for a GPU, and there is none."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("engine.device: this machine has no CUDA device; use 'cpu' or 'auto'")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True  # else a second run of a network with convolutions has other bits
    return torch.device(torchrun.device())


def _make_runner(
    config: Config,
    seed: int,
    method: Method,
    task: Task,
    model: FlatModel,
    clients: engine.ClientStates,
    observe: engine.Observer | None,
    folder: Path | None,
    validation: _work.LabelledData | None,
) -> tuple[engine.RoundRunner, ModelState, FlatModel, SiteModels | None]:
    """Return the runner of a method's rounds, the untrained model, the network for evaluated models, and own models."""
    training, dataset = config.training, task.dataset
    device, some = model.vector.device, some_samples(dataset)
    model.network.train().chain(some.to(device))  # what is done to the network stands in the run's record
    samples = engine.PartitionedData(
        dataset.inputs.to(device), dataset.targets.to(device), task.partition.indices, task.counts, dataset.multi_label
    )
    conditions, each, noisy = config.conditions, dataset.num_classes if dataset.multi_label else 1, None
    if conditions.count_epsilon is not None:
        noisy = privatize(task.counts, conditions.count_epsilon, rng=generator(seed, Purpose.NOISE), each=each)
    pooled = (task.counts if noisy is None else noisy).sum(axis=0)
    sizes = task.sizes.astype(np.float64) if dataset.multi_label else None
    moments = dataset.mean, dataset.std
    total = None if sizes is None else float(sizes.sum())
    work = _work.make_work(config, seed, method, model, samples, *moments, dataset.num_classes, pooled, total)
    weighed = noisy if conditions.count_use == "all" else None
    if config.engine.label_counts == "summed" and isinstance(method.weighting, BySums):
        weighed = stand_ins(method.weighting, task.counts if weighed is None else summable(weighed), sizes)
    size = engine.cohort_size(training.participation, len(task.counts))
    target = task.target if config.target.is_estimated else noisy_target(task.server_target, config.target.noise, seed)
    if method.pipeline is not None:
        size //= method.pipeline.clusters  # each cluster's part of a cohort trains by itself
    protection = _work.make_protection(config, model, len(task.counts))
    announced = _announced(config, method, task.counts if weighed is None else weighed, target)
    processes = _processes(config, model, task, size, some)
    federation = engine.Federation(
        method=method,
        backend=_backend(config, model, work, observe, size, processes),
        counts=task.counts,
        sizes=sizes,
        target=target,
        participation=training.participation,
        seed=seed,
        epochs=training.most_epochs,
        steps=training.steps,
        conditions=engine.Conditions(conditions.dropout, conditions.dropout_rule, conditions.stragglers),
        seen=noisy,
        weighed=weighed,
        clients=clients,
        weight_limit=training.weight_limit,
        aim=config.target.estimation(dataset.num_classes),
        codec=Floats() if config.engine.updates == "plain" else FixedPoint(protection, announced),
        constant_bytes=0 if work.private is None else work.private.bytes,
        network=model,
        samples=validation,
    )
    runner: engine.RoundRunner = federation
    untrained, whole = model.read_state(), model
    if method.pipeline is not None:
        runner = _fedconcat(method.pipeline, config, federation, model, work, observe)
        whole = runner.whole
    own = partial(_backend, config, observe=None, clients=size, processes=processes)
    return runner, untrained, whole, SiteModels.of(config, task, whole, work, untrained, clients, folder, own)


def _announced(config: Config, method: methods.Method, counts: FloatArray, target: FloatArray | None) -> Facts | None:
    """Return the sums that all clients are told if label counts are only summed; None if clients report them."""
    if config.engine.label_counts == "reported":
        return None
    weighting = method.weighting
    assert isinstance(weighting, BySums), "the config has been checked"
    with placed("engine.label_counts: "):
        return weighting.announce(lambda question: answers_in_sum(weighting, counts, question), target, len(counts))


def _fedconcat(
    pipeline: FedConcat,
    config: Config,
    federation: engine.Federation,
    network: FlatModel,
    work: engine.LocalWork,
    observe: engine.Observer | None,
) -> FedConcatRunner:
    """Return the runner of a pipeline, around a federation that trains the config's network."""
    seed = federation.seed
    counts = federation.counts if federation.seen is None else federation.seen
    with placed("method.pipeline."):
        cluster_of = called("pipeline", pipeline, "divide", counts, generator(seed, Purpose.CLUSTERS))
    drawn = torch.Generator().manual_seed(stream_key(seed, Purpose.MODEL_ADAPT))
    with placed(f"model.name: FedConcat can't use {config.model.name}: "):
        whole = models.Concatenated(network.module, pipeline.clusters, drawn)
    whole_model = FlatModel(whole)
    head = replace(
        federation,
        method=replace(federation.method, weighting=Uniform(), server_update=Plain(), pipeline=None),
        backend=_backend(config, whole_model, replace(work, hooks={}), observe, federation.cohort_size),
        epochs=pipeline.batches,  # even a client with a single batch can take all its steps
        steps=pipeline.batches,
        conditions=replace(federation.conditions, stragglers=0.0),
        network=whole_model,
        constant_bytes=0,  # its encoders' buffers are no part of the state
    )
    return FedConcatRunner(
        pipeline=pipeline,
        encoder_rounds=pipeline.split(config.training.rounds),
        cluster_of=cluster_of,
        encoders=federation,
        head=head,
        network=network,
        whole=whole_model,
    )


def _backend(
    config: Config,
    model: FlatModel,
    work: engine.LocalWork,
    observe: engine.Observer | None,
    clients: int,
    processes: int = 1,
) -> engine.Backend:
    """Return the backend for cohorts of so many clients, on the model's device; under `torchrun`, over all ranks."""
    section = config.engine
    if work.training.bf16_on(model.vector.device) == "emulated":
        said = "training.precision: this processor has no instructions for bf16; training is slower than without it"
        warnings.warn(said, BackendWarning, stacklevel=2)
    local: engine.Backend = engine.SequentialBackend(model, work, observe)
    here = -(-clients // torchrun.ranks())
    if section.backend == "cohort" or (section.backend == "auto" and CohortBackend.is_faster(model, work, here)):
        local = CohortBackend(model, work, observe, section.chunk)
    elif section.backend == "processes" or processes > 1:
        if model.vector.device.type != "cpu":
            raise ConfigError(
                "engine.backend: 'processes' trains on the CPU only; set engine.device to 'cpu', or engine.backend to "
                "'sequential'"
            )
        local = engine.ProcessBackend(model, work, max(processes, section.number_of_processes()), observe)
    return engine.RankBackend(local, work) if torchrun.launched() else local


def _processes(config: Config, model: FlatModel, task: Task, cohort: int, samples: Tensor) -> int:
    """Return how many processes the backend "auto" takes, whose bits are those of one: one where they can't be started
    safely, or where a run, by the multiplications of its forward passes, takes less time than to start them."""
    section, training = config.engine, config.training
    at_once = min(section.processes or max(1, cores() // section.threads), cohort)
    safe = (
        are_safe()
        and "__main__:" not in str(config.tree())
        and not torchrun.launched()
        and model.vector.device.type == "cpu"
    )
    if section.backend != "auto" or at_once < 2 or not safe:
        return 1
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.module.eval()(samples[:1])
    batches = training.most_epochs * float(task.sizes.mean()) / training.batch_size
    steps = training.rounds * cohort * (batches if training.steps is None else training.steps)
    operations = 3 * counter.get_total_flops() * training.batch_size
    return at_once if steps * (_STEP + operations / _RATE) > _WORTH_IT else 1


def refuses_one(module: nn.Module, sample: Tensor) -> bool:
    """Return whether a network can't be trained on `(1, *in_shape)`, as batch norm then sees one value a channel."""
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return False
    tried = copy.deepcopy(module).cpu().eval()
    for layer in tried.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    hold_still(tried)
    try:
        with torch.no_grad():
            tried(sample.cpu())
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def check_batches(config: Config, names: Sequence[str], sizes: IntArray) -> None:
    """Raise ConfigError where a client has a batch of one sample, for a network that can't be trained on it."""
    training = config.training
    if components.has(methods.build(config.method, training.momentum).selection, "assigns_quotas"):
        return  # a client's samples differ from round to round
    found = [name for name, size in zip(names, sizes.tolist(), strict=True) if _has_batch_of_one(training, size)]
    if not found:
        return
    who = f"client {found[0]} has" if len(found) == 1 else f"{len(found)} clients, such as {found[0]}, have"
    cure = (
        "set training.batch_size to 2 or more"
        if training.batch_size == 1
        else "set training.smallest_batch = 2, which leaves it out, or another batch_size"
    )
    raise ConfigError(
        f"training.smallest_batch: {who} a batch of one sample, on which the batch norm of {config.model.name} can't "
        f"be trained; {cure}"
    )


def _has_batch_of_one(training: TrainingSection, size: int) -> bool:
    batches = math.ceil(size / training.batch_size)
    if training.batch_size == 1:
        return size > 0 and training.epochs > 0
    steps = math.ceil(training.epochs * batches - 1e-9) if training.steps is None else training.steps
    return 0 < batches <= steps and training.smallest_batch == 1 and size % training.batch_size == 1


def run_notes(config: Config, method: Method, task: Task, network: nn.Module, features: str = "") -> tuple[str, ...]:
    """Say what can't be learnt from these labels, by this network or by this method, whatever the training."""
    dataset, counts, weighting, number = task.dataset, task.counts, method.weighting, task.dataset.num_classes
    ids = dataset.test_targets[dataset.test_targets >= 0].numpy()
    tested = findings.as_table(ids, number).sum(axis=0) if dataset.multi_label else np.bincount(ids, minlength=number)
    mix, of = (tested.astype(np.float64), "test part") if task.target is None else (task.target, "target")
    relying = [(slot, one) for slot, one in method.components() if components.has(one, "needs_colocation")]
    trained = [one for one in network.parameters() if one.requires_grad]
    told = config.engine.label_counts == "summed" and config.conditions.count_epsilon is None
    said = filled(
        "fedskew.experiment",
        "run_notes.txt",
        {},
        skipped=dataset.skipped,
        unheld=SkewReport.unheld_in_words(counts, mix, dataset.classes, of) if mix.any() else None,
        held=[dataset.classes[label] for label in np.flatnonzero(counts.any(axis=0))],
        untested=[dataset.classes[label] for label in np.flatnonzero(counts.any(axis=0) & (tested == 0))],
        relying=[(named(slot, one), getattr(one, "weakened_by", "")) for slot, one in relying],
        pairs=ClassPairs.of(counts).in_words(dataset.classes) if relying and len(counts) > 1 else None,
        weights=[one for layer in network.modules() if (one := getattr(layer, "fedskew_note", None))],
        parameters=[sum(one.numel() for one in some) for some in (trained, [*network.parameters()])],
        freezes=config.model.freezes,
        features=features,
        idle=[] if method.pipeline is not None else _idle_terms(method, network),
        network=type(network).__name__,
        weighting=named("weighting", weighting),
        conditions=config.conditions,
        cohort=engine.cohort_size(config.training.participation, len(counts)),
        reveals=weighting.reveals if told and isinstance(weighting, BySums) else None,
    )
    return tuple(filter(None, said.split("\n")))


def _idle_terms(method: Method, network: nn.Module) -> list[str]:
    """Return the terms of an objective that do nothing, as no layer before the network's last one is trained."""
    head = getattr(network, "head", None)
    last = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Linear) else set()
    if not last or any(one.requires_grad and id(one) not in last for one in network.parameters()):
        return []
    return [named("objective", term) for _, term in method.objective.terms if components.has(term, "shapes_features")]
