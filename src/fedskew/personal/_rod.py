"""FedRoD's personal head: a second last layer of each client's own, whose outputs are added to the common model's.

Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022:

    z_k(x) = z(x) + h_k(f(x))        f, z: features and logits of the common model

h_k is linear, begins with zeros, and is trained on the client's plain cross-entropy; no gradient of it reaches the
common model. FedRoD's common model is trained with the preset `fedrod`; this goes with any other as well.

[D] The authors train h_k in the same steps as the client's body. Here it is trained on the features of the model that
was sent, since those are the features that it is used with.
"""

from collections.abc import Mapping
from typing import ClassVar

from fedskew.components import Cost
from fedskew.parameters import component
from fedskew.personal._protocol import OwnTraining, Personal


@component
class RoD(Personal):
    """A head of each client's own beside the common one."""

    paper: ClassVar[str] = "Chen & Chao, ICLR 2022"
    cost: ClassVar[Cost] = Cost(forward=1)
    refuses: ClassVar[Mapping[str, str]] = {
        "pipeline.fedconcat": "its features are those of several networks; take prior",
    }

    def trainings(self) -> tuple[OwnTraining, ...]:
        """See `Personal.trainings`."""
        return (OwnTraining("rounds", "added"),)
