"""FedConcat: one encoder for each cluster of like clients, and one linear head on all of them.

Diao, Li and He, "Exploiting Label Skews in Federated Learning with Model Concatenation", AAAI 2024.

- Once, k-means on the clients' normalised label counts divides them into `clusters`.
- In the first `encoder_rounds` rounds every cluster trains a model of its own. Cohorts are drawn from all clients;
  each client trains its cluster's model, and a cluster none of whose clients was drawn is skipped. Inside a cluster
  this is FedAvg, or whatever local step, objective, weighting and server update are configured.
- In the rounds that remain the clusters' models lose their heads and are frozen, in eval mode. One linear head on their
  concatenated features is trained: each participant takes `batches` local steps from it, and the next head is the plain
  mean, since all have taken as many. Only the head travels (that the encoders reach every client once, when they are
  done, is not counted). Before, there is no model of all clients to evaluate.

Local step and objective serve both parts, learning-rate decay counts all rounds, and stragglers do less in the first.
The paper has 50 and 1000 rounds, FedEntOpt's comparison 480 and 500. The model is `clusters` times as large, to store
and to use: `fedskew.models.Concatenated`.

Where the authors' code differs: in its first round a cluster begins with what client 0 has trained so far (parameters
are shared by mistake), encoders go on in train mode under the head, a client that has fewer batches than it should take
steps takes fewer, and for CIFAR-100 and Tiny-ImageNet clusters have at most 1.2 times the mean size.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import Count, component

_ONE_MODEL = (
    "it keeps or sends something for one model of all clients, and here each cluster has its own until the head has "
    "another; take one that keeps nothing: sgd, fedprox or fedsam as local step, fedavg, fedla or uniform for weights"
)


@component
class FedConcat:
    """Encoders by cluster, then one linear head on their concatenated features.

    Attributes:
        clusters: Number of clusters.
        encoder_rounds: Rounds of the run that train encoders; half of them, rounded down, where None.
        batches: Local steps of a participant in each round after these.
        head: How the head starts: "fresh", drawn as any linear layer, or from the "clusters": their heads side by side
            with the sum of their biases, so that its logits are the sums of theirs (the paper for CIFAR-100 and
            Tiny-ImageNet).
    """

    paper: ClassVar[str] = "Diao et al., AAAI 2024"
    needs_label_counts: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "objective.reads": "it compares with another model of all clients, and under the head there is none; take a "
        "loss that reads labels and logits alone, such as fedrs, fedlc, fedvls_calibration or the term suppression",
        "objective.fixes_last_layer": "it fixes the last layer, and here that is a trained one over all encoders; take "
        "fedlc or fedrod",
        "local_step.fixes_last_layer": "it keeps the last layer as it was drawn, and here that is a trained one over "
        "all encoders; take sgd, fedprox or fedsam",
        **{f"{slot}.keeps_state": _ONE_MODEL for slot in ("selection", "objective", "local_step", "weighting")},
        "aggregation.krum": "a cluster's part of a cohort is too small for Krum's neighbours; take median or "
        "geometric_median",
    }
    warns: ClassVar[Mapping[str, str]] = {
        "weighting.needs_target": "clients of one cluster hold like labels, so weights can't bring its model to the "
        "target mix, and the head, which could, is a plain mean; leave one of them out"
    }

    clusters: Count = 5
    encoder_rounds: Count | None = None
    batches: Count = 3
    head: Literal["fresh", "clusters"] = "fresh"

    def split(self, rounds: int) -> int:
        """Return how many of a run's rounds train encoders; ArgumentError where none would remain for the head."""
        first = rounds // 2 if self.encoder_rounds is None else self.encoder_rounds
        if first < 1 or first >= rounds:
            raise ArgumentError(
                f"encoder_rounds: {first} of rounds = {rounds}; encoders need one at least, and the head one after them"
            )
        return first

    def divide(self, counts: CountsLike, rng: np.random.Generator) -> NDArray[np.int64]:
        """Divide the clients into clusters by k-means (scikit-learn) on label shares, the best of 10 starts.

        A client without samples has share 0 of every class; it takes no part in the search and goes to the nearest
        centre, which is the most even one.

        Args:
            counts: Label counts, shape `(clients, classes)`.

        Returns:
            The cluster of every client, shape `(clients,)`, numbered in the order of their first clients.
        """
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn's own

        table = as_counts(counts)
        sizes = table.sum(axis=1, keepdims=True)
        shares = table / np.where(sizes > 0, sizes, 1)
        holders = shares[sizes[:, 0] > 0]
        different = len(np.unique(holders, axis=0))
        if different < self.clusters:
            raise ArgumentError(
                f"clusters: {self.clusters}, and at most {different}: no more of the clients with samples, "
                f"{len(holders)} of {len(table)}, hold different label shares"
            )
        search = KMeans(self.clusters, n_init=10, random_state=int(rng.integers(2**31)))
        # One thread: sums depend on how many there are, and for points this small more are slower.
        with threadpool_limits(limits=1):
            found = search.fit(holders).predict(shares)
        _, firsts, ids = np.unique(found, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(firsts))[ids]


INDEX: dict[str, type] = {"fedconcat": FedConcat}
"""The pipelines by the name that a config gives them."""
