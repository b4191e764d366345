"""Put what an arena's runs say where the documentation and the package have it.

    python tools/publish_arena.py RUNS
    python tools/publish_arena.py      # only the figures, from the runs that are published

RUNS is the folder given to `fedskew arena` with --out. Of its `arena-arena`, every run goes to
`docs/measured/arena-runs.csv`, the tables to `docs/measured/arena.md`; likewise of
`arena-priors`, `arena-heads`, `arena-words`, `arena-silos`, `arena-networks`, `arena-cifar10`, `arena-cifar10-long` and
`arena-cifar100`.
Of its `arena-advice`, every run goes to `docs/measured/advice-runs.csv`, the table of evidence into the package, the
tables to `docs/measured/advice.md`. Of its `arena-personal`, every run goes to `docs/measured/personal-runs.csv`.
The two tables of `docs/compare.md` and their picture are made anew (`compared_methods.py`). Run it again, in the
repository's folder, whenever there are more runs.
"""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import compared_methods

from fedskew.arena import Arena, ArenaState, Scores, write_comparison
from fedskew.files import write_text
from fedskew.tables import csv_text

REPOSITORY = Path(__file__).resolve().parent.parent
MEASURED = REPOSITORY / "docs" / "measured"
EVIDENCE = REPOSITORY / "src" / "fedskew" / "arena" / "evidence.csv.gz"
BLOCKS = {
    **dict.fromkeys(("heads", "words", "silos"), "task"),
    **dict.fromkeys(("arena", "priors", "networks", "cifar10", "cifar10-long", "cifar100")),
}


def arena_of(name: str, changes: dict[str, int]) -> Arena:
    """The arena of this name, with some of its values changed."""
    folder = "recipes" if name in ("arena", "advice", "personal") else "benchmarks"
    return Arena.read(Path(folder) / f"{name}.toml", changes)  # as it is said on the page


def state_of(name: str, runs: Path) -> ArenaState:
    """Where an arena stands, and its tables, written; of drawn situations, those that have runs."""
    changes = {}
    if name == "advice":
        with (runs / "arena-advice" / "runs.csv").open(newline="", encoding="utf-8") as file:
            changes["arena.draw.points"] = max(int(line["point"]) for line in csv.DictReader(file)) + 1
    state = ArenaState.read(arena_of(name, changes), runs)
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
    last = arena_of(name, {}).settings.last
    scores = Scores.of(lines, axes, "fedavg", last=last, trainings=trainings, blocks=BLOCKS.get(name))
    scores.draw("fedavg", MEASURED / f"{name}-differences.png")


def main(runs: Path) -> None:
    """Publish the arenas that there are."""
    if not [*runs.glob("arena-*/runs.csv")]:
        sys.exit(f"{runs}: holds no arena's runs (arena-NAME/runs.csv); give the folder of fedskew arena --out")
    if (runs / "arena-advice" / "runs.csv").exists():
        publish_page("advice", state_of("advice", runs), runs)
        shutil.copy(runs / "arena-advice" / "evidence.csv.gz", EVIDENCE)
    for name in BLOCKS:
        if (runs / f"arena-{name}" / "runs.csv").exists():
            publish_page(name, state_of(name, runs), runs)
    if (runs / "arena-personal" / "runs.csv").exists():
        state_of("personal", runs)
        shutil.copy(runs / "arena-personal" / "runs.csv", MEASURED / "personal-runs.csv")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    for published in (*BLOCKS, "advice"):
        draw(published)
    compared_methods.main()
