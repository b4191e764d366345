"""Networks, the papers' and a user's own: features and raw logits, parameters as one flat vector, keyed dropout."""

from fedskew.models._added import added_to as added_to
from fedskew.models._added import copied as copied
from fedskew.models._added import hooks_of as hooks_of
from fedskew.models._build import INDEX as INDEX
from fedskew.models._build import build as build
from fedskew.models._build import check_outputs as check_outputs
from fedskew.models._build import note as note
from fedskew.models._dropout import Dropout as Dropout
from fedskew.models._faster import Faster as Faster
from fedskew.models._flat import FlatModel as FlatModel
from fedskew.models._flat import Layout as Layout
from fedskew.models._flat import ModelState as ModelState
from fedskew.models._network import Network as Network
from fedskew.models._network import Outputs as Outputs
from fedskew.models._network import lengths_of as lengths_of
from fedskew.models._network import unit_rows as unit_rows
from fedskew.models._winograd import has_kernels as has_kernels
from fedskew.models._wrappers import Concatenated as Concatenated
from fedskew.models._wrappers import OnPrototypes as OnPrototypes
from fedskew.models._wrappers import OnSimplex as OnSimplex
from fedskew.models._wrappers import Projected as Projected
from fedskew.models._wrappers import last_layer as last_layer
from fedskew.models._wrappers import with_added_head as with_added_head
from fedskew.models._wrappers import with_features as with_features
from fedskew.models._wrappers import with_fixed_head as with_fixed_head
