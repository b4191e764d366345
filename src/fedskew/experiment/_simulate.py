"""Run a config: every seed, every value that is tried, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedskew import torchrun
from fedskew.engine import Federation, RoundRunner, run_round_together
from fedskew.errors import ConfigError, MissingPackageError
from fedskew.experiment._config import Config, read, resolve, write
from fedskew.experiment._folder import plain_json
from fedskew.experiment._loop import PlayedRound, Progress, run_in_step
from fedskew.experiment._mirror import own_place
from fedskew.experiment._setup import make_training_loop
from fedskew.experiment._summary import over_seeds
from fedskew.files import write_text
from fedskew.report import SeedRun, write_report

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """What `simulate` returns.

    `runs`: one for each seed. `rounds`: their records, one after another (each names its seed). `model`: the final
    model of the first seed. `summary`: mean and standard deviation over seeds, and each seed's own. `folder`: the run
    folder, or None.
    """

    config: Config
    runs: tuple[SeedRun, ...]
    model: nn.Module
    summary: dict[str, Any]
    folder: Path | None

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Every record of every seed, in plain values: the lines of `rounds.jsonl` (see `engine.RoundRecord`)."""
        return [record.to_dict() for run in self.runs for record in run.rounds]

    def to_frame(self) -> pd.DataFrame:
        """One row a round, evaluations as columns `evaluation.accuracy` and so on. Needs pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise MissingPackageError("Result.to_frame needs pandas: pip install 'fedskew[frames]'") from None
        return pd.json_normalize(self.rounds)

    def report(self, path: str | Path) -> Path:
        """Write the report page of these runs."""
        return write_report(self.runs, Path(path), self.config.name)


def simulate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **tables: Any,
) -> Result:
    """Train a federation on this machine, or on all ranks of `torchrun`, of which the first writes.

    `config`: the path of a TOML file, a tree, or None with the tree's tables as keyword arguments (which replace the
    config's own where both are given). In a tree from Python, a component, a class or a function may stand where a name
    may. `out`: the folder under which the run folder `<name>-<hash>` is made; None: nothing touches the disk. `resume`:
    go on from that folder. `progress`: called with every record.

    Raises ConfigError, DataError, PartitionError or RunError before anything is trained.

        result = fedskew.simulate(
            data="digits", partition={"rule": "quantity", "clients": 20, "labels_per_client": 2},
            model="mlp3", method="fedvls", training={"rounds": 20},
        )
    """
    whole = _config(config, tables)
    folder = None if out is None else run_folder(whole, Path(out))
    if resume and folder is None:
        raise ConfigError("resume: needs the folder of the run (out=...)")
    runs: list[SeedRun] = []
    model: nn.Module | None = None
    single = len(whole.seeds) == 1 and whole.tune is None
    with own_place(whole, folder, resume) as (here, place):
        parts = {seed: place if single or place is None else place / f"seed-{seed}" for seed in whole.seeds}
        if whole.engine.seeds_together and not torchrun.launched():
            loops = [make_training_loop(here, seed, part) for seed, part in parts.items()]
            runs, model = run_in_step(loops, _rounds_together, resume, progress), loops[0].model.module
        else:
            for seed, part in parts.items():
                run, trained = _seed(here, seed, part, resume, progress)
                runs.append(run)
                model = trained if model is None else model
    assert model is not None
    summary = runs[0].summary if single else over_seeds([run.summary for run in runs])
    result = Result(whole, tuple(runs), model, summary, folder)
    if folder is not None and torchrun.rank() == 0:
        if not single:
            write(whole, folder / "config.toml")
            names = [f"seed-{seed}" for seed in whole.seeds]
            write_text(folder / "summary.json", plain_json(summary | {"parts": names}))
        result.report(folder / "report.html")
    return result


def run_folder(config: Config, out: Path) -> Path:
    """Where a config's run goes under `out`."""
    return out / f"{config.name}-{config.hash}"


def _config(config: Config | Mapping[str, Any] | str | Path | None, tables: Mapping[str, Any]) -> Config:
    if isinstance(config, (str, Path)):
        config = read(Path(config))
    tree = config.tree() if isinstance(config, Config) else dict(config or {})
    return resolve({**tree, **tables})


def _seed(
    config: Config, seed: int, folder: Path | None, resume: bool, progress: Progress | None
) -> tuple[SeedRun, nn.Module]:
    """One seed; where a key is tuned, every value is run and the one with the best validation score is kept."""
    if config.tune is None:
        loop = make_training_loop(config, seed, folder)
        return loop.run(resume, progress), loop.model.module
    tried: list[tuple[float, SeedRun, nn.Module, str]] = []
    for value in config.tune.values:
        part = f"{config.tune.key.rpartition('.')[2]}-{value}"
        loop = make_training_loop(
            config.model_copy(update={"tune": None}).with_value(config.tune.key, value),
            seed,
            None if folder is None else folder / part,
        )
        finished = loop.run(resume, progress)
        best = max(record.validation.score for record in finished.rounds if record.validation is not None)
        tried.append((best, finished, loop.model.module, part))
    _, chosen, model, part = max(tried, key=lambda entry: entry[0])
    if folder is not None:
        scores = {name: best for best, _, _, name in tried}
        write(config.for_seed(seed), folder / "config.toml")
        write_text(folder / "summary.json", plain_json({"parts": [part], "validation": scores, "chosen": part}))
    return chosen, model


def _rounds_together(runners: Sequence[RoundRunner], states: Sequence[Any]) -> list[PlayedRound]:
    return run_round_together([runner for runner in runners if isinstance(runner, Federation)], states)
