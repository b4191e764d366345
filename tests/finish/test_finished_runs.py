"""A finish in a run: the model as it was trained stays, the finished one stands beside it, in every table."""

import json
import re
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn
from typer.testing import CliRunner

import fedskew
from common import TO_FINISH, alike
from covering import Cell
from fedskew.cli import app
from fedskew.data import Dataset, load
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import make_training_loop, resolve
from fedskew.files import load_tensors
from fedskew.finish import Finish, Finished, Head
from fedskew.report import SeedRun

DIGITS = load("digits")
TASK = TO_FINISH | {"evaluation": {"every": 2}}
QUICK = {"name": "ccvr", "samples": 20, "ridge": 1.0}
"""CCVR whose minimum is found in a few steps."""


def run(folder=None, **tables):
    return fedskew.simulate({**TASK, **tables}, out=folder, progress=False)


def tensors(folder):
    """As it was trained, and as it was finished."""
    return [load_tensors(folder / name)[0] for name in ("model.safetensors", "finished.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("finish", ["ccvr", {"name": "ccvr", "samples": 50, "target": True}, "adapt"])
def test_only_the_last_layer_of_a_copy_changes(finish, tmp_path):
    plain = run(tmp_path / "plain")
    done = run(tmp_path / "done", method={"preset": "fedavg", "finish": finish})
    assert (done.folder / "model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()
    assert not (plain.folder / "finished.safetensors").exists()
    assert plain.finished is None
    before, after = tensors(done.folder)
    assert before.keys() - alike(before, after) == {"head.weight", "head.bias"}

    said = done.summary["finished"]
    assert said["name"] == (finish if isinstance(finish, str) else finish["name"])
    model = fedskew.load(done.folder, finished=True)
    right = model.predict(DIGITS.test_inputs).argmax(1) == DIGITS.test_targets.numpy()
    assert said["evaluation"]["accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    assert done.headline("finished")["accuracy"].mean == said["evaluation"]["accuracy"]
    before, after = SeedRun.with_finished(done.runs)  # what tables show of it: the same round's model twice
    assert before.headline == plain.summary["final"]
    assert after.headline["accuracy"] == said["evaluation"]["accuracy"]
    last_ten = [run.summarised("last 10") for run in done.runs]
    assert [run.headline for run in SeedRun.with_finished(last_ten)] == [before.headline, after.headline]
    assert SeedRun.with_finished(plain.runs) == list(plain.runs)
    assert done.summary["final"] == plain.summary["final"]
    with torch.no_grad():
        given = done.finished.eval()(DIGITS.test_inputs).softmax(1)
    np.testing.assert_allclose(given.numpy(), model.predict(DIGITS.test_inputs), atol=1e-6)
    assert json.loads((done.folder / "summary.json").read_text()) == done.summary


@pytest.mark.slow
def test_a_finish_has_its_bytes_and_clients_in_the_record():
    done = run(method={"preset": "fedavg", "finish": QUICK})
    said = done.summary["finished"]
    clients, model = 5, 4 * (65 * 12 + 13 * 12 + 13 * 10)  # who trains; floats from 64 inputs to 12, 12 and 10
    answer = 8 * 10 * (1 + 12 + 12**2)  # of each class the number of samples, their sums and products
    assert (said["clients"], said["bytes_up"], said["bytes_down"]) == (clients, clients * answer, clients * model)
    before, after = SeedRun.with_finished(done.runs)
    for key in ("bytes_up", "bytes_down", "seconds"):
        assert before.summary[key] == done.summary[key]
        assert after.summary[key] == pytest.approx(done.summary[key] + said[key])
        assert sum(getattr(record, key) for record in after.rounds) == pytest.approx(after.summary[key])


@pytest.mark.slow
def test_adapt_in_a_run_estimates_the_targets_mix_and_gains_there():
    done = run(method="adapt", model={"name": "mlp3", "width": 100}, training=TASK["training"] | {"rounds": 20})
    notes, truth = done.summary["finished"]["notes"], done.runs[0].target
    assert np.abs(np.array(notes["mix"]) - truth).sum() < 0.35
    assert sum(notes["held_out"]) == pytest.approx(0.25 * 5 / 6 * len(DIGITS.targets), rel=0.1)
    assert done.headline("finished")["target mix"].mean > done.headline("final")["target mix"].mean


@pytest.mark.slow
@pytest.mark.parametrize("finish", [QUICK, "adapt"], ids=["ccvr", "adapt"])
def test_the_same_bits_in_processes_after_a_stop_and_read_again(finish, tmp_path, interrupt_after):
    tree = {**TASK, "method": {"preset": "scaffold", "finish": finish}}
    whole = fedskew.simulate(tree, out=tmp_path / "whole")
    bits = (whole.folder / "finished.safetensors").read_bytes()
    processes = fedskew.simulate(tree, out=tmp_path / "two", engine={"backend": "processes", "processes": 2})
    assert processes.summary["finished"]["evaluation"] == whole.summary["finished"]["evaluation"]
    interrupt_after(1, tree, tmp_path / "stopped")
    # Killed while it was finishing: the last round is there, and no summary.
    killed = shutil.copytree(whole.folder, tmp_path / "killed" / whole.folder.name)
    for name in ("summary.json", "finished.safetensors", "report.html"):
        (killed / name).unlink()
    resumed = [fedskew.simulate(tree, out=tmp_path / name, resume=True) for name in ("stopped", "killed")]
    for run_again in (processes, *resumed):
        assert (run_again.folder / "finished.safetensors").read_bytes() == bits
    read = fedskew.simulate(tree, out=tmp_path / "whole", resume=True)
    assert read.headline("finished") == whole.headline("finished")
    with torch.no_grad():
        assert torch.equal(read.finished(DIGITS.test_inputs[:5]), whole.finished(DIGITS.test_inputs[:5]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"preset": "fedconcat", "finish": QUICK}, "training": {"rounds": 2, "batch_size": 32}},
        {"method": "moon+adapt"},
        {"method": {"preset": "fedentopt+fedla+fedexp", "finish": QUICK}, "engine": {"backend": "cohort"}},
        {
            "method": {"preset": "fedpals", "finish": QUICK},
            "seeds": [0, 1],
            "engine": {"backend": "cohort", "seeds_together": True},
        },
    ],
    ids=["pipeline", "another network", "cohort", "seeds together"],
)
def test_it_goes_with_other_methods_and_backends(changes):
    done = run(**{"evaluation": {"every": 1}, **changes})
    assert 0 < done.headline("finished")["accuracy"].mean < 1
    assert done.finished is not None


# ---- refused before the first round


class Scaled(nn.Module):
    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.last = nn.Linear(64, num_classes)

    def forward(self, x):
        return 2 * self.last(x.flatten(1))


class NoBias(nn.Sequential):
    def __init__(self, num_classes, in_shape):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes, bias=False))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "ccvr", "model": Scaled}, "the logits of Scaled are not the output of a linear layer; end"),
        ({"method": "ccvr", "model": NoBias}, "the last layer of NoBias has no bias; end the network"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line_before_the_first_round(changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        fedskew.simulate({**TASK, **changes}, progress=False)
    assert "\n" not in str(caught.value)


# ---- a finish of one's own


@dataclass(frozen=True)
class Own(Finish):
    """Half of every bias, or something else."""

    does: str = "half"

    def statistics(self, question, observed):
        if self.does == "raises":
            raise KeyError("oh")
        if self.does == "numbers":
            return {"samples": 3}
        samples = torch.tensor(float(len(observed.targets)))
        return {"features": observed.features} if self.does == "ragged" else {"samples": samples}

    def finish(self, head, ask, known):
        made = {
            "half": Head(head.weight, head.bias / 2),
            "narrow": Head(head.weight[:, :1], head.bias),
            "opposite": Head(-head.weight, -head.bias),
        }
        samples = ask("training")["samples"]
        return Finished(made.get(self.does, head), {"samples": samples if self.does == "notes" else float(samples)})


def test_one_of_the_users_own(tmp_path):
    done = run(tmp_path, method={"preset": "fedavg", "finish": Own()})
    assert done.summary["finished"]["notes"] == {"samples": float(done.runs[0].counts.sum())}
    before, after = tensors(done.folder)
    torch.testing.assert_close(after["head.bias"], before["head.bias"] / 2)
    assert torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("narrow", r"Own: finish\(\) must return a layer of the shapes \(10, 12\), \(10,\), not \(10, 1\), \(10,\)"),
        ("notes", r"Own: finish\(\): its notes are plain values for the summary, which \{'samples': tensor.* are not"),
        ("ragged", r"Own: statistics\(\) must return the same names and shapes at every client"),
        ("numbers", r"Own: statistics\(\) must return tensors by name, not \{'samples': 3\}"),
        ("raises", r"Own: statistics\(\) failed: KeyError: 'oh'"),
    ],
)
def test_a_mistake_of_ones_own_is_one_line(does, says):
    failed = run(method={"finish": Own(does)}).summary["finished"]["failed"]
    assert re.search(says, failed)
    assert "\n" not in failed


def test_a_finish_that_fails_after_the_last_round_loses_nothing_of_what_was_trained(tmp_path):
    config = resolve({**TASK, "method": {"finish": Own("raises")}})
    done = fedskew.simulate(config, out=tmp_path, progress=False)
    assert done.summary["finished"]["name"]
    assert done.summary["final"]["accuracy"] > 0
    assert json.loads((done.folder / "summary.json").read_text()) == done.summary
    (row,) = SeedRun.with_finished(done.runs)
    assert row.label == "digits, as trained"
    assert not done.headline("finished")
    assert done.finished is None
    assert "was not done" in (done.folder / "report.html").read_text(encoding="utf-8")
    with pytest.raises(RunError, match=r"as its finish failed: .*statistics\(\) failed: KeyError: 'oh'"):
        fedskew.load(done.folder, finished=True)
    assert fedskew.load(done.folder).classes == DIGITS.classes
    again = fedskew.simulate(config, out=tmp_path, resume=True, progress=False)
    assert again.summary == done.summary


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, "uniform"])
def test_a_finish_that_made_the_model_worse_is_said(target, tmp_path):
    partition = {"rule": "iid", "clients": 6} if target is None else TASK["partition"]
    training = TASK["training"] | {"lr": 0.5}
    tables = {"partition": partition, "training": training, "method": {"finish": Own("opposite")}}
    done = run(tmp_path, **tables, **({} if target is None else {"target": {"mix": target}}))
    (one,) = done.runs
    which = "accuracy" if target is None else "target accuracy"
    said = rf"Own made the model worse: {which} 0\.\d+, and 0\.\d+ before\. Use the model as it was trained"
    assert re.search(said, one.finish_note)
    assert "made the model worse" in (done.folder / "report.html").read_text(encoding="utf-8")
    (better,) = run(tmp_path / "2", partition=partition, training=training, method={"finish": "ccvr"}).runs
    assert better.finish_note is None


@pytest.mark.slow
def test_the_command_says_in_one_line_that_a_finish_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "never_finished.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedskew.finish import Finish\n\n"
        "@dataclass(frozen=True)\nclass Never(Finish):\n"
        "    def statistics(self, question, observed):\n        return {}\n\n"
        "    def finish(self, head, ask, known):\n        raise ValueError('no')\n"
    )
    tree = TASK | {"training": TASK["training"] | {"rounds": 1}, "method": {"finish": {"name": "never_finished:Never"}}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(tree))
    done = CliRunner().invoke(app, ["run", "mine.toml"])
    assert done.exit_code == 0, done.output
    assert ":Never was not done: finish never_finished:Never: finish() failed: ValueError: no" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(
    ("classes", "mix", "says"),
    [
        ([5, 300], "uniform", "adapt compares classes, and all samples that are held out are of class 1; set a larger"),
        ([5, 300, 300], [1.0, 0.0, 0.0], "adapt moves the model to target.mix, which has no share of a class that is"),
    ],
)
def test_held_out_samples_that_a_finish_can_make_nothing_of_are_refused_before_the_first_round(classes, mix, says):
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(classes))
    samples = torch.zeros(len(labels), 4)
    data = Dataset("few", samples, labels, samples, labels, classes=tuple("abc"[: len(classes)]))
    tables = {"partition": {"rule": "iid", "clients": 3}, "model": {"name": "mlp3", "width": 4}, "method": "adapt"}
    tree = {**TASK, **tables, "target": {"mix": mix}, "data": {"name": data, "validation": 0.1}}
    with pytest.raises(ConfigError, match=says):
        fedskew.simulate(tree, progress=False)


def test_a_product_cell_with_a_finish_resumes_bit_for_bit(tmp_path):
    cell = Cell(loss="fedlc", weighting="fedla", finish="ccvr")
    config = resolve({**TASK, "method": cell.tables()})
    assert make_training_loop(config, 0, tmp_path).run().summary["finished"]["name"] == "ccvr"
