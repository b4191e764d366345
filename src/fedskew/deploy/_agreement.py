"""What a server and its sites agree on beside the config: `deploy.toml` in the app folder, the same for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedskew import components, methods
from fedskew.errors import ConfigError, nearest
from fedskew.experiment._config import Config, read_tree

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Agreement(BaseModel):
    """The file `deploy.toml`.

    - `sites`: the names under which the sites' keys are registered at the SuperLink. Client k of the method is the k-th
      of the sorted names; nobody else ever trains.
    - `classes`: names by class id; `shape`: of one sample; `tokens`: whether samples are token ids, not floats.
    - `mean` and `std`, one value a channel: what every site normalises its samples by, in place of its own (empty: not
      at all).
    - `label_counts`: what a site tells of its labels before training: "exact", "noisy" (Laplace noise for `epsilon`,
      drawn at the site by a secure mechanism; the extra `fedskew[dp]`), or "withheld" (its number of samples only).
      `neighbours`: what epsilon protects, one sample more or less, or one replaced (see `labels.privatize`).
    - `start_timeout`: seconds that the server waits for all sites' label counts before it begins with those it has, at
      least `min_sites` of them; `round_timeout`: seconds for a round's replies, then it goes on with who answered.
    - `norm_limit`: an update whose norm is more than so many times the median of its cohort is reported, and left out
      if `norm_action` says so.
    - `max_reply`: the largest reply, in bytes; None: what the method needs, and a mebibyte.
    - `evaluation`: "confusion" (each site sends the confusion matrix of its own test samples, whose rows tell how many
      it has of each class), "none", or "auto": confusion where label counts are exact, else none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal[1] = Field(1, alias="schema")
    sites: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1)]
    classes: Annotated[list[str], Field(min_length=1)]
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    tokens: bool = False
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    std: list[Positive] = []
    label_counts: Literal["exact", "noisy", "withheld"] = "exact"
    epsilon: Positive | None = None
    neighbours: Literal["add-remove", "replace"] = "add-remove"
    min_sites: Annotated[int, Field(ge=1)] = 1
    start_timeout: Positive = 600.0
    round_timeout: Positive = 3600.0
    norm_limit: Positive = 10.0
    norm_action: Literal["report", "leave_out"] = "report"
    max_reply: Annotated[int, Field(ge=1)] | None = None
    evaluation: Literal["auto", "confusion", "none"] = "auto"

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Agreement:
        for name in ("sites", "classes"):
            given = getattr(self, name)
            if len(set(given)) != len(given):
                raise ValueError(f"{name} names one twice")
        channels = self.shape[0]
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, channels):
            raise ValueError(f"mean and std take {channels} values each, one a channel, or none")
        if (self.label_counts == "noisy") != (self.epsilon is not None):
            raise ValueError("epsilon goes with label_counts = 'noisy', and only with it")
        if self.min_sites > len(self.sites):
            raise ValueError(f"min_sites is {self.min_sites}, and there are {len(self.sites)} sites")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The sites by client index: their names, sorted."""
        return tuple(sorted(self.sites))

    @property
    def evaluates(self) -> bool:
        """Whether sites report confusion matrices, whose rows are their test samples' label counts."""
        return self.evaluation == "confusion" or (self.evaluation == "auto" and self.label_counts == "exact")

    def tree(self) -> dict[str, Any]:
        """In plain values, every default included, None left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def write(self, path: Path) -> None:
        """As TOML, defaults included."""
        path.write_text(tomli_w.dumps(self.tree()), encoding="utf-8")


def read_agreement(path: Path) -> Agreement:
    """The agreement in a `deploy.toml`. Raises ConfigError naming the file and the key."""
    tree, _, _ = read_tree(path, "agreement", None, False)
    try:
        return agree(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def agree(tree: Mapping[str, Any]) -> Agreement:
    """A checked agreement. Raises ConfigError whose message begins with the key."""
    try:
        return Agreement.model_validate(tree)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        fields = [field.alias or name for name, field in Agreement.model_fields.items()]
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{key}: no such key{nearest(key, fields)}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key}: {message}" if key else message) from None


def check_config(config: Config, agreement: Agreement, has_target: bool = False) -> None:
    """Whether a config can be deployed under an agreement; `has_target`: the server has a file with the target mix.

    Raises ConfigError naming the key and the reason.
    """
    if len(config.seeds) != 1:
        raise ConfigError(f"seeds: a federation of real sites runs one seed, not {config.seeds}")
    for key, given, reason in (
        ("tune", config.tune is not None, "it chooses by a validation set, and the server has no data"),
        ("data.validation", config.data.validation != 0, "the server has no data to hold out"),
        ("evaluation.patience", config.evaluation.patience > 0, "it stops by a validation set, which there is none of"),
        ("evaluation.clients", config.evaluation.clients, "it needs a test set at the server"),
        ("conditions.dropout", config.conditions.dropout > 0, "it is simulated; real sites drop out by themselves"),
        ("conditions.stragglers", config.conditions.stragglers > 0, "they are simulated; real sites need no help"),
        ("target.noise", config.target.noise > 0, "it is simulated; write the mix that the server is to be told"),
        (
            "conditions.count_epsilon",
            config.conditions.count_epsilon is not None,
            "it is simulated; set label_counts = 'noisy' and epsilon in deploy.toml",
        ),
        ("method.pipeline", "pipeline" in config.method, "FedConcat's stages are not deployed; simulate it"),
    ):
        if given:
            raise ConfigError(f"{key}: can't be deployed: {reason}")
    if not has_target:
        _check_target(config, agreement)
    if agreement.label_counts != "exact":
        _check_private(config, agreement)


def _check_target(config: Config, agreement: Agreement) -> None:
    mix = config.target.mix
    if mix in ("client", "data"):
        raise ConfigError(
            f"target.mix: {mix!r} is taken from data, and the server has none; give a file (target in the app's config "
            "for Flower), or the shares as a list"
        )
    if mix == "pooled" and agreement.label_counts == "withheld":
        raise ConfigError("target.mix: 'pooled' is made of label counts, which this federation withholds")
    if isinstance(mix, list) and len(mix) != len(agreement.classes):
        raise ConfigError(f"target.mix: expected {len(agreement.classes)} shares, one per class; got {len(mix)}")


def _check_private(config: Config, agreement: Agreement) -> None:
    """Whether the method can do with label counts that are noisy, or with none."""
    method = methods.build(config.method, config.training.momentum)
    for slot, component in method.components():
        name = methods.key_of(slot, component)
        if components.has(component, "reveals_label_counts"):
            raise ConfigError(
                f"method.{slot}: {name} returns every round how many samples of each class a client trained on, and "
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
                f"method.{slot}: {name} gives each client quotas of its own samples, which noisy label "
                "counts don't; choose another, or label_counts = 'exact' in deploy.toml"
            )


def needs_label_counts(method: methods.Method, slots: Collection[str] = ("selection", "weighting")) -> bool:
    """Whether any of a method's components of these slots works with label counts at the server."""
    return any(components.needs_label_counts(slot, getattr(method, slot)) for slot in slots)
