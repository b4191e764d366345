"""The data on a site's own disk: its samples, and the states that it keeps between rounds.

A site describes its samples in its own file `data.toml`, which never leaves the site:

    state = "state"             the folder of the site's states, relative to this file unless absolute
    unlabelled = "unlabelled"   samples without labels of the target site: a folder of images, an .npz or a CSV file

    [data]                      as in the config of a simulation; a target site that does not train has none
    name = "folder"
    root = "images"

States are stored by round. A site cannot know whether the server aggregated its update: the site may have been killed
before it replied, or the reply may have come too late or have been refused. The state after a training is therefore
written beside the state of the last counted round, that is, the last round in which the site's update was aggregated.
The server's next instruction names that round; the site starts from its state and deletes all later ones. A server that
undoes a round, or was killed, goes back and names an earlier round. The site therefore keeps the states of some earlier
rounds, too: as many as the config's evaluations and checkpoints can make it go back.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedskew import components, data, findings
from fedskew.data import Dataset, Inputs
from fedskew.data import unlabelled as load_unlabelled
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._log import LOG
from fedskew.engine import ClientSamples
from fedskew.errors import ArgumentError, ConfigError, DataError, RunError, nearest, placed
from fedskew.files import private_folder, replacing, writing
from fedskew.parameters import one_mistake
from fedskew.randomness import Purpose, generator
from fedskew.trees import read_tree


@dataclass(frozen=True, eq=False)
class SiteData:
    """One site's samples.

    Attributes:
        inputs: Training samples, shape `(samples, *shape)`.
        targets: Class ids of the training samples, shape `(samples,)`, int64; of several labels their bits.
        test_inputs: Test samples, shape `(samples, *shape)`; there may be none.
        test_targets: Class ids of the test samples, shape `(samples,)`, int64.
        num_classes: Number of classes of the federation, including classes without a sample here.
        state: The site's folder for states that it keeps between rounds; None if it keeps none.
        unlabelled: Reads the samples without labels, as networks take them; None: the site is no target site.
        multi_label: Whether a sample may have several labels, or none.
    """

    inputs: Inputs
    targets: Tensor
    test_inputs: Inputs
    test_targets: Tensor
    num_classes: int
    state: Path | None = None
    unlabelled: Callable[[], Inputs] | None = None
    multi_label: bool = False

    @property
    def counts(self) -> NDArray[np.float64]:
        """Number of training samples of each class, shape `(classes,)`."""
        return self._counted(self.targets)

    @property
    def test_counts(self) -> NDArray[np.float64]:
        """Number of test samples of each class, likewise."""
        return self._counted(self.test_targets)

    def _counted(self, targets: Tensor) -> NDArray[np.float64]:
        ids, number = targets.cpu().numpy(), self.num_classes
        found = findings.as_table(ids, number).sum(axis=0) if self.multi_label else np.bincount(ids, minlength=number)
        return found.astype(np.float64)

    @property
    def reported(self) -> NDArray[np.float64]:
        """What a site says of its labels: the counts, and of several labels then the number of samples."""
        return np.append(self.counts, float(len(self.targets))) if self.multi_label else self.counts

    @property
    def is_unlabelled(self) -> bool:
        """Whether the site has samples without labels, and no others."""
        return self.unlabelled is not None and not len(self.targets) and not len(self.test_targets)

    def of(self, client: int) -> ClientSamples:
        """Return all samples of the site (see `engine.ClientData`)."""
        return ClientSamples(self.inputs, self.targets, np.arange(len(self.targets)), self.counts, self.multi_label)

    @staticmethod
    def load(path: Path, agreement: Agreement) -> "SiteData":
        """Read the samples that a site's `data.toml` describes, with the agreement's class ids and normalisation;
        ConfigError for a wrong key, DataError where they do not fit the agreement."""
        tree, _, _ = read_tree(path, "site's data", None, False)
        with placed(f"{path}: ", of=ConfigError), one_mistake(fields=_SiteFile):
            described = _SiteFile.model_validate(tree)
        state, unlabelled = path.parent / Path(described.state).expanduser(), None
        if described.unlabelled is not None:
            place = path.parent / Path(described.unlabelled).expanduser()
            window = tuple((described.data or {}).get("window", ()))
            unlabelled = functools.partial(_read_unlabelled, path, place, agreement, window)
        wrong = placed(f"{path}: data.", ConfigError, of=(ArgumentError, ConfigError))
        with placed(f"{path}: ", DataError, of=DataError), wrong:
            if described.data is None:
                inputs = torch.zeros(0, *agreement.shape, dtype=torch.int64 if agreement.tokens else torch.float32)
                targets, classes = torch.zeros(0, dtype=torch.int64), len(agreement.classes)
                samples = SiteData(inputs, targets, inputs, targets, classes, state, multi_label=agreement.multi_label)
            else:
                found = _read(described.data, path.parent, agreement)
                samples = _fitted(found, agreement, state, "separator" in described.data)
        return dataclasses.replace(samples, unlabelled=unlabelled)


class _SiteFile(BaseModel):
    """The contents of a site's `data.toml`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    state: str = "state"
    server: str = ""  # for `run_supernode`
    unlabelled: Annotated[str, Field(min_length=1)] | None = None
    data: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _described(self) -> "_SiteFile":
        is_named = self.data is not None and isinstance(self.data.get("name"), str)
        if not is_named and (self.data is not None or self.unlabelled is None):
            raise ValueError("expected a table [data] with the name and options of a reader")
        return self


def _read_unlabelled(data: Path, place: Path, agreement: Agreement, window: tuple[float, ...]) -> Tensor:
    info = agreement.info
    with placed(f"{data}: unlabelled: ", DataError, of=DataError), placed(f"{place}: ", DataError):
        found = load_unlabelled([place], info.in_shape, window or info.window, encoder=info.made_encoder())
        return info.normalise(torch.cat([some.inputs for some in found]))


def _read(table: dict[str, Any], beside: Path, agreement: Agreement) -> Dataset:
    options, own = dict(table), "window" in table
    if options["name"] == "csv" and agreement.table is not None:
        if {"schema", "label", "client"} & options.keys():
            raise ConfigError("schema: the agreement has it (encoder in deploy.toml), and the columns of labels too")
        options["schema"] = agreement.encoder
    name, root = options.pop("name"), options.pop("root", None)
    place = None if root is None else beside / Path(root).expanduser()
    load = components.find(data.INDEX, name, "name")
    if ":" not in name:
        if agreement.window and "window" in inspect.signature(load).parameters:
            options.setdefault("window", agreement.window)
        made = data.load(name, place, rng=generator(0, Purpose.DATA), encoder=agreement.info.made_encoder(), **options)
        if made.encoder is not None and made.encoder.kind == "text" and agreement.encoder is None:
            raise DataError(
                "deploy.toml has no words (encoder), so that a word would have another number at each site; whoever "
                "wrote the federation does so anew from texts: fedskew deploy init"
            )
        if made.window and not (own or agreement.window):
            raise DataError(
                "pictures have more than 8 bits, and the federation's have 8: set window = [low, high] in [data], the "
                "values that are black and white"
            )
        return made
    made = load(**options) if place is None else load(root=place, **options)
    if not isinstance(made, Dataset):
        raise ConfigError(f"name: {name} returned {type(made).__name__}, not a fedskew.data.Dataset")
    return made


def _fitted(dataset: Dataset, agreement: Agreement, state: Path, in_cells: bool) -> SiteData:
    """Return a data set as the federation has it; where labels stand together `in_cells`, some may occur in none."""
    if dataset.multi_label != agreement.multi_label:
        kinds = ("of one class each", "of several labels, or none")
        advice = "; where a cell holds several, give their separator in [data]" if agreement.multi_label else ""
        raise DataError(
            f"samples are {kinds[dataset.multi_label]}; the federation's are {kinds[agreement.multi_label]}{advice}"
        )
    parts, number = [one.numpy() for one in (dataset.targets, dataset.test_targets)], dataset.num_classes
    if dataset.multi_label:
        parts = [findings.as_table(part, number) for part in parts]
        there = np.flatnonzero(np.concatenate(parts).any(axis=0))
    else:
        there = np.unique(np.concatenate(parts))
    used = {dataset.classes[place] for place in there.tolist()}
    if foreign := sorted(used - {*agreement.classes}):
        raise DataError(
            f"class {foreign[0]!r} is not one of the federation's classes{nearest(foreign[0], agreement.classes)}"
        )
    if dataset.multi_label and not in_cells and (absent := sorted({*agreement.classes} - {*dataset.classes})):
        raise DataError(
            f"nothing is said of {absent[0]!r}, which the federation has, so that every sample would count as free of "
            f"it{nearest(absent[0], dataset.classes)}; give its column"
        )
    if dataset.in_shape != tuple(agreement.shape):
        raise DataError(f"samples are {dataset.in_shape}; the federation's are {tuple(agreement.shape)}")
    ids = np.array([agreement.classes.index(name) if name in used else -1 for name in dataset.classes])
    if dataset.multi_label:
        masks = np.array([1 << place if place >= 0 else 0 for place in ids.tolist()], dtype=np.int64)
        parts = [part @ masks for part in parts]
    else:
        parts = [ids[part] for part in parts]
    return SiteData(
        inputs=_normalised(dataset.inputs, dataset, agreement),
        targets=torch.from_numpy(parts[0]),
        test_inputs=_normalised(dataset.test_inputs, dataset, agreement),
        test_targets=torch.from_numpy(parts[1]),
        num_classes=len(agreement.classes),
        state=state,
        multi_label=dataset.multi_label,
    )


def _normalised(inputs: Inputs, dataset: Dataset, agreement: Agreement) -> Inputs:
    """Normalise samples by the agreement's mean and standard deviation instead of the reader's."""
    if not isinstance(inputs, Tensor):
        if (dataset.mean, dataset.std) != (tuple(agreement.mean), tuple(agreement.std)):
            raise DataError(
                f"reader {dataset.name!r} leaves samples on disk and normalises them by {dataset.mean}, "
                f"{dataset.std}; the federation normalises by {agreement.mean}, {agreement.std}"
            )
        return inputs
    if agreement.tokens != (inputs.dtype == torch.int64):
        kinds = ("floats", "token ids")
        raise DataError(f"samples are {kinds[not agreement.tokens]}; the federation's are {kinds[agreement.tokens]}")
    if agreement.tokens:
        return inputs
    values = data.in_own_units(inputs, dataset.mean, dataset.std).double()
    if agreement.table is not None:
        values = agreement.table.restored(values)
    if agreement.mean:
        of = agreement.mean, agreement.std
        mean, std = (torch.tensor(one, dtype=torch.float64).view(1, -1, *[1] * (inputs.ndim - 2)) for one in of)
        values = ((values - mean) / std).nan_to_num(nan=0.0)
    return values if agreement.sums_moments else values.float()


class SiteStates:
    """A site's states of one run, `<run>/<round>.safetensors`, of `earlier` rounds before the last that counted."""

    def __init__(self, folder: Path, run: str, earlier: int = 1) -> None:
        self._folder, self._earlier = folder / run, earlier

    @property
    def newest(self) -> int:
        """The latest round with a state; 0 if there is none."""
        return max(self._rounds(), default=0)

    def load(self, round: int) -> dict[str, Tensor]:
        """Read the state after the last counted round; delete later ones, which did not count, and too early ones."""
        rounds = self._rounds()
        kept = sorted(other for other in rounds if other < round)[-self._earlier :]
        for other in set(rounds) - {round, *kept}:
            self._path(other).unlink()
        if round == 0:
            return {}
        path = self._path(round)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            LOG.warning("%s can't be read (%s); this site begins without a state", path, type(error).__name__)
            return {}

    def keep(self, round: int, state: Mapping[str, Tensor]) -> None:
        """Write the state after a round, atomically."""
        private_folder(self._folder)
        path = self._path(round)
        unwritten = placed(f"{path}: can't be written: ", RunError, of=SafetensorError)
        with unwritten, writing(path), replacing(path, shared=True) as part:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, part)

    def _rounds(self) -> list[int]:
        return [int(path.stem) for path in self._folder.glob("*.safetensors")]

    def _path(self, round: int) -> Path:
        return self._folder / f"{round}.safetensors"
