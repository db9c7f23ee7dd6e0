"""Sentences that say that c is to d what a is to b."""

import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass

TEMPLATES: dict[str, str] = {
    "is-to-what": "{a} is to {b} what {c} is to {d}",
    "is-to-as": "{a} is to {b} as {c} is to {d}",
    "rel-same": "The relation between {a} and {b} is the same as the relation between {c} and {d}",
    "what-is-to": "what {a} is to {b}, {c} is to {d}",
    "she-to-as": "She explained to him that {a} is to {b} as {c} is to {d}.",
    "as-what-same": "As I explained earlier, what {a} is to {b} is essentially the same as what {c} is to {d}.",
}
"""Templates of Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021, by name."""

Permutation = tuple[int, int, int, int]
"""Which of the words (a, b, c, d) stands in each of the four places of a template."""


def _permutations(names: str) -> tuple[Permutation, ...]:
    """Read permutations such as "abcd acbd"."""
    places = (tuple("abcd".index(letter) for letter in name) for name in names.split())
    return tuple((first, second, third, fourth) for first, second, third, fourth in places)


POSITIVE_PERMUTATIONS = _permutations("abcd acbd badc bdac cdab cadb dcba dbca")
"""The 8 orders in which the analogy still holds."""

NEGATIVE_PERMUTATIONS = _permutations("abdc acdb adbc adcb bacd bcad bcda bdca cabd cbad cbda cdba dabc dacb dbac dcab")
"""The 16 orders in which it does not."""

PERMUTATIONS = POSITIVE_PERMUTATIONS + NEGATIVE_PERMUTATIONS
"""All 24 orders, the positive ones first."""


@dataclass(frozen=True)
class Sentence:
    """A text that a model scores.

    Attributes:
        text: The text.
        spans: Where the words a, b, c, d of the question stand, as ranges of characters (first, one past the last);
            in the order a, b, c, d whatever their order in the text.
        hidden: Numbers of the words, 0 to 3, whose tokens are replaced by mask tokens and not scored.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    hidden: tuple[int, ...] = ()


def template_text(template: str) -> str:
    """Text of a template.

    Args:
        template: A name of `TEMPLATES`, or a text that has each of the fields {a}, {b}, {c}, {d} once.

    Raises:
        ValueError: If it is neither; the message lists the names.
    """
    text = TEMPLATES.get(template, template)
    _parse(text)
    return text


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> tuple[tuple[str, str], ...]:
    """Pieces of a template: a literal text and the field after it, which is empty at the end."""
    try:
        pieces = tuple(string.Formatter().parse(text))
    except ValueError:  # a brace without its other half
        pieces = ()
    fields = sorted(f"{field}{form}{conversion or ''}" for _, field, form, conversion in pieces if field is not None)
    if fields != ["a", "b", "c", "d"]:
        raise ValueError(
            f"{text!r} is no template. Give one of {', '.join(TEMPLATES)}, or a text with each of the fields "
            "{a}, {b}, {c} and {d} once."
        )
    return tuple((literal, field or "") for literal, field, _, _ in pieces)


def fill(
    template: str, words: Sequence[str], permutation: Sequence[int] = (0, 1, 2, 3), *, hidden: Sequence[int] = ()
) -> Sentence:
    """Put four words into a template.

    Args:
        template: A name of `TEMPLATES`, or a text with the fields {a}, {b}, {c}, {d}, each once, in any order.
        words: The words a, b, c, d of the question.
        permutation: Which of the words takes the place of {a}, of {b}, of {c} and of {d}: (1, 0, 3, 2) says "b is to a
            what d is to c".
        hidden: Numbers of the words to be hidden by mask tokens.

    Raises:
        ValueError: If the template has not the four fields, or there are not four words.
    """
    if len(words) != 4 or sorted(permutation) != [0, 1, 2, 3]:
        raise ValueError(
            f"a template takes four words in an order of (0, 1, 2, 3); got {list(words)} in {list(permutation)}."
        )
    text = ""
    spans: dict[int, tuple[int, int]] = {}
    for literal, field in _parse(TEMPLATES.get(template, template)):
        text += literal
        if field:
            word = permutation["abcd".index(field)]
            spans[word] = (len(text), len(text) + len(words[word]))
            text += words[word]
    return Sentence(text, tuple(spans[word] for word in range(4)), tuple(hidden))
