"""A trained model, read back from its run folder to be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedskew import labels, methods, models
from fedskew.data import Inputs, Stored, take
from fedskew.errors import ArgumentError, RunError
from fedskew.experiment._config import Config, read
from fedskew.experiment._folder import FINISHED
from fedskew.experiment._model_info import ModelInfo, export
from fedskew.experiment._work import make_network
from fedskew.files import load_tensors
from fedskew.own_code import of_run
from fedskew.tables import counted

FloatArray = NDArray[np.float64]

ADAPTED = "adapted.safetensors"
BATCH = 256


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained model, with what it takes to use it.

    Attributes:
        network: The network, in eval mode: normalised inputs in, logits `(samples, classes)` out.
        info: Classes, shape and normalisation.
        file: The file that the weights are from.
        seed: The seed of its run.
    """

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

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class", "classes")
        return f"<TrainedModel of {self.file}: samples of shape {self.in_shape}, {classes}>"

    def held_out(self) -> tuple[Inputs, NDArray[np.int64]]:
        """Return the samples that the model's run held out, normalised, and their classes; RunError if there are none.

        They are the clients' own (`data.held_out`) where there are such, else the validation samples.
        """
        from fedskew.experiment._task import held_out_rows, make_task

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

    @torch.inference_mode()
    def predict(self, inputs: ArrayLike | Tensor | Stored, *, normalised: bool = False) -> NDArray[np.float64]:
        """Return the probability of each class for each sample, `(samples, classes)`.

            model = fedskew.load("runs/my-1a2b3c4d")
            probabilities = model.predict(images)
            names = [model.classes[label] for label in probabilities.argmax(1)]

        Args:
            inputs: Samples in their own units, `(samples, *in_shape)`: features as in the file that was trained on,
                images in [0, 1] or uint8 (grey ones also `(samples, height, width)`), or token ids. The model
                normalises them as in training.
            normalised: The samples are normalised already, like `inputs` and `test_inputs` of a `data.Dataset`; a
                `data.Stored` always is.

        Raises:
            ArgumentError: The samples' shape or type is not the model's; the message says which is expected. Images in
                other units, such as floats up to 255, issue a DataWarning.
        """
        return torch.softmax(self._outputs(inputs, normalised), 1).cpu().numpy()

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

        What is written normalises samples as `predict` does and returns probabilities, for any number of samples at
        once. TorchScript takes what `predict` takes, as tensors: images in [0, 1] or uint8, features of any type, token
        ids. An ONNX graph has one type of input: float32 (images in [0, 1]: divide bytes by 255), or int64 for token
        ids; it needs `pip install 'fedskew[onnx]'`. The names of the classes are in the file's metadata: `classes`, a
        JSON list. RunError where PyTorch can't export this network, or the file can't be written.
        """
        return export(self.network, self.info, Path(path), kind)

    def _batches(self, inputs: ArrayLike | Tensor | Stored, normalised: bool) -> Iterator[Tensor]:
        """Yield the samples as the network takes them, some at a time."""
        if isinstance(inputs, Stored) and not isinstance(inputs, Tensor):
            for start in range(0, len(inputs), BATCH):
                rows = torch.arange(start, min(start + BATCH, len(inputs)), device=inputs.device)
                yield inputs.index_select(0, rows)
            return
        samples = inputs if isinstance(inputs, Tensor) else _tensor(inputs)
        info = ModelInfo(self.classes, self.in_shape, self.info.tokens) if normalised else self.info
        for start in range(0, max(len(samples), 1) if samples.dim() else 1, BATCH):
            if len(batch := info.normalise(samples[start : start + BATCH] if samples.dim() else samples)):
                yield batch


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
    trust_code: bool = False,
) -> TrainedModel:
    """Read the model of a finished run, to use it.

        model = fedskew.load("runs/my-1a2b3c4d")
        model.classes                       # names, in the order of the probabilities
        model.predict(images)               # probabilities, (samples, classes)

    Args:
        run: The run folder.
        seed: The seed whose model it is to be; None: the first.
        best: The model that was best on the validation samples, in place of the final one.
        finished: The model that the method's finish made of the final one.
        adapted: The model that `fedskew adapt` made; its probabilities are those under the target's label mix.
        trust_code: Import the code that the run folder brings, which then runs with your rights. Without it a network
            of one's own has to be importable from your own files.

    Returns:
        The model, on the CPU.

    Raises:
        ArgumentError: More than one of `best`, `finished` and `adapted`.
        RunError: There is no such run or model, or it can't be read.
        ConfigError: Its network can't be built, as where a class of one's own isn't importable here, or came with it.
    """
    if best and finished:
        raise ArgumentError("finished: it is made of the final model, not of the best one; leave out best")
    if adapted:
        if best or finished:
            raise ArgumentError("adapted: the file says of which model it is; leave out best and finished")
        return _adapted(run, load(run, seed=seed, trust_code=trust_code))
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
        if not (folder / "summary.json").exists():
            raise RunError(f"{folder}: no model yet; finish the run: {_command(folder)} --resume")
    try:
        state, notes = load_tensors(path)
        info = ModelInfo.of_plain(notes)
    except (RunError, TypeError) as error:
        raise RunError(
            f"{path}: the model can't be read ({error}); put the file back, or train it anew: "
            f"{_command(folder)} --fresh"
        ) from None
    network = _network(config, info)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"{path}: not the weights of the config's network: {' '.join(str(error).split())}") from None
    return TrainedModel(network.eval(), info, path, config.seeds[0])


def _finish_failed(folder: Path) -> str | None:
    """Why a run's trained model could not be finished; None where that is not known."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return str(summary["finished"]["failed"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _of_seed(run: Path, seed: int | None, trust_code: bool) -> Path:
    """Return the folder of one seed (and of the value that validation chose, where several were tried)."""
    if not (run / "config.toml").exists():
        raise RunError(f"{run}: not a run folder (it has no config.toml)")
    with of_run(run, trust_code):
        seeds = read(run / "config.toml").seeds
    if seed is not None and seed not in seeds:
        raise RunError(f"{run}: has no seed {seed}; its seeds: {', '.join(map(str, seeds))}")
    if (run / "rounds.jsonl").exists():
        return run
    try:
        parts: list[Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))["parts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f"{run}: no model yet; finish the run: {_command(run)} --resume") from None
    chosen = str(parts[0 if seed is None else seeds.index(seed)])
    if chosen != Path(chosen).name or chosen == "..":
        raise RunError(f"{run / 'summary.json'}: damaged: parts names {chosen!r}, which is no folder of this run")
    return run / chosen


def _command(folder: Path) -> str:
    """Return the command that the run of a folder belongs to: that of all its seeds, where it is one of several."""
    whole = folder.parent if (folder.parent / "config.toml").exists() else folder
    return f"fedskew run {whole / 'config.toml'}"


def _network(config: Config, info: ModelInfo) -> nn.Module:
    """Return the network of a config before its weights are read."""
    method = methods.build(config.method, config.training.momentum)
    network = make_network(config, config.seeds[0], method, len(info.classes), info.in_shape)
    return network if method.pipeline is None else models.Concatenated(network, method.pipeline.clusters)


def _tensor(values: ArrayLike) -> Tensor:
    try:
        array = np.asarray(values)
        numbers = array if array.dtype.kind in "fiub" else array.astype(np.float64)
        return torch.from_numpy(np.require(numbers, requirements=["C", "W"]))  # as PyTorch takes memory
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"inputs: not an array of numbers: {error}") from None


def moved_model(model: TrainedModel, calibration: labels.Calibration, mix: FloatArray) -> TrainedModel:
    return replace(model, network=Adapted(model.network, calibration.temperature, calibration.offsets(mix)).eval())


def _adapted(run: str | Path, plain: TrainedModel) -> TrainedModel:
    """Read the model that `fedskew adapt` made of a run's; RunError if there is none, or it is of other weights."""
    path = plain.file.with_name(ADAPTED)
    try:
        tensors, notes = load_tensors(path)
    except RunError as error:
        raise RunError(f"{path}: {error}; make it: fedskew adapt {run} --target-data ...") from None
    name = notes["model"]
    model = load(run, seed=plain.seed, best=name == "best.safetensors", finished=name == FINISHED)
    if notes["digest"] != digest(model.file):
        raise RunError(f"{path}: made of other weights than {model.file.name} holds now; run fedskew adapt {run} again")
    calibration = labels.Calibration(tensors["temperature"].item(), tensors["biases"].numpy())
    return moved_model(model, calibration, tensors["mix"].numpy())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
