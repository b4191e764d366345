"""A transformer of a local folder at sites that hold texts: from a config to predictions by what they trained."""

from pathlib import Path

import pytest
from federated import LocalGrid, TaskIdentity

import fedskew
from fedskew.deploy import Address, Draft, agree, make_deployed_loop, site_app, write_federation, write_samples
from fedskew.experiment import make_task, read
from texts import write_texts


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
