"""Personal models: what a client does with the common model for itself. Nothing of it leaves the client."""

from fedskew.personal._ditto import Ditto
from fedskew.personal._finetune import Finetune
from fedskew.personal._held_out import HeldOut
from fedskew.personal._partial import Partial
from fedskew.personal._prior import Prior
from fedskew.personal._protocol import Names, OwnTraining, Personal
from fedskew.personal._rod import RoD

INDEX: dict[str, type] = {"prior": Prior, "finetune": Finetune, "partial": Partial, "ditto": Ditto, "rod": RoD}

__all__ = ["INDEX", "HeldOut", "Names", "OwnTraining", "Personal", "Prior"]
