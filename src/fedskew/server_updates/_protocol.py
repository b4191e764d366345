"""What a server update implements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class ServerUpdate(Protocol):
    """One component of the server-update slot: a frozen dataclass of hyper-parameters.

    It moves trainable parameters only; the engine averages buffers (batch-norm statistics) plainly with the same
    weights.
    """

    def init(self, parameters: Tensor) -> Any:
        """The state before the first round: a frozen dataclass of tensors and plain values, or None."""

    def update(
        self, state: Any, parameters: Tensor, updates: Tensor, weights: NDArray[np.float64], steps: NDArray[np.int64]
    ) -> tuple[Tensor, Any]:
        """The next model and state.

        `parameters`: the model that was sent, `(parameters,)`; `updates`: client model minus sent model,
        `(answered, parameters)`; `weights` and `steps` (local steps that each took): `(answered,)`.
        """
