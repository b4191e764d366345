"""A trained model moved to the label mix of the place where it will be used.

    p_target(y | x) ~ softmax(z / T + b)_y q_y        z: the network's logits

The temperature T and the biases b are found on labelled samples that the model was not trained on, the mix q from the
target's unlabelled samples (`labels.calibrate`, `labels.estimate_mix`), or from its label counts, which makes the model
that of one client (`personal.Prior`). No weight changes. It repairs what training
across clients with different labels does to a model, its preference for some classes, beside the change of mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from torch import Tensor

from fedskew.data import Inputs, unlabelled
from fedskew.errors import ArgumentError, DataError, RunError, in_one_line
from fedskew.experiment._identity import set_aside
from fedskew.experiment._task import FloatArray
from fedskew.experiment._trained import ADAPTED, PERSONAL, TrainedModel, check_one_class, mix_of_client, moved_model
from fedskew.files import file_hash, save_tensors
from fedskew.finish import LEAST_SAMPLES
from fedskew.labels import Calibration, MixEstimate, MixMethod, calibrate, estimate_mix, outcome_cells, outcome_table
from fedskew.personal import HeldOut


@dataclass(frozen=True)
class Adaptation:
    """The move of a model to a target's label mix, and what it is expected to gain.

    Attributes:
        model: The model that gives the target's probabilities; its `network` gives their logarithms.
        plain, adapted: Share of each class's held-out samples that the model gets right, as it is and after the move,
            `(classes,)`; NaN without any.
        gains: What the move changes in these shares, with 95 % interval ends: `(classes, 3)`.
        held_out: Held-out samples of each class, `(classes,)`.
        held_out_mix: The mix that the calibration is for, where the target's own is of counts; None: uniform.
    """

    model: TrainedModel
    calibration: Calibration
    estimate: MixEstimate
    plain: FloatArray
    adapted: FloatArray
    gains: FloatArray
    held_out: NDArray[np.int64]
    samples: int
    held_out_mix: FloatArray | None = None

    @property
    def is_counted(self) -> bool:
        """Whether the target's mix is of label counts, and not estimated."""
        return self.held_out_mix is not None

    def expected(self) -> tuple[float, float, float, float]:
        """Return the model's expected accuracy on the target, what the move gains, and that gain's 95 % interval.

        Classes count by the estimated mix. The held-out samples chose the temperature and biases too, which makes the
        gain look a little larger than it is.
        """
        mix = self.estimate.mix
        known = self.held_out > 0
        gain = float(mix[known] @ self.gains[known, 0])
        own = np.linalg.norm(mix[known] * (self.gains[known, 2] - self.gains[known, 1]) / 2)
        below, above = self.estimate.reach(self.gains[:, 0])
        low, high = max(-1.0, float(gain - np.hypot(own, below))), min(1.0, float(gain + np.hypot(own, above)))
        return float(mix[known] @ self.plain[known]), gain, low, high

    def accuracy_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the trained model's expected accuracy on the target."""
        mix, known = self.estimate.mix, self.held_out > 0
        sizes, plain = self.held_out[known] + 2, self.plain[known]
        middle = (plain * (sizes - 2) + 1) / sizes  # one more right and one more wrong: no class is certain
        own = ndtri(0.975) * np.linalg.norm(mix[known] * np.sqrt(middle * (1 - middle) / sizes))
        mean = mix[known] @ plain
        below, above = self.estimate.reach(self.plain)
        return max(0.0, float(mean - np.hypot(own, below))), min(1.0, float(mean + np.hypot(own, above)))

    @property
    def doubt(self) -> str | None:
        """Why the move is not to be used; None: nothing speaks against it."""
        if self.samples < LEAST_SAMPLES and not self.is_counted:
            return f"the target's samples, {self.samples}, are too few to move a model by; give {LEAST_SAMPLES} or more"
        _, gain, _, high = self.expected()
        if (high if self.is_counted else gain) < 0:
            return (
                f"the moved model is expected to get {-100 * gain:.1f} points less right; use the one that was trained"
            )
        return None

    def save(self, *, fresh: bool = False, personal: bool = False) -> Path:
        """Write `adapted.safetensors`, or `personal.safetensors`, beside the model's file; RunError where there is one
        already, which `fresh` moves to `earlier/`."""
        file = self.model.file
        path = file.with_name(PERSONAL if personal else ADAPTED)
        if fresh:
            set_aside(path)
        elif path.exists():
            raise RunError(
                f"{path}: is there already; add --fresh to make it anew, which keeps the old one in earlier/"
            )
        tensors = {
            "temperature": torch.tensor(self.calibration.temperature, dtype=torch.float64),
            "biases": torch.from_numpy(self.calibration.biases.copy()),
            "mix": torch.from_numpy(self.estimate.mix.copy()),
            "covariance": torch.from_numpy(self.estimate.covariance.copy()),
        }
        if self.held_out_mix is not None:
            tensors["held_out_mix"] = torch.from_numpy(self.held_out_mix.copy())
        save_tensors(path, tensors, {"model": file.name, "digest": file_hash(file)[:16], "seed": self.model.seed})
        return path

    @staticmethod
    def of(
        model: TrainedModel,
        target: ArrayLike | Inputs,
        held_out: tuple[ArrayLike | Inputs, ArrayLike],
        method: MixMethod = "gls",
        *,
        normalised: bool = False,
    ) -> Adaptation:
        """Work out the move of a model to a target's label mix, from unlabelled samples of it, and labelled ones, of
        two classes or more, that the model was not trained on: `normalised` (see `TrainedModel.predict`) or not."""
        theirs = model.logits(target)
        ours, labels = model.logits(held_out[0], normalised=normalised), np.asarray(held_out[1], dtype=np.int64)
        if not len(theirs):
            raise ArgumentError("target: there is no sample")
        calibration = calibrate(ours, labels)
        # Cells are of calibrated probabilities, as a model that is never sure has all its samples in one bin.
        held, new = calibration.apply(ours), calibration.apply(theirs)
        held_cells, cells = (outcome_cells(shares) for shares in (held, new))
        tables = outcome_table(labels, held_cells, len(model.classes))
        outcomes = new if method == "em" else np.bincount(cells, minlength=tables.shape[1])
        return Adaptation._of_mix(model, calibration, estimate_mix(tables, outcomes, method), ours, labels, len(theirs))

    @staticmethod
    def of_counts(model: TrainedModel, counts: ArrayLike, logits: FloatArray, targets: ArrayLike) -> Adaptation:
        """Work out the move of a model to one client's label mix, from its counts, and from the logits and classes of
        samples that the model was not trained on."""
        labels = np.asarray(targets, dtype=np.int64)
        held_out = HeldOut.of(logits, labels)
        unseen = tuple(np.flatnonzero(held_out.mix == 0).tolist())
        estimate = MixEstimate.known(mix_of_client(counts, held_out.mix), unseen)
        samples = round(float(np.sum(counts)))
        return Adaptation._of_mix(model, held_out.calibration, estimate, logits, labels, samples, held_out.mix)

    @staticmethod
    def _of_mix(
        model: TrainedModel,
        calibration: Calibration,
        estimate: MixEstimate,
        ours: FloatArray,
        labels: NDArray[np.int64],
        samples: int,
        held_out_mix: FloatArray | None = None,
    ) -> Adaptation:
        """Return a move with what it changes on held-out samples."""
        classes = len(model.classes)
        right = ours.argmax(axis=1) == labels
        moved = ours / calibration.temperature + calibration.offsets(estimate.mix, held_out_mix)
        better = (moved.argmax(axis=1) == labels).astype(float) - right
        sizes = np.bincount(labels, minlength=classes)
        with np.errstate(invalid="ignore", divide="ignore"):
            plain = np.bincount(labels, right, minlength=classes) / sizes
            mean = np.bincount(labels, better, minlength=classes) / sizes
            squares = np.bincount(labels, better**2, minlength=classes) / sizes
            # Two more samples, one better and one worse, so that no class's gain is taken to be certain.
            reach = ndtri(0.975) * np.sqrt(((squares - mean**2) * sizes + 2) / (sizes + 2) / (sizes + 2))
        gains = np.stack([mean, (mean - reach).clip(-1, 1), (mean + reach).clip(-1, 1)], axis=1)
        adapted = moved_model(model, calibration, estimate.mix, held_out_mix)
        return Adaptation(adapted, calibration, estimate, plain, plain + mean, gains, sizes, samples, held_out_mix)

    @staticmethod
    def read_labelled(path: Path, model: TrainedModel) -> tuple[Tensor, NDArray[np.int64]]:
        """Read labelled samples, as they are, with their classes: a folder of one for each class, an .npz file of x and
        y, or what the model's encoder reads; DataError where there are none, or of a class unknown to the model."""
        check_one_class(model)
        known = {name: place for place, name in enumerate(model.classes)}
        labels: list[Any]
        if model.encoder is not None and path.suffix.lower() != ".npz":
            labels, parts = model.encoder.labels(path), [model.encoder.read(path)[1]]
        elif path.is_dir():
            folders = sorted(part for part in path.iterdir() if part.is_dir() and not part.name.startswith((".", "__")))
            if not folders:
                raise DataError(f"{path}: holds no folder; expected one for each class: {', '.join([*known][:4])}, ...")
            form = model.in_shape, model.info.window
            read = [(folder.name, some) for folder in folders for some in unlabelled([folder], *form)]
            labels = [name for name, some in read for _ in some.names]
            parts = [some.inputs for _, some in read]
        else:
            parts = [some.inputs for some in unlabelled([path], model.in_shape, model.info.window)]
            given = _labels_in(path, sum(map(len, parts)))
            if given.dtype.kind in "iu" and not all(name.isdecimal() for name in known):
                known = {str(place): place for place in known.values()}
            labels = given.tolist()
        for label in labels:
            if str(label) not in known:
                raise DataError(f"{path}: the model has no class {label!r}; it has {', '.join(model.classes)}")
        return torch.cat(parts), np.array([known[str(label)] for label in labels])


def _labels_in(path: Path, size: int) -> NDArray[Any]:
    """Return the array y of an .npz file, which holds names of classes or, unless names are numbers, ids."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            given: NDArray[Any] = arrays["y"]
    except KeyError:
        raise DataError(f"{path}: has no array 'y' with the class of each sample") from None
    except Exception as error:  # a damaged array can raise almost anything
        raise DataError(f"{path}: array 'y' can't be read: {in_one_line(error)}") from None
    if given.shape != (size,):
        raise DataError(f"{path}: y has the shape {given.shape}, expected ({size},), a class for each sample")
    return given
