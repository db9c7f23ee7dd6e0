"""Sentences stating that a is to b what c is to d, and the names of their scorings; torch is not imported."""

import re
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

SCORINGS = {
    "embedding_similarity": "hf_sphere.analogies.scoring:EmbeddingSimilarity",
    "hypothesis_bias": "hf_sphere.analogies.scoring:HypothesisBias",
    "marginal_bias": "hf_sphere.analogies.scoring:MarginalBias",
    "perplexity": "hf_sphere.analogies.scoring:Perplexity",
    "pmi": "hf_sphere.analogies.scoring:PMI",
}
"""Classes of the scorings by name. To add a scoring, add a subclass of `Scoring` that sets `name`, and a row here."""

Permutation = tuple[int, ...]
"""Index of the word among (a, b, c, d) in each of the four fields of a template."""


_NAMES = (
    "abcd acbd badc bdac cdab cadb dcba dbca "
    "abdc acdb adbc adcb bacd bcad bcda bdca cabd cbad cbda cdba dabc dacb dbac dcab"
)

PERMUTATIONS: tuple[Permutation, ...] = tuple(tuple(map("abcd".index, name)) for name in _NAMES.split())
"""All 24 permutations, the positive ones first."""

POSITIVE_PERMUTATIONS = PERMUTATIONS[:8]
"""The 8 permutations in which the analogy still holds."""

NEGATIVE_PERMUTATIONS = PERMUTATIONS[8:]
"""The 16 permutations in which the analogy does not hold."""

_FIELD = re.compile(r"\{([abcd])\}")


@dataclass(frozen=True)
class Sentence:
    """A text that a model scores.

    The spans are ranges of characters (first, one past the last) of the words a, b, c, d of the question, in this
    order, regardless of their order in the text.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    hidden: tuple[int, ...] = ()  # indices of the words, 0 to 3, whose tokens are replaced by masks and not scored


def scoring_names() -> list[str]:
    """Return the names of all scorings, sorted.

    Example:
        >>> scoring_names()
        ['embedding_similarity', 'hypothesis_bias', 'marginal_bias', 'perplexity', 'pmi']
    """
    return sorted(SCORINGS)


def template_text(template: str) -> str:
    """Return the text of a template: a name of `TEMPLATES`, or a text that has each of {a}, {b}, {c}, {d} once."""
    text = TEMPLATES.get(template, template)
    if sorted(_FIELD.findall(text)) != list("abcd") or re.search(r"[{}]", _FIELD.sub("", text)):
        allowed = f"one of {', '.join(TEMPLATES)}, or a text with each of {{a}}, {{b}}, {{c}} and {{d}} once"
        raise ValueError(f"{text!r} is not a template. Use {allowed}.")
    return text


def fill(
    template: str, words: Sequence[str], permutation: Sequence[int] = (0, 1, 2, 3), *, hidden: Sequence[int] = ()
) -> Sentence:
    """Fill a template with the words a, b, c, d of a question, in the order of their indices in `permutation`.

    `hidden` are the indices of the words to replace by mask tokens.
    """
    text, *rest = _FIELD.split(template_text(template))
    spans: dict[int, tuple[int, int]] = {}
    for field, literal in zip(rest[::2], rest[1::2], strict=True):
        word = permutation["abcd".index(field)]
        spans[word] = (len(text), len(text) + len(words[word]))
        text += words[word] + literal
    return Sentence(text, tuple(spans[word] for word in range(4)), tuple(hidden))
