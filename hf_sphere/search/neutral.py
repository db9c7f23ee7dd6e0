"""Texts of everyday topics, which calibrate a space for questions that have nothing to do with it."""

from importlib import resources

from hf_sphere.utils.checks import check_choice

LANGUAGES = ("de", "en", "es", "fr")


def neutral_texts(language: str = "en") -> list[str]:
    """Return 400 short questions, statements and requests about everyday topics, as `calibration` of a space.

    Embedded by the model and the prompt of the queries, they are queries without a match: `EmbeddingSpace.fit` then
    limits how often an unrelated question is accepted, without a label. That is a promise for queries like these: a
    question of a topic near to those of the space is accepted more often. They were written for this library, and no
    two of them share four words in a row.

    Args:
        language: `en`, `de`, `es` or `fr`.

    Raises:
        ValueError: If there are no texts in the language.

    Example:
        >>> texts = neutral_texts()
        >>> len(texts), texts[0]
        (400, 'How long should I boil potatoes before mashing them?')
    """
    check_choice("language", language, LANGUAGES)
    file = resources.files(__package__) / "texts" / f"{language}.txt"
    return file.read_text(encoding="utf-8").splitlines()
