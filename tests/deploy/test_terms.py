"""A site refuses what goes beyond its `agreed.toml`, whatever the server sends, and says so in one line of its log."""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import Federated, arrays_of, federate, training, tree
from flwr.app import ConfigRecord, Message
from flwr.cli.build import build_fab_from_disk

from fedskew import __version__
from fedskew.deploy import Address, Agreement, Book, Look, Terms, agree, write_federation
from fedskew.deploy.app_files import app_hash, read_app, unzip_app
from fedskew.deploy.supernode import is_agreed
from fedskew.errors import ConfigError
from fedskew.experiment import make_network, resolve
from fedskew.hooks import Hooks, LocalEnd
from fedskew.methods import build
from fedskew.models import FlatModel
from fedskew.objectives import INDEX
from fedskew.parameters import component

CrossEntropy = INDEX["cross_entropy"]


def model(federation: Federated, value: float = 0.0) -> FlatModel:
    config = federation.config
    network = FlatModel(make_network(config, 3, build(config.method), 10, tuple(federation.agreement.shape)))
    network.vector.data[0] += value
    return network


def train(federation: Federated, round: int = 1, value: float | None = None, **instruction: Any) -> Message:
    content = training(model(federation, float(round) if value is None else value), round=round, **instruction)
    return federation.ask("train", content)


def evaluate(federation: Federated, round: int = 1, value: float | None = None) -> Message:
    entries = ConfigRecord({"server-round": round, "confusion": 1})
    arrays = arrays_of(model(federation, float(round) if value is None else value).state_dict())
    return federation.ask("evaluate", {"arrays": arrays, "config": entries})


def query(federation: Federated) -> Message:
    return federation.ask("query", {"config": ConfigRecord()})


def change_terms(federation: Federated, **changes: Any) -> None:
    """Edit a site's agreed.toml by hand."""
    path = federation.folder / "ash" / "agreed.toml"
    Terms.model_validate(Terms.read(path).model_dump(by_alias=True) | changes).write(path)


def refused(answer: Message, kind: str, caplog: Any, *words: str) -> None:
    assert answer.error.reason == f"not agreed: {kind}; its own log says more"
    said = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]
    assert len(said) == 1
    assert "\n" not in said[0]
    assert all(word in said[0] for word in words), said[0]


def test_what_was_agreed_is_done(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    for answer in (query(federation), train(federation), evaluate(federation)):
        assert answer.has_content()


def test_a_site_that_agreed_to_nothing_does_nothing(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    (tmp_path / "ash" / "agreed.toml").unlink()
    refused(query(federation), "nothing", caplog, "fedskew deploy site --check", "data.toml")
    assert train(federation).has_error()
    assert evaluate(federation).has_error()


def test_another_app_is_refused(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    (federation.app / "extra.py").write_text("import os\n")
    refused(train(federation), "app", caplog, "not the one that this site agreed to")


def test_another_version_of_fedskew_is_looked_at_before_it_sends_anything(tmp_path: Path, caplog: Any) -> None:
    federation, agreed = federate(tmp_path, tree("fedavg")), tmp_path / "ash" / "agreed.toml"
    written = agreed.read_text()
    agreed.write_text(written.replace(f'fedskew = "{__version__}"', 'fedskew = "0.0.9"'))
    refused(train(federation), "version", caplog, "agreed under fedskew 0.0.9", "fedskew deploy site --check")
    assert query(federation).has_error()
    assert evaluate(federation).has_error()
    assert not Look.at(tmp_path / "ash" / "data.toml", federation.app).is_agreed
    agreed.write_text(written)
    assert train(federation).has_content()


def test_less_noise_than_agreed_is_refused(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg"), label_counts="noisy", epsilon=0.5)
    federation.agreement.model_copy(update={"epsilon": 50.0}).write(federation.app / "deploy.toml")
    change_terms(federation, app=app_hash(read_app(federation.app)))  # and all of its other terms stay
    refused(query(federation), "epsilon", caplog, "a release with 50", "agreed to 0.5")


SINGLE = (1, *[0] * 9)
"""A quota of one sample of class 0: the reply would be its loss and gradient, and 0 steps if there is none."""
NOISY = {"label_counts": "noisy", "epsilon": 1.0}
"""Whether a class is there, and by bisection how many samples it has, would be told by the steps."""


@pytest.mark.parametrize(
    ("config", "agreed", "honest", "sent", "kind", "words"),
    [
        ({"epochs": 2}, {}, {"epochs": 2}, {"epochs": 2.5}, "epochs", "asks for 2.5 in round 1; this site agreed to 2"),
        ({"epochs": 2}, {}, {"epochs": 2}, {"epochs": 0.001}, "epochs", "in round 1"),  # the gradient of one batch
        ({"epochs": 2}, {}, {"epochs": 2}, {"epochs": 2, "steps": 1}, "steps", "in round 1"),
        ({"steps": 2}, {}, {"epochs": 2, "steps": 2}, {"epochs": 2}, "steps", "in round 1"),
        ({"steps": 2}, {}, {"epochs": 2, "steps": 2}, {"epochs": 2, "steps": 1}, "steps", "in round 1"),
        ({}, {}, {}, {"quota": SINGLE}, "quota", "samples of single classes in round 1"),
        ({}, NOISY, {}, {"quota": SINGLE}, "quota", ""),
    ],
)
def test_other_training_than_agreed_is_refused(
    tmp_path: Path, caplog: Any, config: Any, agreed: Any, honest: Any, sent: Any, kind: str, words: str
) -> None:
    federation = federate(tmp_path, tree("fedavg", **config), **agreed)
    assert train(federation, **honest).has_content()
    refused(train(federation, **sent), kind, caplog, words)


def test_quotas_are_taken_from_a_method_that_assigns_them(tmp_path: Path) -> None:
    assert train(federate(tmp_path, tree("seol_kim")), quota=(5,) * 4 + (0,) * 6).has_content()


def test_more_rounds_are_refused_whatever_the_runs_are_called(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3))
    for round, run in ((1, "0a"), (2, "0a"), (1, "0b")):
        assert train(federation, round, run=run).has_content()
    refused(train(federation, 2, run="0b"), "rounds", caplog, "agreed to 3 rounds")
    assert train(federation, 1).has_content()  # a server that was killed repeats a round, and gets the same answer
    caplog.clear()
    change_terms(federation, rounds=2)  # a smaller number, by hand
    refused(train(federation, 3), "rounds", caplog, "agreed to 2 rounds")


def test_the_same_round_with_another_model_counts(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    assert train(federation).has_content()
    assert train(federation, value=7.0).error.reason.startswith("not agreed: rounds")


@pytest.mark.slow
def test_evaluations_are_counted_too(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    for round in (0, 1, 2, 1):
        assert evaluate(federation, round).has_content()
    for again in range(10):  # a server that was killed evaluates round 1 once more, with other sites' updates in it
        assert evaluate(federation, 1, value=2.5 + again).has_content()
    refused(evaluate(federation, 1, value=99.0), "rounds", caplog, "13 models that it evaluated")


def test_an_evaluation_that_was_not_agreed_is_refused(tmp_path: Path, caplog: Any) -> None:
    refused(evaluate(federate(tmp_path, tree("fedavg"), evaluation="none")), "evaluation", caplog)


def test_a_stock_servers_questions_reveal_nothing(tmp_path: Path, caplog: Any) -> None:
    """Without fedskew's keys a message would be answered with the number of samples, even if counts are noisy."""
    federation = federate(tmp_path, tree("fedavg"), label_counts="noisy", epsilon=1.0)
    content = {"arrays": arrays_of(model(federation).state_dict()), "config": ConfigRecord({"server-round": 1})}
    refused(federation.ask("train", content), "message", caplog)
    caplog.clear()
    refused(federation.ask("evaluate", content), "evaluation", caplog)


@component
class Telling(CrossEntropy, Hooks):
    """An objective that returns more of a site's samples than of the two zeros by which a plan is made."""

    larger: bool = False

    def end_local(self, end: LocalEnd) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        many = end.steps > 1
        name, size = ("told.samples", 10**6 if many else 1) if self.larger or not many else ("told.more", 1)
        return {}, {name: torch.zeros(size)}


@pytest.mark.parametrize(
    ("larger", "kind", "words"), [(False, "returns", "returns told.more"), (True, "bytes", "the reply has 40")]
)
def test_more_than_the_site_was_told_would_leave_it_does_not(
    tmp_path: Path, caplog: Any, larger: bool, kind: str, words: str
) -> None:
    telling = {"preset": "fedavg", "objective": {"name": "test_terms:Telling", "larger": larger}}
    federation = federate(tmp_path, tree(telling))
    refused(train(federation), kind, caplog, words)


@pytest.mark.slow
def test_a_refusing_site_costs_its_update_only(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    change_terms(federation, rounds=1)
    records = federation.play()
    assert sorted(records[1]["answered"]) == [0, 1, 2]
    assert sorted(records[2]["answered"]) == [1, 2]
    assert records[2]["deployment"]["failed"] == {"ash": "not agreed: rounds; its own log says more"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("rounds", "round"), r"round: no such key \(did you mean 'rounds'\?\)"),
        (lambda text: text.replace("rounds = 3", "rounds = 0"), "rounds: input should be greater than or equal to 1"),
        (lambda text: text.replace('app = "', 'app = "x'), "app: "),
        (lambda text: "[", "not valid TOML"),
    ],
)
def test_a_damaged_agreed_toml_is_one_line(tmp_path: Path, edit: Callable[[str], str], message: str) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    path = tmp_path / "ash" / "agreed.toml"
    path.write_text(edit(path.read_text()))
    with pytest.raises(ConfigError, match=message):
        Terms.read(path)
    assert query(federation).error.reason == "ConfigError in its own log"


def test_a_damaged_count_of_rounds_refuses(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg"))
    assert train(federation).has_content()
    book = Book(tmp_path / "ash" / "state").path
    book.write_text("{}")
    assert train(federation).error.reason == "RunError in its own log"
    book.unlink()
    agree(federation.data_of("ash"), federation.app)
    assert train(federation).has_content()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An app folder, as Flower's build wants it."""
    agreement = Agreement.resolve({"sites": ["a"], "classes": ["x", "y"], "shape": [1, 8, 8]})
    config = resolve(tree("fedavg") | {"data": {"name": "digits"}})
    write_federation(tmp_path / "fed", config, agreement, Address("localhost", 9092), {"name": "folder"})
    return tmp_path / "fed" / "app"


built = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own build


@built
def test_the_app_that_flower_sends_has_the_hash_of_its_folder(app: Path) -> None:
    sent = unzip_app(build_fab_from_disk(app))
    assert app_hash(sent) == app_hash(read_app(app))
    (app / "federation" / "__pycache__").mkdir()
    (app / "federation" / "__pycache__" / "site.pyc").write_bytes(b"compiled")
    project = app / "pyproject.toml"
    project.write_text("# a comment\n" + project.read_text() + '\n[tool.flwr.federations]\ndefault = "x"\n')
    assert app_hash(read_app(app)) == app_hash(sent)


@built
@pytest.mark.parametrize(
    "name", ["federation/site.so", ".hidden/site.py", "federation/__pycache__/site.pyc", "torch.py"]
)
def test_whatever_python_could_run_is_in_the_hash(app: Path, name: str) -> None:
    packed = io.BytesIO(build_fab_from_disk(app))
    before = app_hash(unzip_app(packed.getvalue()))
    with zipfile.ZipFile(packed, "a") as more:
        more.writestr(name, b"code")
    assert app_hash(unzip_app(packed.getvalue())) != before


def zipped(files: Mapping[str, bytes | str], method: int = zipfile.ZIP_STORED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as file:
        for name, held in files.items():
            file.writestr(name, held)
    return packed.getvalue()


@pytest.mark.parametrize("name", ["../site.py", "/etc/passwd", "a\\..\\b", "C:/x"])
def test_an_app_stays_in_its_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="a file outside its folder"):
        unzip_app(zipped({name: b""}))


@built
def test_an_app_that_was_not_agreed_on_is_kept_to_be_looked_at_and_not_run(app: Path, caplog: Any) -> None:
    data = app.parent / "sites" / "a" / "data.toml"
    ours = build_fab_from_disk(app)
    assert not is_agreed(ours, data)
    assert "has agreed to nothing yet" in caplog.text
    assert caplog.text.count("fedskew deploy site --check") == 1
    assert app_hash(read_app(data.parent / "offered")) == app_hash(read_app(app))
    for damaged in (b"agreed = ", b"\xff", b"schema = 2\n"):
        caplog.clear()
        (data.parent / "agreed.toml").write_bytes(damaged)
        assert not is_agreed(ours, data)
        assert caplog.messages[0].endswith(f"move it away, and agree anew: fedskew deploy site --check {data}")
    terms = Terms(schema=1, agreed="now", app=app_hash(read_app(app)), fedskew=__version__, rounds=1, data="now")
    terms.write(data.parent / "agreed.toml")  # as `agree` does, without data
    assert is_agreed(ours, data)
    assert not (data.parent / "offered").exists()
    caplog.clear()
    (app / "federation" / "site.py").write_text("import os\n")
    assert not is_agreed(build_fab_from_disk(app), data)
    (said,) = [entry.message for entry in caplog.records]
    assert "the server sent another app than this site agreed to; it is not run" in said
    assert f"fedskew deploy site --check {data}" in said
    assert (data.parent / "offered" / "federation" / "site.py").read_text() == "import os\n"
    assert not is_agreed(b"no zip file", data)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_app_does_not_end_the_supernode(tmp_path: Path, caplog: Any, method: int) -> None:
    whole, begins = zipped({"a.py": "x = 1\n" * 1000}, method), 30 + len("a.py")
    damaged = whole[:begins] + bytes(byte ^ 0xFF for byte in whole[begins : begins + 8]) + whole[begins + 8 :]
    assert not is_agreed(damaged, tmp_path / "data.toml")
    assert "the server's app is no zip file that can be unpacked" in caplog.text


@pytest.mark.parametrize("project", ["tool = 1", "tool.flwr = 1", "a = " + "[" * 5000])
def test_an_app_with_an_odd_project_file_does_not_end_the_supernode(tmp_path: Path, caplog: Any, project: str) -> None:
    assert not is_agreed(zipped({"pyproject.toml": project}), tmp_path / "data.toml")
    assert "has agreed to nothing yet" in caplog.text


@pytest.mark.slow
def test_a_giant_app_is_not_unpacked() -> None:
    with pytest.raises(ConfigError, match="larger than"):
        unzip_app(zipped({f"{part}.py": bytes(2**24) for part in range(5)}, zipfile.ZIP_DEFLATED))
    with pytest.raises(ConfigError, match="no zip file"):
        unzip_app(b"PK")
