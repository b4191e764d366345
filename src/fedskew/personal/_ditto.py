"""Ditto: a model of each client's own, trained beside the common one and pulled towards it.

Li, Hu, Beirami & Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021:

    v_k <- v_k - lr (grad F_k(v_k) + strength (v_k - w))        w: the model as the server sent it in this round

v_k begins with the first model that the client gets. A client takes as many steps of its own model as of the common
one, on the same batches.

[D] F_k is plain cross-entropy, whatever the method's objective is for the common model. With several strengths, a model
for each is trained, and a client takes the one that is best on its held-out samples (`data.held_out`).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from fedskew.components import Cost
from fedskew.parameters import NonNegative, component
from fedskew.personal._protocol import OwnTraining, Personal


@component
class Ditto(Personal):
    """A model of each client's own, pulled towards the common one.

    Attributes:
        strengths: Strengths of the pull, lambda in the paper (0.1 to 1 there).
    """

    strengths: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (0.1,)

    takes_findings: ClassVar[bool] = True
    paper: ClassVar[str] = "Li et al., ICML 2021"
    cost: ClassVar[Cost] = Cost(forward=1, backward=1, client_models=1)  # of each strength
    refuses: ClassVar[Mapping[str, str]] = {
        "pipeline.fedconcat": "it trains several networks, and a client's own model is pulled towards one; take prior",
    }

    def trainings(self) -> tuple[OwnTraining, ...]:
        """See `Personal.trainings`."""
        return tuple(OwnTraining("rounds", pull=strength) for strength in self.strengths)
