"""The protocol of a personal component: its base class, and the types that its functions take and return."""

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from torch import nn

from fedskew.local_steps import LocalStep
from fedskew.personal._held_out import FloatArray, HeldOut

Layers: TypeAlias = Literal["all", "head"]


class Names(NamedTuple):
    """Names of a network's tensors: trained parameters, floating-point buffers, and parts of these.

    `head` are the trained parameters of its last linear layer, which has an output for each class (of several such, the
    one written last), none where that is frozen or not linear; `norm` are parameters and buffers of its normalisations.
    """

    trained: tuple[str, ...]
    buffers: tuple[str, ...]
    head: frozenset[str]
    norm: frozenset[str]

    @staticmethod
    def of(module: nn.Module, trained: tuple[str, ...], held: tuple[str, ...], classes: int) -> "Names":
        """Read the names from a network, of whose tensors these are trained, and these buffers part of its state."""
        buffers = tuple(name for name, buffer in module.named_buffers() if name in held and buffer.is_floating_point())
        layers = dict(module.named_modules())
        linear = [one for one in layers.values() if isinstance(one, nn.Linear) and one.out_features == classes]
        last = [layers["head"]] if "head" in layers else linear[-1:]
        last = [layer for layer in last if isinstance(layer, nn.Linear) and getattr(layer, "learns", True)]
        norms = [name for name, layer in layers.items() if isinstance(layer, _NORMS)]
        tied = {id(one) for layer in last for one in layer.parameters()}  # which may have another layer's name
        whole = (*trained, *buffers)
        return Names(
            trained,
            buffers,
            frozenset(name for name, one in module.named_parameters() if name in trained and id(one) in tied),
            frozenset(name for name in whole if name.rpartition(".")[0] in norms),
        )


_NORMS = nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm


class OwnTraining(NamedTuple):
    """A training of a client's own model: SGD on the cross-entropy of its training samples.

    Attributes:
        when: "rounds": in each round that the client takes part in, from where its own model was left; "end": from the
            common model, whenever a personal one is asked for.
        layers: What is trained; "added": a last layer of its own, of zeros at first, whose outputs are added to the
            common model's.
        pull: Strength of the pull towards the model that was sent, pull / 2 times the squared distance.
        epochs: Local epochs; None: as many as a round has.
    """

    when: Literal["rounds", "end"]
    layers: Literal["all", "head", "added"] = "all"
    pull: float = 0.0
    epochs: int | None = None


class Personal:
    """A component of the place `personal`: a frozen dataclass of hyper-parameters that inherits from this class.

    What a client does with the common model for itself. Nothing of it leaves the client.

    Attributes:
        refuses: The components that no personal one goes with; see `fedskew.components`.
        reads_held_out: Whether it needs labelled samples that no client trains on (`data.held_out`).
        head_epochs: So many of a round's epochs train what is private alone, and those after them the rest.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    reads_held_out: ClassVar[bool] = False
    head_epochs: int = 0

    def private(self, names: Names) -> frozenset[str]:
        """Return the names of what never leaves a client; ArgumentError where the network has none of them.

        Every client trains it from the first model's, and from its own last one.
        """
        return frozenset()

    def local_step(self, step: LocalStep) -> LocalStep:
        """Return the local step that clients take in place of the method's."""
        return step

    def trainings(self) -> tuple[OwnTraining, ...]:
        """Return the trainings of own models; of several, a client takes what is best on its held-out samples."""
        return ()

    def moved(self, logits: FloatArray, held_out: HeldOut | None, counts: FloatArray) -> FloatArray:
        """Return what becomes of the logits, `(samples, classes)`, of the personal model, or of the common one.

        Args:
            held_out: What all clients are told of the common model; None unless it `reads_held_out`.
            counts: The client's training samples of each class, `(classes,)`.
        """
        return logits
