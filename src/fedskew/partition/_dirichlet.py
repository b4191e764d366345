"""Rules that divide by Dirichlet draws: every class among clients, or within domains; or a mix for each client."""

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, PartitionError, placed
from fedskew.parameters import Count, FloatArray, IntArray, Positive, Size, Switch, component
from fedskew.partition._rule import Rule, apportion
from fedskew.tables import counted


@component
class DirichletByClass(Rule):
    """Every class is divided among the clients by a Dirichlet draw: label mixes and sizes both vary.

    Li et al., "Federated Learning on Non-IID Data Silos" (NIID-Bench); the `Dir(beta)` of FedEntOpt and FedVLS. For
    each class in turn, shares p ~ Dir(beta, ..., beta) over the clients are drawn; with the balance rule, the share of
    every client that already holds its fair part (all samples / clients) or more is set to 0, and the others are
    normalised; the n samples of the class are cut at floor(cumsum(p) * n) and the last client gets the rest. Everything
    is drawn again until every client holds `min_size` samples.

    The authors' code loops until that happens, which may be never, and divides by zero where all remaining shares are
    0; here the tries are bounded and such a class is drawn again. (CIFAR-10, beta 0.1, 10 samples: about one draw in 4
    suffices for 100 clients, in 30 for 150, in 300 for 200.)

    Attributes:
        beta: Concentration; small values are skewed.
        min_size: Samples that every client must hold; take 1 for 150 or more clients at beta 0.1.
        balance: Whether the balance rule applies, as in the papers' results.
        max_tries: Draws before the rule gives up.
    """

    beta: Positive
    min_size: Size = 10
    balance: Switch = True
    max_tries: Count = 10_000

    def _counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        samples = int(class_sizes.sum())
        if samples < clients * self.min_size:
            raise PartitionError(
                f"{samples} samples can't give {self.min_size} to each of {counted(clients, 'client')}: lower min_size"
            )
        best = 0
        for _ in range(self.max_tries):
            counts = self._draw_counts(class_sizes, clients, rng)
            smallest = int(counts.sum(axis=1).min())
            if smallest >= self.min_size:
                return counts
            best = max(best, smallest)
        raise PartitionError(
            f"none of {self.max_tries} draws gave {counted(self.min_size, 'sample')} to each of "
            f"{counted(clients, 'client')} (the best gave {best}): lower min_size or clients, or raise beta or "
            "max_tries"
        )

    def _draw_counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        """Return one try: the number of samples of each client and class."""
        fair = class_sizes.sum() / clients
        held = np.zeros(clients, dtype=np.int64)
        counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
        draws = rng.dirichlet(np.full(clients, self.beta), size=len(class_sizes))
        for label, size in enumerate(class_sizes):
            if size == 0:
                continue
            share = self._open_shares(draws[label], held < fair, rng)
            cuts = (np.cumsum(share) * size).astype(np.int64)
            cuts[-1] = size
            counts[:, label] = np.diff(cuts, prepend=0)
            held += counts[:, label]
        return counts

    def _open_shares(self, share: FloatArray, below_fair: NDArray[np.bool_], rng: Generator) -> FloatArray:
        """Return the shares after the balance rule, sum 1; drawn again where all of them are 0."""
        # Some client is below its fair part as long as a sample is left, but the shares of all such clients may
        # underflow to 0.
        for _ in range(self.max_tries):
            kept: FloatArray = share * below_fair if self.balance else share
            total = float(kept.sum())
            if total > 0:
                return kept / total
            share = rng.dirichlet(np.full(len(share), self.beta))
        raise PartitionError(
            f"none of {self.max_tries} draws of a class left a share to a client below its fair part: raise beta, or "
            "set balance to false"
        )


@component
class DirichletWithinDomains(DirichletByClass):
    """Divides each domain among its own clients, class by class, by a Dirichlet draw.

    The split of Digits in FedVLS (tables 14 and 15: "each domain among six clients"). With D domains and K clients,
    domain d goes to clients d K/D to (d + 1) K/D - 1, by `DirichletByClass`, whose parameters it takes.
    """

    def split(self, labels: ArrayLike, clients: int, rng: Generator, num_classes: int | None = None) -> list[IntArray]:
        """Raise PartitionError: labels alone do not give the domain of a sample."""
        raise PartitionError("the data set has no domains: choose another partition rule")

    def split_domains(
        self, labels: ArrayLike, domains: ArrayLike, clients: int, rng: Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples, of these domain ids, as `Rule.split` does."""
        labels, domains = np.asarray(labels), np.asarray(domains)
        if domains.shape != labels.shape or domains.dtype.kind not in "iu":
            raise ArgumentError(
                f"domains: must be one integer a sample, ({len(labels)},); got {domains.shape} {domains.dtype}"
            )
        found = np.unique(domains)
        each, rest = divmod(clients, len(found))
        if rest or not each:
            raise PartitionError(
                f"clients: {clients} can't be shared evenly by {len(found)} domains: take a multiple of {len(found)}"
            )
        shares = []
        for domain in found:
            rows = np.flatnonzero(domains == domain)
            with placed(f"in domain {domain}: ", PartitionError, of=PartitionError):
                shares += [rows[own] for own in super().split(labels[rows], each, rng, num_classes)]
        return shares


@component
class DirichletByClient(Rule):
    """Every client draws a label mix from a Dirichlet: label mixes vary, sizes are given.

    Yurochkin et al., 2019; the `Dir(beta)` of FedPALS' text. Client i draws p_i ~ Dir(beta, ..., beta) over the
    classes; its size is fixed; its counts are size * p_i by largest remainder, drawn without replacement.

    Clients may request more samples of a class than there are. Then all requests for it are cut in the same proportion,
    and each client fills up to its size from the classes that are not used up, by its own p_i; no client is favoured by
    its position. (The FedPALS authors' prototype draws per class over the clients and truncates.)

    Sizes that use up all samples bend the mixes towards the data set's own (CIFAR-10, beta 0.1: by 0.24 in total
    variation for 10 clients, by 0.08 for 100); smaller ones keep them as drawn.

    Attributes:
        beta: Concentration; small values are skewed.
        target_client: Whether the last client is the target (FedPALS).
        sizes: Samples of each client; without it, all samples are divided equally and the remainder is left out.
    """

    beta: Positive
    target_client: Switch = False
    sizes: tuple[Size, ...] | None = None

    def _counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        sizes = self._client_sizes(int(class_sizes.sum()), clients)
        return _fill(sizes, rng.dirichlet(np.full(len(class_sizes), self.beta), size=clients), class_sizes)

    def _client_sizes(self, samples: int, clients: int) -> IntArray:
        if self.sizes is None:
            if samples < clients:
                raise PartitionError(f"clients: {clients} are more than there are samples, {samples}; lower it")
            return np.full(clients, samples // clients, dtype=np.int64)
        if len(self.sizes) != clients:
            raise ArgumentError(f"sizes: has {len(self.sizes)} entries for {counted(clients, 'client')}")
        if sum(self.sizes) > samples:
            raise PartitionError(f"sizes ask for {counted(sum(self.sizes), 'sample')} of {samples}: lower sizes")
        return np.array(self.sizes, dtype=np.int64)


def _fill(sizes: IntArray, mixes: FloatArray, class_sizes: IntArray) -> IntArray:
    """Draw counts with row sums `sizes`, close to `mixes`, within `class_sizes`."""
    counts = np.zeros(mixes.shape, dtype=np.int64)
    missing, remaining = sizes.copy(), class_sizes.copy()
    # Each pass either serves all clients or uses up a class.
    while missing.any():
        wish = np.where(remaining > 0, mixes, 0.0)
        # A client without a share in any remaining class takes what there is.
        wish[wish.sum(axis=1) == 0] = remaining
        granted = apportion(missing, wish)
        over = granted.sum(axis=0) > remaining
        granted[:, over] = apportion(remaining[over], granted[:, over].T).T
        counts += granted
        missing -= granted.sum(axis=1)
        remaining -= granted.sum(axis=0)
    return counts
