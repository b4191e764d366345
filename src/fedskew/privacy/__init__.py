"""Differential privacy of clients' updates: clipped at the client, with noise that each adds a share of, and accounted
for.

What a round releases is the weighted sum of the updates (McMahan et al., ICLR 2018, DP-FedAvg; the shares as in Kairouz
et al., ICML 2021), and the unit that is protected is a client with all of its samples:

    client k    n_k = round(2**24 a_k D_k min(1, C / ||D_k||)) + e_k,     e_k discrete Gaussian of variance s**2 / m
    released    sum of n_k,     whose noise has a variance of s**2 if m clients are in it
    s           = z S,     S = 2**24 a C + sqrt(parameters) / 2,     a the weight limit: no a_k is above it

S is the sensitivity: the most that the sum changes if one client's update is replaced by zeros. Rounding comes before
the noise and is part of S. A sum of discrete Gaussians is no discrete Gaussian, but so near to one (Kairouz et al.,
for a share of s / sqrt(m) >= 10 units the difference in epsilon is below 1e-200) that the mechanism is
accounted for as the Gaussian one with noise multiplier z. Sums are modulo 2**32, which reveals nothing.

A sum opens over all that add to it or not at all, so m is their number, and each knows it before it draws its noise.
Where some of them may tell their noise to the server, m is the number of those that don't (`UpdateNoise.answers`).

No amplification by sampling is claimed: whoever sees who took part (the server does) gains none, and a client's epsilon
is that of the rounds in which it took part.
"""

from fedskew.privacy._noise import COVERED as COVERED
from fedskew.privacy._noise import Protection as Protection
from fedskew.privacy._noise import UpdateNoise as UpdateNoise
from fedskew.privacy._noise import epsilon as epsilon
from fedskew.privacy._noise import most_rounds as most_rounds
from fedskew.privacy._noise import noise_for as noise_for
from fedskew.privacy._noise import secure_noise as secure_noise
from fedskew.privacy._noise import together as together
