"""Run a config: every seed, and every value that is tried for a tuned key."""

import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from fedskew import torchrun
from fedskew.engine import Federation, RoundRunner
from fedskew.engine.cohort import run_round_together
from fedskew.engine.workers import from_the_first
from fedskew.errors import ConfigError, FedskewError, placed
from fedskew.experiment._config import Config, read, resolve
from fedskew.experiment._folder import FINISHED, RunFolder, check_empty, is_begun
from fedskew.experiment._identity import refuse_changes, set_aside, shared_data
from fedskew.experiment._loop import PlayedRound, TrainingLoop, run_in_step
from fedskew.experiment._progress import Listen, watched
from fedskew.experiment._result import Result
from fedskew.experiment._sections import OutputSection
from fedskew.experiment._setup import make_training_loop, try_out
from fedskew.experiment._summary import headline, over_seeds
from fedskew.experiment._trained import load
from fedskew.files import locked, write_text
from fedskew.report import SeedRun, write_report
from fedskew.tables import counted, flatten, json_text

DIFFERENCES = 3
"""How many are shown of the nearest run, where there is none to go on with."""


def simulate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    fresh: bool = False,
    progress: Listen | bool | None = None,
    **tables: Any,
) -> Result:
    """Train a federation on this machine, or on all ranks of `torchrun`, of which the first writes the run folder.

        result = fedskew.simulate(
            data="digits", partition={"rule": "quantity", "clients": 20, "labels_per_client": 2},
            model="mlp3", method="fedvls", training={"rounds": 20},
        )

    Args:
        config: Path of a TOML file, a config, or its tree; None: `tables` are the whole tree.
        out: Folder under which the run folder `<name>-<hash>` is made; None: nothing is written.
        resume: Go on from that run folder; a finished run is only read.
        fresh: Start over: a run that is in that folder is moved to `earlier/` beside it.
        progress: Called with every record, as a plain dict. True: a progress bar; where output is no terminal, a line
            at least 30 s after the last one. None: a bar in a notebook or a terminal, else nothing. False: nothing.
        **tables: Tables of the config, in place of those in `config`. A component, a class or a function may stand
            where a name may.

    Returns:
        The runs, their records, the model and the summary.

    Raises:
        ConfigError: The config is not valid. Nothing has been trained, as with the next three.
        DataError: The data can't be loaded.
        PartitionError: The data can't be divided in this way.
        RunError: There is a run in the folder already, another process writes there, or the run was made by other code,
            of other data or by another version of fedskew; also where local training fails or a file can't be written.
    """
    resolved = _resolve(config, tables)
    folder = None if out is None else resolved.folder(Path(out))
    for name, given in (("resume", resume), ("fresh", fresh)):
        if given and folder is None:
            raise ConfigError(f"{name}: give the folder that the run is in (out=...)")
    if resume and fresh:
        raise ConfigError("fresh: starts over, and resume goes on; choose one")
    return run_config(resolved, folder, resume=resume, fresh=fresh, progress=progress)


def simulate_together(configs: Sequence[Config]) -> list[Result | FedskewError]:
    """Train several federations at a time, a round of all after a round of all; nothing is written.

    Where they have the same data set and network, and local training differs in no more than samples, seed and learning
    rate, their clients train as one cohort. Results are those of `simulate` up to rounding, without AUROC and the like;
    a config that can't be set up has the error that `simulate` raises. RunError, of all, where training fails in one.
    """
    alike: dict[str, list[int]] = {}
    for at, config in enumerate(configs):
        if not config.engine.seeds_together:
            raise ConfigError("engine.seeds_together: is false, and federations train together; set it to true")
        tree = config.tree()
        same = [tree["data"], tree["model"], tree["engine"], config.training.augmentation]
        alike.setdefault(json_text(same), []).append(at)
    results: dict[int, Result | FedskewError] = {}
    with shared_data():
        for places in alike.values():
            loops: dict[int, list[TrainingLoop]] = {}
            for at in sorted(places, key=lambda at: str(configs[at].partition.seed)):  # one data set is kept
                try:
                    loops[at] = [make_training_loop(configs[at], seed, ranks=False) for seed in configs[at].seeds]
                except FedskewError as error:
                    results[at] = error
            every = [loop for _, own in sorted(loops.items()) for loop in own]
            trained = iter(run_in_step(every, _rounds_together) if every else ())
            for at, own in sorted(loops.items()):
                runs = tuple(islice(trained, len(own)))
                summary = runs[0].summary if len(runs) == 1 else over_seeds([run.summary for run in runs])
                results[at] = Result(configs[at], runs, own[0].model.entire, summary, None, own[0].finished_network())
    return [results[at] for at in range(len(configs))]


def check_runs(configs: Sequence[Config], out: Path, resume: bool, fresh: bool) -> None:
    """Check the runs that a command is about to begin, or to `resume`; ConfigError names the nearest that is there."""
    if resume:
        _check_resumable(configs, out)
    for config in configs if len(configs) > 1 and not torchrun.launched() else ():
        with placed(f"run {config.name!r}: ", None, of=FedskewError):
            if not (resume or fresh):
                check_empty(config.folder(out))
            _try_out(config, config.folder(out))


def _check_resumable(configs: Sequence[Config], out: Path) -> None:
    """Raise where no config has a run to go on with, and name the nearest that is there."""
    if any(is_begun(config.folder(out)) for config in configs):
        return
    here, missing = flatten(configs[0].tree()), "none"
    differences: dict[Path, list[str]] = {}
    for path in sorted(out.glob("*/config.toml")):
        with suppress(OSError, ValueError):
            there = flatten(tomllib.loads(path.read_text(encoding="utf-8")))
            differences[path.parent] = [
                f"{key} ({there.get(key, missing)!r} there, {here.get(key, missing)!r} here)"
                for key in dict.fromkeys([*here, *there])
                if there.get(key, missing) != here.get(key, missing) and key.split(".")[0] not in ("name", "output")
            ]
    said = "leave out --resume to start a new run"
    differences = {folder: found for folder, found in differences.items() if found}
    if differences:
        nearest = min(differences, key=lambda folder: len(differences[folder]))
        found = differences[nearest]
        more = f" and {counted(len(found) - DIFFERENCES, 'key')} more" if len(found) > DIFFERENCES else ""
        said = f"{nearest} differs in {', '.join(found[:DIFFERENCES])}{more}; change that back, or {said}"
    raise ConfigError(f"--resume: {out} has no run of this config to go on with; {said}")


def run_config(
    resolved: Config,
    folder: Path | None,
    *,
    resume: bool,
    fresh: bool = False,
    progress: Listen | bool | None = None,
    scripts: Path | None = None,
) -> Result:
    """Train a federation in its run folder: see `simulate`, and `report.write_report` for `scripts`."""
    alone = folder if torchrun.rank() == 0 else None
    with shared_data():
        if fresh and alone is not None:
            with locked(alone):
                pass  # no other process writes there
            if alone.exists() and not torchrun.launched():
                _try_out(resolved, alone)  # nothing is moved before it is known that the config can be run
            set_aside(alone)
        with watched(resolved, progress) as listen, nullcontext() if alone is None else locked(alone):
            return _simulate(resolved, folder, resume, listen, scripts)


def _try_out(config: Config, folder: Path) -> None:
    """Set up a config's first run without writing."""
    first = next(iter(config.parts().values()))
    try_out(first, first.seeds[0], folder.with_name(f"{folder.name}.new"))


def _simulate(
    resolved: Config, folder: Path | None, resume: bool, progress: Listen | None, scripts: Path | None
) -> Result:
    best: dict[int, tuple[float, str, SeedRun]] = {}
    scores: dict[str, float] = {}
    model, finished = None, None
    single = list(resolved.parts()) == [""]
    with _of_this_rank(resolved, folder, resume) as (own, place):
        begin = partial(_begin_whole, resolved, None if single else place)
        for name, run, *networks in _trained(own, place, begin, resume, progress):
            validated = (record.validation for record in run.rounds if record.validation is not None)
            scores[name] = max((one.judged(resolved.evaluation.measure) for one in validated), default=-1.0)
            if run.seed not in best or scores[name] > best[run.seed][0]:
                best[run.seed] = scores[name], name, run
                if run.seed == resolved.seeds[0]:  # one network is kept
                    model, finished = networks
            del networks
    assert model is not None, "there are seeds and values"
    runs = [run for _, _, run in best.values()]
    summary = runs[0].summary if single else over_seeds([run.summary for run in runs])
    result = Result(resolved, tuple(runs), model, summary, folder, finished)
    if folder is not None and torchrun.rank() == 0 and not (resume and is_finished(folder)):
        if not single:
            parts = {"parts": [name for _, name, _ in best.values()]}
            tried = {} if resolved.tune is None else {"validation": scores}
            resolved.write(folder / "config.toml")
            write_text(folder / "summary.json", json_text(summary | parts | tried))
        write_report(runs, folder / "report.html", resolved.name, scripts=scripts)
    return result


def _trained(
    config: Config, folder: Path | None, begin: Callable[[], None], resume: bool, progress: Listen | None
) -> Iterator[tuple[str, SeedRun, nn.Module, nn.Module | None]]:
    """Train each seed and value that isn't finished, after `begin`; yield name, run, model and finished model."""
    parts = config.parts()
    places = {name: None if folder is None else folder / name for name in parts}
    done = {name: place for name, place in places.items() if resume and place and (place / "summary.json").exists()}
    left = {name: part for name, part in parts.items() if name not in done}
    together: Iterator[tuple[TrainingLoop, SeedRun]] = iter(())
    if left and config.engine.seeds_together and not torchrun.launched():
        loops = [make_training_loop(part, part.seeds[0], places[name]) for name, part in left.items()]
        begin()
        together = zip(loops, run_in_step(loops, _rounds_together, resume, progress), strict=True)
    for name, part in parts.items():
        if name in done:
            yield name, *_read_finished(part, done[name], progress)
            continue
        if (trained := next(together, None)) is None:
            loop = make_training_loop(part, part.seeds[0], places[name])
            begin()
            trained = loop, loop.run(resume, progress)
        loop, run = trained
        yield name, run, loop.model.entire, loop.finished_network()
        del loop, trained  # before the next is made


def _read_finished(
    config: Config, folder: Path, progress: Listen | None
) -> tuple[SeedRun, nn.Module, nn.Module | None]:
    """Read a run that is finished, which must be of the code and data that there are now."""
    refuse_changes(folder, RunFolder.changes_since(folder, config))
    (run,) = RunFolder.read_runs(folder)
    if progress is not None:
        for record in run.rounds:
            progress(record.to_dict())
    summary = run.summary | headline(run.summary, config.evaluation.summary)
    run = replace(run, label=config.name, config=config.tree(), summary=summary)
    finished = load(folder, finished=True).network if (folder / FINISHED).exists() else None
    return run, load(folder).network, finished


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder is finished: the report is the last file that it writes."""
    return all((folder / file).exists() for file in ("summary.json", "report.html"))


def _resolve(config: Config | Mapping[str, Any] | str | Path | None, tables: Mapping[str, Any]) -> Config:
    if isinstance(config, (str, Path)):
        config = read(Path(config))
    if isinstance(config, Config):
        return resolve({**config.tree(), **tables}).of(config.origin)
    return resolve({**(config or {}), **tables})


def _begin_whole(config: Config, folder: Path | None) -> None:
    """Write the config of a folder that is going to hold several runs, so that it can be gone on with."""
    if folder is not None and not (folder / "config.toml").exists():
        config.write(folder / "config.toml")


@contextmanager
def _of_this_rank(config: Config, folder: Path | None, resume: bool) -> Iterator[tuple[Config, Path | None]]:
    """Yield this rank's config and run folder; ranks but the first work in a temporary one, a copy of a resumed run."""
    if not torchrun.launched() or folder is None:
        yield config, folder
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html") if resume else []
    names = from_the_first([str(path.relative_to(folder)) for path in files])
    if torchrun.rank() == 0:
        for name in names:
            from_the_first((folder / name).read_bytes())
        yield config, folder
        return
    with tempfile.TemporaryDirectory(prefix="fedskew-") as place:
        for name in names:
            path = Path(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(from_the_first(None))
        yield config.model_copy(update={"output": OutputSection(checkpoint_every=sys.maxsize)}), Path(place)


def _rounds_together(runners: Sequence[RoundRunner], states: Sequence[Any]) -> list[PlayedRound]:
    return run_round_together([runner for runner in runners if isinstance(runner, Federation)], states)
