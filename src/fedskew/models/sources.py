"""Networks of timm, torchvision and transformers, by name. Nothing is ever downloaded: weights are files of one's own.

timm:NAME            timm.create_model                      extra `timm`
torchvision:NAME     torchvision.models.get_model           extra `torchvision`
transformers:FOLDER  a text classifier of a local folder    extra `transformers`
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError, in_one_line, nearest, optional


def from_source(name: str, num_classes: int, in_shape: tuple[int, ...], options: Mapping[str, Any]) -> nn.Module:
    """Make an untrained network of another package, by PyTorch's global generator; for transformers `options` has its
    `architecture`. ArgumentError where that can't be made, MissingPackageError without the package."""
    source, _, what = name.partition(":")
    package = optional(source, f"{name} needs {source}: pip install 'fedskew[{source}]'")
    known = [] if source == "transformers" else (package if source == "timm" else package.models).list_models()
    if known and what not in known:
        raise ArgumentError(f"name: {source} has no network {what!r}{_near(what, known)}")
    try:
        if source == "transformers":
            return TextClassifier(package, num_classes, **options)
        if source == "timm":
            made: nn.Module = package.create_model(
                what, pretrained=False, num_classes=num_classes, in_chans=in_shape[0], **options
            )
            return made
        made = package.models.get_model(what, weights=None, num_classes=num_classes, **options)
    except Exception as error:  # of its options, or of an architecture that it does not know
        raise ArgumentError(f"name: {name} can't be made: {in_one_line(error)}") from None
    return made


def _near(what: str, known: list[str]) -> str:
    found = nearest(what, known)
    return found if "mean" in found else f"; it lists its {len(known)}: list_models()"


class TextClassifier(nn.Module):
    """A classifier of transformers', `network`, on padded token ids, `(batch, length)`: logits alone."""

    def __init__(self, package: Any, num_classes: int, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        given = {"num_labels": num_classes, "id2label": None, "label2id": None}
        own = {name: value for name, value in architecture.items() if name not in (*given, "model_type", "dtype")}
        config = package.AutoConfig.for_model(architecture.get("model_type"), num_labels=num_classes, **own)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        self.padding = int(config.pad_token_id)
        self.network = package.AutoModelForSequenceClassification.from_config(config).float()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, `(batch, classes)`; what is padding is not attended to."""
        logits: Tensor = self.network(input_ids=x, attention_mask=(x != self.padding).to(torch.int64)).logits
        return logits

    @property
    def body(self) -> str:
        """How the names of parameters begin that a file has whatever it was trained for."""
        return f"{self.network.base_model_prefix}."
