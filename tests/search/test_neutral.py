"""The texts of `neutral_texts`, and a space that they calibrate."""

import re
from collections import Counter

import pytest
import torch

from hf_sphere.search import EmbeddingSpace, ImageIndex, neutral_texts
from hf_sphere.search.calibration import LANGUAGES
from hf_sphere.search.source import ImageSource


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.mark.parametrize("language", LANGUAGES)
def test_there_are_400_texts_of_three_to_twenty_words(language):
    texts = neutral_texts(language)
    lengths = Counter(len(words(text)) for text in texts)
    assert len({*texts}) == 400
    assert lengths.keys() <= {*range(3, 21)}
    assert lengths.keys() >= {3, 5, 10, 15}
    assert 100 < sum("?" in text for text in texts) < 300


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_two_texts_share_four_words_in_a_row(language):
    runs = Counter()
    for text in map(words, neutral_texts(language)):
        runs.update({*zip(text, text[1:], text[2:], text[3:], strict=False)})
    assert [run for run, count in runs.items() if count > 1] == []


@pytest.mark.parametrize("language", ["EN", "it", None])
def test_a_language_without_texts_is_refused(language):
    with pytest.raises(ValueError, match=f"language must be one of de, en, es, fr; got {language!r}"):
        neutral_texts(language)


def bags_of_letters(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


def test_texts_like_the_neutral_ones_are_accepted_at_the_level_without_any_label():
    texts = neutral_texts()
    # Every second text calibrates, and the others ask; half as many accepted or twice as many would be unlike 0.2.
    rows = bags_of_letters(["".join(pair) for pair in zip(neutral_texts("de"), neutral_texts("fr"), strict=True)])
    calibration, queries = bags_of_letters(texts[::2]).float(), bags_of_letters(texts[1::2]).float()
    space = EmbeddingSpace.fit(rows.float(), calibration=calibration, score="cosine")
    assert 0.1 < space.search(queries, 1, false_accept=0.2).accepted.float().mean() < 0.3


def test_texts_that_are_not_embedded_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"calibration must be numbers; the first is 'How long .* texts by a model"):
        EmbeddingSpace.fit(torch.eye(8), calibration=neutral_texts())


def test_an_index_of_images_refuses_texts_that_its_model_cannot_embed(model, photos):
    index = ImageIndex.build(model, photos, progress=False)
    with pytest.raises(ValueError, match="embeds no texts; search with images, or use a model such as CLIP"):
        index.calibrate(ImageSource.of(neutral_texts(), content="text"))
