"""Weightings and selections for NVIDIA FLARE, by the clients' label counts.

On the server, `WeightingAggregator` goes where FLARE takes an aggregator:

    from fedskew.nvflare import SelectingFedAvg, WeightingAggregator

    recipe = FedAvgRecipe(..., aggregator=WeightingAggregator("fedla"))

Each client adds its label counts, the number of its training samples of each class, to what it sends:

    flare.send(FLModel(params=..., meta={"label_counts": counts}))

`SelectingFedAvg` goes where FLARE takes a controller, and chooses the sites of each round; before the first it asks for
the label counts in a task of its own, which a client answers with them alone:

    if get_task_name() == "label_counts":  # of nvflare.client.api
        flare.send(FLModel(params={}, meta={"label_counts": counts}))

FLARE comes with the extra `fedskew[nvflare]`. What label counts reveal is in `docs/privacy.md`.
"""

from typing import TYPE_CHECKING, Any

from fedskew.errors import MissingPackageError

if TYPE_CHECKING:
    from fedskew.nvflare._flare import SelectingFedAvg, WeightingAggregator

__all__ = ["SelectingFedAvg", "WeightingAggregator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    try:
        from fedskew.nvflare import _flare
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nvflare":
            raise
        raise MissingPackageError("NVIDIA FLARE is not installed: pip install 'fedskew[nvflare]'") from None
    return getattr(_flare, name)
