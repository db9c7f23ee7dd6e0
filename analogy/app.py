"""Page to ask a language model a word analogy: what each choice costs, in every order of the words.

python analogy/app.py --model <id or folder>

It is also the app of a Space. It needs gradio; nothing is loaded from the network but the model, if that is an id.
"""

import argparse
import dataclasses
import functools
import html
import os
import re
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported: it would report the start

import gradio as gr
import pandas as pd
from pandas.io.formats.style import Styler

from hf_sphere.analogies import SCORINGS, TEMPLATES, LanguageModel, Question, make_questions, score_questions
from hf_sphere.analogies.prompts import PERMUTATIONS, POSITIVE_PERMUTATIONS
from hf_sphere.analogies.scoring import PermutedScoring, build_scoring

DEFAULT_MODEL = "bert-base-cased"
DEFAULT_TEMPLATE = "default of the scoring"
STEM = "word : language"
CHOICES = "paint : portrait\nnote : music\ntale : story\nweek : year"
WEIGHTS = ("weight_head", "weight_tail", "alpha")
"""Options of scorings that the page sets together: what they weigh is the share of head and tail by themselves."""

DEFAULT_WEIGHT = 0.2
HIGHLIGHT = "background-color: #9be7b5; color: black; font-weight: bold"

INTRODUCTION = """# Word analogies
Which pair of words is related as the first one is? A language model answers by how natural the sentences are that say
so; **the lowest cost is the answer**. A single question says little about a model: accuracies on many, beside what
guessing reaches, are what `recipes/evaluate_analogies.py` of `hf_sphere` is for.
"""


def main() -> None:
    """Start the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="id or folder of a model that the page starts with")
    parser.add_argument("--host", help="address to listen on; this machine only by default")
    parser.add_argument("--port", type=int, help="port; the first that is free by default")
    args = parser.parse_args()
    # The default theme has its fonts from the network.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    build_page(args.model).launch(server_name=args.host, server_port=args.port, theme=theme, ssr_mode=False)


def build_page(model: str) -> gr.Blocks:
    """Lay out the page."""
    with gr.Blocks(title="Word analogies", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column():
                stem = gr.Textbox(STEM, label="Pair", info="Two words, with a colon or a comma between them.")
                choices = gr.Textbox(CHOICES, label="Choices", lines=5, info="One pair a line.")
            with gr.Column():
                name = gr.Textbox(model, label="Model", info="Id on the Hub or folder, of any kind that reads text.")
                scoring = gr.Dropdown(list(SCORINGS), value="perplexity", label="Scoring")
                template = gr.Dropdown(
                    [DEFAULT_TEMPLATE, *TEMPLATES],
                    value=DEFAULT_TEMPLATE,
                    allow_custom_value=True,
                    label="Template",
                    info="A name, or a text with {a}, {b}, {c} and {d}; with {a} and {b} for relation_embedding.",
                )
                weight = gr.Slider(
                    -1,
                    1,
                    DEFAULT_WEIGHT,
                    step=0.1,
                    label="Weight of the biases",
                    info="What head and tail cost by themselves is taken off by it, in marginal_bias, hypothesis_bias "
                    "and pmi; at 0 the first two answer as perplexity does.",
                )
        button = gr.Button("Answer", variant="primary")
        verdict = gr.HTML()
        by_choice = gr.Dataframe(label="Costs, by choice", visible=False)
        by_order = gr.Dataframe(label="Costs, by order of the words a, b, c, d", visible=False, max_height=1000)
        button.click(answer, [stem, choices, name, scoring, template, weight], [verdict, by_choice, by_order])
    return page


def answer(
    stem: str, choices: str, model: str, scoring: str, template: str, weight: float = DEFAULT_WEIGHT
) -> tuple[str, Any, Any]:
    """Answer a question, or say what is wrong with it.

    Returns:
        A sentence, and the two tables.
    """
    try:
        question = read_question(stem, choices)
        costs, by_order = score(question, load(model.strip()), scoring, template, weight)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        nothing = gr.update(visible=False)
        return box(f"<b>Error</b>: {html.escape(str(error))}", "#ffd7d5"), nothing, nothing
    best = min(range(len(costs)), key=costs.__getitem__)
    names = [" : ".join(pair) for pair in question.choices]
    stem_text, best_text = (html.escape(text) for text in (" : ".join(question.stem), names[best]))
    verdict = box(f"{stem_text} is as <b>{best_text}</b>", "#d3f5dd")
    table = pd.DataFrame({"choice": names, "cost": costs})
    first = table.style.format(precision=4).apply(lambda row: [HIGHLIGHT * (row.name == best)] * len(row), axis=1)
    if by_order is None:
        return verdict, gr.update(value=first, visible=True), gr.update(visible=False)
    return verdict, gr.update(value=first, visible=True), gr.update(value=style_orders(by_order, names), visible=True)


def read_question(stem: str, choices: str) -> Question:
    """Read a pair, and a pair a line."""
    pairs = [read_pair(line) for line in choices.splitlines() if line.strip()]
    return make_questions([read_pair(stem)], [pairs])[0]


def read_pair(text: str) -> tuple[str, str]:
    """Read "word : language", "word, language" or "word language"."""
    words = [word.strip() for word in re.split(r"[:,;\t]", text)]
    if len(words) == 1:
        words = text.split()
    if len(words) != 2 or not all(words):
        raise ValueError(f"{text.strip()!r} is no pair; write two words with a colon between them.")
    return words[0], words[1]


@functools.lru_cache(maxsize=1)  # one, for two may not fit in memory
def load(model: str) -> LanguageModel:
    """Load a model, or take the one that was asked last."""
    if not model:
        raise ValueError("no model is given; write the id of one on the Hub, or a folder.")
    return LanguageModel.load(model)


def score(
    question: Question, model: LanguageModel, scoring: str, template: str, weight: float
) -> tuple[list[float], list[list[float]] | None]:
    """Costs of the choices (K), and of each in the 24 orders of the words (24, K), where the scoring has orders."""
    known = {option.name for option in dataclasses.fields(SCORINGS[scoring])}
    options: dict[str, Any] = {option: weight for option in WEIGHTS if option in known}
    if template not in ("", DEFAULT_TEMPLATE):
        options["template"] = template
    built = build_scoring(scoring, **options)
    if not isinstance(built, PermutedScoring):
        return score_questions([question], model, scoring, **options).by_question()[0], None
    measured = built.measure([question], model)
    orders = built.permutation_costs(built.terms(measured))[0].tolist()
    return orders[0], orders  # the first is the question as it is asked


def style_orders(costs: list[list[float]], names: list[str]) -> Styler:
    """Table of the costs in every order, the lowest of each highlighted."""
    table = pd.DataFrame(
        [
            [" ".join("abcd"[word] for word in order), "yes" if order in POSITIVE_PERMUTATIONS else "no", *row]
            for order, row in zip(PERMUTATIONS, costs, strict=True)
        ],
        # A table needs different names, and a choice may be given twice.
        columns=["order", "analogy holds", *(f"{number}. {name}" for number, name in enumerate(names, start=1))],
    )

    def mark(row: Any) -> list[str]:
        values = list(row)[2:]
        return ["", "", *(HIGHLIGHT * (place == values.index(min(values))) for place in range(len(values)))]

    return table.style.format(precision=4).apply(mark, axis=1)


def box(content: str, color: str) -> str:
    """Put what was escaped into a coloured box."""
    return f'<div style="background:{color}; color:black; padding:0.8em 1em; border-radius:6px">{content}</div>'


if __name__ == "__main__":
    main()
