"""Text as token ids, by a vocabulary of the training text; AG News."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data.published import Source
from fedskew.errors import ArgumentError, DataError

PADDING, UNKNOWN = 0, 1
_SEPARATED = str.maketrans(
    {mark: f" {mark} " for mark in "'.,()!?"} | {'"': None} | dict.fromkeys(";:", " "),
)

_TRAIN, _SUBSET, _TEST = "train.csv", "train-subset.csv", "test.csv"


def ag_news(
    root: Path, subset: bool = False, vocabulary_size: int = 98_635, length: int = 200, verify: bool = True
) -> Dataset:
    """Read AG News: 120,000 and 7,600 titles and descriptions of news in four classes.

    Zhang, Zhao, LeCun, "Character-level Convolutional Networks for Text Classification", NIPS 2015. From
    `ag_news_csv/train.csv` and `test.csv`, whose columns are class (1 to 4), title and description, or class and the
    joined text. Inputs are token ids, `(samples, length)` int64. A text is title and description joined by a space,
    split into lower-case English words. Token 0 pads, 1 is unknown, then come the words of the training text, most
    frequent first.

    Args:
        subset: Train on the 8,815 rows of `train-subset.csv` instead. The data set is then called "AG News (8.8k-row
            training subset)", its classes are unequal, and results on it are not those of the full set.
        vocabulary_size: Number of token ids. This default and the next are what FedVLS's code leaves of AG News (the
            paper prints none).
        length: Number of words kept of each text, from its beginning.
        verify: Check the published files against their MD5; False accepts other files in this format too.
    """
    source, train = Source.of("ag_news", root, verify), _SUBSET if subset else _TRAIN
    if not (source.folder / train).exists() and (source.folder / _SUBSET).exists():
        error = source.missing(train, f"MD5 {source.facts['md5'][train]}")
        raise DataError(f"{error}; set subset = true to train on {_SUBSET}")
    texts, labels = _read(source, train)
    test_texts, test_labels = _read(source, _TEST)
    ids = vocabulary(texts, vocabulary_size)
    return Dataset(
        "AG News (8.8k-row training subset)" if subset else "ag_news",
        token_ids(texts, ids, length),
        torch.tensor(labels),
        token_ids(test_texts, ids, length),
        torch.tensor(test_labels),
        source.classes,
    )


def _read(source: Source, name: str) -> tuple[list[str], list[int]]:
    """Return texts, and class ids from 0."""
    content = source.read(name)
    texts, labels = [], []
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
        for row in rows:
            if len(row) not in (2, 3) or row[0] not in ("1", "2", "3", "4"):
                raise source.damaged(name, f"line {rows.line_num} is no class from 1 to 4 and one or two texts")
            labels.append(int(row[0]) - 1)
            texts.append(" ".join(row[1:]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise source.damaged(name, f"it can't be read as CSV in UTF-8 ({error})") from None
    if not texts:
        raise source.damaged(name, "it is empty")
    return texts, labels


def _words(text: str) -> list[str]:
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
        counts.update(_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def token_ids(texts: Sequence[str], ids: dict[str, int], length: int) -> Tensor:
    """Return the first `length` words of each text as ids, `(texts, length)` int64, padded with 0."""
    if length < 1:
        raise ArgumentError(f"length: must be at least 1, got {length}")
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        found = [ids.get(word, UNKNOWN) for word in _words(text)[:length]]
        tokens[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    return tokens
