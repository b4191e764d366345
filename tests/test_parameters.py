"""Parameters of components that make no sense are refused, each by its name."""

from __future__ import annotations

from math import inf, nan

import pytest

from fedskew.errors import ArgumentError
from fedskew.methods import PLACES

REFUSED = {
    "objective": [
        (("fedkd", "fedekd", "fedntd", "fedlmd", "feddkd", "moon", "fpl"), "temperature", (0.0, -1.0, nan)),
        (("feddkd",), "target_weight", (-1.0, inf)),
        (("feddkd",), "rest_weight", (-1.0, inf)),
        (("fedlc",), "tau", (-1.0, nan, inf)),
        (("fedrs",), "alpha", (-0.1, 1.1, nan)),
        (("fedrod", "fedetf"), "least", (-1.0,)),
        (("fedetf", "fedgela", "fednh"), "scale", (0.0, -1.0)),
        (("fedvls_calibration", "suppression"), "prior_eps", (-1e-9, nan)),
        (("fednh",), "smoothing", (1.1, -0.1)),
    ],
    "selection": [
        (("fedentopt",), "buffer", (-0.1, 1.0, nan)),
        (("fedentopt",), "candidates", (0, -3, 2.5, True)),
        (("fedcbs",), "exploration", (-1.0, inf)),
        (("fedcbs",), "exponent", (0.0, -1.0)),
        (("seol_kim",), "threshold", (-0.1, nan, inf)),
        (("greedy_kl",), "normalise", (1,)),
    ],
    "local_step": [
        (("fedprox",), "mu", (-0.1, nan, inf)),
        (("fedsam", "fedgf"), "rho", (-0.1, nan, inf)),
        (("fedgf",), "server_rho", (-0.1, nan, inf)),
        (("fedgf",), "threshold", (-0.1, nan, inf)),
        (("fedgf",), "window", (0,)),
        (("scaffold",), "option", ("three",)),
    ],
    "weighting": [(("fedpals",), "strength", (-1, nan)), (("fedpals",), "ess", (1.5, -0.1))],
    "aggregation": [
        (("trimmed_mean",), "beta", (0.5,)),
        (("norm_clipping",), "quantile", (1.5,)),
        (("norm_clipping",), "bound", (0.0,)),
        (("geometric_median",), "nu", (0.0,)),
        (("krum",), "malicious", (-1,)),
        (("krum",), "keep", (0,)),
    ],
    "server_update": [
        (("plain", "fedadam"), "lr", (0.0, nan)),
        (("plain", "fedadam"), "momentum", (-0.1, 1.0)),
        (("fedexp",), "eps", (-1.0, inf)),
        (("fednova",), "local_momentum", (1.0,)),
        (("fedadam",), "decay", (1.0,)),
        (("fedadam",), "tau", (0.0,)),
        (("fedadam",), "initial", (-1.0,)),
    ],
}
"""By slot: names of components, a parameter, and values that it can't have."""


@pytest.mark.parametrize("slot", REFUSED)
def test_senseless_parameters_are_refused_by_name(slot):
    for names, parameter, wrong in REFUSED[slot]:
        for name in names:
            for value in wrong:
                with pytest.raises(ArgumentError, match=f"^{parameter}: input should be "):
                    PLACES[slot][name](**{parameter: value})
