"""Texts of three classes and a small transformer in a folder, for tests of networks of other packages."""

import random
from pathlib import Path

import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "film", "goal", "sport", "bank", "money", "the", "was"]
OF = {"films": ["good", "film"], "sports": ["goal", "sport"], "banks": ["bank", "money"]}


def write_texts(place: Path) -> None:
    """Write texts, a transformer of other classes with its tokeniser, and a config."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    for name, words in OF.items():
        (place / "texts" / name).mkdir(parents=True)
        for number in range(24):
            drawn = random.Random(number).choices([*words, "the", "was"], k=6)
            (place / "texts" / name / f"{number}.txt").write_text(" ".join([*drawn, words[0]]))
    tiny = place / "tiny"
    tiny.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(tiny / "tokenizer.json"))
    torch.manual_seed(0)
    made = DistilBertConfig(
        vocab_size=12, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=5, max_position_embeddings=16,
        initializer_range=0.3,
    )  # fmt: skip
    DistilBertForSequenceClassification(made).save_pretrained(tiny)
    (place / "run.toml").write_text("""
        data = {name = "folder", root = "texts", tokenizer = "tiny", length = 12}
        partition = {rule = "iid", clients = 3}
        model = {name = "transformers:tiny"}
        training = {rounds = 6, batch_size = 8, lr = 0.2, epochs = 2}
    """)
