"""Fine-tuning: some epochs of local training from the common model.

FedAvg + fine-tuning; with `layers = "head"` and FedBABU it is FedBABU's personal model (Oh et al., ICLR 2022).
Cheng et al., "Fine-tuning is Fine in Federated Learning", arXiv 2108.07313.

[D] A client trains on plain cross-entropy, whatever the method's objective is for the common model: for its own use it
wants its own mix of classes. Learning rate and shuffles are those of the round after the last.
"""

from typing import ClassVar

from fedskew.parameters import Count, component
from fedskew.personal._protocol import Layers, OwnTraining, Personal


@component
class Finetune(Personal):
    """Local training from the common model.

    Attributes:
        epochs: Epochs over the client's training samples.
        layers: "all", or "head": the last linear layer alone; where that is frozen, as FedBABU's, or not linear, one of
            zeros whose outputs are added to it (which is the same beside a linear one).
    """

    epochs: Count = 5
    layers: Layers = "all"

    takes_findings: ClassVar[bool] = True
    paper: ClassVar[str] = "Cheng et al., arXiv 2108.07313"

    def trainings(self) -> tuple[OwnTraining, ...]:
        """See `Personal.trainings`."""
        return (OwnTraining("end", self.layers, epochs=self.epochs),)
