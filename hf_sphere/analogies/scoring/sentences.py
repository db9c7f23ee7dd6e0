"""Scorings of sentences by their perplexity: which sentences, is what a subclass says."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Size, Tensor

from hf_sphere.analogies.likelihoods import perplexities
from hf_sphere.analogies.prompts import PERMUTATIONS, Permutation, Sentence, fill, template_text
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Measurements, PermutedScoring, gather

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class SentenceScoring(PermutedScoring):
    """A scoring by the perplexity of sentences that a template makes.

    Attributes:
        template: A name of `TEMPLATES`, or a text with the fields {a}, {b}, {c} and {d}.
        sides: 1 if there are sentences for each choice, 2 if there is one for each head with each tail.
        rest: With one side, how many sentences each choice has, if several.
    """

    sides: ClassVar[int] = 1
    rest: ClassVar[int] = 0

    template: str = "is-to-what"

    def __post_init__(self) -> None:
        super().__post_init__()
        template_text(self.template)

    @abstractmethod
    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """Sentences of a question in one order of its words: k of them, or k k, or k times `rest`."""

    def fill(
        self, question: Question, head: str, tail: str, permutation: Permutation, hidden: tuple[int, ...] = ()
    ) -> Sentence:
        """Say that head is to tail what the stem's words are to each other."""
        return fill(self.template, (*question.stem, head, tail), permutation, hidden=hidden)

    def measure(
        self,
        questions: Sequence[Question],
        language_model: "LanguageModel",
        permutations: Iterable[int] = range(len(PERMUTATIONS)),
        **engine: Any,
    ) -> Measurements:
        """See `PermutedScoring.measure`."""
        permutations = list(permutations)
        sentences = [
            sentence
            for question in questions
            for number in permutations
            for sentence in self.sentences(question, PERMUTATIONS[number])
        ]
        found = perplexities(language_model, sentences, **engine)
        shapes = [self._shape(len(permutations), len(question.choices)) for question in questions]
        pieces = found.split([shape.numel() for shape in shapes])
        values = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        return Measurements(self, *gather(questions, permutations, values, sides=self.sides, rest=self.rest))

    def _shape(self, num_permutations: int, num_choices: int) -> Size:
        return Size((num_permutations, *([num_choices] * self.sides), *([self.rest] if self.rest else [])))


@dataclass(frozen=True, kw_only=True)
class GridScoring(SentenceScoring):
    """A scoring of each head with each tail, of which the choices are the diagonal."""

    sides: ClassVar[int] = 2

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """See `SentenceScoring.sentences`."""
        heads, tails = zip(*question.choices, strict=True)
        return [self.fill(question, head, tail, permutation) for head in heads for tail in tails]


def log_shares(values: Tensor) -> Tensor:
    """Logarithm of the share that each choice has in the sum over all choices, (..., K); missing ones are NaN or 0."""
    return (values / values.nansum(-1, keepdim=True)).log()
