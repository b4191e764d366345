"""Whether a method can do with sums over clients, so that masks may hide what each of them sends."""

from __future__ import annotations

from typing import Any

from fedskew.components import covers, has, needs_label_counts
from fedskew.hooks import Hooks
from fedskew.methods._slots import Method, named
from fedskew.weighting import BySums


def masks_refused(method: Method) -> str | None:
    """Return why a method needs more of its clients than sums over them, and what to take instead; None if it doesn't.

    A component can do with sums if it declares `adds_up`, or reads nothing of single clients: no hook `end_round` or
    `next_model`. Server updates move by sums.
    """
    if method.pipeline is not None:
        return (
            f"{type(method.pipeline).__name__} trains a model for each cluster of clients, whose sums are over few; "
            'take a method of one model, or updates = "plain"'
        )
    for slot, component in method.components():
        name = named(slot, component)
        if has(component, "assigns_quotas"):
            return (
                f"{name} says on how many samples of each class a client trains, so that the server could choose whose "
                f'update is nothing, and the sum would show the others\'; take another {slot}, or updates = "plain"'
            )
        if slot == "aggregation" and not (has(component, "adds_up") and covers(component, "adds_up", "combine")):
            return (
                f"{name} works on each client's update, and masks hide them; take the "
                'aggregation mean, or updates = "plain"'
            )
        if slot == "server_update" and has(component, "is_dynamic"):
            return (
                f"{name} reads each client's update (their plain mean beside the weighted one), and masks hide them; "
                'take the preset scaffold or fedavg, or updates = "plain"'
            )
        if _reads_replies(component) and not _adds_up(component):
            return (
                f"{name} reads what each client returned by itself (it does not declare adds_up), and masks show only "
                f'sums; take another {slot}, or updates = "plain"'
            )
    return None


def summed_counts_refused(method: Method, participation: float) -> str | None:
    """Return why a method can't be trained where label counts are only ever summed over all clients; None if it can."""
    if (reason := masks_refused(method)) is not None:
        return reason
    if needs_label_counts("selection", method.selection):
        name = named("selection", method.selection)
        return f"{name} selects clients by their label counts, and nobody tells these; take uniform"
    weighting = method.weighting
    name = named("weighting", weighting)
    if not isinstance(weighting, BySums) or not covers(weighting, "own_weight", "weigh"):
        return f"{name} weighs by each client's label counts, and nobody tells these; take fedavg, fedla or fedpals"
    if (reason := weighting.why_no_sums()) is not None:
        return f"{name}: {reason}"
    if has(weighting, "weighs_everyone") and participation < 1:
        return (
            f"{name} weighs a round's clients by the labels of these alone, and sums over changing cohorts would tell "
            "every client's counts; set training.participation to 1, or take noisy counts"
        )
    return None


def noise_refused(method: Method) -> str | None:
    """Return why a method can't be trained with noise on clients' updates, for differential privacy; None if it can."""
    if (reason := masks_refused(method)) is not None:
        return reason
    if hasattr(method.server_update, "share"):
        name = named("server_update", method.server_update)
        return f"{name} needs a number of each client beside its update, which would have no noise; take plain"
    for slot, component in method.components():
        if slot == "finish":
            return f"the finish {named(slot, component)} asks clients for sums without noise; leave it out"
        if _reads_replies(component) and type(component).end_local is not Hooks.end_local:
            return (
                f"{named(slot, component)} returns something beside the update, which would have no "
                f"noise; take another {slot}"
            )
    return None


def _adds_up(component: Any) -> bool:
    """Return whether a component declares that sums will do for the hooks that it has, not for those of its parent."""
    return has(component, "adds_up") and all(covers(component, "adds_up", hook) for hook in ("end_round", "next_model"))


def _reads_replies(component: Any) -> bool:
    """Return whether a component has a hook that is shown what clients returned."""
    kind = type(component)
    return isinstance(component, Hooks) and (
        kind.end_round is not Hooks.end_round or kind.next_model is not Hooks.next_model
    )
