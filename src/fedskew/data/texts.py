"""Texts as token ids: by a vocabulary of the training text, or by a tokeniser of the package tokenizers; AG News."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._images import BrokenFileError, Tray
from fedskew.data._schema import ENCODERS, Encoder
from fedskew.data._table import Table, is_saved
from fedskew.data.published import Source
from fedskew.errors import ArgumentError, DataError, DataWarning, in_one_line, optional
from fedskew.parameters import Count, Size, component
from fedskew.tables import counted

TEXT = ".txt"
PADDING, UNKNOWN = 0, 1
_SEPARATED = str.maketrans({mark: f" {mark} " for mark in "'.,()!?"} | {'"': None} | dict.fromkeys(";:", " "))

_TRAIN, _SUBSET, _TEST = "train.csv", "train-subset.csv", "test.csv"


def ag_news(
    root: Path,
    subset: bool = False,
    vocabulary_size: int = 98_635,
    length: int = 200,
    verify: bool = True,
    encoder: Encoder | None = None,
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
        encoder: A federation's words, in place of those of the training part.
    """
    source, train = Source.of("ag_news", root, verify), _SUBSET if subset else _TRAIN
    if not (source.folder / train).exists() and (source.folder / _SUBSET).exists():
        error = source.missing(train, f"MD5 {source.facts['md5'][train]}")
        raise DataError(f"{error}; set subset = true to train on {_SUBSET}")
    texts, labels = _read(source, train)
    test_texts, test_labels = _read(source, _TEST)
    own = encoder if isinstance(encoder, Texts) else Vocabulary.of(texts, vocabulary_size, length)
    return Dataset(
        "AG News (8.8k-row training subset)" if subset else "ag_news",
        own.encode(texts),
        torch.tensor(labels),
        own.encode(test_texts),
        torch.tensor(test_labels),
        source.classes,
        encoder=own,
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


class Texts:
    """What all encoders of texts share: how these are read from files, of a table from `column`."""

    column: str

    def encode(self, rows: Sequence[str], where: object = "texts") -> Tensor:
        """Return ids, `(texts, length)` int64."""
        raise NotImplementedError

    def decode(self, ids: Tensor) -> list[str]:
        """Return texts that `encode` turns into these ids, as far as there are such."""
        raise NotImplementedError

    def read(self, path: Path, skip_broken: bool = False) -> tuple[list[str], Tensor]:
        """See `Encoder.read`: of `.txt` files, a text each, of folders of these, and of tables."""
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder; texts themselves are given as a list")
        names, texts, _ = self._rows(path, None, skip_broken)
        return names, self.encode(texts, path)

    def labels(self, path: Path) -> list[str]:
        """See `Encoder.labels`: the folders of files, or the column "label"."""
        return self._rows(path, "label", False)[2]

    def _rows(self, path: Path, label: str | None, skip_broken: bool) -> tuple[list[str], list[str], list[str]]:
        """Return the names, texts and labels of samples."""
        if path.suffix.lower() == TEXT or (path.is_dir() and not is_saved(path)):
            below = sorted(path.rglob(f"*{TEXT}")) if path.is_dir() else [path]
            files = [file for file in below if not file.name.startswith(".")]
            if not files:
                raise DataError(f"{path}: holds no texts ({TEXT})")
            texts = read_texts(files, tray := Tray(skip_broken))
            tray.close(len(texts) + len(tray.broken), "text")
            return list(map(str, files)), texts, [file.parent.name for file in files]
        table = Table.read(path)
        column = self.column if self.column in table.columns or len(table.columns) > 1 else next(iter(table.columns))
        for name in (column, *([label] if label else [])):
            if name not in table.columns:
                table.fail(f"no column {name!r}, as texts that were trained on (columns: {', '.join(table.columns)})")
        names = [f"{path}, row {row + 1}" for row in range(len(table))]
        return names, list(table.columns[column]), list(table.columns[label] if label else ())


@component
class Vocabulary(Texts):
    """How texts become token ids: the words of ids 2 and on; 0 pads, and 1 is any other word.

    It stands in the model's file, and in a federation's agreement, so that a word has one id everywhere.

    Attributes:
        words: Words of the training text, most frequent first, ties alphabetically.
        length: Words kept of each text, from its beginning.
        column: Column of the texts where they lie in a table.
    """

    kind: ClassVar[str] = "text"

    words: tuple[str, ...]
    length: Count
    column: str = "text"

    @classmethod
    def of(cls, texts: Iterable[str], size: int, length: int, column: str = "text") -> Vocabulary:
        """Number the words of texts; `size` counts ids 0 and 1 too."""
        for name, number, least in (("vocabulary_size", size, 3), ("length", length, 1)):
            if number < least:
                raise ArgumentError(f"{name}: must be at least {least}, got {number}")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(_words(text))
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]), length, column)

    def plain(self) -> dict[str, Any]:
        """See `Encoder.plain`."""
        return {"kind": self.kind, **asdict(self)}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=2)}

    def encode(self, rows: Sequence[str], where: object = "texts") -> Tensor:
        """Return ids, `(texts, length)` int64; a DataWarning says of how many texts no word is known."""
        tokens = torch.zeros(len(rows), self.length, dtype=torch.int64)
        for row, text in enumerate(rows):
            found = [self._ids.get(word, UNKNOWN) for word in _words(text)[: self.length]]
            tokens[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
        unknown = torch.nonzero((tokens <= UNKNOWN).all(1)).flatten().tolist()
        if unknown:
            warnings.warn(
                f"{where}: {len(unknown):,} of {counted(len(rows), 'text')} have not one of the {len(self.words):,} "
                f"words of training, the first being number {unknown[0] + 1}: nothing can be learned or said of them",
                DataWarning,
                stacklevel=2,
            )
        return tokens

    def decode(self, ids: Tensor) -> list[str]:
        """See `Texts.decode`."""
        other = "x" * (1 + max(map(len, self.words)))
        words = ("", other, *self.words)
        return [" ".join(words[number] for number in row if number != PADDING) for row in ids.tolist()]


ENCODERS[Vocabulary.kind] = Vocabulary


def read_texts(files: list[Path], tray: Tray) -> list[str]:
    """Return the texts in files, of which those that can't be read are taken out of the list."""
    texts = []
    for file in tuple(files):
        with tray.reading(files, file):
            texts.append(_text_in(file))
    return texts


def _text_in(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BrokenFileError(f"{path}: is not in UTF-8; save it so") from None
    except OSError as error:
        raise BrokenFileError(f"{path}: {error.strerror}") from None
    if not text.strip():
        raise BrokenFileError(f"{path}: the file is empty")
    return text


def _words(text: str) -> list[str]:
    """Split text into lower-case words as torchtext's "basic_english", which PFLlib and FedVLS's code use: `' . , ( ) !
    ?` become words of their own, `"` is dropped, `; :` and `<br />` become spaces."""
    return text.lower().replace("<br />", " ").translate(_SEPARATED).split()


@component
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
    padding: Size
    length: Count
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

    @cached_property
    def _made(self) -> Any:
        kind = optional("tokenizers:Tokenizer", "a tokeniser needs tokenizers: pip install 'fedskew[transformers]'")
        try:
            made = kind.from_str(self.tokenizer)
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


ENCODERS[Tokens.kind] = Tokens
