"""What is stored with a model's weights (classes, shape and normalisation of inputs), and models for other programs."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.data import Dataset, Encoder, Inputs, Profile, TableSchema, encoder_of, in_own_units
from fedskew.errors import ArgumentError, DataWarning, MissingPackageError, RunError, nearest
from fedskew.files import replacing, save_tensors, writing
from fedskew.models.adapters import merged, save_adapters
from fedskew.models.sources import TextClassifier

MOST_PROFILED, PROFILED_AT_ONCE = 10_000, 256
FAR = 20.0
"""Standard deviations from the mean of training beyond which an image is taken to be in other units."""


@dataclass(frozen=True)
class ModelInfo:
    """A model's inputs and outputs.

    Attributes:
        classes: Names of the classes, in the order of the model's outputs.
        tokens: Whether samples are token ids instead of numbers.
        mean: Mean by channel (by feature if samples are no images) by which inputs are normalised; empty: they are not.
        window: What is black and white in pictures of more than 8 bits (see `data.Dataset`).
        encoder: What makes inputs of samples as they are in files, in plain values (`data.encoder_of`); None: there is
            nothing of that kind, as of images.
        multi_label: Whether a sample may have several of the classes, or none: each has a probability of its own.
        threshold: The probability from which a sample is taken for the second of two classes, as validation samples
            chose it; None: samples are taken for the likeliest class.
    """

    EXPORTS: ClassVar[dict[str, str]] = {
        "onnx": ".onnx",
        "torchscript": ".pt",
        "weights": ".weights.safetensors",
        "adapters": ".adapters",
    }
    """The formats that a model can be exported to, with the suffix of their files."""

    classes: tuple[str, ...]
    in_shape: tuple[int, ...]
    tokens: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    window: tuple[float, ...] = ()
    encoder: dict[str, Any] | None = None
    multi_label: bool = False
    threshold: float | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, `(samples, classes)`."""
        return torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, dim=1)

    @property
    def is_table(self) -> bool:
        """Whether samples are rows of a table, in which a number that is NaN is missing."""
        return self.encoder is not None and self.encoder["kind"] == "table"

    def made_encoder(self) -> Encoder | None:
        """Return what makes inputs of samples as they are in files; None where there is nothing of that kind."""
        return None if self.encoder is None else encoder_of(self.encoder)

    def plain(self) -> dict[str, Any]:
        """Return these notes as the model's file holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, dataset: Dataset) -> "ModelInfo":
        """Return what is stored with a model of a data set; whole numbers in memory are token ids."""
        tokens = isinstance(dataset.inputs, Tensor) and not dataset.inputs.is_floating_point()
        encoder = None if dataset.encoder is None else dataset.encoder.plain()
        form = dataset.mean, dataset.std, dataset.window
        return cls(dataset.classes, dataset.in_shape, tokens, *form, encoder, dataset.multi_label)

    @classmethod
    def of_plain(cls, values: dict[str, Any]) -> "ModelInfo":
        """Read what `plain` returned; TypeError if they are of something else."""
        made: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
        return cls(**made)

    @property
    def before(self) -> str | None:
        """What has to be done to samples before an exported model takes them; None: nothing."""
        if self.encoder is not None and self.encoder["kind"] == "text":
            return (
                "int64 ids of a text's words, 0 where it has no more: in lower case, each of ' . , ( ) ! ? a word, "
                "quotes left out, ; and : spaces; an id is a word's place in `words` of `encoder` plus 2, else 1"
            )
        if self.encoder is not None and self.encoder["kind"] == "tokens":
            return "int64 ids by the tokeniser in `encoder` (tokenizer.json), cut to `length`, `padding` after"
        if len(self.in_shape) != 3 or self.tokens:
            return None
        window = self.window
        deep = f"; stored values of 16 bits divided by {window[0]:g}" if len(window) == 1 else ""
        if len(window) == 2:
            low, high = window
            deep = f"; stored values v of more than 8 bits as (v - {low:g}) / ({high:g} - {low:g}), clipped"
        return f"float32 in [0, 1], upright; bytes of an image divided by 255{deep}"

    def profile(self, inputs: Inputs, cells: Mapping[str, Any] | None = None) -> Profile:
        """Describe normalised samples in their own units, in given cells, or at most `MOST_PROFILED` in their own."""
        size, encoder = len(inputs) if cells else min(len(inputs), MOST_PROFILED), self.made_encoder()
        schema = encoder if isinstance(encoder, TableSchema) else None
        parts = []
        for rows in torch.split(torch.arange(size) * len(inputs) // size, PROFILED_AT_ONCE):
            values = inputs.index_select(0, rows.to(inputs.device)).cpu()
            parts.append(Profile.columns(in_own_units(values, self.mean, self.std), schema))
        return Profile.of({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, cells)

    def normalise(self, inputs: Tensor) -> Tensor:
        """Check samples in their own units, and normalise them as in training: to float32, or int64 for token ids.

        Samples are `(samples, *in_shape)`, grey images also `(samples, height, width)`. Images are in [0, 1], or uint8
        from 0 to 255; values above 1 that are far from those of training issue a DataWarning. ArgumentError for another
        shape or type; the message says which is expected.
        """
        given, shape = tuple(inputs.shape), self.in_shape
        if len(shape) == 3 and shape[0] == 1 and given[1:] == shape[1:]:
            inputs = inputs.unsqueeze(1)
        if tuple(inputs.shape[1:]) != shape:
            one = "; add a first dimension for the samples" if given == shape else ""
            raise ArgumentError(f"inputs: expected {('samples', *shape)}, got {given}{one}".replace("'", ""))
        if self.tokens:
            if inputs.is_floating_point() or inputs.dtype == torch.bool:
                raise ArgumentError(f"inputs: the model takes token ids, whole numbers; got {inputs.dtype}")
            return inputs.long()
        values: Tensor = _Normaliser(self).to(inputs.device)(inputs)
        if not torch.isfinite(values).all():
            raise ArgumentError("inputs: a value is NaN or infinite")
        above_one = len(shape) == 3 and inputs.dtype != torch.uint8 and inputs.numel() and inputs.max() > 1
        if self.mean and above_one and values.abs().max() > FAR:
            warnings.warn(
                f"inputs: some are more than {FAR:g} standard deviations from the images of training; images are "
                "given in [0, 1] or as uint8 (arrays: in the units of training), so these may mean nothing",
                DataWarning,
                stacklevel=2,
            )
        return values


class _Normaliser(nn.Module):
    """Samples in their own units, to what the network takes; TorchScript compiles `forward`."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        sides = [1 for _ in info.in_shape[1:]]
        self.tokens = info.tokens
        self.features = len(info.in_shape) == 1
        self.grey = len(info.in_shape) == 3 and info.in_shape[0] == 1
        self.normalised = bool(info.mean)
        self.table = info.is_table
        self.register_buffer("mean", torch.tensor(info.mean, dtype=torch.float64).view(-1, *sides))
        self.register_buffer("std", torch.tensor(info.std, dtype=torch.float64).view(-1, *sides))

    def forward(self, samples: Tensor) -> Tensor:
        if self.tokens:
            return samples.long()
        if self.grey and samples.dim() == 3:
            samples = samples.unsqueeze(1)
        values = samples.double() if self.features else samples.float()  # the precision of training
        if samples.dtype == torch.uint8 and not self.features:
            values = values / 255
        if self.normalised:
            values = (values - self.mean.to(values.dtype)) / self.std.to(values.dtype)  # type: ignore[operator]
        if self.table:
            values = torch.where(values.isnan(), torch.zeros_like(values), values)  # the mean
        return values.float()


class _Classifier(nn.Module):
    """Samples as `TrainedModel.predict` takes arrays, or one number for each column of a table, to probabilities."""

    def __init__(self, network: nn.Module, info: ModelInfo, schema: TableSchema | None) -> None:
        super().__init__()
        self.encode = nn.Identity() if schema is None else schema.module()
        self.normalise, self.network, self.multi_label = _Normaliser(info), network, info.multi_label

    def forward(self, samples: Tensor) -> Tensor:
        logits = self.network(self.normalise(self.encode(samples)))
        return torch.sigmoid(logits) if self.multi_label else torch.softmax(logits, dim=1)


def export(network: nn.Module, info: ModelInfo, path: Path, kind: str) -> Path:
    """Write a model as ONNX or TorchScript (see `TrainedModel.export`)."""
    if kind not in ModelInfo.EXPORTS:
        raise ArgumentError(f"kind: can't export as {kind!r}{nearest(kind, ModelInfo.EXPORTS)}")
    if kind == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise MissingPackageError("export as ONNX needs onnx and onnxscript: pip install 'fedskew[onnx]'")
    if kind in ("weights", "adapters"):
        return _export_weights(network, path, kind)
    schema = TableSchema.of_plain(info.encoder) if info.encoder is not None and info.is_table else None
    model = _Classifier(merged(network), info, schema).cpu().eval().requires_grad_(False)
    shape = info.in_shape if schema is None else (len(schema.inputs),)
    samples = torch.zeros(2, *shape, dtype=torch.int64 if info.tokens else torch.float32)
    before = info.before if schema is None else schema.values_in_words()
    about = {"classes": json.dumps(info.classes)} | ({} if before is None else {"samples": before})
    if info.encoder is not None:
        about["encoder"] = json.dumps(info.encoder)
    if info.multi_label:
        about["probabilities"] = "of each label by itself; a sample has those at 0.5 or more"
    if info.threshold is not None:
        about["threshold"] = str(info.threshold)
    write = _write_onnx if kind == "onnx" else _write_torchscript
    try:
        with _quiet(), replacing(path) as part:
            write(model, samples, about, part)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from None
    except Exception as error:  # the exporters raise all kinds
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{path}: PyTorch can't export this network as {kind}: {reason}") from error
    return path


def _export_weights(network: nn.Module, path: Path, kind: str) -> Path:
    """Write the weights alone: adapters apart, in peft's files, or all of them with adapters added."""
    with writing(path):
        if kind == "adapters":
            save_adapters(network, path)
        else:
            inner = network.network if isinstance(network, TextClassifier) else network
            tensors = {name: one.clone() for name, one in merged(inner).cpu().state_dict().items()}
            save_tensors(path, tensors)
    return path


def _write_onnx(model: _Classifier, samples: Tensor, about: dict[str, str], path: Path) -> None:
    program = torch.onnx.export(
        model,
        (samples,),
        input_names=["samples"],
        output_names=["probabilities"],
        dynamic_shapes={"samples": {0: torch.export.Dim("batch")}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None, "with dynamo=True it returns the program"
    program.model.metadata_props.update(about)
    program.save(path)


def _write_torchscript(model: _Classifier, samples: Tensor, about: dict[str, str], path: Path) -> None:
    with torch.no_grad():
        inputs = model.encode(samples).to(samples.dtype)
        model.network = torch.jit.trace(model.network, inputs)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer, _extra_files=about)
    path.write_bytes(buffer.getvalue())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print for their own developers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
