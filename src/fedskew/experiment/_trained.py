"""A trained model, read back from its run folder to be used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedskew import labels, methods, models
from fedskew.data import Encoder, Inputs, Profile, Stored, TableSchema, take
from fedskew.errors import ArgumentError, RunError, placed
from fedskew.experiment._config import Config, read
from fedskew.experiment._folder import FINISHED, RunFolder, parts_of, reading, require_end, require_run
from fedskew.experiment._model_info import ModelInfo, export
from fedskew.experiment._task import FloatArray, held_out_rows, make_task
from fedskew.experiment._work import make_network
from fedskew.files import file_hash, load_tensors
from fedskew.own_code import of_run
from fedskew.personal import HeldOut
from fedskew.tables import counted

ADAPTED, PERSONAL = "adapted.safetensors", "personal.safetensors"
BATCH = 256


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained model: network (normalised inputs to logits), classes, shape, normalisation, file, the run's seed."""

    network: nn.Module
    info: ModelInfo
    file: Path
    seed: int

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.info.classes

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.info.in_shape

    @cached_property
    def encoder(self) -> Encoder | None:
        """What makes inputs of samples as they are in files; None where samples are images or arrays."""
        return self.info.made_encoder()

    @property
    def schema(self) -> TableSchema | None:
        """What the columns hold of a table that the model was trained on; None: it was trained on something else."""
        return self.encoder if isinstance(self.encoder, TableSchema) else None

    def decide(self, probabilities: FloatArray) -> NDArray[np.int64]:
        """Return the likeliest class ids by probabilities, `(samples, classes)`; of two by an `info.threshold`."""
        shares, threshold = np.asarray(probabilities), self.info.threshold
        decided = shares.argmax(axis=1) if threshold is None else shares[:, 1] >= threshold
        return decided.astype(np.int64)

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class", "classes")
        return f"<TrainedModel of {self.file}: samples of shape {self.in_shape}, {classes}>"

    def held_out(self) -> tuple[Inputs, NDArray[np.int64]]:
        """Return the normalised samples that the model's run held out, at clients or for validation, and classes."""
        check_one_class(self)
        folder = self.file.parent
        config = read(folder / "config.toml")
        if not config.data.validation and not config.data.held_out:
            raise RunError(
                f"{folder}: this run held no samples out; give labelled ones with --held-out, or train with "
                "data.held_out = 0.2 (or data.validation = 0.1)"
            )
        task = make_task(config, self.seed)
        if not (held := held_out_rows(task)):
            raise RunError(f"{folder}: not one sample of this run was held out; give some with --held-out")
        rows = torch.from_numpy(np.sort(np.concatenate(held)))
        return take(task.dataset.inputs, rows), task.dataset.targets[rows].numpy()

    @cached_property
    def _held_out_logits(self) -> tuple[FloatArray, NDArray[np.int64]]:
        samples, targets = self.held_out()
        return self.logits(samples, normalised=True), targets

    def personal(self, counts: ArrayLike, held_out: tuple[ArrayLike | Inputs, ArrayLike] | None = None) -> TrainedModel:
        """Return the model of one client, which need not have taken part: this one under the client's own label mix.

            model = fedskew.load("runs/my-1a2b3c4d")
            ours = model.personal([120, 3, 0])      # samples of each class, in the order of model.classes

        It is the component `prior` of `method.personal`. Of a model that was moved to a target's mix, the model
        before that is taken, as the client's mix stands in place of the target's.

        Args:
            counts: The client's samples of each class, `(classes,)`.
            held_out: Labelled samples in their own units that the model was not trained on, and their classes; None:
                those that the run held out.

        Raises:
            ArgumentError: The counts are not one number >= 0 for each class, or all 0.
            RunError: The run held no samples out.
        """
        model = self.before_move()
        told = HeldOut.of(*(model._held_out_logits if held_out is None else (model.logits(held_out[0]), held_out[1])))
        return moved_model(model, told.calibration, mix_of_client(counts, told.mix), told.mix)

    def profile(self) -> Profile:
        """Return what the training samples looked like (`fedskew watch`); RunError where the folder does not say."""
        path = self.file.with_name(RunFolder.INPUTS)
        try:
            return Profile.of_plain(json.loads(path.read_text(encoding="utf-8")))
        except OSError:
            who = 'a run of this version writes it, and one of real sites with input_profile = "summed" in deploy.toml'
            raise RunError(f"{path}: there is none; {who}: train the model anew") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{path}: damaged ({type(error).__name__}); put the file back") from None

    def before_move(self) -> TrainedModel:
        """Return the model as it was before it was moved to a label mix, if it was: by a finish `adapt`, or later."""
        if isinstance(self.network, Adapted):
            return replace(self, network=self.network.network)
        finish = read(self.file.with_name("config.toml")).method.get("finish", {}) if self.file.name == FINISHED else {}
        return load(self.file.parent) if finish.get("name") == "adapt" else self

    @torch.inference_mode()
    def predict(self, inputs: ArrayLike | Tensor | Stored, *, normalised: bool = False) -> NDArray[np.float64]:
        """Return the probability of each class for each sample, `(samples, classes)`.

        Where a sample may have several labels (`info.multi_label`) each has a probability of its own.

            model = fedskew.load("runs/my-1a2b3c4d")
            probabilities = model.predict(images)
            names = [model.classes[label] for label in probabilities.argmax(1)]

        Args:
            inputs: Samples in their own units, `(samples, *in_shape)`: features as in the file that was trained on,
                images in [0, 1] or uint8 (grey ones also `(samples, height, width)`), or token ids. The model
                normalises them as in training. Of a model of tables also a CSV or Parquet file, a data frame, or a
                list of one dict a row: columns by name, in any order, without labels or with.
            normalised: The samples are normalised already, like `inputs` and `test_inputs` of a `data.Dataset`; a
                `data.Stored` always is.

        Raises:
            ArgumentError: The samples' shape or type is not the model's; the message says which is expected. Images in
                other units, such as floats up to 255, issue a DataWarning.
            DataError: A file or row does not fit the model's schema; the message names column and line.
        """
        return self.info.probabilities(self._outputs(inputs, normalised)).cpu().numpy()

    @torch.inference_mode()
    def logits(self, inputs: ArrayLike | Tensor | Stored, *, normalised: bool = False) -> NDArray[np.float64]:
        """Return logits, `(samples, classes)`, of samples as `predict` takes them."""
        return self._outputs(inputs, normalised).cpu().numpy()

    def _outputs(self, inputs: ArrayLike | Tensor | Stored, normalised: bool) -> Tensor:
        device = next(self.network.parameters()).device
        logits = [self.network(batch.to(device)).double() for batch in self._batches(inputs, normalised)]
        return torch.cat(logits) if logits else torch.zeros(0, len(self.classes), dtype=torch.float64)

    def export(self, path: str | Path, kind: str) -> Path:
        """Write the model for other programs, by PyTorch's own exporters, to a file of `kind` "onnx" or "torchscript".

        Adapters are added to the network's own weights. "weights" writes a state dict of these as safetensors;
        "adapters" the adapters apart, as peft does, to a folder.

        What is written normalises samples as `predict` does and returns probabilities, for any number of samples at
        once. TorchScript takes what `predict` takes, as tensors: images in [0, 1] or uint8, features of any type, token
        ids. An ONNX graph has one type of input: float32 (images in [0, 1]: divide bytes by 255), or int64 for token
        ids; it needs `pip install 'fedskew[onnx]'`. The names of the classes are in the file's metadata: `classes`, a
        JSON list, and `threshold` where there is one; where a sample may have several labels, `probabilities` says that
        each is by itself. RunError where PyTorch can't export this network, or the file can't be written.
        """
        if isinstance(self.network, Adapted) and kind in ("weights", "adapters"):
            raise ArgumentError(f"{kind}: export the model before its move (no --adapted, --personal), or take onnx")
        return export(self.network, self.info, Path(path), kind)

    def _batches(self, inputs: ArrayLike | Tensor | Stored, normalised: bool) -> Iterator[Tensor]:
        """Yield the samples as the network takes them, some at a time."""
        if isinstance(inputs, Stored) and not isinstance(inputs, Tensor):
            for start in range(0, len(inputs), BATCH):
                rows = torch.arange(start, min(start + BATCH, len(inputs)), device=inputs.device)
                yield inputs.index_select(0, rows)
            return
        samples = inputs if isinstance(inputs, Tensor) else self._encoded(inputs)
        info = ModelInfo(self.classes, self.in_shape, self.info.tokens) if normalised else self.info
        for start in range(0, max(len(samples), 1) if samples.dim() else 1, BATCH):
            if len(batch := info.normalise(samples[start : start + BATCH] if samples.dim() else samples)):
                yield batch

    def _encoded(self, inputs: Any) -> Tensor:
        """Return samples as a tensor: what files, rows and data frames hold by the model's encoder."""
        is_path, encoder = isinstance(inputs, str | Path), self.encoder
        first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
        if not is_path and not isinstance(first, Mapping | str) and not hasattr(first, "to_dict"):
            with placed("inputs: not an array of numbers: ", ArgumentError, of=(ValueError, TypeError)):
                array = np.asarray(inputs)
                numbers = array if array.dtype.kind in "fiub" else array.astype(np.float64)
                return torch.from_numpy(np.require(numbers, requirements=["C", "W"]))  # as PyTorch takes memory
        if encoder is None:
            expected = str(("samples", *self.in_shape)).replace("'", "")
            raise ArgumentError(f"inputs: not an array of numbers; the model takes arrays of shape {expected}")
        return encoder.read(Path(inputs))[1] if is_path else encoder.encode(inputs)


class Adapted(nn.Module):
    """A network whose outputs are log-probabilities under a target's label mix: of z / temperature + offsets."""

    temperature: Tensor
    offsets: Tensor

    def __init__(self, network: nn.Module, temperature: float, offsets: FloatArray) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("temperature", torch.tensor(temperature, dtype=torch.float32))
        self.register_buffer("offsets", torch.from_numpy(offsets).float())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return log-probabilities, `(samples, classes)`, of `(samples, ...)`."""
        outputs: Tensor = (self.network(inputs) / self.temperature + self.offsets).log_softmax(dim=1)
        return outputs


def load(
    run: str | Path,
    *,
    seed: int | None = None,
    best: bool = False,
    finished: bool = False,
    adapted: bool = False,
    personal: bool = False,
    trust_code: bool = False,
) -> TrainedModel:
    """Read the model of a finished run, to use it.

        model = fedskew.load("runs/my-1a2b3c4d")
        model.classes                       # names, in the order of the probabilities
        model.predict(images)               # probabilities, (samples, classes)

    Args:
        seed: The seed whose model it is to be; None: the first.
        best: The model that was best on the validation samples, in place of the final one.
        finished: The model that the method's finish made of the final one.
        adapted: The model that `fedskew adapt` made; its probabilities are those under the target's label mix.
        personal: The model that `fedskew personal` made; its probabilities are those under one client's label mix.
        trust_code: Import the code that the run folder brings, which then runs with your rights. Without it a network
            of one's own has to be importable from your own files.

    Returns:
        The model, on the CPU.

    Raises:
        ArgumentError: More than one of `best`, `finished`, `adapted` and `personal`.
        RunError: There is no such run or model, or it can't be read.
        ConfigError: Its network can't be built, as where a class of one's own isn't importable here, or came with it.
    """
    if best and finished:
        raise ArgumentError("finished: it is made of the final model, not of the best one; leave out best")
    if adapted or personal:
        if best or finished or (adapted and personal):
            name, command = ("adapted", "adapt") if adapted else ("personal", "personal")
            raise ArgumentError(f"{name}: `fedskew {command}` says of which model it is; leave out other options")
        return _moved(run, load(run, seed=seed, trust_code=trust_code), ADAPTED if adapted else PERSONAL)
    folder = _of_seed(Path(run), seed, trust_code)
    config = read(folder / "config.toml")
    path = folder / ("best.safetensors" if best else FINISHED if finished else "model.safetensors")
    if not path.exists():
        if finished and "finish" not in config.method:
            raise RunError(f"{path}: this run's method has no finish (method.finish), so there is only the final model")
        if finished and (failed := _finish_failed(folder)) is not None:
            raise RunError(f"{path}: there is only the model as it was trained, as its finish failed: {failed}")
        if best and (folder / "model.safetensors").exists():
            raise RunError(f"{path}: no validation samples were held out (data.validation), so no model is the best")
        require_end(folder)
    with reading(path):
        state, notes = load_tensors(path)
        info = ModelInfo.of_plain(notes)
    network = _network(config, info)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"{path}: not the weights of the config's network: {' '.join(str(error).split())}") from None
    return TrainedModel(network.eval(), info, path, config.seeds[0])


def _finish_failed(folder: Path) -> str | None:
    """Why a run's trained model could not be finished; None where that is not known."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["finished"]["failed"])
    return None


def _of_seed(run: Path, seed: int | None, trust_code: bool) -> Path:
    """Return the folder of one seed (and of the value that validation chose, where several were tried)."""
    require_run(run)
    with of_run(run, trust_code):
        seeds = read(run / "config.toml").seeds
    if seed is not None and seed not in seeds:
        raise RunError(f"{run}: has no seed {seed}; its seeds: {', '.join(map(str, seeds))}")
    if (run / "rounds.jsonl").exists():
        return run
    parts, at = parts_of(run), 0 if seed is None else seeds.index(seed)
    chosen = str(parts[at]) if at < len(parts) else ""
    if chosen != Path(chosen).name or chosen in ("", ".."):
        raise RunError(f"{run / 'summary.json'}: damaged: parts names {chosen!r}, which is no folder of this run")
    return run / chosen


def _network(config: Config, info: ModelInfo) -> nn.Module:
    """Return the network of a config before its weights are read."""
    method = methods.build(config.method, config.training.momentum)
    network = make_network(config.weights_in(None), config.seeds[0], method, len(info.classes), info.in_shape)
    return network if method.pipeline is None else models.Concatenated(network, method.pipeline.clusters)


def moved_model(
    model: TrainedModel, calibration: labels.Calibration, mix: FloatArray, prior: FloatArray | None = None
) -> TrainedModel:
    check_one_class(model)
    added = calibration.offsets(mix, prior)
    info = replace(model.info, threshold=None)  # it was chosen for other probabilities
    return replace(model, network=Adapted(model.network, calibration.temperature, added).eval(), info=info)


def check_one_class(model: TrainedModel) -> None:
    """Raise RunError where a sample may have several labels."""
    if model.info.multi_label:
        raise RunError(
            f"{model.file}: samples may have several labels, so that there is no label mix that it could be moved to"
        )


def mix_of_client(counts: ArrayLike, held_out_mix: FloatArray) -> FloatArray:
    """Return a client's label mix among the classes with held-out samples; ArgumentError where there is none."""
    mix, seen = labels.own_mix(counts, len(held_out_mix)), held_out_mix > 0
    if not np.any(counts):
        raise ArgumentError("counts: are all 0, which says nothing of a client; give its samples of each class")
    if not np.asarray(counts)[seen].any():
        raise ArgumentError("counts: no held-out sample is of a class that they have, so nothing is known of them")
    known: FloatArray = np.where(seen, mix, 0.0) / mix[seen].sum()
    return known


def _moved(run: str | Path, plain: TrainedModel, file: str) -> TrainedModel:
    """Read what `fedskew adapt` or `personal` made of a run's model; RunError if there is none, or of other weights."""
    path, command = plain.file.with_name(file), f"fedskew {'adapt' if file == ADAPTED else 'personal'} {run}"
    try:
        tensors, notes = load_tensors(path)
    except RunError as error:
        how = "--target-data ..." if file == ADAPTED else "--counts ..."
        raise RunError(f"{path}: {error}; make it: {command} {how}") from None
    name = notes["model"]
    model = load(run, seed=plain.seed, best=name == "best.safetensors", finished=name == FINISHED)
    if notes["digest"] != file_hash(model.file)[:16]:
        raise RunError(f"{path}: made of other weights than {model.file.name} holds now; run {command} again")
    calibration = labels.Calibration(tensors["temperature"].item(), tensors["biases"].numpy())
    prior = tensors["held_out_mix"].numpy() if "held_out_mix" in tensors else None
    return moved_model(model, calibration, tensors["mix"].numpy(), prior)
