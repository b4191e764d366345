"""A client's samples in an order of one's own: rare classes more often than they are, though not as often as others.

    p(sample of class c) = n_c ** (power - 1), divided by the sum over samples          power 0.5

With 1 it would be uniform, with 0 every class as likely (`training.sampler = "balanced"`). In a config:

    [training]
    sampler = "root_sampler:by_roots"
"""


def by_roots(labels, counts, rng):
    """Return the rows of one epoch, numbers from 0, as many as there are samples, one of which may come often.

    `labels` are the classes of the client's samples, `counts` its samples of each class, `rng` a generator for this
    client and round: all draws come from it.
    """
    chances = counts[labels] ** -0.5
    return rng.choice(len(labels), len(labels), p=chances / chances.sum())
