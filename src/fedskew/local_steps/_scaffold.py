"""SCAFFOLD: steps corrected by how a client's gradient differs from the mean of all clients' gradients.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, algorithm 1.

    g   <- g - c_k + c                                   every local step
    c_k <- gradient of the client's objective at w       option I
    c_k <- c_k - c + (w - y_k) / (a(tau_k, rho) lr)      option II
    c   <- c + (sum of the changes of c_k) / K           K: number of all clients

The last sum is over the clients that replied. Option I costs one more pass over a client's samples.

All control variates begin at zero. The paper has plain SGD, where a(tau, 0) = tau. With momentum rho a local training
adds up to a(tau, rho) gradients (`fedskew.hooks`), so that, with the correction inside the gradient, dividing by tau
would overestimate c_k up to 1 / (1 - rho) times and diverge; some public code does. Weight decay is part of the
gradient that option II recovers. Steps of Adam recover no gradient, so it is refused.

The paper's mean of the updates is the Uniform weighting, and its eta_g the plain server update's lr. NIID-Bench's code
begins from random control variates, which partial participation never forgets; the FedDG benchmark's divides by epochs
instead of steps, and takes the mean over the cohort for c.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.components import Cost
from fedskew.hooks import Hooks, LocalEnd, Returned, RoundEnd, fednova_normaliser
from fedskew.local_steps._optimizers import SGD
from fedskew.local_steps._protocol import Correction, Named, StepSettings
from fedskew.parameters import component

SERVER, CLIENT, CHANGE = "scaffold.server", "scaffold.client", "scaffold.change"
TOLERANCE = 1e-2
"""Largest relative rounding error of a control variate's change, which is the difference of two float32 vectors."""


@component
class Scaffold(SGD, Hooks):
    """SGD along the gradient minus the client's control variate plus the server's.

    A client that took no step keeps its control variate.

    Attributes:
        option: How a client renews its control variate: "two" from its steps (the paper's choice), or "one" from the
            gradient over all of its samples at the sent model.
    """

    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    takes_rows: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost(models_up=1, models_down=1, client_models=1)
    corrects_gradients: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "training.adapts_rates": "its control variates are mean gradients, which it takes from steps of SGD, and adds "
        "to gradients that nothing rescales; set training.optimizer = 'sgd', or take fedprox or feddyn",
        "training.clips_gradients": "it takes its control variates from steps, and of clipped gradients these are too "
        "small; leave out training.clip_norm, or take fedprox or feddyn",
        "training.keeps_momentum": "its control variates count momentum from zero; leave out training.keep_optimizer",
        "training.has_rates": "it takes its control variates from steps, divided by one learning rate for all "
        "parameters; leave lr out of training.groups, or take fedprox or feddyn",
    }
    warns: ClassVar[Mapping[str, str]] = {
        "weighting.not weighs_equally": "SCAFFOLD's corrections lead every client along the plain mean of all clients' "
        "gradients, so weights don't move where it ends; its paper weighs uniformly",
        "selection.fixed_cohort": "where the cohort is always the same, the other clients' control variates stay 0 and "
        "SCAFFOLD's steps shrink to the cohort's share of the clients; uniform and fedentopt reach every client",
    }

    option: Literal["one", "two"] = "two"

    def correction(self, settings: StepSettings) -> Correction:
        """Return the server's control variate minus the client's."""
        return Correction(settings.broadcast[SERVER] - settings.client[CLIENT])

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the server's control variate, zeros, `(parameters,)`."""
        return {SERVER: torch.zeros_like(parameters)}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """Return the server's control variate."""
        return {SERVER: state[SERVER]}

    def init_client(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the client's control variate, zeros, `(parameters,)`."""
        return {CLIENT: torch.zeros_like(parameters)}

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the client's new control variate, and its change for the server."""
        before = end.client[CLIENT]
        if not end.steps:
            return {CLIENT: before}, {CHANGE: torch.zeros_like(before)}
        if self.option == "one":
            after = end.full_gradient(end.start)
            return {CLIENT: after}, {CHANGE: after - before}
        # In place: fresh memory for wide models takes longer than the sums.
        mean = torch.sub(end.start, end.parameters).div_(fednova_normaliser(end.steps, end.momentum) * end.lr)
        after = torch.sub(before, end.broadcast[SERVER]).add_(mean)
        return {CLIENT: after}, {CHANGE: torch.sub(after, before, out=mean)}

    def refuse(self, returned: Named, seen: Returned) -> str | None:
        """Return a reason if the change of the control variate is not what the update makes it, with option "two"."""
        if CHANGE not in returned or seen.lr is None or self.option == "one":
            return None
        known = torch.zeros_like(seen.change)
        if seen.steps:
            mean = -seen.change / (fednova_normaliser(seen.steps, seen.momentum) * seen.lr)
            known = mean - seen.broadcast[SERVER]
        off = torch.linalg.vector_norm(returned[CHANGE].double() - known.double())
        size = torch.linalg.vector_norm(known.double()) + torch.linalg.vector_norm(seen.broadcast[SERVER].double())
        if off <= TOLERANCE * size:
            return None
        return f"the change of its control variate is {float(off):.3g} off what its update and steps make it"

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the server's next control variate, which stays the mean of all clients' control variates."""
        total = torch.zeros_like(state[SERVER], dtype=torch.float64)
        for reply in end.replies:
            total += reply[CHANGE]
        return {SERVER: total.div_(end.clients).add_(state[SERVER]).to(state[SERVER].dtype)}
