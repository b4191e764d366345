"""What labels said about runs before their training, and what their ends: each sentence once, whoever it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fedskew.report._groups import Group, listed
from fedskew.report._runs import finish_in_words

_WORDS_ALIKE = 3
"""Notes that begin with so many words alike are one note about several runs."""
_SHOWN = 4
"""Of so many runs a note shows what differs."""


@dataclass(frozen=True)
class Note:
    """A note, as the page shows it in one box.

    Attributes:
        opening: Its words up to where runs differ; all of them where they don't.
        parts: Runs, and the words in which their note differs.
        ending: The words after these, the same for all.
    """

    opening: str
    parts: tuple[tuple[str, str], ...] = ()
    ending: str = ""


def label_notes(groups: Sequence[Group]) -> list[Note]:
    """Return the notes of runs, those that say the same of several seeds or runs as one.

    Args:
        groups: The runs.
    """
    about: dict[str, list[tuple[Group, int]]] = {}
    for group in groups:
        for run in group.seeds:
            for note in filter(None, (*run.notes, finish_in_words(run))):
                about.setdefault(note, []).append((group, run.seed))
    alike: list[list[str]] = []
    for note in about:
        start = note.split()[:_WORDS_ALIKE]
        found = next((notes for notes in alike if notes[0].split()[:_WORDS_ALIKE] == start), None)
        alike.append([note]) if found is None else found.append(note)
    names = {note: _names(runs, groups) for note, runs in about.items()}
    return [_merged({note: names[note] for note in notes}) for notes in alike]


def _names(runs: Sequence[tuple[Group, int]], groups: Sequence[Group]) -> str:
    """Name these runs by label and seed; an empty text where they are all runs."""
    everywhere = {(group.label, run.seed) for group in groups for run in group.seeds}
    there = {(group.label, seed) for group, seed in runs}
    if there == everywhere:
        return ""
    seeds = sorted({seed for _, seed in there})
    if there == {(label, seed) for label, seed in everywhere if seed in seeds}:  # of every method
        return f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"
    return listed(group.label if len(group.seeds) == 1 else f"{group.label}, seed {seed}" for group, seed in runs)


def _merged(names: Mapping[str, str]) -> Note:
    """Make one note of notes that begin alike.

    Args:
        names: Which runs each is about.
    """
    notes = list(names)
    if len(notes) == 1:
        return Note(f"{names[notes[0]]}: {notes[0]}" if names[notes[0]] else notes[0])
    words = [note.split() for note in notes]
    before = _alike(words)
    after = min(_alike([one[::-1] for one in words]), min(map(len, words)) - before)
    while before and not words[0][before - 1].endswith((".", ":")):  # whole sentences
        before -= 1
    while after and not words[0][len(words[0]) - after - 1].endswith("."):
        after -= 1
    parts = [(names[note], " ".join(one[before : len(one) - after])) for note, one in zip(notes, words, strict=True)]
    if len(parts) > _SHOWN:
        parts = [*parts[:_SHOWN], (f"{len(parts) - _SHOWN} more", "each with its own figures")]
    return Note(" ".join(words[0][:before]), tuple(parts), " ".join(words[0][len(words[0]) - after :]))


def _alike(texts: Sequence[Sequence[str]]) -> int:
    """Return how many words all texts have alike at their beginning."""
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False)))
