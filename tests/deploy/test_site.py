"""A site by itself: what it imports, remembers and refuses, and that what goes wrong there stays there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import torch
from federated import federate, training, tree
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor, nn

from common import largest_file, save_image
from fedskew.deploy import Agreement, Disclosure, SiteData, Terms, client_app
from fedskew.deploy._site import agreed_site
from fedskew.deploy._wire import TrainInstruction
from fedskew.deploy.site_data import SiteStates
from fedskew.errors import ComponentError, ConfigError, DataError, RunError
from fedskew.experiment import make_network
from fedskew.local_steps import Scaffold
from fedskew.methods import build
from fedskew.models import FlatModel


def test_a_site_goes_on_from_the_round_that_counted(tmp_path: Path) -> None:
    states = SiteStates(tmp_path, "0a")
    assert states.load(0) == {}
    states.keep(1, {"kept": torch.ones(2)})
    states.keep(2, {"kept": torch.full((2,), 2.0)})
    assert states.newest == 2
    assert states.load(1)["kept"].tolist() == [1.0, 1.0]
    assert states.newest == 1  # round 2 was not counted, and is no more
    assert SiteStates(tmp_path, "0b").load(0) == {}
    assert states.load(1)["kept"].tolist() == [1.0, 1.0]


def test_a_site_has_the_state_of_the_round_before_if_the_last_is_undone(tmp_path: Path) -> None:
    states = SiteStates(tmp_path, "0a")
    for round in (1, 2, 3):
        states.load(round - 1)
        states.keep(round, {"kept": torch.full((2,), float(round))})
    assert states.load(3)["kept"].tolist() == [3.0, 3.0]
    assert states.load(2)["kept"].tolist() == [2.0, 2.0]  # the server has undone round 3
    assert states.newest == 2


def test_sites_that_name_a_state_below_home_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = federation.data_of("ash")
    data.write_text(data.read_text().replace('"state"', '"~/shared"'))
    assert SiteData.load(data, federation.agreement).state == tmp_path / "home" / "shared"


@pytest.mark.parametrize(
    ("agreed", "more", "back"),
    [
        ({"evaluation": "none"}, {}, 1),
        ({}, {"evaluation": {"every": 3}}, 2),
        ({}, {"output": {"checkpoint_every": 4}}, 3),
    ],
)
def test_a_site_keeps_states_as_far_as_its_server_may_go_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, agreed: Any, more: Any, back: int
) -> None:
    federation = federate(tmp_path, tree("scaffold", rounds=9) | more, **agreed)
    grid, node = federation.grid(), federation.node("ash")
    shape = tuple(federation.agreement.shape)
    model = FlatModel(make_network(federation.config, 3, build(federation.config.method), 10, shape))
    broadcast = {"scaffold.server": torch.zeros(len(model.vector))}

    def train(round: int, counted: int) -> None:
        content = training(model, broadcast, round=round, counted=counted)
        (answer,) = grid.send_and_receive([Message(content, node, "train")])
        assert answer.has_content()

    for round in range(1, 6):
        train(round, round - 1)
    train(6, 4 - back)
    assert "begins without a state" not in caplog.text


def test_a_site_that_lost_what_it_kept_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = SiteStates(tmp_path, "0a")
    states.keep(3, {"kept": torch.ones(2)})
    (tmp_path / "0a" / "3.safetensors").write_bytes(b"half a file")
    assert states.load(3) == {}
    assert "begins without a state" in caplog.text
    with largest_file(1000), pytest.raises(RunError, match=r"/0a/4\.safetensors: can't be written: "):
        states.keep(4, {"kept": torch.ones(1000)})


@pytest.mark.parametrize("hook", ["init_server", "broadcast", "init_client"])
def test_what_hooks_return_is_checked_as_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    federation = federate(tmp_path, tree("scaffold"))
    path, agreement = federation.data_of("ash"), federation.agreement
    data, terms = SiteData.load(path, agreement), Terms.read(path.with_name("agreed.toml"))
    worker = agreed_site(federation.config, agreement, data, terms, path).worker
    content = training(worker.model, {"scaffold.server": torch.zeros(len(worker.model.vector))})
    monkeypatch.setattr(Scaffold, hook, lambda *_: None)
    said = rf"local_step scaffold: {hook}\(\) must return tensors by name, not None"
    with pytest.raises(ComponentError, match=said):
        federation.run(federation.grid())
    if hook == "init_client":
        with pytest.raises(ComponentError, match=f"round 1: {said}"):
            worker.train(content, TrainInstruction("0a", 1, 0, 1, 0), None)


def test_a_sites_data_gets_the_federations_class_ids_and_normalisation(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    site = SiteData.load(federation.data_of("cedar"), federation.agreement)
    raw = dict(np.load(tmp_path / "cedar" / "own.npz"))
    assert site.targets.tolist() == raw["y"].tolist()  # its own reader would call class 6 number 0
    assert site.counts[:6].sum() == 0
    mean, std = np.array(federation.agreement.mean), np.array(federation.agreement.std)
    whole = raw["x"].reshape(site.inputs.shape)  # type: ignore[union-attr]
    shape = (1, -1, *(1,) * (whole.ndim - 2))
    expected = (whole - mean.reshape(shape)) / std.reshape(shape)
    np.testing.assert_allclose(np.asarray(site.inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("agreed", "message"),
    [
        (
            {"classes": ["0", "1", "2", "3", "4", "5", "6", "7", "8", "nine"]},
            "class '9' is not one of the federation's",
        ),
        ({"shape": [32], "mean": [], "std": []}, r"the federation's are \(32,\)"),
        ({"tokens": True, "mean": [], "std": []}, "the federation's are token ids"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, agreed: dict[str, object], message: str
) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    other = federation.agreement.model_copy(update=agreed)
    with pytest.raises(DataError, match=message):
        SiteData.load(federation.data_of("cedar"), other)


def test_a_wrong_data_file_is_one_line(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    path = federation.data_of("ash")
    path.write_text('[dat]\nname = "npz"\n')
    with pytest.raises(ConfigError, match=r"data\.toml: dat: no such key \(did you mean 'data'\?\)"):
        SiteData.load(path, federation.agreement)
    path.write_text('[data]\nname = "npzz"\n')
    with pytest.raises(ConfigError, match=r"/data\.toml: data\.name: .*npzz"):
        SiteData.load(path, federation.agreement)


def test_what_leaves_a_site_is_said_in_full(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("scaffold"))
    words = [thing.what for thing in Disclosure.all_of(federation.config, federation.agreement)]
    assert any("number of its training samples of each of 10 classes" in what for what in words)
    assert any("scaffold.change" in what for what in words)
    assert any("confusion matrix" in what for what in words)
    withheld = federation.agreement.model_copy(update={"label_counts": "withheld"})
    words = [thing.what for thing in Disclosure.all_of(federation.config, withheld)]
    assert words[0] == "the number of its training samples"
    assert not any("confusion" in what for what in words)


def test_pictures_of_a_site_are_black_and_white_where_the_federation_says_or_the_site(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for label in "ab":
            values = np.linspace(0, 2000, 48).astype(np.uint16).reshape(6, 8)
            save_image(tmp_path / "scans" / part / label / "0.png", values)
    shape = {"sites": ["a", "b"], "classes": ["a", "b"], "shape": [1, 6, 8]}

    def read(window: str = "", agreed: list[int] | None = None) -> float:
        table = f'unlabelled = "scans"\n[data]\nname = "folder"\nroot = "scans"\n{window}'
        (tmp_path / "data.toml").write_text(table)
        made = SiteData.load(tmp_path / "data.toml", Agreement.resolve(shape | {"window": agreed or []}))
        assert made.unlabelled is not None
        brightest = float(made.unlabelled().max())  # type: ignore[union-attr]
        assert float(made.inputs.max()) == pytest.approx(brightest)  # type: ignore[union-attr]
        return brightest

    # alone its own reader would take 11 bits, and 2047 for white
    assert read(agreed=[4095]) == pytest.approx(2000 / 4095)
    assert read(agreed=[0, 8000]) == pytest.approx(0.25)
    assert read("window = [0, 4000]", [0, 8000]) == pytest.approx(0.5)
    assert read("window = [0, 4000]") == pytest.approx(0.5)
    with pytest.raises(DataError, match=r"pictures have more than 8 bits, and the federation's have 8: set window"):
        read()
    with pytest.raises(DataError, match="has values from 0 to 2000, and black is 0 and white 1023"):
        read(agreed=[1023])


def test_texts_have_the_federations_words_at_every_site(tmp_path: Path) -> None:
    def lay(site: str, *texts: str) -> Path:
        for part in ("train", "test"):
            for label, text in zip("ab", texts, strict=True):
                (tmp_path / site / "texts" / part / label).mkdir(parents=True)
                (tmp_path / site / "texts" / part / label / "0.txt").write_text(text)
        (tmp_path / site / "data.toml").write_text('unlabelled = "texts"\n[data]\nname = "folder"\nroot = "texts"\n')
        return tmp_path / site / "data.toml"

    north, south = lay("north", "fine day", "wet day"), lay("south", "wet wet wet", "a fine dog")
    words = {"kind": "text", "words": ["day", "fine", "wet"], "length": 3, "column": "text"}
    about = {"sites": ["north", "south"], "classes": ["a", "b"], "shape": [3], "tokens": True}
    agreed = Agreement.resolve({**about, "encoder": words})
    # alone the south would call "wet" number 2
    read = [SiteData.load(place, agreed).inputs.tolist() for place in (north, south)]  # type: ignore[union-attr]
    assert read == [[[3, 2, 0], [4, 2, 0]], [[4, 4, 4], [1, 3, 1]]]
    site = SiteData.load(south, agreed)
    assert site.unlabelled is not None
    assert sorted(site.unlabelled().tolist()) == sorted([*read[1], *read[1]])  # type: ignore[union-attr]
    assert Agreement.resolve(agreed.tree()) == agreed
    with pytest.raises(
        DataError, match=r"deploy.toml has no words \(encoder\), so that a word would have another number"
    ):
        SiteData.load(south, Agreement.resolve(about))
    with pytest.raises(ConfigError, match="encoder.kind: there is none 'words'"):
        Agreement.resolve({**about, "encoder": {"kind": "words"}})


# What goes wrong at a site stays there: file names, keys and values of its data reach its own log only.


SECRET = "patient-17.png"


def raising(error: BaseException) -> Callable[[Context], Never]:
    def read(context: Context) -> Never:
        raise error

    return read


NAMED_AFTER_DATA = type(SECRET, (OSError,), {})


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError(SECRET), "KeyError in its own log"),
        (ValueError(f"/data/{SECRET}: 3.5"), "ValueError in its own log"),
        (NAMED_AFTER_DATA(SECRET), "OSError in its own log"),
        (MemoryError(SECRET), "MemoryError in its own log"),
        (SystemExit(SECRET), "SystemExit in its own log"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_readers_exception_leaves_as_its_type(error: BaseException, reason: str, kind: str, caplog: Any) -> None:
    assert asked(client_app(nn.Linear(2, 2), raising(error)), kind).error.reason == reason
    assert SECRET in caplog.text
    assert "Traceback" not in caplog.text


class Model(nn.Module):
    """A model whose forward pass fails with a value of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError(f"{SECRET}: {inputs[0]}")


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_models_exception_leaves_as_its_type(kind: str, tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))

    def data(context: Context) -> SiteData:
        return SiteData.load(federation.data_of("ash"), federation.agreement)

    answer = asked(client_app(Model, data), kind, ArrayRecord(Model().state_dict()))
    assert "in its own log" in answer.error.reason
    assert SECRET not in answer.error.reason
    assert SECRET in caplog.text


def test_a_damaged_data_file_stays_at_home(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    np.savez(tmp_path / "ash" / "own.npz", y=np.zeros(3))
    reason = federation.ask("query", {"config": ConfigRecord({"server-round": 1})}).error.reason
    assert str(tmp_path) not in reason
    assert "own.npz" not in reason
    assert "own.npz" in caplog.text


def asked(app: Any, kind: str, arrays: ArrayRecord | None = None) -> Message:
    """A ClientApp's answer, in a context like Flower's."""
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    if arrays is not None:
        content["arrays"] = arrays
    return app(Message(content, 5, kind), Context(1, 5, {}, RecordDict(), {}))
