"""The agreement of a server and its sites, in addition to the config: `deploy.toml` in the app folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from fedskew import components, findings, methods
from fedskew.data import Profile, TableSchema, encoder_of
from fedskew.errors import ArgumentError, ConfigError, RunError, placed
from fedskew.experiment import Config, ModelInfo, target_mix
from fedskew.finish import Calibrate
from fedskew.metrics import Tally
from fedskew.parameters import Count, Finite, Positive, one_mistake
from fedskew.personal import Personal
from fedskew.sums import SumContext
from fedskew.trees import read_tree
from fedskew.weighting import BySums

UNSEEN = {"norm_limit", "norm_action", "loss_limit", "undone_limit"}
"""Keys of an agreement about single sites' updates and losses."""

MASKED = {"updates", "sum_sites", "keys", "site_figures"}
"""Keys of an agreement about masked sums only."""

MEAN, STD = "fedskew-mean", "fedskew-std"
"""Keys of a message's config for means and deviations of all sites."""

LARGEST_SHARE = 0.5
"""Largest weight of one site's update in a masked sum: with more the sum would be mostly that update."""


SIMULATED = {
    "tune": "it chooses by a validation set, and the server has no data",
    "data.validation": "the server has no data to hold out",
    "data.held_out": "it is simulated; real sites hold out samples of their own",
    "data.client_test": "it is simulated; real sites test on samples of their own",
    "evaluation.patience": "it stops by a validation set, and the server has no data",
    "evaluation.clients": "it needs a test set at the server",
    "evaluation.measure": "it takes the scores of test samples, and sites send confusion matrices; set evaluation = "
    "'scores' in deploy.toml, or take balanced_accuracy or macro_f1",
    "training.class_weights": "'balanced' goes by the label counts of all sites, which this federation withholds; give "
    "the weights as a list, such as [1.0, 9.0]",
    "conditions.dropout": "it is simulated; real sites drop out by themselves",
    "conditions.stragglers": "they are simulated; real sites are slow by themselves",
    "target.truth": "it is simulated; leave it out",
    "target.unlabelled": "it is a place on this machine; the target site's data.toml says where its samples are "
    "(unlabelled)",
    "target.noise": "it is simulated; write the mix that the server is to be given",
    "conditions.count_epsilon": "it is simulated; leave it out, and have noise at the sites: fedskew deploy init "
    "--label-counts noisy, or summed, with --epsilon 1",
    "method.pipeline": "FedConcat's stages are not deployed; simulate it",
}
"""Keys of a config that can't be deployed, and why."""


SITE_FIGURES = ("accuracy", "balanced_accuracy", "macro_f1", "ece", "loss")
"""Figures in sums over sites: each site with a test sample has them, so that no sum of one is over fewer."""


class Agreement(BaseModel):
    """The contents of `deploy.toml`.

    Attributes:
        sites: Names under which the sites' keys are registered at the SuperLink. Client k of the method is the k-th of
            the sorted names; no other node trains.
        classes: Class names, by class id.
        shape: Shape of one sample.
        tokens: Whether samples are token ids instead of floats.
        multi_label: Whether a sample may have several of the classes, or none; a site's data have to name all of them
            then, and label counts are of each label, with the number of samples beside.
        mean: Mean of each channel, by which every site normalises its samples in place of the data's own; empty: no
            normalisation.
        std: Standard deviation of each channel, used like `mean`.
        window: What is black and white in pictures of more than 8 bits (see `data.Dataset`), where a site's `data.toml`
            does not say what it is in the site's own.
        encoder: What makes samples of a site's files, in plain values (`data.encoder_of`), as of a table its schema; a
            file that does not fit it is refused at the site. None: the site's reader alone. Of a table whose numbers
            have a range in the schema, and without `mean`, mean and std are those of all sites, from sums.
        label_counts: What a site reports about its labels before training: "exact" counts; "noisy" counts, with Laplace
            noise for `epsilon` drawn at the site by a secure mechanism (the extra `fedskew[dp]`); "withheld": only its
            number of samples; or "summed", with masked updates: the server gets sums over all sites only, and each site
            computes its own weight (see `weighting.BySums`).
        epsilon: Privacy parameter of noisy label counts; with "summed", each site adds noise to its counts first, once.
        neighbours: What epsilon protects: one sample more or less, or one sample replaced (see `labels.privatize`).
        min_sites: Smallest number of sites that must have reported before training begins.
        start_timeout: Seconds that the server waits for the reports of all sites. It then begins with the sites that
            have reported, if there are at least `min_sites`.
        round_timeout: Seconds that the server waits for the replies of a round, and then for the evaluations of its
            model. It goes on with those received. A site that does not answer is then skipped for 1, 2, 4 and so on
            rounds, 64 at most.
        idle_timeout: Seconds that the server waits while no site is connected, or too few have reported to begin. The
            run then ends, and can be gone on with.
        loss_limit: A round is undone if at half of the sites that evaluate its model the loss is more than this many
            times that site's lowest so far, and above that of a model that knows nothing; or if it is not finite. Sites
            that took part in it are left out until the operator readmits them: all of them if at least half of the
            sites remain, else the one whose update is the longest.
        undone_limit: The run stops once so many rounds were undone.
        norm_limit: An update is out of line if its length for its steps, a running statistic, or what the method
            returns beside it is more than this many times what the sites' medians, or with fewer than three sites the
            sent model and its training, make likely.
        norm_action: Whether such an update is only reported, or also left out.
        max_reply: Largest reply in bytes; None: the size that the method needs, plus one mebibyte.
        target_site: Where the config's target mix is estimated: the site whose samples without labels that is done
            with. One that is not among `sites` does not train, and sends nothing else. None: there is no such site.
        updates: "plain": the server sees each site's update. "masked": it sees sums over sites only (see
            `fedskew.sums`); `keys` then has every site's key.
        keys: Public keys of masked sums, by site: the middle line of what `openssl pkey -in mask.key -pubout` writes.
        sum_sites: Fewest sites that a masked sum may be over.
        input_profile: "summed": before the first round each site adds to a sum over sites how many of its training
            samples are in each cell of each column of its table, or of `input_cells`, and how numbers go together, with
            which `fedskew watch` compares later samples. "none": nothing of that. "auto": "summed" if updates are
            masked, and neither label counts nor updates have an epsilon.
        input_cells: Of pictures and texts what `Profile.columns` makes of them (brightness, contrast, words), each with
            the mean and deviation by which its ten cells are cut: those of the data that `deploy init` read.
        evaluation: "confusion": each site sends the confusion matrix of its own test samples, whose rows reveal how
            many samples it has of each class; of several labels how many samples have each and are taken to.
            "scores": also how many samples of each class, and of the others, have scores in each of 64 bins, from
            which AUROC, PR-AUC and the calibration error follow. "none": the model is not evaluated. "auto":
            "confusion" if label counts are exact, else "none".
        site_figures: "summed": after the last round, sites whose terms allow it add to masked sums what the models that
            they have are worth on their own test samples (see `SITE_FIGURES`). "none": nothing of that leaves them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    sites: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1)]
    classes: Annotated[list[str], Field(min_length=1)]
    shape: Annotated[list[Count], Field(min_length=1)]
    tokens: bool = False
    multi_label: bool = False
    mean: list[Finite] = []
    std: list[Positive] = []
    window: Annotated[list[Finite], Field(max_length=2)] = []
    encoder: dict[str, Any] | None = None
    label_counts: Literal["exact", "noisy", "withheld", "summed"] = "exact"
    epsilon: Positive | None = None
    neighbours: Literal["add-remove", "replace"] = "add-remove"
    min_sites: Count = 1
    start_timeout: Positive = 600.0
    round_timeout: Positive = 3600.0
    idle_timeout: Positive = 86400.0
    loss_limit: Annotated[float, Field(gt=1, strict=True)] = 10.0
    undone_limit: Count = 3
    norm_limit: Positive = 10.0
    norm_action: Literal["report", "leave_out"] = "leave_out"
    max_reply: Count | None = None
    target_site: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    input_profile: Literal["auto", "summed", "none"] = "auto"
    input_cells: dict[str, Annotated[tuple[Finite, Positive], Field(strict=False)]] | None = None
    evaluation: Literal["auto", "confusion", "scores", "none"] = "auto"
    updates: Literal["plain", "masked"] = "plain"
    sum_sites: Annotated[int, Field(ge=SumContext.LEAST)] = SumContext.LEAST
    keys: dict[str, str] = {}
    site_figures: Literal["none", "summed"] = "none"
    _told: bool = PrivateAttr(False)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Agreement:
        for name in ("sites", "classes"):
            given = getattr(self, name)
            if len(set(given)) != len(given):
                raise ValueError(f"{name}: a name occurs twice")
        if prod(self.shape) > 2**28:
            raise ValueError("shape: a sample of more than 268,435,456 numbers; give the shape that the network takes")
        channels = self.shape[0]
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise ValueError(f"mean and std take one value per channel ({channels}) each, or none")
        if len(self.window) == 2 and self.window[0] >= self.window[1]:
            raise ValueError("window: takes [low, high], the values that are black and white, low first")
        self._check_encoder()
        if self.multi_label and not 2 <= len(self.classes) <= findings.MOST:
            raise ValueError(f"multi_label: of 2 to {findings.MOST} classes a sample has any, not {len(self.classes)}")
        if self.label_counts == "noisy" and self.epsilon is None:
            raise ValueError("label_counts = 'noisy' needs epsilon")
        if self.epsilon is not None and self.label_counts not in ("noisy", "summed"):
            raise ValueError("epsilon is for label_counts = 'noisy' or 'summed'")
        if self.label_counts == "summed" and self.updates == "plain":
            raise ValueError("label_counts = 'summed' needs updates = 'masked', as updates show what sums hide")
        if self.min_sites > len(self.sites):
            raise ValueError(f"min_sites is {self.min_sites}, and of sites there are only {len(self.sites)}")
        self._check_cells()
        if self.input_profile == "summed" and (self.cells is None or self.epsilon is not None):
            needs = "needs a table's schema (encoder), or the cells of pictures or texts (input_cells)"
            why = needs if self.cells is None else "has no noise, which epsilon promises"
            raise ValueError(f"input_profile = 'summed' {why}; set 'none'")
        self._check_masks()
        return self

    def _check_cells(self) -> None:
        if self.input_cells and self.table is not None:
            raise ValueError("input_cells: are of pictures and texts; those of a table follow from its schema")
        kind = torch.int64 if self.tokens else torch.float32
        known = Profile.columns(torch.zeros(1, *self.shape, dtype=kind)) if self.input_cells else {}
        if {*known} != {*(self.input_cells or {})}:
            raise ValueError(f"input_cells: expected {', '.join(known)}, each with a mean and a deviation")

    def _check_encoder(self) -> None:
        with placed("encoder: ", ValueError, of=(ArgumentError, TypeError)):
            table = self.table
        if table is None:
            return
        if self.shape != [len(table.slots)]:
            raise ValueError(f"shape: is {self.shape}, and the schema in encoder makes samples of {[len(table.slots)]}")
        if len(table.labelled) > 1 and (not self.multi_label or {*table.labelled} != {*self.classes}):
            raise ValueError(
                "multi_label: the schema in encoder has several columns of labels; set multi_label = true, and classes "
                f"to their names, {', '.join(table.labelled)}"
            )
        if table.numbers and not self.mean:
            if no_range := table.without_range:
                raise ValueError(f"encoder.columns.{no_range[0]}: give a range, by which means of all sites are taken")
            if self.epsilon is not None:
                raise ValueError(
                    "mean: sums of numbers would tell how many samples sites have, without the noise of epsilon; give "
                    "mean and std, as deploy init writes them from the schema's ranges"
                )

    def _check_masks(self) -> None:
        if self.updates == "plain":
            if self.keys:
                raise ValueError("keys are allowed only with updates = 'masked'")
            if self.site_figures != "none":
                raise ValueError("site_figures = 'summed' needs updates = 'masked', whose keys mask the sums")
            return
        if len(self.sites) < self.sum_sites:
            raise ValueError(
                f"updates = 'masked' takes {self.sum_sites} sites or more, as of two each knows the other's part of a "
                f"sum; there are {len(self.sites)}"
            )
        if set(self.keys) != set(self.sites):
            missing, extra = sorted({*self.sites} - {*self.keys}), sorted({*self.keys} - {*self.sites})
            wrong = f"{missing[0]} has none" if missing else f"{extra[0]} is no site"
            raise ValueError(f"keys: updates = 'masked' takes the public key of every site, and {wrong}")
        if given := sorted(self.model_fields_set & UNSEEN):
            raise ValueError(
                f"{given[0]}: can't be held with updates = 'masked', as nobody sees one site's update or loss; leave "
                "it out"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites by client index, that is, sorted."""
        return tuple(sorted(self.sites))

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all nodes: the sites by client index, then the target site, if it does not train."""
        target = self.target_site
        return self.names if target is None or target in self.names else (*self.names, target)

    @property
    def info(self) -> ModelInfo:
        """What is known of the federation's samples and classes."""
        mean, std, window = tuple(self.mean), tuple(self.std), tuple(self.window)
        form = tuple(self.shape), self.tokens, mean, std, window, self.encoder, self.multi_label
        return ModelInfo(tuple(self.classes), *form)

    @property
    def summed_figures(self) -> tuple[str, ...]:
        """The figures of sites' models that are summed: of several labels a sample there is no calibration error."""
        return tuple(name for name in SITE_FIGURES if name != "ece" or not self.multi_label)

    @property
    def tally(self) -> Tally:
        """What sites count of their test samples."""
        return Tally(len(self.classes), self.multi_label, self.evaluation == "scores")

    @property
    def table(self) -> TableSchema | None:
        """The schema of the sites' tables; None where their samples are of another kind."""
        made = None if self.encoder is None else encoder_of(self.encoder)
        return made if isinstance(made, TableSchema) else None

    @property
    def sums_moments(self) -> bool:
        """Whether means and deviations are still to be had, from sums over all sites."""
        return self.table is not None and self.table.numbers > 0 and not self.mean

    @property
    def sums_profile(self) -> bool:
        """Whether sites add up what their inputs look like, if updates have no noise."""
        wanted = self.updates == "masked" if self.input_profile == "auto" else self.input_profile == "summed"
        return wanted and self.cells is not None and self.epsilon is None

    @property
    def cells(self) -> Mapping[str, Any] | None:
        """The cells in which sites count what inputs look like, of a table by its `mean` and `std`; None: none."""
        if (table := self.table) is None:
            return self.input_cells
        by = (self.mean, self.std) if self.mean else [[0.0] * len(table.slots)] * 2  # not told yet
        return Profile.cells_of(table, *by)

    @property
    def is_told(self) -> bool:
        """Whether mean and std are not those of `deploy.toml`, but of all sites."""
        return self._told

    @property
    def means(self) -> dict[str, Any]:
        """What messages say of means and deviations of all sites; nothing where `deploy.toml` has them."""
        return {MEAN: self.mean, STD: self.std} if self.is_told else {}

    def told(self, said: Mapping[str, Any]) -> Agreement:
        """Return the agreement with the means and deviations that a message says; RunError if they are not in range."""
        if not self.sums_moments or MEAN not in said:
            return self
        table = self.table
        assert table is not None, "as there are moments"
        mean, std = (np.array(said[key], dtype=np.float64) for key in (MEAN, STD))
        middle, half = table.middles()
        numbers, rest = slice(None, table.numbers), slice(table.numbers, None)
        if (
            mean.shape != (len(table.slots),)
            or std.shape != mean.shape
            or not (np.abs(mean[numbers] - middle) <= half * (1 + 1e-6)).all()
            or not ((std[numbers] > 0) & (std[numbers] <= np.maximum(2 * half, 1.0))).all()
            or mean[rest].any()
            or (std[rest] != 1).any()
        ):
            raise RunError("means and deviations that were told are not those of numbers in the schema's ranges")
        made = self.model_copy(update={"mean": mean.tolist(), "std": std.tolist()})
        made._told = True
        return made

    @property
    def evaluates(self) -> bool:
        """Whether sites report confusion matrices, whose rows are label counts of their test samples."""
        is_default = self.evaluation == "auto" and self.label_counts == "exact"
        return is_default or self.evaluation in ("confusion", "scores")

    @classmethod
    def resolve(cls, tree: Mapping[str, Any]) -> Agreement:
        """Make an agreement from a tree of plain values; ConfigError begins with the key that is wrong."""
        with one_mistake(fields=cls):
            return cls.model_validate(tree)

    def tree(self) -> dict[str, Any]:
        """Return the agreement as plain values, with defaults and without None."""
        tree = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        left_out = UNSEEN if self.updates == "masked" else MASKED
        return {key: value for key, value in tree.items() if key not in left_out}

    def write(self, path: Path) -> None:
        """Write the agreement as TOML, with defaults."""
        path.write_text(tomli_w.dumps(self.tree()), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Agreement:
        """Read a `deploy.toml`; ConfigError names the file and the key."""
        tree, _, _ = read_tree(path, "agreement", None, False)
        with placed(f"{path}: ", of=ConfigError):
            return Agreement.resolve(tree)

    def check_config(self, config: Config, target: Path | None = None, at_site: bool = False) -> None:
        """Raise ConfigError where a config can't be deployed; `target` is the server's file, unknown `at_site`."""
        if len(config.seeds) != 1:
            raise ConfigError(f"seeds: a federation of real sites runs one seed, not {config.seeds}")
        special = {
            "target.unlabelled": isinstance(config.target.unlabelled, str),
            "method.pipeline": "pipeline" in config.method,
            "evaluation.measure": config.evaluation.reads_scores and self.evaluation != "scores",
            "training.class_weights": config.training.balances and self.label_counts == "withheld",
        }
        for key, reason in SIMULATED.items():
            if special[key] if key in special else attrgetter(key)(config):
                raise ConfigError(f"{key}: can't be deployed: {reason}")
        method = methods.build(config.method, config.training.momentum)
        if self.multi_label:
            method = _of_findings(config, method)
        if (refused := methods.sites_refused(method)) is not None:
            raise ConfigError(f"method.{refused}")
        if method.personal is not None:
            _check_personal(method.personal)
        if self.updates == "masked":
            _check_masked(config, self, method)
        elif config.engine.updates == "masked":
            raise ConfigError(
                "engine.updates: the config is for masked updates, and this federation's are plain, so that the server "
                "would see each; write the federation with fedskew deploy init --updates masked"
            )
        _check_summed(config, self, method)
        if config.privacy is not None and self.evaluates and self.evaluation == "auto":
            raise ConfigError(
                "evaluation: with [privacy] in run.toml sites would send sums of confusion matrices of their test "
                "samples, without noise; set evaluation = 'none' in deploy.toml, or 'confusion' if these may be known"
            )
        if config.privacy is not None and self.input_profile == "summed":
            raise ConfigError(
                "input_profile: sums of what inputs look like have no noise, which [privacy] in run.toml promises; set "
                "'none' in deploy.toml"
            )
        if config.privacy is not None and self.sums_moments:
            raise ConfigError(
                "mean: with [privacy] in run.toml sums of the sites' numbers would have no noise; give mean and std in "
                "deploy.toml, as deploy init writes them from the schema's ranges"
            )
        if self.site_figures != "none":
            _check_figures(config, method)
        _check_target_site(config, self)
        if config.target.is_estimated and target is not None:
            raise ConfigError(
                f"target.mix: the mix is estimated in the run, and {target} gives it; leave out the file, or target.mix"
            )
        if not config.target.is_estimated and target is None and not at_site:
            classes = len(self.classes)
            unknown = dict.fromkeys(
                ("client", "data", "truth"),
                "is taken from data, and the server has none; give a file (target in the app's config for Flower), or "
                "the shares as a list",
            )
            unknown["pooled"] = "is computed from label counts, which this federation withholds"
            hidden = self.label_counts in ("withheld", "summed")
            known = {} if hidden else {"pooled": np.ones(classes)}  # not known yet
            target_mix(config.target.mix, classes, known, unknown, "target.mix")
        if self.label_counts != "exact":
            _check_private(self, method)


def _of_findings(config: Config, method: methods.Method) -> methods.Method:
    """Return a method as it trains on several labels a sample; ConfigError for what is for samples of one class."""
    one_class = {
        "target.mix": config.target.is_estimated,
        "evaluation.measure": config.evaluation.measure == "target_accuracy",
    }
    for key, is_set in one_class.items():
        if is_set:
            raise ConfigError(f"{key}: is for classes of which a sample has one, and here it may have several labels")
    return methods.for_findings(method, config.engine.label_counts == "summed")


def _check_personal(personal: Personal) -> None:
    if len(personal.trainings()) > 1:
        raise ConfigError("method.personal.strengths: a site has no samples to choose one by; give one, such as [0.1]")
    if getattr(personal, "mix", "counts") == "estimate":
        raise ConfigError("method.personal.mix: sites are not told what an estimate takes; take counts")


def _check_figures(config: Config, method: methods.Method) -> None:
    if config.privacy is not None:
        raise ConfigError(
            "site_figures: sums of figures have no noise, which [privacy] in run.toml promises; set site_figures = "
            "'none' in deploy.toml"
        )
    if method.personal is not None and method.personal.reads_held_out:
        raise ConfigError(
            "site_figures: no site would have all models, as a calibration, which method.personal takes, is not masked "
            "yet; set site_figures = 'none' in deploy.toml, or take another method.personal"
        )


def _check_masked(config: Config, agreement: Agreement, method: methods.Method) -> None:
    from fedskew.deploy.keys import public_keys  # it needs the extra of Flower
    from fedskew.engine import cohort_size

    if (reason := methods.masks_refused(method)) is not None:
        raise ConfigError(f"updates: {reason}")
    public_keys(agreement.keys)
    limit = config.training.weight_limit
    if limit is None or limit > LARGEST_SHARE:
        raise ConfigError(
            f"training.weight_limit: updates = 'masked' needs one of at most {LARGEST_SHARE:g}, and here is "
            f"{'none' if limit is None else f'{limit:g}'}: with more a sum would be mostly one site's update"
        )
    if method.finish is not None:
        raise ConfigError(
            "method.finish: its sums over sites are not masked yet, and the server would see each site's; leave it "
            "out, or updates = 'plain' in deploy.toml"
        )
    if config.target.is_estimated:
        raise ConfigError(
            "target.mix: 'estimate' compares sites' tables, which the server does not see with updates = 'masked'; "
            "give the mix, or updates = 'plain' in deploy.toml"
        )
    sites = cohort_size(config.training.participation, len(agreement.sites))
    if sites < agreement.sum_sites:
        raise ConfigError(
            f"training.participation: {sites} of {len(agreement.sites)} sites take part in a round, and a masked sum "
            f"is over {agreement.sum_sites} at least"
        )


def _check_summed(config: Config, agreement: Agreement, method: methods.Method) -> None:
    """Check that config and agreement agree on how label counts are reported, and that the sites are enough."""
    if (config.engine.label_counts == "summed") != (agreement.label_counts == "summed"):
        raise ConfigError(
            f"engine.label_counts: the config says {config.engine.label_counts!r}, and deploy.toml label_counts = "
            f"{agreement.label_counts!r}; write the federation with fedskew deploy init --label-counts summed"
        )
    if agreement.label_counts == "summed":
        weighting = method.weighting
        assert isinstance(weighting, BySums), "checked with the config"
        name = methods.named("weighting", weighting)
        if agreement.epsilon is not None and not weighting.most_questions:
            raise ConfigError(f"epsilon: {name} asks for no label counts; leave it out")
        if config.training.balances and not weighting.most_questions:
            raise ConfigError(
                f"training.class_weights: 'balanced' takes sums of label counts, and {name} asks for none; take "
                "fedavg, or give the weights as a list"
            )
        if weighting.reveals is not None and agreement.epsilon is None:
            raise ConfigError(
                f"label_counts: {name} takes noise in what is summed: {weighting.reveals}; give epsilon in deploy.toml "
                "(deploy init --label-counts summed --epsilon 1), or take fedavg or fedla"
            )
        if len(agreement.sites) < weighting.least_clients:
            raise ConfigError(
                f"label_counts: sums over {len(agreement.sites)} sites would tell their counts to {name}, which takes "
                f"{weighting.least_clients} or more; let them be noisy"
            )


def _check_target_site(config: Config, agreement: Agreement) -> None:
    """Check that what estimates the target's mix can be had, where it is to be estimated."""
    if not config.target.is_estimated:
        if agreement.target_site is not None:
            raise ConfigError(
                f"target_site: {agreement.target_site!r} would answer with what the model makes of its samples without "
                "labels, and nothing asks for that; set target.mix = 'estimate' in run.toml, or leave target_site out"
            )
        return
    if config.target.estimator == "em":
        raise ConfigError(
            "target.estimator: can't be deployed: 'em' needs the probabilities of single samples, which no site "
            "sends; choose gls, em-cells or bbse"
        )
    if agreement.target_site is None:
        raise ConfigError(
            "target.mix: 'estimate' needs a site whose samples without labels the mix is estimated from; name it: "
            "target_site in deploy.toml (fedskew deploy init --target-site NAME)"
        )
    if agreement.evaluation == "scores":
        raise ConfigError(
            "evaluation: 'scores' are not told where the target's mix is estimated, for which sites send what the "
            "model makes of their test samples in other cells; set 'confusion' in deploy.toml"
        )
    if not agreement.evaluates:
        raise ConfigError(
            "target.mix: 'estimate' needs what the model makes of the sites' own test samples; set "
            "evaluation = 'confusion' in deploy.toml, whose tables tell how many test samples a site has of each class"
        )


def _check_private(agreement: Agreement, method: methods.Method) -> None:
    for slot, component in method.components():
        name = methods.named(slot, component)
        if components.has(component, "reveals_label_counts"):
            raise ConfigError(
                f"method.{slot}: {name} returns how many samples of each class a client trained on, and "
                f"label counts are {agreement.label_counts} here; choose another, or label_counts = 'exact' in "
                "deploy.toml"
            )
        if agreement.label_counts == "withheld" and components.needs_label_counts(slot, component):
            raise ConfigError(
                f"method.{slot}: {name} needs the clients' label counts, which this federation withholds; choose "
                "another, or label_counts = 'noisy' in deploy.toml"
            )
        if agreement.label_counts == "noisy" and components.has(component, "assigns_quotas"):
            raise ConfigError(
                f"method.{slot}: {name} gives each client quotas of its own samples, which noisy label counts don't "
                "allow; choose another, or label_counts = 'exact' in deploy.toml"
            )


def method_of(config: Config, agreement: Agreement) -> methods.Method:
    """Make the method of real sites, whose number it knows; with a calibration where a personal model takes one."""
    method = methods.build(config.method, config.training.momentum)
    if agreement.multi_label:
        method = methods.for_findings(method)
    with placed("method.server_update."):
        server_update = components.with_clients(method.server_update, len(agreement.sites))
    calibrates = method.personal is not None and method.personal.reads_held_out and agreement.evaluates
    if calibrates and method.finish is None and agreement.updates == "plain":
        method = dataclasses.replace(method, finish=Calibrate())
    return dataclasses.replace(method, server_update=server_update)
