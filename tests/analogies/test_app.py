import html
import itertools
import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from hf_sphere.analogies import LanguageModel, make_questions, score_questions

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio")
CHOICES = "paint : portrait\nnote : music\ntale : story\nweek : year"


@pytest.fixture(scope="module")
def tiny(golden_folder):
    return str(golden_folder / "tiny-bert")


@pytest.fixture(scope="module")
def app(load_file):
    return load_file("analogy/app.py")


@pytest.fixture(scope="module")
def expected(tiny):
    """Costs of the default choices of the page."""
    pairs = [tuple(line.split(" : ")) for line in CHOICES.splitlines()]
    (costs,) = score_questions(make_questions([("word", "language")], [pairs]), LanguageModel.load(tiny)).by_question()
    return dict(zip(CHOICES.splitlines(), costs, strict=True))


def shown_costs(result):
    """The choices that a result lists, with their costs as text."""
    rows = re.findall(r"<button data-choice=\S+ class=\S+><span>([^<]*)</span><span>([^<]*)</span>", result)
    return [(html.unescape(name), cost) for name, cost in rows]


# Results


def test_common_notations_of_a_pair_are_parsed(app):
    for text in ("word : language", "word:language", "word, language", "word\tlanguage", " word language"):
        assert app.read_pair(text) == ("word", "language")
    assert app.read_pair("New York : United States") == ("New York", "United States")
    for text in ("", "word", "one two three", "word :", "a : b : c"):
        with pytest.raises(ValueError, match="is not a pair; enter two words separated by a colon"):
            app.read_pair(text)


def test_costs_match_the_library_and_the_lowest_are_highlighted(app, tiny, expected):
    result, by_order, _ = app.answer("word : language", CHOICES, tiny, "perplexity", app.DEFAULT_TEMPLATE)
    assert f"<b>{min(expected, key=expected.get)}</b>" in result
    assert shown_costs(result) == [(name, f"{cost:.4f}") for name, cost in expected.items()]
    table = by_order.data
    assert len(table) == 24
    assert table.iloc[0, 2:].tolist() == pytest.approx(list(expected.values()))
    assert table.iloc[:, 1].tolist() == ["yes"] * 8 + ["no"] * 16
    assert result.count('class="best"') == 1
    by_order._compute()
    lowest = {(row, 2 + table.iloc[row, 2:].astype(float).argmin()) for row in range(24)}
    assert {cell for cell, style in by_order.ctx.items() if style} == lowest


def test_the_weight_is_passed_to_the_scoring(app, tiny):
    pairs = [tuple(line.split(" : ")) for line in CHOICES.splitlines()]
    of_scorings = {"marginal_bias": ("weight_head", "weight_tail"), "pmi": ("alpha",), "perplexity": ()}
    for scoring, names in of_scorings.items():
        questions, model = make_questions([("word", "language")], [pairs]), app.load(tiny)
        assert app.load(tiny) is model
        (costs,) = score_questions(questions, model, scoring, **dict.fromkeys(names, 0.7)).by_question()
        result, *_ = app.answer("word : language", CHOICES, tiny, scoring, "", 0.7)
        assert [cost for _, cost in shown_costs(result)] == [f"{cost:.4f}" for cost in costs]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"choices": ""}, "at least one choice"),
        ({"stem": "word"}, "is not a pair"),
        ({"template": "nonsense"}, "is not a template. Use one of is-to-what"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_errors_are_shown_without_a_table(app, tiny, changed, message):
    given = {"stem": "a : b", "choices": CHOICES, "model": tiny, "scoring": "perplexity", "template": ""}
    result, _, details = app.answer(**(given | changed))
    assert "Error" in result
    assert message in result
    assert shown_costs(result) == []
    assert not details["visible"]


class Words:
    """A tokenizer of a few words, of which it marks the first letter as BPE does, and of single lower-case letters."""

    unk_token = "<unk>"

    def get_vocab(self):
        return {word: 0 for word in ["Ġlanguage", "Ġlanguages", "Ġword", "Ġstory", "Ġ12", "ing", "<unk>"]}

    def tokenize(self, text):
        if text.replace(" ", "Ġ") in self.get_vocab():
            return [text.replace(" ", "Ġ")]
        return [letter if letter.islower() else "<unk>" for letter in text.strip()]


def test_words_that_the_model_lacks_are_named_with_the_nearest_spellings(app):
    model = SimpleNamespace(tokenizer=Words())
    question = app.read_question("lagnuage : word", "storry : ÄÖ\nlanguages : word word\nxyzzy : word")
    hints = [re.sub("<[^>]*>", "", hint) for hint in app.list_hints(question, model).split("</p>")[:-1]]
    split = "is not in the vocabulary of the model, which splits it into"
    assert hints == [
        f"lagnuage {split} 8 tokens. Did you mean language languages?",
        f"storry {split} 6 tokens. Did you mean story?",
        "ÄÖ is unknown to the model; choices that differ only in unknown words tie.",
    ]  # nothing about xyzzy, which no word is near


def test_a_click_exchanges_pair_and_choice_or_replaces_a_word(app):
    assert app.change_question("a : b", "c : d\n\ne : f", choice="1") == ("e : f", "c : d\na : b")
    assert app.change_question("a : b", "c : d", choice="7") == ("a : b", "c : d")  # of an older question
    changed = app.change_question("hte : b", "hte hte : white\nx : hte", word="hte", spelling=r"the\1")
    assert changed == (r"the\1 : b", "the\\1 the\\1 : white\nx : the\\1")


@pytest.mark.filterwarnings("ignore:the tokenizer of .* does not know the words <img:UserWarning")
def test_user_input_is_escaped(app, tiny):
    for stem in ("<img src=x> : b", "<img src=x>"):
        result, *_ = app.answer(stem, CHOICES, tiny, "perplexity", "")
        assert "<img" not in result


def test_visitors_choose_among_the_models_of_the_page(app, tiny):
    (models,) = (block for block in app.build_page([tiny]).blocks.values() if getattr(block, "label", "") == "Model")
    assert models.preprocess(tiny) == tiny
    for name in ("/etc", "bert-large-cased", "", ["x"]):
        with pytest.raises(Exception, match="not in the list of choices"):
            models.preprocess(name)


# In a browser


@pytest.fixture(scope="module")
def address(app, tiny, free_port):
    """URL of the page."""
    launched, launch = [], app.gr.Blocks.launch

    def start(page, **options):
        launched.append(page)
        return launch(page, prevent_thread_lock=True, quiet=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRADIO_ANALYTICS_ENABLED", raising=False)
        patch.setattr(sys, "argv", ["app.py", "--model", tiny, "--port", str(free_port)])
        patch.setattr(app.gr.Blocks, "launch", start)
        app.main()
        yield f"http://127.0.0.1:{free_port}"
    launched[0].close()


def test_the_page_shows_costs_and_errors(page, expected):
    orders = page.get_by_role("button", name="Costs by permutation")
    page.get_by_role("button", name="Answer").click()
    best = min(expected, key=expected.get)
    page.get_by_text(f"word : language :: {best}").wait_for()
    rows = page.locator(".choices button")
    assert rows.all_inner_texts() == [f"{name}\n{cost:.4f}" for name, cost in expected.items()]
    boxes = rows.evaluate_all("all => all.map(each => each.getBoundingClientRect()).map(box => [box.top, box.bottom])")
    assert all(bottom <= top for (_, bottom), (top, _) in itertools.pairwise(boxes))
    orders.click()
    page.get_by_text("analogy holds").filter(visible=True).first.wait_for()
    page.get_by_label("Choices").fill("paint portrait\nnote")
    page.get_by_role("button", name="Answer").click()
    page.get_by_text("'note' is not a pair; enter two words separated by a colon.").wait_for()
    orders.wait_for(state="hidden")


def test_a_click_on_a_choice_asks_with_it(page):
    page.get_by_role("button", name="Answer").click()
    page.locator(".choices button", has_text="tale : story").focus()
    page.keyboard.press("Enter")
    page.get_by_text("tale : story :: ").wait_for()
    assert page.get_by_label("Choices").input_value() == CHOICES.replace("tale : story", "word : language")
