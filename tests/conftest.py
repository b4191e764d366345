"""What several test folders share."""

import functools
import gc
import itertools
import os
import pickle
import sys
import tempfile
import tomllib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

gc.disable()  # what is imported stays until the end: to look through it for garbage takes a second of each process

typer.main.get_command = functools.cache(typer.main.get_command)  # else made anew for each command, in 0.1 s
_parsed = functools.lru_cache(256)(lambda text, **options: pickle.dumps(_loads(text, **options)))
_loads = tomllib.loads
tomllib.loads = lambda text, /, **options: pickle.loads(_parsed(text, **options))  # a site reads four files a message

REPOSITORY = Path(__file__).resolve().parent.parent


PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
PLACE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let every test process collect from another folder on: a file that another one has compiled is only read."""
    report = yield
    if isinstance(collector, pytest.Directory):
        start = len(report.result) * PLACE // PROCESSES
        report.result[:] = [*report.result[start:], *report.result[:start]]
    return report


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Let a network that a test makes have the same weights each time, whatever ran before in its process.

    Others may put an activation on ReLU's kink, where gradients are anybody's.
    """
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal out the longest tests, so that every test process begins with some: one that begins last is waited for.

    xdist gives each process one stretch of the tests, of equal lengths, and what is left to those that are done.
    """
    if PROCESSES == 1:
        return
    items.sort(key=lambda item: item.path)  # the same in all processes
    first = [item for item in items if item.get_closest_marker("first")]
    others = iter([item for item in items if not item.get_closest_marker("first")])
    ends = [len(items) * place // PROCESSES for place in range(PROCESSES + 1)]
    dealt = []
    for place in range(PROCESSES):
        own = first[place::PROCESSES]
        dealt += [*own, *itertools.islice(others, max(0, ends[place + 1] - ends[place] - len(own)))]
    items[:] = [*dealt, *others]


def pytest_collection_finish() -> None:
    """From here on collect garbage, in what the tests make, and rarely: by default it takes 3 % of their time."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def _own_files_are_forgotten() -> Generator[None]:
    """Forget modules that a test wrote and imported: another one's file may have the same name; ours stay anywhere."""
    last = next(reversed(sys.modules))  # to compare all names takes a tenth of the tests' time
    yield
    for name in list(itertools.takewhile(lambda name: name != last, reversed(sys.modules))):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(tempfile.gettempdir()) and not file.startswith(str(REPOSITORY)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that holds the real data sets; skips where there is none."""
    root = Path(os.environ.get("FEDSKEW_DATA", REPOSITORY / ".data"))
    if not root.is_dir():
        pytest.skip("real data sets are not laid out (set FEDSKEW_DATA, or run make test beside ../shared)")
    return root


@pytest.fixture(scope="session")
def interrupt_after() -> Callable[[int, Mapping[str, Any], Path], Path]:
    """Run a config in an empty folder until a round is over, as Ctrl-C ends it, and return the run folder."""
    import fedskew
    from common import stop_at

    def run(round: int, tree: Mapping[str, Any], out: Path) -> Path:
        with pytest.raises(KeyboardInterrupt):
            fedskew.simulate(tree, out=out, progress=stop_at(round))
        (folder,) = out.iterdir()
        return folder

    return run
