"""Texts as the ids of a tokeniser of the package tokenizers, as models of transformers take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.data._schema import ENCODERS
from fedskew.data._text import Texts
from fedskew.errors import ArgumentError, DataError, MissingPackageError, in_one_line


@dataclass(frozen=True)
class Tokens(Texts):
    """How texts become ids by a tokeniser of the package tokenizers, which travels with the model.

    Attributes:
        tokenizer: Its tokenizer.json.
        padding: The id that pads.
        length: Ids kept of each text, from its beginning, special ones included.
        column: Column of the texts where they lie in a table.
    """

    kind: ClassVar[str] = "tokens"

    tokenizer: str
    padding: int
    length: int
    column: str = "text"

    @classmethod
    def of_folder(cls, folder: Path, length: int) -> Tokens:
        """Read the tokeniser of a folder as transformers writes it; DataError where there is none."""
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            about = folder / "tokenizer_config.json"
            said = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
            padding = said.get("pad_token")
            made = cls(text, 0, length)
            token = made._made.token_to_id(padding["content"] if isinstance(padding, dict) else padding or "[PAD]")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / 'tokenizer.json'}: is no tokeniser that can be read ({error})") from None
        return replace(made, padding=token or 0)

    def plain(self) -> dict[str, Any]:
        """See `Encoder.plain`."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Tokens:
        """Read what `plain` returned; ArgumentError where it is none."""
        values = {name: value for name, value in plain.items() if name != "kind"}
        kinds = {"tokenizer": str, "padding": int, "length": int, "column": str}
        if values.keys() != kinds.keys() or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ArgumentError("tokenizer, padding, length, column: expected those of a tokeniser")
        return cls(**values)

    @cached_property
    def _made(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingPackageError("a tokeniser needs tokenizers: pip install 'fedskew[transformers]'") from None
        try:
            made = Tokenizer.from_str(self.tokenizer)
        except Exception as error:  # tokenizers raises bare ones
            raise DataError(f"tokenizer: can't be read ({in_one_line(error)})") from None
        made.no_padding()
        made.enable_truncation(self.length)
        return made

    def encode(self, rows: Sequence[str], where: object = "texts") -> Tensor:
        """See `Texts.encode`."""
        ids = torch.full((len(rows), self.length), self.padding, dtype=torch.int64)
        for row, found in zip(ids, self._made.encode_batch(list(rows)), strict=True):
            row[: len(found.ids)] = torch.tensor(found.ids, dtype=torch.int64)
        return ids

    def decode(self, ids: Tensor) -> list[str]:
        """See `Texts.decode`."""
        beside = {self.padding, *self._made.encode("").ids}
        kept = [[number for number in row if number not in beside] for row in ids.tolist()]
        return list(self._made.decode_batch(kept, skip_special_tokens=False))


ENCODERS[Tokens.kind] = Tokens.of_plain
