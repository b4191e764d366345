"""Text as token ids: splitting into English words, and a vocabulary built from training text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedskew.errors import ArgumentError

PADDING, UNKNOWN = 0, 1
_SEPARATED = str.maketrans(
    {mark: f" {mark} " for mark in "'.,()!?"} | {'"': None} | dict.fromkeys(";:", " "),
)


def words(text: str) -> list[str]:
    """Split text into lower-case words.

    The punctuation `' . , ( ) ! ?` becomes words of its own, `"` is dropped, `; :` and `<br />` become spaces. These
    are the rules of torchtext's "basic_english", which PFLlib and FedVLS's code use.
    """
    return text.lower().replace("<br />", " ").translate(_SEPARATED).split()


def vocabulary(texts: Iterable[str], size: int) -> dict[str, int]:
    """Number the words from 2 on, most frequent first, ties alphabetically; 0 pads, and 1 is any other word.

    `size` counts ids 0 and 1 too.
    """
    if size < 3:
        raise ArgumentError(f"vocabulary: counts padding and unknown too, so it must be at least 3, got {size}")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def token_ids(texts: Sequence[str], ids: dict[str, int], length: int) -> Tensor:
    """Return the first `length` words of each text as ids, `(texts, length)` int64, padded with 0."""
    if length < 1:
        raise ArgumentError(f"length: must be at least 1, got {length}")
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        found = [ids.get(word, UNKNOWN) for word in words(text)[:length]]
        tokens[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    return tokens
