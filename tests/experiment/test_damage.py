"""Run folders that are damaged, full, read-only or foreign: one line that says what, and no figure that is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fedskew
from common import largest_file, refused, task
from fedskew.errors import FedskewError, RunError
from fedskew.experiment import RunFolder

TASK = task(4, beta=0.5, rounds=4, batch_size=32, lr=0.1) | {"name": "small", "method": "scaffold"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, interrupt_after: Callable[..., Path]) -> Path:
    return interrupt_after(3, TASK, tmp_path_factory.mktemp("interrupted"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    return fedskew.simulate(TASK, out=out).folder


def lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "records are cut": (lambda run: lines(run / "rounds.jsonl", lambda all: all[:2]), "rounds.jsonl: has been cut"),
    "records are empty": (lambda run: (run / "rounds.jsonl").write_text(""), "rounds.jsonl: has been cut"),
    "records are gone": (lambda run: (run / "rounds.jsonl").unlink(), "rounds.jsonl: has been cut|is missing"),
    "records are junk": (lambda run: (run / "rounds.jsonl").write_bytes(b"\0junk\n" * 9999), "has been changed"),
    "a round is missing": (
        lambda run: lines(run / "rounds.jsonl", lambda all: [*all[:1], *all[2:], all[1]]),
        "rounds.jsonl: has been changed",
    ),
    "a figure is edited": (
        lambda run: lines(run / "rounds.jsonl", lambda all: [line.replace('"accuracy": 0.', '"accuracy": 1.') for line in all]),  # noqa: E501
        "rounds.jsonl: has been changed",
    ),
    "a bit of the state flips": (lambda run: flip(run / "checkpoint" / "state.safetensors"), "does not match its checksum"),  # noqa: E501
    "the checkpoint is gone": (lambda run: (run / "checkpoint" / "state.safetensors").unlink(), "checkpoint is miss"),
    "a client's state is gone": (
        lambda run: next((run / "checkpoint" / "clients").glob("2-*")).unlink(),
        r"clients/2-\d.safetensors: what client 2 keeps between rounds can't be read \(it is missing\)",
    ),
    "the summary is another's": (
        lambda run: (run / "summary.json").write_text('{"final": {"accuracy": 0.37}, "rounds": 4}'),
        "summary.json: ",
    ),
    "the summary is junk": (lambda run: (run / "summary.json").write_text("{"), "summary.json: can't be read .*put it back"),  # noqa: E501
}  # fmt: skip


OF_THE_STATE = ("a bit of the state flips", "the checkpoint is gone", "a client's state is gone")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["interrupted", "finished"])
def test_a_damaged_folder_is_not_gone_on_with_and_nothing_in_it_is_lost(tmp_path, request, kind, damage):
    folder = tmp_path / request.getfixturevalue(kind).name
    shutil.copytree(request.getfixturevalue(kind), folder)
    do, says = DAMAGES[damage]
    do(folder)
    before = contents(folder)
    if kind == "finished" and damage in OF_THE_STATE:  # which a run that is only read does not need
        assert fedskew.simulate(TASK, out=tmp_path, resume=True).rounds
        assert contents(folder) == before
        return
    with refused(RunError, match=says):
        fedskew.simulate(TASK, out=tmp_path, resume=True)
    assert contents(folder) == before


def test_a_flipped_bit_in_a_clients_state_is_found_when_that_client_trains(tmp_path, interrupted):
    folder = shutil.copytree(interrupted, tmp_path / interrupted.name)
    for path in (folder / "checkpoint" / "clients").iterdir():
        flip(path)
    with pytest.raises(RunError, match="keeps between rounds can't be read .its content does not match its checksum"):
        fedskew.simulate(TASK, out=tmp_path, resume=True)


def test_a_finished_run_is_only_read(tmp_path, finished):
    folder = shutil.copytree(finished, tmp_path / finished.name)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = fedskew.simulate(TASK, out=tmp_path, resume=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path != folder} == {
        path: time for path, time in before.items() if path != folder
    }
    assert again.summary == json.loads((folder / "summary.json").read_text())


def test_what_came_after_the_checkpoint_is_cut_off_and_played_again(tmp_path, interrupted, finished):
    folder = shutil.copytree(interrupted, tmp_path / interrupted.name)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"seed": 0, "round": 4, "junk')
    fedskew.simulate(TASK, out=tmp_path, resume=True)
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert len(RunFolder.read_runs(folder)[0].rounds) == 5


@pytest.mark.parametrize("damage", [name for name in DAMAGES if "client" not in name and "checkpoint" not in name])
def test_a_report_is_not_made_of_a_damaged_folder(tmp_path, finished, damage):
    folder = shutil.copytree(finished, tmp_path / finished.name)
    DAMAGES[damage][0](folder)
    if damage == "a bit of the state flips":
        assert RunFolder.read_runs(folder)[0].rounds  # a report needs no state
        return
    with refused(RunError):
        RunFolder.read_runs(folder)


@pytest.mark.parametrize("limit", [500, 3_000, 6_500, 12_000])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, finished, limit):
    with largest_file(limit), refused(RunError, match=r"small-.*: can't be written: "):
        fedskew.simulate(TASK, out=tmp_path)
    folder = fedskew.simulate(TASK, out=tmp_path, resume=True).folder
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize("out", ["/proc/runs", "/sys/runs", "/dev/null/runs"])
def test_a_place_that_cannot_be_written_is_one_line(out):
    with pytest.raises(RunError, match=f"{out}/small-.*: can't be written: "):
        fedskew.simulate(TASK, out=out)


@pytest.mark.parametrize("name", [":x", "x:", ".x:y", "..:y", "os.path:nothing", "this_raises:x", "this_is_odd:x", ":"])
def test_a_name_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "this_raises.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "this_is_odd.py").write_text("def broken(:\n")
    for tables in ({"model": {"name": name}}, {"data": {"name": name}}, {"method": {"weighting": name}}):
        with refused(
            FedskewError, match=r"(model|data|weighting).name: .* (can't be imported|names nothing|standard library)"
        ):
            fedskew.simulate(TASK, **tables)
