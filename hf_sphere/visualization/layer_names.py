"""Module paths short enough to stand beside a picture, and those to draw if there are too many."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_WORD = re.compile(r"[^\W\d_]+")


def shorten_layer_names(names: Sequence[str], longest: int = 26) -> list[str]:
    """Shorten module paths of one model, all in the same way, as far as the longest of them needs it.

    First go the starts that are not needed to tell them apart, or what all start and end with, whichever leaves less,
    then the ends of the words: `encoder.stages.0.layers.1` becomes `stages.0.layers.1`, and that `sta.0.lay.1`. Numbers
    stay, since by them layers are told apart.

    Args:
        names: Module paths, each once.
        longest: Characters that there is room for, at least 8.

    Returns:
        A name for each, no two the same. Where not even two letters a word fit, names are numbered from 1 and only
        their ends are left.
    """
    if max(map(len, names), default=0) <= longest:
        return list(names)
    names = min(_tails(names), _without_common_ends(names), key=lambda short: max(map(len, short)))
    if max(map(len, names)) <= longest:
        return list(names)
    for letters in range(longest, 1, -1):
        short = [_WORD.sub(lambda word: word[0][:letters], name) for name in names]  # noqa: B023  (called at once)
        if max(map(len, short)) <= longest and len(set(short)) == len(short):
            return short
    starts = [f"{number}…" for number in range(1, len(names) + 1)]
    return [start + name[-max(longest - len(start), 1) :] for start, name in zip(starts, names, strict=True)]


def _tails(names: Sequence[str]) -> list[str]:
    """Of each path the shortest end that no other path has, and that begins with a word and not with a number."""
    paths = [name.split(".") for name in names]
    ends = Counter(".".join(path[start:]) for path in paths for start in range(len(path)))

    def tail(path: list[str]) -> str:
        for start in range(len(path) - 2, 0, -1):  # a last part alone says little
            end = ".".join(path[start:])
            if ends[end] == 1 and not path[start].isdecimal():
                return end
        return ".".join(path)

    return [tail(path) for path in paths]


def _without_common_ends(names: Sequence[str]) -> list[str]:
    """Leave out the parts that all paths start or end with; what is left begins with a word, not with a number."""
    paths = [name.split(".") for name in names]
    spare = min(map(len, paths)) - 1  # parts that every path can do without
    start = 0
    while start < spare and len({path[start] for path in paths}) == 1:
        start += 1
    while start > 0 and any(path[start].isdecimal() for path in paths):
        start -= 1
    end = 0
    while start + end < spare and len({path[-1 - end] for path in paths}) == 1:
        end += 1
    return [".".join(path[start : len(path) - end]) for path in paths]


def choose_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Choose at most `most` (two at least) items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def check_known(kind: str, given: Collection[object], known: Collection[object]) -> None:
    """Refuse what is not there.

    Args:
        kind: What the items are called, in the plural.
        given: Those asked for.
        known: Those there are.

    Raises:
        ValueError: If one of the given is not among the known, or none is given.
    """
    unknown = [item for item in given if item not in known]
    if unknown or not given:
        asked = ", ".join(map(str, unknown)) or "none"
        raise ValueError(f"{kind} {asked} cannot be drawn; there are: {', '.join(map(str, known))}.")
