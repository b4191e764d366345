"""Samples of several labels, or none, at real sites: the run that was simulated, counts, lies, refusals by name."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from federated import FOUR, NAMES, Federated, check_models, federate, federate_files, fedskew, figures, init, on, tree
from flwr.app import Array, ConfigRecord
from test_summed_counts_at_sites import OF_FEW

import fedskew as package
from fedskew.data import load
from fedskew.deploy import Agreement, Disclosure, SiteData, agree
from fedskew.deploy._site_report import SiteReport
from fedskew.deploy.terms import CountsRequest
from fedskew.errors import CombinationError, ConfigError, DataError
from fedskew.experiment import make_training_loop, resolve
from fedskew.metrics import Tally, finding_figures
from fedskew.parameters import component
from fedskew.weighting import INDEX

FINDINGS = ("Edema", "Effusion", "Hernia")
LIMITED = {"rounds": 2, "weight_limit": 0.5}
MASKED = {"engine": {"updates": "masked"}, "updates": "masked", "round_timeout": 0.5}


def drawn(place: int, size: int) -> dict[str, Any]:
    """A site's samples: features that show three findings; the second site's have none at all."""
    rng = np.random.default_rng(place)
    y = rng.random((size, 3)) < np.array([0.4, 0.3, 0.1]) * (place != 1)
    return {"x": y @ (2 * np.eye(3, 5)) + rng.normal(size=(size, 5)), "y": y.astype(int)}


def chests(folder: Path, method: Any = "fedavg", names: tuple[str, ...] = NAMES, **agreed: Any) -> Federated:
    parts = [drawn(place, 40 + 10 * place) for place in range(len(names))]
    tests = [drawn(place + 10, 20) for place in range(len(names))]
    kind = {"classes": list(FINDINGS), "multi_label": True}
    given = {key: agreed.pop(key) for key in ("training", "engine") if key in agreed}
    config = {**tree(method, **{**LIMITED, **given.pop("training", {})}), **given}
    return federate_files(folder, config, names, parts, tests, {"classes": np.array(FINDINGS)}, **kind, **agreed)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedentopt+fedla", marks=pytest.mark.slow)])
def test_sites_train_what_was_simulated(tmp_path: Path, method: str) -> None:
    more = {} if method == "fedavg" else {"training": {**LIMITED, "participation": 0.67}}
    federation = chests(tmp_path, method, **more)
    simulated, deployed = federation.as_simulated()

    assert (deployed.counts.tolist(), deployed.samples.tolist()) == (simulated.counts.tolist(), [40, 50, 60])
    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        assert (there.cohort, there.answered, there.steps) == (here.cohort, here.answered, here.steps)
        np.testing.assert_allclose(there.weights, here.weights, rtol=1e-6)
        for name in ("accuracy", "loss", "balanced_accuracy", "macro_f1", "per_class"):
            assert getattr(there.evaluation, name) == pytest.approx(getattr(here.evaluation, name), rel=1e-4), name
        assert (there.evaluation.auroc, there.evaluation.measure("auto")) == (None, "balanced_accuracy")
    federation.config.write(federation.run_folder / "config.toml")
    model = package.load(federation.run_folder)
    assert model.info.multi_label
    assert not np.allclose(model.predict(drawn(0, 9)["x"]).sum(axis=1), 1)


@pytest.mark.slow
def test_so_they_do_where_updates_are_masked(tmp_path: Path) -> None:
    simulated, deployed = chests(tmp_path, "fedla", FOUR, **MASKED).as_simulated()
    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        np.testing.assert_allclose(there.weights, here.weights, rtol=1e-12)
        assert there.evaluation.balanced_accuracy == pytest.approx(here.evaluation.balanced_accuracy, abs=1e-9)
        assert there.evaluation.loss == pytest.approx(here.evaluation.loss, rel=1e-4)


def test_a_tally_of_sites_gives_the_figures_of_all_samples_together() -> None:
    rng = np.random.default_rng(2)
    tally, logits, bits = Tally(3, several=True), rng.normal(size=(90, 3)), rng.integers(0, 8, 90)
    total = sum(tally.count(logits[at : at + 30], bits[at : at + 30]) for at in (0, 30, 60))
    expected = finding_figures(logits, bits)
    for name in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert tally.figures(total)[name] == pytest.approx(expected[name])
    assert (tally.samples(total), tally.refuse(total)) == (90, None)
    # One sample that has the first of two labels, and is taken for the second: cells (have, taken) of each, then right.
    assert Tally(2, True).count([[-1.0, 1.0]], [1]).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0]


LIES = {
    "elm": ("query", {"label_counts": [4, 3, 2]}, "its label counts are [4, 3, 2]; expected 3 numbers, one per class"),
    "fir": ("query", {"label_counts": [4, 3, 90, 60]}, "it has 90 samples with one label, and 60 in all"),
    "ash": ("evaluate", {"confusion": [9] * 9}, "expected 13 whole numbers"),
    "birch": ("evaluate", {"confusion": [5] * 11 + [6, 0]}, "labels are of 20 to 21 samples"),
    "cedar": ("evaluate", {"confusion": [5] * 12 + [11]}, "11 samples are right in all labels, and one label"),
}


def test_a_site_s_numbers_that_can_not_be_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names, training = (*FOUR, "elm", "fir"), {"rounds": 1, "weight_limit": 0.6}
    federation = chests(tmp_path, names=names, training=training, start_timeout=0.1)
    _, after = federation.play({name: on(kind, figures(**said)) for name, (kind, said, _) in LIES.items()})
    for *_, reason in LIES.values():
        assert reason in caplog.text
    assert sorted(after["answered"]) == [0, 1, 2, 3]
    assert list(after["deployment"]["evaluations"]) == ["dogwood"]
    assert after["evaluation"]["accuracy"] is not None


@pytest.mark.slow
def test_a_masked_sum_that_no_sites_have_is_no_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = chests(tmp_path, "fedla", FOUR, training={"rounds": 1}, **MASKED)

    def lie(_: Any, answer: Any) -> None:
        sums = answer.content["sums"]
        sums["counts"] = Array(sums["counts"].numpy() + np.eye(13, dtype=np.int64)[0])

    records = federation.play({"birch": on("evaluate", lie)})
    assert [one["evaluation"] for one in records] == [None, None]
    assert "the sum of the sites' confusion matrices can't be one" in caplog.text


@pytest.mark.slow
def test_noisy_counts_have_noise_for_all_labels_and_the_number_of_samples(tmp_path: Path) -> None:
    federation = chests(tmp_path, training={"rounds": 1, "weight_limit": 0.6}, label_counts="noisy", epsilon=0.5)
    assert CountsRequest.of(federation.agreement).each == 4
    run = federation.run(federation.grid())
    (_, after) = run.run(resume=True).rounds
    assert len(after.answered) == 3
    stored = json.loads((federation.run_folder / "deployment.json").read_text())["sites"]
    told = np.array([[*one["counts"], one["samples"]] for one in stored.values()])
    exact = np.array([SiteData.load(federation.data_of(name), federation.agreement).reported for name in stored])
    assert (told != exact)[exact > 0].all()  # others may be cut at 0
    assert (told >= 0).all()
    assert np.abs(told - exact).max() < 40 * 4 / 0.5  # e^-40
    what = [one.what for one in Disclosure.all_of(federation.config, federation.agreement)]
    assert any("of each of 3 labels, and in all, with Laplace noise for epsilon 0.5" in one for one in what)


@component
class SamplesOfFew(INDEX["fedavg"]):
    """FedAvg that asks four sites, too."""

    least_clients: ClassVar[int] = 1


SAMPLES = {"preset": "fedavg", "weighting": {"name": "test_findings_at_sites:SamplesOfFew"}}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "epsilon"), [(OF_FEW, None), (SAMPLES, 1.0)])
def test_labels_and_samples_are_summed_for_weights_of_sites_and_of_classes(
    tmp_path: Path, method: Any, epsilon: float | None
) -> None:
    summed = {**MASKED, "engine": {"updates": "masked", "label_counts": "summed"}}
    agreed = {"label_counts": "summed", "evaluation": "none", "epsilon": epsilon}
    training = {"rounds": 1, "weight_limit": 0.5, "class_weights": "balanced"}
    federation = chests(tmp_path, method, FOUR, training=training, **summed, **agreed)
    (_, deployed) = federation.run(federation.grid()).run(resume=True).rounds
    assert len(deployed.answered) == 4
    if epsilon is None:
        make_training_loop(federation.config, 3, tmp_path / "simulated").run()
        check_models(tmp_path / "simulated", federation.run_folder)
    what = [one.when for one in Disclosure.all_of(federation.config, federation.agreement)]
    assert "once for class weights, and each time that the weighting asks" in what[0]
    uniform = federation.config.with_value("method.weighting", {"name": "uniform"})
    with pytest.raises(
        ConfigError, match=r"training\.class_weights: 'balanced' takes sums of label counts, and uniform"
    ):
        federation.agreement.model_copy(update={"epsilon": None}).check_config(uniform)


@pytest.mark.parametrize("training", [{"class_weights": "balanced"}, {"sampler": "balanced"}], ids=str)
def test_rare_labels_count_at_sites_as_in_a_simulation(tmp_path: Path, training: dict[str, Any]) -> None:
    federation = chests(tmp_path, training={"rounds": 1, "weight_limit": 0.6, **training})
    grid = federation.grid()
    federation.as_simulated(grid)
    if "class_weights" in training:
        y = np.concatenate([drawn(place, 40 + 10 * place)["y"] for place in range(3)])
        asked = grid.last("train")
        told = asked.content["config"]["fedskew-class-weights"]
        assert told == pytest.approx((len(y) - y.sum(axis=0)) / y.sum(axis=0))
        for other in (told[::-1], [0.0, 1.0, 1.0], [1.0]):
            assert federation.refusal(asked, "train", **{"fedskew-class-weights": other}) != ""
        message = federation.ask("train", {"config": ConfigRecord({
            key: value for key, value in asked.content["config"].items() if key != "fedskew-class-weights"
        }), "arrays": asked.content["arrays"]})  # fmt: skip
        assert "not agreed: class_weights" in str(message.error.reason)
        assert federation.again(asked, "train").has_content()
        withheld = federation.agreement.model_copy(update={"label_counts": "withheld"})
        with pytest.raises(ConfigError, match="which this federation withholds; give the weights as a list"):
            withheld.check_config(federation.config)
        federation.amend("ash", "own_models = false", "own_models = true")
        made = SiteReport.write(federation.data_of("ash"), federation.app)
        assert [row.row for row in made.rows] == ["alone", "common"]


def site(folder: Path, data: str, **arrays: Any) -> Path:
    folder.mkdir()
    if arrays:
        np.savez(folder / "own.npz", **arrays)
    (folder / "data.toml").write_text(f"[data]\n{data}\n")
    return folder / "data.toml"


def test_a_site_s_labels_are_found_by_name_and_what_is_not_said_is_no_label(tmp_path: Path) -> None:
    federation = chests(tmp_path / "federation")
    part, npz = drawn(0, 40), "name = 'npz'\nroot = 'own.npz'"
    names = np.array(FINDINGS)
    same = SiteData.load(federation.data_of("ash"), federation.agreement)
    x, y = part["x"], part["y"][:, ::-1]
    turned = site(tmp_path / "a", npz, x=x, y=y, classes=names[::-1], x_test=x, y_test=y)
    assert SiteData.load(turned, federation.agreement).targets.tolist() == same.targets.tolist()
    assert same.reported.tolist() == [*part["y"].sum(axis=0).tolist(), 40]
    two = site(tmp_path / "b", npz, x=part["x"], y=part["y"][:, :2], classes=names[:2])
    with pytest.raises(DataError, match="nothing is said of 'Hernia', which the federation has"):
        agree(two, federation.app)
    one = site(tmp_path / "c", npz, x=part["x"], y=part["y"][:, 0])
    with pytest.raises(DataError, match="samples are of one class each; the federation's are of several labels"):
        agree(one, federation.app)
    other = site(tmp_path / "d", npz, x=part["x"], y=part["y"], classes=np.array(["Edema", "Effusion", "Hernias"]))
    with pytest.raises(DataError, match="class 'Hernias' is not one of the federation's classes .did you mean"):
        agree(other, federation.app)


def test_several_labels_of_one_class_are_refused() -> None:
    with pytest.raises(ConfigError, match="multi_label: of 2 to 62 classes a sample has any, not 1"):
        Agreement.resolve({"sites": ["a"], "classes": ["one"], "shape": [5], "multi_label": True})


def test_what_is_for_one_class_is_refused_and_what_leaves_is_listed(tmp_path: Path) -> None:
    federation = chests(tmp_path)
    agreement = federation.agreement
    with pytest.raises(ConfigError, match=r"target\.mix: is for classes of which a sample has one"):
        agreement.check_config(federation.config.with_value("target.mix", "estimate"))
    agreement.check_config(federation.config.with_value("training.class_weights", [1.0, 2.0, 3.0]))
    with pytest.raises(CombinationError, match="is for samples of one class"):
        agreement.check_config(resolve({**tree("fedlc"), "data": {"name": "npz", "root": "x"}}))
    what = [one.what for one in Disclosure.all_of(federation.config, agreement)]
    assert "the number of its training samples of each of 3 labels, and in all" in what
    assert any("of each of 3 labels how many of its test samples have it and are taken to" in one for one in what)


@pytest.mark.slow
def test_a_site_reports_on_its_models(tmp_path: Path) -> None:
    federation = chests(
        tmp_path, {"preset": "fedavg", "personal": "finetune"}, training={"rounds": 1, "weight_limit": 0.6}
    )
    federation.play()
    made = SiteReport.write(federation.data_of("ash"), federation.app)
    assert [row.row for row in made.rows] == ["alone", "common", "personal"]
    (common,) = [row for row in made.rows if row.row == "common"]
    assert (common.samples, np.isnan(common.ece), 0 < common.auroc <= 1) == (20, True, True)
    page = made.page.read_text()
    assert "Common: accuracy" in page
    assert re.search(rf"{100 * common.auroc:.1f} \([0-9.]+ to [0-9.]+\)", page)  # by bootstrap over its 20 samples


@pytest.mark.slow
def test_sites_add_up_what_their_models_are_worth_but_no_calibration(tmp_path: Path) -> None:
    masked = {**MASKED, "round_timeout": 1.0, "site_figures": "summed"}
    federation = chests(tmp_path, training={"rounds": 1}, names=FOUR, **masked)
    federation.play()
    found = json.loads((federation.run_folder / "site-figures.json").read_text())
    made = [SiteReport.write(federation.data_of(name), federation.app).rows for name in found["sites"]]
    assert len(found["sites"]) == 4
    for model, known_of in found["models"].items():
        assert list(known_of) == ["accuracy", "balanced_accuracy", "macro_f1", "loss"]
        for name, known in known_of.items():
            values = [getattr(row, name) for rows in made for row in rows if row.row == model]
            assert known["mean"] == pytest.approx(np.mean(values), abs=2**-11)
    what = [one.what for one in Disclosure.all_of(federation.config, federation.agreement)]
    assert any(one.startswith("accuracy, balanced accuracy, macro f1, loss of the models") for one in what)


def test_init_writes_findings_and_how_a_site_reads_them(tmp_path: Path) -> None:
    lines = ["age,notes", *(f"{20 + at},{'|'.join(FINDINGS[: at % 4]) or 'no finding'}" for at in range(40))]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    notes = {"kind": "label", "categories": list(FINDINGS)}
    schema = {"columns": {"age": {"kind": "number", "range": [0, 200]}, "notes": notes}}
    data = {"name": "csv", "root": str(tmp_path / "all.csv"), "schema": schema, "separator": "|"}
    config = resolve({**tree("fedavg", rounds=1), "data": data}).tree()
    agreement, _ = init(tmp_path / "f", config, "--sites", "north,south")
    place = tmp_path / "f" / "sites" / "north"
    (place / "data.csv").write_text("\n".join(lines[:20]) + "\n")  # some have all three, some none
    assert (agreement.multi_label, agreement.classes) == (True, list(FINDINGS))
    code, said = fedskew("deploy", "site", "--check", place / "data.toml")
    assert code == 0, said
    assert f"{len(SiteData.load(place / 'data.toml', agreement).targets)} samples to train on" in " ".join(said.split())
    assert load("csv", tmp_path / "all.csv", rng=np.random.default_rng(0), schema=schema, separator="|").multi_label


SAYS_SEVERAL = [
    ({"label": ["Edema", "Hernia"]}, (), {"name": "csv", "root": "data.csv", "label": ["Edema", "Hernia"]}),
    ({"label": "Edema, Hernia"}, (), {"name": "csv", "root": "data.csv", "label": "Edema, Hernia"}),
    ({"label": "dx", "separator": "|"}, (), {"name": "csv", "root": "data.csv", "label": "dx", "separator": "|"}),
    ({"name": "npz"}, ("--multi-label",), {"name": "npz", "root": "samples.npz"}),
    (
        {"name": "huggingface", "label": ["Edema", "Hernia"], "inputs": "note", "length": 9},
        (),
        {"name": "huggingface", "root": "samples", "label": ["Edema", "Hernia"], "inputs": "note"},
    ),
    ({"label": "dx"}, (), None),
    ({"label": "Diagnosis, main"}, (), None),
]


@pytest.mark.parametrize(("data", "words", "described"), SAYS_SEVERAL)
def test_init_without_data_takes_several_labels_from_the_config_or_a_word(
    tmp_path: Path, data: dict[str, Any], words: tuple[str, ...], described: dict[str, Any] | None
) -> None:
    data = {"name": "csv", "root": "elsewhere.csv"} | data
    config = {**tree("fedavg", rounds=1), "data": data}
    kind = ("--classes", "Edema,Hernia", "--shape", "2", *words)
    agreement, _ = init(tmp_path / "f", config, "--sites", "a,b", *kind)
    assert agreement.multi_label == (described is not None)
    there = tomllib.loads((tmp_path / "f" / "sites" / "a" / "data.toml").read_text())["data"]
    assert there == (described or {"name": "csv", "root": "data.csv", "label": data["label"]})
    several = ("--config", tmp_path / "f.toml", "--sites", "a,b", "--multi-label")
    code, said = fedskew("deploy", "init", tmp_path / "g", *several)
    assert (code, "--multi-label: goes with --classes and --shape" in " ".join(said.split())) == (2, True)


def scored(folder: Path, names: tuple[str, ...] = NAMES, **more: Any) -> Federated:
    config = {**tree("fedavg", rounds=1, weight_limit=0.5), "evaluation": {"measure": "auroc"}}
    config |= {"engine": {"updates": more.get("updates", "plain")}}
    return federate(folder, config, names, evaluation="scores", round_timeout=0.5, **more)


@pytest.mark.slow
def test_a_federation_has_auroc_from_bins_plain_and_masked(tmp_path: Path) -> None:
    (plain, also) = (scored(tmp_path / kind, FOUR, updates=kind) for kind in ("plain", "masked"))
    simulated = make_training_loop(resolve({**plain.config.tree(), "engine": {}}), 3).run()
    run, masked = (one.run(one.grid()).run(resume=True) for one in (plain, also))
    for here, there, summed in zip(simulated.rounds, run.rounds, masked.rounds, strict=True):
        error = there.deployment["scores"]["auroc_error"]
        assert there.deployment["scores"]["bins"] == 64
        assert abs(there.evaluation.auroc - here.evaluation.auroc) <= error + 1e-4
        assert there.evaluation.ece == pytest.approx(here.evaluation.ece, abs=1e-3)
        assert summed.evaluation.auroc == pytest.approx(there.evaluation.auroc, abs=1e-3)
    assert (run.measure, "AUROC and PR-AUC are from 64 bins of scores" in run.notes[0]) == ("auroc", True)
    with pytest.raises(ConfigError, match="set evaluation = 'scores' in deploy.toml"):
        plain.agreement.model_copy(update={"evaluation": "confusion"}).check_config(plain.config)
    (what,) = [one.what for one in Disclosure.all_of(plain.config, plain.agreement) if "64 bins" in one.what]
    assert "how many are right by how sure the model is" in what


def test_scores_of_other_samples_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = scored(tmp_path)

    def lie(_: Any, answer: Any) -> None:
        told = list(answer.content["metrics"]["confusion"])
        answer.content["metrics"]["confusion"] = [*told[:100], told[100] + 1, *told[101:]]

    records = federation.play({"birch": on("evaluate", lie)})
    assert "its confusion matrix can't be: scores are of other samples than classes" in caplog.text
    assert list(records[1]["deployment"]["evaluations"]) == ["ash", "cedar"]
