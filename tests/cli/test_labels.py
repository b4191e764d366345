"""`fedskew describe` and `fedskew weights`, as their users call them."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from common import task
from fedskew.hooks import Hooks
from fedskew.labels import LabelCounts, describe
from fedskew.weighting import INDEX, Answered, fedla, fedpals_solve, fedpals_strength

COUNTS = """client,cat,dog,emu
Paris,30,10,0
Rome,0,40,5
Oslo [north],0,0,80
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "counts.csv").write_text(COUNTS)
    (tmp_path / "target.csv").write_text("class,share\nemu,10\ncat,10\ndog,20\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, command):
    """What a command prints."""
    return lambda *words: command(*words, COLUMNS="100").stdout


@pytest.mark.slow
def test_describe_prints_sentences_then_figures_and_draws_a_picture(here, run):
    page = run("describe", "counts.csv", "--target", "target.csv")
    assert page.index("The labels are strongly skewed") < page.index("earth mover's distance") < page.index("Classes")
    assert "Weighing clients can match the target exactly" in " ".join(page.split())
    for name in ("Paris", "Oslo [north]", "cat", "who-holds-what.html"):
        assert name in page
    assert (
        "Outlined: the labels of all clients together. Grey: the target mix."
        in (here / "who-holds-what.html").read_text()
    )


@pytest.mark.slow
def test_the_picture_goes_where_it_is_asked_to_or_nowhere(here, run):
    run("describe", "counts.csv", "--picture", "here.html")
    assert "3 clients, 165 samples, 3 classes" in (here / "here.html").read_text()
    assert "Classes that clients hold together" in (here / "here.html").read_text()
    run("describe", "counts.csv", "--no-picture")
    run("describe", "counts.csv", "--json")
    assert sorted(path.name for path in here.iterdir()) == ["counts.csv", "here.html", "target.csv"]


def test_a_target_that_nobody_can_serve_is_pointed_out(here, run):
    (here / "counts.csv").write_text("client,cat,dog,emu\nParis,30,10,0\nRome,0,40,0\n")
    for words in (("describe", "--no-picture"), ("weights", "--method", "fedpals")):
        page = " ".join(run(words[0], "counts.csv", "--target", "target.csv", *words[1:]).split())
        assert "No client holds class emu, 25% of the target" in page
        assert "expect at most 75.0% accuracy" in page


def test_describe_as_json_is_the_report(here, run):
    found = json.loads(run("describe", "counts.csv", "--target", "target.csv", "--json"))
    assert found == json.loads(json.dumps(describe(LabelCounts.read_csv("counts.csv"), [10, 20, 10]).to_dict()))
    assert found["by_client"]["Rome"]["minority"] == ["emu"]


def test_many_clients_and_classes_are_shortened_on_the_page_only(here, run):
    rng = np.random.default_rng(0)
    LabelCounts(rng.integers(0, 9, (300, 60)) * (rng.random((300, 60)) < 0.1)).to_csv("many.csv")
    page = run("describe", "many.csv", "--no-picture")
    assert len(page.splitlines()) < 90
    assert "the 12 most one-sided" in page
    assert "the 20 rarest" in page
    assert len(json.loads(run("describe", "many.csv", "--json"))["by_client"]) == 300
    assert "the 12 with most weight" in run("weights", "many.csv", "--method", "fedla")


def test_one_client_one_class_and_one_sample_are_not_called_several(here, run):
    (here / "one.csv").write_text("client,cat\nParis,1\n")
    (here / "lone.csv").write_text("client,cat,dog\nParis,3,1\nRome,0,0\n")
    for page in (
        run("describe", "one.csv"),
        (here / "who-holds-what.html").read_text(),
        run("weights", "one.csv", "--method", "fedavg"),
        run("describe", "lone.csv", "--no-picture"),
        run("weights", "counts.csv", "--method", "fedpals", "--target", "target.csv"),
    ):
        assert not re.search(r"(?<![\d.,])1 (clients|classes|samples|rounds|seeds)\b", page), page
    assert "1 client holds 1 sample of 1 class" in " ".join(run("describe", "one.csv", "--no-picture").split())


def test_weights_of_fedla_and_fedavg(here, run):
    counts = LabelCounts.read_csv("counts.csv")
    found = json.loads(run("weights", "counts.csv", "--method", "fedla", "--json"))
    assert list(found["weights"]) == ["Paris", "Rome", "Oslo [north]"]
    assert list(found["weights"].values()) == pytest.approx(fedla(counts).tolist())
    assert found["target"] is found["distance"] is found["strength"] is None
    plain = json.loads(run("weights", "counts.csv", "--method", "fedavg", "--target", "target.csv", "--json"))
    assert plain["ess_share"] == pytest.approx(1)
    assert plain["distance"] == pytest.approx(plain["fedavg_distance"])
    assert plain["mix"]["cat"] == pytest.approx(30 / 165)


def test_a_target_that_a_switch_leaves_unread_is_told(here, run):
    arguments = ("weights", "counts.csv", "--method", "feddisco", "--target", "target.csv")
    said = " ".join(run(*arguments).split())
    assert "feddisco doesn't read the target as it is set here; it does with --set target=true." in said
    assert "doesn't read" not in run(*arguments, "--set", "target=true")
    assert "doesn't read" not in run(*arguments[:4])


def test_a_config_s_target_that_a_switch_leaves_unread_is_told():
    from fedskew.experiment import resolve

    tree = task(3, rounds=1) | {"target": {"mix": "pooled"}, "method": {"weighting": {"name": "feddisco"}}}
    assert (resolve(tree).target_in_words() or "").endswith("does not use it (weighting.target = false)")
    tree["method"] = {"weighting": {"name": "feddisco", "target": True}}
    assert (resolve(tree).target_in_words() or "").endswith("of all clients together")


def test_the_decimal_sign_of_the_counts_need_not_be_the_targets(here, run):
    Path("german.csv").write_text("client;cat;dog;emu\nParis;1.230;10;0\nRome;0;4.100;5\n")
    Path("shares.csv").write_text("class,share\nemu,0.25\ncat,0.25\ndog,0.5\n")
    arguments = ("weights", "german.csv", "--decimal", ",", "--method", "fedpals", "--json", "--target")
    found = json.loads(run(*arguments, "shares.csv"))
    assert found["target"] == {"cat": 0.25, "dog": 0.5, "emu": 0.25}
    Path("german-shares.csv").write_text("class;share\nemu;0,25\ncat;0,25\ndog;0,5\n")
    assert json.loads(run(*arguments, "german-shares.csv")) == found


def test_weights_of_fedpals_reach_the_target_or_keep_the_share_asked_for(here, run):
    arguments = ("weights", "counts.csv", "--method", "fedpals", "--target", "target.csv", "--json")
    counts, target = LabelCounts.read_csv("counts.csv"), [10, 20, 10]
    fitted = json.loads(run(*arguments))
    assert (fitted["strength"], fitted["distance"]) == (0, pytest.approx(0, abs=1e-20))
    assert list(fitted["mix"].values()) == pytest.approx([0.25, 0.5, 0.25])
    kept = json.loads(run(*arguments, "--ess", "0.9"))
    assert kept["ess_share"] == pytest.approx(0.9)
    assert kept["strength"] == pytest.approx(fedpals_strength(counts, target, 0.9))
    strong = json.loads(run(*arguments, "--strength", "50"))
    assert list(strong["weights"].values()) == pytest.approx(fedpals_solve(counts, target, 50).weights.tolist())
    assert json.loads(run(*arguments, "--strength", "inf"))["strength"] == "inf"


@dataclass(frozen=True)
class Capped:
    """A weighting of a user's own: samples count up to a limit."""

    limit: float
    needs_target: ClassVar[bool] = False

    def weigh(self, answered: Answered) -> np.ndarray:
        capped = np.minimum(answered.sizes, self.limit)
        return capped / capped.sum()


def test_every_weighting_that_label_counts_suffice_for_is_taken(here, run):
    for name, kind in INDEX.items():
        if issubclass(kind, Hooks):
            continue
        found = json.loads(run("weights", "counts.csv", "--method", name, "--target", "target.csv", "--json"))
        assert sum(found["weights"].values()) == pytest.approx(1)
    uniform = json.loads(run("weights", "counts.csv", "--method", "uniform", "--json"))
    assert list(uniform["weights"].values()) == pytest.approx([1 / 3] * 3)


def test_a_weighting_of_ones_own_and_a_parameter_of_any(here, run):
    arguments = ("weights", "counts.csv", "--method", f"{__name__}:Capped", "--set", "limit=40", "--json")
    assert list(json.loads(run(*arguments))["weights"].values()) == pytest.approx([1 / 3] * 3)
    arguments = ("weights", "counts.csv", "--method", "fedpals", "--target", "target.csv", "--json")
    assert run(*arguments, "--set", "ess=0.9") == run(*arguments, "--ess", "0.9")


def test_weights_page_says_cost_and_result(here, run):
    page = run("weights", "counts.csv", "--method", "fedpals", "--target", "target.csv", "--ess", "0.9")
    words = " ".join(page.split())
    assert "Effective sample size 148.5 of 165 (90.0%)" in words
    assert "Squared distance of the resulting label mix from the target" in words
    assert "KKT residual" in words
    assert "Oslo [north]" in page


def test_a_share_of_effective_samples_that_no_strength_gives_is_said_to_be_out_of_reach(here, run):
    arguments = ("weights", "counts.csv", "--method", "fedpals", "--target", "target.csv")
    fitted = json.loads(run(*arguments, "--json"))["ess_share"]
    words = " ".join(run(*arguments, "--ess", "0.2").split())
    assert f"A share of 20.0% can't be reached: the best fit to the target, at strength 0, keeps {fitted:.1%}" in words
    assert "can't be reached" not in run(*arguments, "--ess", f"{fitted + 0.05}")
    assert json.loads(run(*arguments, "--ess", "0.2", "--json"))["ess_asked"] == 0.2


def test_weights_are_written_for_every_client(here, run):
    run("weights", "counts.csv", "--method", "fedla", "--csv", "w.csv")
    lines = (here / "w.csv").read_text().splitlines()
    assert (lines[0], lines[1].split(",")[1]) == ("client,samples,weight,fedavg", "40")
    assert [line.split(",")[0] for line in lines[1:]] == ["Paris", "Rome", "Oslo [north]"]
    assert sum(float(line.split(",")[2]) for line in lines[1:]) == pytest.approx(1)


def test_weights_of_a_class_that_overrides_weigh_alone(here, run, monkeypatch):
    (here / "own_even.py").write_text(
        "import numpy as np\nfrom dataclasses import dataclass\nfrom fedskew.weighting import FedPALS\n"
        "@dataclass(frozen=True)\nclass Even(FedPALS):\n"
        "    def weigh(self, answered):\n        return np.full(len(answered.sizes), 1 / len(answered.sizes))\n"
    )
    monkeypatch.syspath_prepend(here)
    said = json.loads(run("weights", "counts.csv", "--method", "own_even:Even", "--target", "target.csv", "--json"))
    assert set(said["weights"].values()) == {1 / 3}


@pytest.mark.slow
def test_what_only_looks_at_label_counts_does_not_import_pytorch(tmp_path):
    (tmp_path / "counts.csv").write_text("client,cat,dog\na,90,10\nb,5,60\n", encoding="utf-8")
    code = """
import sys
from fedskew.cli import main
for command in (["describe"], ["advise", "--network", "lenet5"], ["weights", "--method", "fedla"], ["counts"]):
    sys.argv = ["fedskew", command[0], "counts.csv", *command[1:]]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
    assert "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_raw_findings_are_counted_and_a_note_says_of_how_many_samples(command, tmp_path):
    (tmp_path / "chests.csv").write_text("client,Edema,Hernia\nA,1,1\nB,0,0\nB,0,1\n")
    done = command("counts", "chests.csv", "--label", "Edema,Hernia")
    assert done.stdout == "client,Edema,Hernia\nA,1,1\nB,0,1\n"
    assert "counts of labels, of 3 samples." in done.stderr
    assert "--label: is for tables" in command("counts", "@digits", "--label", "Edema", status=2).stderr
