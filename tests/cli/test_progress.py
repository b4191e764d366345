"""Where output is no terminal, progress is a line now and then, with the time left."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

from rich.console import Console

import fedskew
from fedskew.arena import Trained
from fedskew.cli.progress import ArenaProgressBar
from fedskew.experiment import RunBar, resolve

CONFIG = resolve(
    {
        "name": "digits",
        "data": {"name": "digits"},
        "partition": {"rule": "quantity", "clients": 10, "labels_per_client": 5},
        "model": {"name": "logistic"},
        "training": {"rounds": 3},
        "evaluation": {"every": 2},
    }
)


def printed(every: float, configs=(CONFIG,)) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    with RunBar(console, configs, every=every) as bar:
        for config in configs:
            fedskew.simulate(config, progress=bar.start(config))
    return progress_in(console)


def at_times() -> tuple[Console, list[float]]:
    """A console that is no terminal, and the time that it is there."""
    clock = [0.0]
    return Console(file=io.StringIO(), width=60, get_time=lambda: clock[0]), clock


def progress_in(console: Console) -> list[str]:
    """The lines of progress, without what a run says of itself once."""
    return [line for line in console.file.getvalue().splitlines() if "rounds" in line]


def test_each_line_says_what_is_done_how_good_it_is_and_how_long_it_will_take():
    lines = printed(0.0, (CONFIG, CONFIG.with_method("fedla")))
    assert len(lines) == 5
    assert re.fullmatch(r"digits: 1 of 6 rounds  seed 0  accuracy 0\.\d{3}, \.\.\. left", lines[0])
    assert re.fullmatch(r"digits: 2 of 6 rounds  seed 0  accuracy 0\.\d{3}, about \d+ s left", lines[1])
    assert lines[-1].startswith("digits-fedla: 5 of 6 rounds  seed 0  accuracy ")


def test_a_short_run_prints_none():
    assert printed(30.0) == []


def test_what_the_first_round_waited_for_is_not_taken_for_the_pace_of_the_others():
    console, clock = at_times()
    bar = RunBar(console, [CONFIG.with_value("training.rounds", 100)], every=30.0)
    listen = bar.start(CONFIG.with_value("training.rounds", 100))
    for round, clock[0] in ((1, 31.0), (2, 31.5), (3, 62.0)):
        listen({"round": round, "seed": 0, "evaluation": None, "seconds": 0.5})
    assert progress_in(console) == [
        "digits: 1 of 100 rounds, ... left",
        "digits: 3 of 100 rounds, about 25 min left",
    ]


def test_records_of_a_resumed_run_which_come_at_once_do_not_shorten_the_time_left():
    console = Console(file=io.StringIO(), width=60)
    bar = RunBar(console, [CONFIG], every=0.0)
    listen = bar.start(CONFIG)
    for round in (1, 2):
        listen({"round": round, "seed": 0, "evaluation": None, "seconds": 600.0})
    assert progress_in(console) == [
        "digits: 1 of 3 rounds, ... left",
        "digits: 2 of 3 rounds, about 10 min left",
    ]


def test_runs_of_an_arena_that_end_together_share_the_time_that_they_took():
    console, clock = at_times()
    bar = ArenaProgressBar(console, every=60.0)
    bar.begin(0, 256)
    call = [
        (SimpleNamespace(name=f"job {number}"), Trained({seed: {} for seed in range(8)}, {})) for number in range(8)
    ]
    for clock[0] in (640.0, 1280.0):
        bar.ended(call)
    bar.stop()
    assert console.file.getvalue().splitlines() == [
        "64 of 256 runs, ... left",
        "128 of 256 runs, about 21 min left",
    ]
