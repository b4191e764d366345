"""Put what an arena's runs say where the documentation and the package have it.

    python tools/publish_arena.py RUNS
    python tools/publish_arena.py      # only the figures, from the runs that are published
    python tools/publish_arena.py --evidence    # what `fedskew advise` looks up: with .data, heads/, cifar10-part.npz

RUNS is the folder given to `fedskew arena` with --out. Of its `arena-arena`, every run goes to
`docs/measured/arena-runs.csv`, the tables to `docs/measured/arena.md`; likewise of each other arena of `BLOCKS`. Of its
`arena-personal`, every run goes to `docs/measured/personal-runs.csv`. The two tables of `docs/compare.md` and their
picture are made anew (`compared_methods.py`). Run it again, in the repository's folder, whenever there are more runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import compared_methods

from fedskew.arena import Arena, ArenaState, Scores, write_comparison
from fedskew.arena._advice import SHIPPED, evidence_bytes
from fedskew.arena._run import federation_of
from fedskew.arena._tables import evidence_rows
from fedskew.experiment import make_task, shared_data
from fedskew.files import write_text
from fedskew.tables import csv_text

REPOSITORY = Path(__file__).resolve().parent.parent
MEASURED = REPOSITORY / "docs" / "measured"
EVIDENCE = "heads", "words", "silos", "networks", "cifar10-long", "cifar100", "cifar100-classes"
"""The arenas that `fedskew advise` looks up."""
BLOCKS = {
    **dict.fromkeys(("heads", "words", "silos"), "task"),
    **dict.fromkeys(("arena", "priors", "networks", "cifar10", "cifar10-long", "cifar10-tuned")),
    **dict.fromkeys(("cifar100", "cifar100-classes")),
}


def arena_of(name: str) -> Arena:
    """The arena of this name."""
    folder = "recipes" if name in ("arena", "personal") else "benchmarks"
    return Arena.read(Path(folder) / f"{name}.toml")  # as it is said on the page


def state_of(name: str, runs: Path) -> ArenaState:
    """Where an arena stands, and its tables, written."""
    state = ArenaState.read(arena_of(name), runs)
    write_comparison(state, runs)
    return state


def publish_page(name: str, state: ArenaState, runs: Path) -> None:
    """Write the runs of an arena into the documentation, and copy its tables there.

    Of its CSV those that its plan asks for: a training also has lines in views whose plan chose another value.
    """
    folder = runs / f"arena-{name}"
    write_text(MEASURED / f"{name}-runs.csv", csv_text([[*state.runs[0]], *([*line.values()] for line in state.runs)]))
    page = (folder / "table.md").read_text(encoding="utf-8").split("\n", 1)[1]
    lines = [
        f"# Measured: {name}",
        f"\n![Points of accuracy gained or lost against FedAvg]({name}-differences.png)",
        page,
        f"Every run, those that tune among them: [{name}-runs.csv]({name}-runs.csv).",
    ]
    (MEASURED / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(name: str) -> None:
    """Draw the figure of the published runs of an arena, as what differs in the target alone is one training."""
    axes, every = compared_methods.published(name)
    lines = [line for line in every if line["stage"] != "tune"]
    fixed = [axis for axis in axes if axis != "target"]
    trainings = {tuple(line[axis] for axis in axes): tuple(line[axis] for axis in fixed) for line in lines}
    last = arena_of(name).settings.last
    scores = Scores.of(lines, axes, "fedavg", last=last, trainings=trainings, blocks=BLOCKS.get(name))
    scores.draw("fedavg", MEASURED / f"{name}-differences.png")


def federations(arena: Arena, situations: set[tuple[str, ...]]) -> dict[tuple[str, ...], dict[str, str]]:
    """The federations of these situations of an arena, by partition, and their figures; nothing is trained."""
    found = {}
    for entry in (entry for entry in arena.entries if entry.method == arena.settings.reference):
        for seed in arena.settings.partitions if tuple(entry.situation.values()) in situations else ():
            config = entry.config.with_value("partition.seed", seed)
            task = make_task(config, config.seeds[0])
            figures = federation_of(config, task.counts, task.target)
            found[*entry.situation.values(), str(seed)] = {f"of:{name}": value for name, value in figures.items()}
    return found


def publish_evidence() -> None:
    """Write what methods gained in each situation of the tuned arenas, where `fedskew advise` looks it up."""
    os.environ.setdefault("FEDSKEW_DATA", ".data")
    rows = []
    for name in EVIDENCE:
        arena, (axes, lines) = arena_of(name), compared_methods.published(name)
        lines = [line for line in lines if line["stage"] != "tune"]
        last = compared_methods.LAST.get(name, arena.settings.last)
        scores = Scores.of(lines, axes, arena.settings.reference, last=last)
        with shared_data():
            there = {tuple(line[axis] for axis in axes) for line in lines}
            found = evidence_rows(arena, federations(arena, there), scores)
        untrained = {entry.method for entry in arena.entries if not entry.config.training.rounds}
        for network, figures, gains in found:
            named = {f"{one.split(',')[0]}: no round" if one in untrained else one: gain for one, gain in gains.items()}
            # A comma is between the names of `--without`.
            rows.append((network, figures, {label.replace(",", ":"): gain for label, gain in named.items()}))
    SHIPPED.write_bytes(evidence_bytes(rows))


def main(runs: Path) -> None:
    """Publish the arenas that there are."""
    if not [*runs.glob("arena-*/runs.csv")]:
        sys.exit(f"{runs}: holds no arena's runs (arena-NAME/runs.csv); give the folder of fedskew arena --out")
    for name in BLOCKS:
        if (runs / f"arena-{name}" / "runs.csv").exists():
            publish_page(name, state_of(name, runs), runs)
    if (runs / "arena-personal" / "runs.csv").exists():
        state_of("personal", runs)
        shutil.copy(runs / "arena-personal" / "runs.csv", MEASURED / "personal-runs.csv")


if __name__ == "__main__":
    if sys.argv[1:] == ["--evidence"]:
        publish_evidence()
    else:
        if len(sys.argv) > 1:
            main(Path(sys.argv[1]))
        for published in BLOCKS:
            draw(published)
        compared_methods.main()
