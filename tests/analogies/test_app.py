import os
import subprocess
import sys

import pytest

from hf_sphere.analogies import LanguageModel, make_questions, score_questions

pytest.importorskip("gradio")
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


# Results


@pytest.mark.parametrize(
    "text", ["word : language", "word:language", "word, language", "word\tlanguage", " word language"]
)
def test_common_notations_of_a_pair_are_parsed(app, text):
    assert app.read_pair(text) == ("word", "language")


def test_words_may_contain_spaces_if_the_separator_is_not_a_space(app):
    assert app.read_pair("New York : United States") == ("New York", "United States")


@pytest.mark.parametrize("text", ["", "word", "one two three", "word :", "a : b : c"])
def test_an_invalid_pair_is_rejected(app, text):
    with pytest.raises(ValueError, match="is not a pair; enter two words separated by a colon"):
        app.read_pair(text)


def test_costs_match_the_library(app, tiny, expected):
    verdict, by_choice, by_order = app.answer("word : language", CHOICES, tiny, "perplexity", app.DEFAULT_TEMPLATE)
    best = min(expected, key=expected.get)
    assert f"<b>{best}</b>" in verdict
    assert dict(by_choice["value"].data.to_numpy().tolist()) == pytest.approx(expected)
    table = by_order["value"].data
    assert len(table) == 24
    assert table.iloc[0, 2:].tolist() == pytest.approx(list(expected.values()))
    assert table.iloc[:, 1].tolist() == ["yes"] * 8 + ["no"] * 16


def test_the_answer_and_the_lowest_cost_per_permutation_are_highlighted(app, tiny):
    _, by_choice, by_order = app.answer("word : language", CHOICES, tiny, "perplexity", app.DEFAULT_TEMPLATE)
    assert by_choice["value"].to_html().count("background-color") == 1  # one CSS rule for the cells of one row
    table = by_order["value"]
    table._compute()
    lowest = {(row, 2 + table.data.iloc[row, 2:].astype(float).argmin()) for row in range(24)}
    assert {cell for cell, style in table.ctx.items() if style} == lowest


@pytest.mark.parametrize("scoring", ["marginal_bias", "pmi", "hypothesis_bias", "embedding_similarity"])
def test_scorings_with_permutations_show_them(app, tiny, scoring):
    _, _, by_order = app.answer("word : language", CHOICES, tiny, scoring, "is-to-as")
    assert by_order["visible"]


def test_the_weight_is_passed_to_the_scoring(app, tiny):
    pairs = [tuple(line.split(" : ")) for line in CHOICES.splitlines()]
    for scoring, names in {
        "marginal_bias": ("weight_head", "weight_tail"),
        "pmi": ("alpha",),
        "perplexity": (),
    }.items():
        (costs,) = score_questions(
            make_questions([("word", "language")], [pairs]), app.load(tiny), scoring, **dict.fromkeys(names, 0.7)
        ).by_question()
        _, by_choice, _ = app.answer("word : language", CHOICES, tiny, scoring, "", 0.7)
        assert by_choice["value"].data["cost"].tolist() == pytest.approx(costs)


def test_duplicate_choices_are_allowed(app, tiny):
    verdict, by_choice, _ = app.answer("a : b", "c : d\nc : d", tiny, "perplexity", app.DEFAULT_TEMPLATE)
    assert "<b>c : d</b> or <b>c : d</b> (a tie)" in verdict
    assert by_choice["value"].data["choice"].tolist() == ["c : d", "c : d"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"choices": ""}, "has no choices"),
        ({"stem": "word"}, "is not a pair"),
        ({"template": "nonsense"}, "is not a template. Use one of is-to-what"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_errors_are_shown_without_a_table(app, tiny, changed, message):
    given = {"stem": "a : b", "choices": CHOICES, "model": tiny, "scoring": "perplexity", "template": ""}
    verdict, by_choice, by_order = app.answer(**(given | changed))
    assert "Error" in verdict
    assert message in verdict
    assert not by_choice["visible"]
    assert not by_order["visible"]


@pytest.mark.filterwarnings("ignore:the tokenizer of .* does not know the words <img:UserWarning")
def test_user_input_is_escaped(app, tiny):
    for stem in ("<img src=x> : b", "<img src=x>"):
        verdict, _, _ = app.answer(stem, CHOICES, tiny, "perplexity", "")
        assert "<img" not in verdict


def test_visitors_choose_among_the_models_of_the_page(app, tiny):
    (models,) = (block for block in app.build_page([tiny]).blocks.values() if getattr(block, "label", "") == "Model")
    assert models.preprocess(tiny) == tiny
    for name in ("/etc", "bert-large-cased", "", ["x"]):
        with pytest.raises(Exception, match="not in the list of choices"):
            models.preprocess(name)


def test_a_model_is_loaded_once(app, tiny):
    assert app.load(tiny) is app.load(tiny)


# In a browser


@pytest.fixture
def address(root, tiny, free_port, tmp_path):
    """URL of the page, served by a separate process."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    environment.pop("GRADIO_ANALYTICS_ENABLED", None)
    process = subprocess.Popen(
        [sys.executable, str(root / "analogy" / "app.py"), "--model", tiny, "--port", str(free_port)],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = ""
    for line in process.stdout:
        said += line
        if "Running on local URL" in line:
            break
    assert process.poll() is None, said
    yield f"http://127.0.0.1:{free_port}"
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def page(address, chromium):
    """The page in a browser without network access."""
    page = chromium.new_page()
    page.set_default_timeout(60_000)
    page.strangers = []
    page.on("request", lambda asked: asked.url.startswith((address, "data:")) or page.strangers.append(asked.url))
    page.route(lambda url: not url.startswith(address), lambda route: route.abort())
    page.goto(address)
    yield page
    page.close()


def test_the_page_shows_costs_and_errors(page, expected):
    def see(text: str) -> None:
        page.get_by_text(text).filter(visible=True).first.wait_for()

    orders = page.get_by_text("Costs by permutation of the words")
    page.get_by_role("button", name="Answer").click()
    best = min(expected, key=expected.get)
    see(f"word : language :: {best}")
    see(f"{expected[best]:.4f}")
    orders.wait_for()
    page.get_by_label("Choices").fill("paint portrait\nnote")
    page.get_by_role("button", name="Answer").click()
    see("'note' is not a pair; enter two words separated by a colon.")
    orders.wait_for(state="hidden")
    assert page.strangers == []
