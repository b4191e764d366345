"""The arena: methods compared in many situations, tuned under one budget, on the same partitions and seeds.

arena = read_arena(Path("arena.toml"))
with executor(processes=2) as (pool, at_once):
    state = run_arena(arena, Path("runs"), pool, at_once)
write_comparison(state, Path("runs"))
"""

from __future__ import annotations

from fedskew.arena._arena import TUNING_SEED, Arena, ArenaEntry, in_words, read_arena
from fedskew.arena._compare import VIEWS, Part, Ranks, Scored, Scores, Standing, View, by_axis, ranks, scores, standings
from fedskew.arena._federation import FIGURES, Trained, train
from fedskew.arena._jobs import ArenaJob, Plan, next_calls
from fedskew.arena._run import ArenaProgress, ArenaState, missing_jobs, read_state, run_arena
from fedskew.arena._tables import comparison_notes, standing_table, write_comparison

__all__ = [
    "FIGURES",
    "TUNING_SEED",
    "VIEWS",
    "Arena",
    "ArenaEntry",
    "ArenaJob",
    "ArenaProgress",
    "ArenaState",
    "Part",
    "Plan",
    "Ranks",
    "Scored",
    "Scores",
    "Standing",
    "Trained",
    "View",
    "by_axis",
    "comparison_notes",
    "in_words",
    "missing_jobs",
    "next_calls",
    "ranks",
    "read_arena",
    "read_state",
    "run_arena",
    "scores",
    "standing_table",
    "standings",
    "train",
    "write_comparison",
]
