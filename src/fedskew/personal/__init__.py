"""Personal models: what a client does with the common model for itself. Nothing of it leaves the client."""

from fedskew.personal._ditto import Ditto
from fedskew.personal._finetune import Finetune
from fedskew.personal._held_out import HeldOut as HeldOut
from fedskew.personal._partial import Partial
from fedskew.personal._prior import Prior
from fedskew.personal._protocol import Names as Names
from fedskew.personal._protocol import OwnTraining as OwnTraining
from fedskew.personal._protocol import Personal as Personal
from fedskew.personal._rod import RoD

INDEX: dict[str, type] = {"prior": Prior, "finetune": Finetune, "partial": Partial, "ditto": Ditto, "rod": RoD}
