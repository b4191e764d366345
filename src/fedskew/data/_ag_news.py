"""AG News (Zhang, Zhao, LeCun, "Character-level Convolutional Networks for Text Classification", NIPS 2015)."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read_checked
from fedskew.data._words import token_ids, vocabulary
from fedskew.errors import DataError

_PAGE = "https://github.com/zhangxiangxiao/Crepe"
_TRAIN, _SUBSET, _TEST = "train.csv", "train-subset.csv", "test.csv"
_MD5 = {_TRAIN: "b1a00f826fdfbd249f79597b59e1dc12", _TEST: "d52ea96a97a2d943681189a97654912d"}
_CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def ag_news(
    root: Path, subset: bool = False, vocabulary_size: int = 98_635, length: int = 200, verify: bool = True
) -> Dataset:
    """Read AG News: 120,000 and 7,600 titles and descriptions of news in four classes.

    Inputs are token ids, `(samples, length)` int64. A text is title and description joined by a space, split into
    lower-case English words. Token 0 pads, 1 is unknown, then come the words of the training text, most frequent first.

    Args:
        root: Holds `ag_news_csv/train.csv` and `test.csv`; columns are class (1 to 4), title and description, or class
            and the joined text.
        subset: Train on the 8,815 rows of `train-subset.csv` instead. The data set is then called "AG News (8.8k-row
            training subset)", its classes are unequal, and results on it are not those of the full set.
        vocabulary_size: Number of token ids. This default and the next are what FedVLS's code leaves of AG News (the
            paper prints none).
        length: Number of words kept of each text, from its beginning.
        verify: Check the published files against their MD5; False accepts other files in this format too.
    """
    folder, train = root / "ag_news_csv", _SUBSET if subset else _TRAIN
    if not subset and not (folder / _TRAIN).exists() and (folder / _SUBSET).exists():
        raise DataError(
            f"{folder / _TRAIN} is missing (expected MD5 {_MD5[_TRAIN]}); its authors publish it at {_PAGE}; "
            f"set subset = true to train on {_SUBSET}"
        )
    texts, labels = _read(folder / train, _MD5.get(train) if verify else None)
    test_texts, test_labels = _read(folder / _TEST, _MD5[_TEST] if verify else None)
    ids = vocabulary(texts, vocabulary_size)
    return Dataset(
        name="AG News (8.8k-row training subset)" if subset else "ag_news",
        inputs=token_ids(texts, ids, length),
        targets=torch.tensor(labels),
        test_inputs=token_ids(test_texts, ids, length),
        test_targets=torch.tensor(test_labels),
        classes=_CLASSES,
    )


def _read(path: Path, md5: str | None) -> tuple[list[str], list[int]]:
    """Return texts, and class ids from 0."""
    content = read_checked(path, md5, _PAGE)
    texts, labels = [], []
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""))
        for row in rows:
            if len(row) not in (2, 3) or row[0] not in ("1", "2", "3", "4"):
                raise damaged(path, f"line {rows.line_num} is no class from 1 to 4 and one or two texts", _PAGE)
            labels.append(int(row[0]) - 1)
            texts.append(" ".join(row[1:]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, f"it can't be read as CSV in UTF-8 ({error})", _PAGE) from None
    if not texts:
        raise damaged(path, "it is empty", _PAGE)
    return texts, labels
