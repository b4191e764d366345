"""What the cohort backend chooses by rule: the form of a convolution, and how many clients are stacked."""

from __future__ import annotations

from typing import Literal

ConvolutionForm = Literal["each", "columns", "grouped"]


def convolution_form(device: str, groups: int, padded_by_name: bool) -> ConvolutionForm:
    """How clients' convolutions, each with its own weights, are taken together.

    "each": one client's after another's; "columns": patches, and one batched matrix product; "grouped": one convolution
    with a group for each client, PyTorch's own rule.

    On a CPU always one after another: forward and backward passes took, in ms on one thread of a Xeon,

        layer, clients x batch     each    grouped    columns
        3->6 5x5, 10 x 10            9         22         11
        3->6 5x5, 10 x 64           49        137        271
        6->16 5x5, 10 x 10           5          9         10
        6->16 5x5, 10 x 64          34         64        136
        3->32 3x3, 10 x 10          13         22         17
        32->64 3x3, 10 x 10        158        197        418
        32->64 3x3, 50 x 10        532       1268       2458

    On a GPU nothing has been measured yet; columns are batched products of the sizes that GPUs like, and cuDNN's
    grouped convolutions are known to be slow with few channels a group.
    """
    if device == "cpu":
        return "each"
    return "columns" if groups == 1 and not padded_by_name else "grouped"
