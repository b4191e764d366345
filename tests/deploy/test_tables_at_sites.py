"""Tables at real sites: read by the agreement's schema, standardised as if pooled, refused by name before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from federated import FOUR, NAMES, Federated, LocalGrid, agreed_on, federate, fedskew, init, silent_on, tree
from flwr.app import Array, ConfigRecord
from sklearn.preprocessing import StandardScaler
from test_masked import silent_at

from fedskew import load
from fedskew.data import Profile, TableSchema
from fedskew.deploy import Agreement, Disclosure, _moments, agree
from fedskew.errors import ArgumentError, ConfigError, DataError, EndedEarlyError
from fedskew.experiment import ModelInfo, resolve

pytestmark = pytest.mark.filterwarnings("ignore:.*taken as another one")

SCHEMA: dict[str, Any] = {
    "columns": {
        "age": {"kind": "number", "range": [0, 200], "missing": True},
        "sex": {"kind": "category", "categories": ["f", "m"]},
        "lab": {"kind": "number", "range": [-5, 5e4], "unit": "mmol/l"},
        "label": {"kind": "label", "categories": ["ill", "well"]},
        "site": {"kind": "client"},
    }
}
TABLE = TableSchema.of_plain({"kind": "table", **SCHEMA})
MASKED: dict[str, Any] = {"given": {"engine": {"updates": "masked"}}, "updates": "masked", "round_timeout": 0.5}


def rows_of(place: int, size: int = 60) -> list[dict[str, Any]]:
    rng = np.random.default_rng(place)
    labels = rng.random(size) < 0.3 + 0.2 * place
    ages, labs = rng.normal(50 + 9 * labels + 4 * place, 8), rng.normal(2e3 + 900 * labels, 500 + 100 * place)
    return [
        {"age": "" if rng.random() < 0.1 else f"{age:.2f}", "sex": "fmx"[rng.integers(3)], "lab": f"{lab:.3f}",
         "label": "well" if label else "ill"}
        for age, lab, label in zip(ages, labs, labels, strict=True)
    ]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], order: list[str], client: str = "") -> None:
    lines = [",".join([*order, *(["site"] if client else [])])]
    lines += [",".join([*(row[name] for name in order), *([client] if client else [])]) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def tables(
    folder: Path, names: tuple[str, ...] = NAMES, given: dict[str, Any] | None = None, **agreed: Any
) -> Federated:
    """Sites with tables whose columns stand in another order each; the last rows of each are its test part."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {**tree("fedavg", rounds=2, weight_limit=0.5, momentum=0.0), "model": {"name": "table", "width": 8}}
    config = resolve({**plain, **(given or {}), "data": {"name": "csv", "root": str(folder), "schema": SCHEMA}})
    for place, name in enumerate(names):
        (folder / name).mkdir()
        order = ["age", "sex", "lab", "label"]
        np.random.default_rng(place).shuffle(order)
        rows = rows_of(place)
        write(folder / name / "own.csv", rows[:45], order, name)
        write(folder / name / "test.csv", rows[45:], order)
        described = {"state": "state", "data": {"name": "csv", "root": "own.csv", "test": "test.csv"}}
        (folder / name / "data.toml").write_text(tomli_w.dumps(described))
    kind = {"classes": list(TABLE.classes), "shape": [len(TABLE.slots)], "encoder": TABLE.plain()}
    return agreed_on(folder, config, names, **{"start_timeout": 2.0, "round_timeout": 1.0, **kind, **agreed})


def pooled(names: tuple[str, ...]) -> torch.Tensor:
    """The training samples of all sites in their own units, NaN where missing."""
    rows = [row for place in range(len(names)) for row in rows_of(place)[:45]]
    return TABLE.encode(rows)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federated, LocalGrid]:
    return tables(tmp_path_factory.mktemp("played")).played()


def check_moments(names: tuple[str, ...], info: ModelInfo) -> None:
    expected = StandardScaler().fit(pooled(names)[:, :2])
    np.testing.assert_allclose(info.mean, [*expected.mean_, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(info.std, [*expected.scale_, 1, 1, 1, 1], rtol=1e-6)


def test_means_and_deviations_are_those_of_the_pooled_samples(played: tuple[Federated, LocalGrid]) -> None:
    federation, grid = played
    again = federation.grid()
    info = federation.run(again).info  # a server that is started again asks no more
    check_moments(NAMES, info)
    assert grid.kinds("ash").count("query.moments") == 1
    assert "query.moments" not in again.kinds("ash")
    federation.config.write(federation.run_folder / "config.toml")
    model = load(federation.run_folder)
    assert model.info == info
    assert model.schema == TABLE
    assert model.predict(federation.folder / "ash" / "test.csv").shape == (15, 2)


def test_so_they_are_where_updates_are_masked_and_over_all_sites_or_none(tmp_path: Path) -> None:
    federation = tables(tmp_path / "a", FOUR, **MASKED)
    grid = federation.grid({"birch": silent_at("query.moments", "moments")})
    loop = federation.run(grid)
    profile = ["query.profile", "query.unmask"]
    assert grid.kinds("ash") == ["query", "query.moments", "query.moments", "query.unmask", *profile]
    check_moments(FOUR, loop.info)
    assert len(loop.run(resume=True).rounds[-1].answered) == 4
    fewer = {"fedskew-members": list(FOUR[:3])}
    assert "not agreed: members" in federation.refusal(grid.last("query.moments"), "query.moments", **fewer)
    other = tables(tmp_path / "b", FOUR, **MASKED, idle_timeout=0.1, start_timeout=0.1)
    with pytest.raises(EndedEarlyError, match="means and deviations were not summed within"):
        other.run(other.grid(away=["cedar"]))


def test_a_site_trains_by_one_set_of_means(played: tuple[Federated, LocalGrid]) -> None:
    """A server that tells one site other means could single it out, and one that tells none would not standardise."""
    federation, grid = played
    train = grid.last("train")
    mean = list(train.content["config"]["fedskew-mean"])
    assert "moments" in federation.refusal(train, "train", **{"fedskew-mean": [mean[0] + 1, *mean[1:]]})
    assert "RunError" in federation.refusal(train, "train", **{"fedskew-mean": [1e9, *mean[1:]]})
    bare = {key: value for key, value in train.content["config"].items() if key not in ("fedskew-mean", "fedskew-std")}
    answer = federation.ask("train", {**train.content, "config": ConfigRecord(bare)})
    assert "not agreed: moments" in str(answer.error.reason)


MISTAKES = [
    ("age,sex,label\n30,f,ill\n", "no column 'lab', which the schema has"),
    ("age,sex,lab,bmi,label\n30,f,2,20,ill\n", "the schema has no column 'bmi'"),
    ("age,sex,lab,label\n30,f,high,ill\n", "line 2, column 'lab': 'high' is not a number"),
    ("age,sex,lab,label\n30,f,60000,ill\n", "line 2, column 'lab': 60000 is outside the schema's range"),
    ("age,sex,lab,label\n30,f,2,sick\n", "line 2, column 'label': 'sick' is none of the schema's classes"),
    ("age,sex,lab\n30,f,2\n", "no column 'label' of labels"),
]


@pytest.fixture(scope="module")
def at_site(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    return tables(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_site_s_file_that_does_not_fit_is_refused_before_it_agrees(
    text: str, message: str, at_site: Federated, tmp_path: Path
) -> None:
    place = tmp_path / "data.toml"
    place.write_text(at_site.data_of("ash").read_text())
    (tmp_path / "own.csv").write_text(text)
    (tmp_path / "test.csv").write_text("age,sex,lab,label\n30,f,2,ill\n")
    with pytest.raises(DataError) as raised:
        agree(place, at_site.app)
    assert message in str(raised.value)
    assert "own.csv" in str(raised.value)


def test_what_leaves_is_listed_and_a_site_has_no_schema_of_its_own(at_site: Federated, tmp_path: Path) -> None:
    listed = [str(one.what) for one in Disclosure.all_of(at_site.config, at_site.agreement)]
    assert any("of each of 2 columns of numbers how many there are, their sum" in what for what in listed)
    place = tmp_path / "data.toml"
    place.write_text("[data]\nname = 'csv'\nroot = 'own.csv'\nlabel = 'x'\n")
    with pytest.raises(ConfigError, match="data.schema: the agreement has it"):
        agree(place, at_site.app)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": {"kind": "tables"}}, "encoder: encoder.kind: there is none 'tables'"),
        ({"encoder": {"columns": {"a": {"kind": "x"}}}}, "encoder: columns.a.kind: input should be"),
        ({"shape": [3]}, "shape: is \\[3\\], and the schema in encoder makes samples of \\[6\\]"),
        ({"encoder": {"columns": {**SCHEMA["columns"], "lab": {"kind": "number"}}}}, "columns.lab: give a range"),
        ({"label_counts": "noisy", "epsilon": 1.0}, "mean: sums of numbers would tell"),
    ],
)
def test_an_agreement_whose_schema_can_t_be_used_is_refused(change: dict[str, Any], message: str) -> None:
    tree = {"sites": ["a"], "classes": ["ill", "well"], "shape": [6], "encoder": SCHEMA}
    assert Agreement.resolve(tree).sums_moments
    with pytest.raises(ConfigError, match=message):
        Agreement.resolve(tree | change)


def test_init_writes_the_schema_without_data_and_with_noise_means_of_the_ranges(tmp_path: Path) -> None:
    data = {"name": "csv", "root": str(tmp_path / "nowhere.csv"), "schema": SCHEMA}
    config = resolve({**tree("fedavg", rounds=1), "model": "table", "data": data}).tree()
    agreement, _ = init(tmp_path / "a", config, "--sites", "north,south")
    assert (agreement.table, agreement.mean, agreement.sums_moments) == (TABLE, [], True)
    assert 'name = "csv"' in (tmp_path / "a" / "sites" / "north" / "data.toml").read_text()
    noisy = ("--label-counts", "noisy", "--epsilon", "1")
    agreement, said = init(tmp_path / "b", config, "--sites", "north,south", *noisy)
    assert "are of the schema's ranges" in said
    assert (agreement.mean[:2], agreement.std[:2]) == ([100, 24997.5], [50, 12501.25])


def test_other_federations_have_no_such_question(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    answer = federation.ask("query.moments", {"config": ConfigRecord({"server-round": 0})})
    assert "not agreed: moments" in str(answer.error.reason)


@pytest.mark.parametrize("agreed", [{"input_profile": "summed"}, MASKED], ids=["plain", "masked"])
def test_what_inputs_look_like_is_that_of_pooled_samples_and_watch_reads_it(
    tmp_path: Path, agreed: dict[str, Any]
) -> None:
    names = FOUR if "updates" in agreed else NAMES
    federation = tables(tmp_path, names, **agreed)
    grid = federation.grid()
    info = federation.run(grid).info
    columns = Profile.columns(TABLE.restored(pooled(names)), TABLE)
    found, expected = profile_of(federation), Profile.of(columns, Profile.cells_of(TABLE, info.mean, info.std))
    assert (found.samples, found.counts, found.numbers) == (45 * len(names), expected.counts, ("age", "lab"))
    np.testing.assert_allclose(found.products, expected.products, atol=1e-3)
    assert grid.kinds().count("query.profile") == 1
    if names == FOUR:
        return
    federation.run(again := federation.grid()).run(resume=True)
    assert "query.profile" not in again.kinds()
    federation.config.write(federation.run_folder / "config.toml")
    rows = [row for place in range(len(names)) for row in rows_of(place)[45:]]
    for at, row in enumerate(rows):
        row["lab"] = f"{4500 - float(row['lab']):.3f}" if at % 2 else f"{2 * float(row['lab']):.3f}"
    write(tmp_path / "new.csv", rows, ["age", "sex", "lab"])
    code, said = fedskew("watch", federation.run_folder, tmp_path / "new.csv")
    assert code == 0, said
    assert "Not the samples of training: 1 column has changed" in said
    assert "It is not known" in said  # the label mix, as the server has no samples


def profile_of(federation: Federated) -> Profile:
    return Profile.of_plain(json.loads((federation.run_folder / "inputs.json").read_text()))


def refused(federation: Federated, grid: LocalGrid, **entries: Any) -> str:
    return federation.refusal(grid.last("query.profile"), "query.profile", **entries)


def test_a_site_tells_what_inputs_look_like_once_and_only_where_it_agreed(tmp_path: Path) -> None:
    federation = tables(tmp_path / "a", input_profile="summed")
    federation.run(grid := federation.grid())
    asked = grid.last("query.profile")
    mean, std = (list(asked.content["config"][key]) for key in ("fedskew-mean", "fedskew-std"))
    assert refused(federation, grid) == ""  # the same answer, to a server that was killed
    assert "moments" in refused(federation, grid, **{"fedskew-std": [2 * std[0], *std[1:]]})
    assert "moments" in refused(federation, grid, **{"fedskew-mean": [mean[0] + 1, *mean[1:]]})
    other = tables(tmp_path / "b")
    other.run(silent := other.grid())
    assert "query.profile" not in silent.kinds()
    assert "not agreed: input_profile" in other.refusal(asked, "query.profile")
    listed = [[one.what for one in Disclosure.all_of(each.config, each.agreement)] for each in (federation, other)]
    assert [any("each of ten cells of each number" in what for what in whats) for whats in listed] == [True, False]


LIES = {
    "samples": ([(10, 1), (21, 1), (22, 1)], "are of 46 samples, and 45 were told"),
    "columns": ([(0, 1)], "columns are of other samples than each other"),
    "less": ([(0, -9), (1, 9)], "columns are of other samples"),
    "pairs": ([(26, 99)], "numbers that go together are not those in the cells"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_site_s_inputs_look_like_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    changes, reason = LIES[lie]

    def change(question: Any, answer: Any) -> Any:
        if question.metadata.message_type == "query.profile":
            values = answer.content["sums"]["answer"].numpy().copy()
            for place, more in changes:
                values[place] += more * 2**16
            answer.content["sums"]["answer"] = Array(values)
        return answer

    federation = tables(tmp_path, input_profile="summed")
    federation.run(federation.grid({"birch": change}))
    assert reason in caplog.text
    assert "profiles of inputs are those of all sites but birch" in caplog.text
    assert profile_of(federation).samples == 90


@pytest.mark.slow
def test_a_masked_profile_is_of_all_sites_or_none_and_nothing_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_moments, "PATIENCE", 0.2)
    federation = tables(tmp_path, FOUR, **MASKED)
    lost = silent_on("query.unmask", purpose="profile")
    federation.run(federation.grid({"cedar": lost}))
    assert "profiles of inputs were not summed" in caplog.text
    assert not (federation.run_folder / "inputs.json").exists()
    federation.run(federation.grid())  # a server that is started again has it from the same sites
    assert (federation.run_folder / "inputs.json").exists()


def test_a_profile_goes_with_tables_and_without_noise(tmp_path: Path) -> None:
    tree_ = {"sites": ["a"], "classes": ["ill", "well"], "shape": [6], "encoder": SCHEMA, "mean": [0.0] * 6}
    noisy = {"label_counts": "noisy", "epsilon": 1.0, "std": [1.0] * 6}
    with pytest.raises(ConfigError, match="input_profile = 'summed' has no noise, which epsilon promises"):
        Agreement.resolve(tree_ | noisy | {"input_profile": "summed"})
    with pytest.raises(ConfigError, match="input_profile = 'summed' needs a table's schema"):
        Agreement.resolve({"sites": ["a"], "classes": ["x", "y"], "shape": [6], "input_profile": "summed"})
    assert not Agreement.resolve(tree_ | noisy).sums_profile
    with pytest.raises(ArgumentError, match="of less than none"):
        Profile.of_flat(np.array([-1.0, 1.0, 0.0]), {"sex": ("f", "m")}, 0.0)
