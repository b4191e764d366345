"""Adapters by peft: they alone are trained and travel; a run's model is whole, and exported merged or apart."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedskew
from common import exported, task
from fedskew.errors import ConfigError
from fedskew.experiment import make_training_loop, resolve

HAS_PEFT = find_spec("peft") is not None  # to import it takes seconds, in every process of the tests
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not HAS_PEFT, reason="pip install 'fedskew[peft]'"),
]


class Small(nn.Module):
    """Two layers and a last one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.query, self.value, self.fc = nn.Linear(64, 12), nn.Linear(12, 8), nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.value(torch.relu(self.query(x.flatten(1))))))


LORA = {"kind": "lora", "rank": 3, "targets": ["query", "value"]}
ADDED = 3 * (64 + 12) + 3 * (12 + 8)
"""Parameters of both adapters: A is rank x in, and B is out x rank."""


def config(folder: Path, adapters: dict[str, Any], backend: str = "sequential", **more: Any) -> dict[str, Any]:
    path = folder / "body.safetensors"
    torch.manual_seed(3)
    save_file(Small(10).state_dict(), path)
    made = task(3, rounds=2, batch_size=64, lr=0.5, steps=3)
    model = {"name": Small, "weights": str(path), "adapters": adapters}
    engine = {"backend": backend} | ({"processes": 1} if backend == "processes" else {})  # each imports transformers
    return made | {"model": model, "engine": engine} | more


def test_lora_travels_alone_and_is_exported_merged_and_apart(tmp_path):
    made = resolve(config(tmp_path, LORA))
    result = fedskew.simulate(made, out=tmp_path)
    assert (result.rounds[1]["bytes_up"], result.rounds[1]["bytes_down"]) == (3 * 4 * ADDED, 3 * 4 * ADDED)
    run = made.folder(tmp_path)
    stored = load_file(run / "checkpoint" / "state.safetensors")
    assert max(part.numel() for part in stored.values()) == ADDED
    first, frozen = load_file(tmp_path / "body.safetensors"), load_file(run / "frozen.safetensors")
    assert torch.equal(frozen["base_model.model.query.base_layer.weight"], first["query.weight"])
    model = fedskew.load(run)
    inputs = np.random.default_rng(0).random((4, 1, 8, 8)).astype("float32")
    plain = Small(10).eval()
    plain.load_state_dict(load_file(model.export(run / "merged.safetensors", "weights")))
    inside = {name: value for name, value in model.network.state_dict().items() if "query" in name}
    change = (
        inside["base_model.model.query.lora_B.default.weight"] @ inside["base_model.model.query.lora_A.default.weight"]
    )
    scale = 8 / 3  # peft's lora_alpha by the rank
    torch.testing.assert_close(plain.query.weight, first["query.weight"] + scale * change)
    assert change.abs().max() > 1e-4
    with torch.no_grad():
        by_hand = torch.softmax(plain(model.info.normalise(torch.from_numpy(inputs))), 1)
    torch.testing.assert_close(torch.from_numpy(model.predict(inputs)).float(), by_hand, rtol=1e-4, atol=1e-5)
    apart = model.export(run / "apart", "adapters")
    assert sum(one.numel() for one in load_file(apart / "adapter_model.safetensors").values()) == ADDED
    scripted, _ = exported(model, run / "model.pt", "torchscript", inputs)
    torch.testing.assert_close(torch.from_numpy(scripted).float(), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["processes", "cohort"])
def test_every_backend_trains_adapters_alike(tmp_path, backend):
    runs = [fedskew.simulate(config(tmp_path, LORA, one)).model.state_dict() for one in ("sequential", backend)]
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("adapters", "trained"),
    [
        ({"kind": "ia3", "targets": ["value"], "feedforward_modules": []}, 8),
        ({"kind": "lora", "r": 1, "target_modules": ["value"], "modules_to_save": ["fc"]}, 12 + 8 + 8 * 10 + 10),
        ({"kind": "vera", "rank": 4, "targets": ["value"]}, 8 + 4),
    ],
)
def test_other_kinds_and_further_layers_by_peft_s_own_arguments(tmp_path, adapters, trained):
    loop = make_training_loop(resolve(config(tmp_path, adapters)), 0)
    assert len(loop.model.vector) == trained
    loop.run()


@pytest.mark.parametrize(
    ("adapters", "more", "message"),
    [
        ({"kind": "lorra"}, {}, r"model.adapters.kind: peft has none 'lorra' \(did you mean 'lora'\?\)"),
        ({"rank": 2}, {}, r"model.adapters.kind: missing \(known: "),
        ({"kind": "lora", "rnk": 2}, {}, r"model.adapters.rnk: lora has no such argument \(did you mean 'rank'\?\)"),
        (LORA | {"targets": ["quary"]}, {}, "model.adapters: peft can't make lora for this network: .*quary"),
        (LORA, {"method": "moon"}, "model.adapters: MOON changes the network itself; leave out one of them"),
    ],
)
def test_what_peft_does_not_have_is_one_line(tmp_path, adapters, more, message):
    with pytest.raises(ConfigError, match=message):
        make_training_loop(resolve(config(tmp_path, adapters, **more)), 0)
