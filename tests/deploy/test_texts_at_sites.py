"""A transformer of a local folder at sites that hold texts: from a config to predictions by what they trained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from federated import LocalGrid, TaskIdentity

import fedskew
from fedskew.deploy import Address, Draft, agree, make_deployed_loop, site_app, write_federation, write_samples
from fedskew.experiment import make_task, read

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "film", "goal", "sport", "bank", "money", "the", "was"]
OF = {"films": ["good", "film"], "sports": ["goal", "sport"], "banks": ["bank", "money"]}


@pytest.mark.faults  # to import transformers takes seconds
@pytest.mark.filterwarnings("ignore")
def test_from_a_config_to_predictions_on_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="not installed: pip install 'fedskew[transformers]'")
    transformers = pytest.importorskip("transformers", reason="not installed: pip install 'fedskew[transformers]'")
    monkeypatch.chdir(tmp_path)
    for name, words in OF.items():
        Path("texts", name).mkdir(parents=True)
        for number in range(24):
            drawn = random.Random(number).choices([*words, "the", "was"], k=6)
            Path("texts", name, f"{number}.txt").write_text(" ".join([*drawn, words[0]]))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    about = {"vocab_size": 12, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 16}
    made = transformers.DistilBertConfig(**about, initializer_range=0.3)
    transformers.set_seed(1)
    transformers.DistilBertForSequenceClassification(made).save_pretrained("tiny")
    tokenizer.save("tiny/tokenizer.json")
    Path("run.toml").write_text("""
        data = {name = "folder", root = "texts", tokenizer = "tiny", length = 12}
        partition = {rule = "iid", clients = 3}
        model = {name = "transformers:tiny"}
        training = {rounds = 6, batch_size = 8, lr = 0.2, epochs = 2}
    """)
    task = make_task(config := read(Path("run.toml")), 0)
    names, samples, folder = ("ash", "birch", "cedar"), task.dataset, tmp_path / "federation"
    kind = {"classes": list(samples.classes), "shape": [12], "tokens": True, "encoder": samples.encoder.plain()}
    draft = Draft.of(config, names, kind, "exact", None, None)
    table = {"name": "folder", "root": "texts"}
    write_federation(folder, draft.config, draft.agreement, Address("127.0.0.1", 9092), table)
    places = [folder / "sites" / name for name in names]
    write_samples(samples, task.partition.indices, places)
    for place in places:
        agree(place / "data.toml", folder / "app")
    monkeypatch.chdir(folder)  # away from texts, tokeniser and weights
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    app = site_app(folder / "app")
    grid = LocalGrid(
        {
            at: (name, app, {"data": str(place / "data.toml")})
            for at, (name, place) in enumerate(zip(names, places, strict=True))
        }
    )
    make_deployed_loop(
        read(folder / "app" / "run.toml").weights_in(folder / "server"), draft.agreement, grid, folder / "run"
    ).run(resume=True)
    model = fedskew.load(folder / "run")
    found = model.predict(["good good film", "the bank was money", "sport goal the goal"]).argmax(1)
    assert [model.classes[label] for label in found] == ["films", "banks", "sports"]
