"""Networks, the papers' and a user's own: features and raw logits, parameters as one flat vector, keyed dropout."""

from fedskew.models._added import added_to, copied, hooks_of
from fedskew.models._build import INDEX, build, check_outputs, note
from fedskew.models._dropout import Dropout
from fedskew.models._faster import Faster
from fedskew.models._flat import FlatModel, Layout, ModelState
from fedskew.models._network import Network, Outputs, lengths_of, unit_rows
from fedskew.models._winograd import has_kernels
from fedskew.models._wrappers import (
    Concatenated,
    OnPrototypes,
    OnSimplex,
    Projected,
    last_layer,
    with_added_head,
    with_features,
    with_fixed_head,
)

__all__ = [
    "INDEX",
    "Concatenated",
    "Dropout",
    "Faster",
    "FlatModel",
    "Layout",
    "ModelState",
    "Network",
    "OnPrototypes",
    "OnSimplex",
    "Outputs",
    "Projected",
    "added_to",
    "build",
    "check_outputs",
    "copied",
    "has_kernels",
    "hooks_of",
    "last_layer",
    "lengths_of",
    "note",
    "unit_rows",
    "with_added_head",
    "with_features",
    "with_fixed_head",
]
