"""What is frozen never travels: a site has it from its own file of weights, and refuses another file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import LocalGrid, federate, tree
from flwr.app import ConfigRecord
from safetensors.numpy import load_file
from safetensors.torch import save_file

import fedskew
from fedskew.deploy import (
    Address,
    Draft,
    agree,
    check_folder,
    make_deployed_loop,
    site_app,
    write_federation,
    write_samples,
)
from fedskew.errors import ConfigError
from fedskew.experiment import make_task, read
from fedskew.models import build
from texts import write_texts


def weights(folder: Path, seed: int = 5) -> str:
    module = build("mlp3", 10, (1, 8, 8), generator=torch.Generator().manual_seed(seed), width=24)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(module.state_dict(), folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


@pytest.mark.parametrize("updates", ["plain", "masked"])
def test_sites_train_what_was_simulated_and_get_nothing_frozen(tmp_path: Path, updates: str) -> None:
    config = tree("fedavg", rounds=1, **({"weight_limit": 0.4} if updates == "masked" else {}))
    config["model"] |= {"weights": weights(tmp_path / "given"), "freeze": ["fc1"]}
    config["engine"] = {"updates": updates}
    federation = federate(tmp_path, config, updates=updates)
    grid = federation.grid()
    simulated, deployed = federation.as_simulated(grid)
    assert set(grid.last("train").content["arrays"]) == {"fc2.weight", "fc2.bias", "head.weight", "head.bias"}
    assert deployed.rounds[1].bytes_up == simulated.rounds[1].bytes_up or updates == "masked"
    assert set(load_file(federation.run_folder / "frozen.safetensors")) == {"fc1.weight", "fc1.bias"}


def test_a_site_refuses_weights_that_were_not_agreed_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tree("fedavg", rounds=1)
    config["model"] |= {"weights": weights(tmp_path / "given"), "freeze": ["fc1"]}
    federation = federate(tmp_path, config)
    weights(tmp_path / "birch", seed=6)
    (tmp_path / "cedar" / "weights.safetensors").unlink()
    question = {"config": ConfigRecord({"server-round": 0})}
    answers: dict[str, Any] = {name: federation.ask("query", question, name) for name in federation.names}
    assert answers["ash"].has_content()
    assert str(answers["birch"].error.reason) == "ConfigError in its own log"
    assert "birch/weights.safetensors is another file than that of weights_hash" in caplog.text
    assert "cedar/weights.safetensors: No such file" in caplog.text


def test_the_server_and_each_site_get_the_file_once_with_their_folders(tmp_path: Path) -> None:
    config = tree("fedavg", rounds=1)
    path = Path(weights(tmp_path / "given"))
    config["model"] |= {"weights": str(path), "train": ["head"]}
    federation = federate(tmp_path, config)
    folder = tmp_path / "federation"
    write_federation(folder, federation.config, federation.agreement, Address("localhost", 9092), {"name": "npz"})
    for place in ("server", *(f"sites/{name}" for name in federation.names)):
        assert (folder / place / "weights.safetensors").read_bytes() == path.read_bytes()
    written, config_hash = read(folder / "app" / "run.toml"), federation.config.model.weights_hash
    assert (written.model.weights, written.model.weights_hash) == ("weights.safetensors", config_hash)
    assert 'weights=\\"$PWD/weights.safetensors\\"' in (folder / "server" / "run.sh").read_text()
    path.unlink()
    assert check_folder(folder)
    (folder / "server" / "weights.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.weights: .*server/weights.safetensors: No such file"):
        check_folder(folder)
    (run := folder / "app" / "run.toml").write_text(run.read_text().replace('"weights.safetensors"', '"/etc/passwd"'))
    with pytest.raises(ConfigError, match="model.weights: '/etc/passwd' is the app's own"):
        check_folder(folder)


DITTO = {"preset": "fedavg", "finish": "gaussian", "personal": {"name": "ditto", "strengths": [0.1]}}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "updates"), [("fedavg", "masked"), (DITTO, "plain")])
def test_features_that_a_site_keeps_change_nothing_but_the_time(tmp_path: Path, method: Any, updates: str) -> None:
    models, answers = [], []
    for keeps in (True, False):
        config = tree(method, rounds=2, **({"weight_limit": 0.4} if updates == "masked" else {}))
        config["model"] |= {"freeze": ["fc1"]}
        config["engine"] = {"updates": updates, "keep_features": keeps}
        federation = federate(tmp_path / str(keeps), config, updates=updates)
        federation.play()
        models.append(
            load_file(next(federation.run_folder.glob("*finished*"), federation.run_folder / "model.safetensors"))
        )
        answers.append([one["bytes_up"] for one in federation.records()])
        found = sorted(one.name.partition("-")[0] for one in (federation.kept("ash") / "home").glob("*-*/"))
        assert found == (["test", "training"] if keeps else [])
    assert answers[0] == answers[1]
    torch.testing.assert_close(*models, rtol=0, atol=1e-5)


def test_kept_features_are_of_this_body_and_these_samples(tmp_path: Path) -> None:
    config = tree("fedavg", rounds=1)
    config["model"] |= {"freeze": ["fc1"]}
    federation, grid = federate(tmp_path, config, label_counts="withheld").played()
    question, home = grid.last("train"), federation.kept("ash") / "home"
    first = {one.name for one in home.glob("*-*")}
    values = home / next(one for one in first if one.startswith("training")) / "values.npy"
    before = np.load(values)
    assert np.load(values.parent / "known.npy")[0]
    np.lib.format.open_memmap(values, "r+")[:] = 0  # what is kept is what is used
    federation.ask("train", question.content)
    assert not np.load(values).any()
    federation.change_samples("ash", lambda own: {"x": own["x"][::-1]})
    federation.ask("train", question.content)
    (second,) = home.glob("training-*")
    assert second.name not in first
    np.testing.assert_allclose(np.load(second / "values.npy"), before[::-1], rtol=0, atol=1e-5)
    assert {one.name for one in home.glob("test-*")} < first
    assert oct(second.stat().st_mode)[-3:] == "700"


# A transformer of a local folder at sites that hold texts: from a config to predictions by what they trained.


@pytest.mark.faults  # to import transformers takes seconds
@pytest.mark.filterwarnings("ignore")
def test_from_a_config_to_predictions_on_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tokenizers", "transformers"):
        pytest.importorskip(package, reason="not installed: pip install 'fedskew[transformers]'")
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
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
