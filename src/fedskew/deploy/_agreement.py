"""What a server and its sites agree on beside the config: `deploy.toml` in the app folder, which is the same for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedskew.errors import ConfigError, nearest
from fedskew.experiment._config import Config, read_tree

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Agreement(BaseModel):
    """The file `deploy.toml`.

    - `sites`: the names under which the sites' keys are registered at the SuperLink. Client k of the method is the k-th
      of the sorted names; nobody else ever trains.
    - `classes`: names by class id; `shape`: of one sample; `mean` and `std`, one value a channel: what every site
      normalises its samples by, in place of its own (empty: not at all).
    - `label_counts`: what a site tells of its labels before training: "exact", "noisy" (Laplace noise for `epsilon`,
      drawn at the site by a secure mechanism; the extra `fedskew[dp]`), or "withheld" (its number of samples only).
      `neighbours`: what epsilon protects, one sample more or less, or one replaced (see `labels.privatize`).
    - `target`: a file with the target mix, beside `deploy.toml` (see `labels.read_target`), instead of `target.mix`.
    - `start_timeout`: seconds that the server waits for all sites' label counts before it begins with those it has, at
      least `min_sites` of them; `round_timeout`: seconds for a round's replies, then it goes on with who answered.
    - `norm_limit`: an update whose norm is more than so many times the median of its cohort is reported, and left out
      if `norm_action` says so.
    - `max_reply`: the largest reply, in bytes; None: twice what the method needs, and a mebibyte.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal[1] = Field(1, alias="schema")
    sites: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(min_length=1)]
    classes: Annotated[list[str], Field(min_length=1)]
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    std: list[Positive] = []
    label_counts: Literal["exact", "noisy", "withheld"] = "exact"
    epsilon: Positive | None = None
    neighbours: Literal["add-remove", "replace"] = "add-remove"
    target: str | None = None
    min_sites: Annotated[int, Field(ge=1)] = 1
    start_timeout: Positive = 600.0
    round_timeout: Positive = 3600.0
    norm_limit: Positive = 10.0
    norm_action: Literal["report", "leave_out"] = "report"
    max_reply: Annotated[int, Field(ge=1)] | None = None
