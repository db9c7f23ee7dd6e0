"""Gradio app: answer a word analogy with a language model and show the cost of every choice.

python analogy/app.py --model <id or folder> ...

Also the app of a Space. Requires gradio. Visitors choose among the given models; only those are loaded or downloaded.
"""

import argparse
import dataclasses
import difflib
import functools
import html
import os
import re
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry

import gradio as gr
import pandas as pd
import torch
from pandas.io.formats.style import Styler

from hf_sphere.analogies import TEMPLATES, LanguageModel, Question, make_questions, scoring_names
from hf_sphere.analogies.evaluation import lowest_costs
from hf_sphere.analogies.prompts import PERMUTATIONS, POSITIVE_PERMUTATIONS
from hf_sphere.analogies.scoring import Engine, scoring_class

MODELS = ("bert-base-cased", "roberta-base", "gpt2")
DEFAULT_TEMPLATE = "default of the scoring"
STEM = "word : language"
CHOICES = "paint : portrait\nnote : music\ntale : story\nweek : year"
WEIGHTS = ("weight_head", "weight_tail", "alpha")
"""Options of scorings that the page sets to the same value: the weights of the head and tail alone."""

DEFAULT_WEIGHT = 0.2
MOST_SPELLINGS = 3
"""Spellings to choose from, per word that the model does not have."""

HIGHLIGHT = "background-color: #9be7b5; color: black; font-weight: bold"

INTRODUCTION = """# Word analogies
Which pair of words has the same relation as the first one? A language model scores a sentence for each choice; **the
choice with the lowest cost is the answer**. A single question does not measure a model:
`hf-sphere analogies` of `hf_sphere` reports accuracies on benchmarks, next to the accuracy of guessing.
"""

STYLE = """
p { margin: 0.6em 0; }
.choices { display: grid; gap: 4px; max-width: 640px; }
.choices button { display: flex; justify-content: space-between; gap: 16px; padding: 8px 12px; text-align: left; }
button { border: 1px solid var(--border-color-primary); border-radius: 6px; color: inherit; cursor: pointer; }
button { overflow-wrap: anywhere; padding: 0 8px; }
button:hover, button:focus-visible { outline: 2px solid var(--color-accent); }
button.best { background: #9be7b5; color: black; font-weight: bold; }
"""
CLICK = """element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) trigger("click", {...button.dataset});
});"""


def main() -> None:
    """Launch the app."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, help="Hub ids or folders of the models to choose from")
    parser.add_argument("--host", help="address to listen on; localhost by default")
    parser.add_argument("--port", type=int, help="port; the first free one by default")
    args = parser.parse_args()
    # The default theme downloads its fonts.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    address = {"server_name": args.host, "server_port": args.port}
    build_page(args.model).launch(**address, theme=theme, ssr_mode=False, max_file_size="1mb")  # nothing is uploaded


def build_page(models: Sequence[str]) -> gr.Blocks:
    """Build the page; gradio refuses models that are not among the choices."""
    with gr.Blocks(title="Word analogies", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column(min_width=280):
                stem = gr.Textbox(STEM, label="Pair", info="Two words, separated by a colon or a comma.")
                choices = gr.Textbox(CHOICES, label="Choices", lines=5, info="One pair per line.")
            with gr.Column(min_width=280):
                name = gr.Dropdown(list(models), value=models[0], label="Model")
                scoring = gr.Dropdown(scoring_names(), value="perplexity", label="Scoring")
                with gr.Accordion("More options", open=False):
                    template = gr.Dropdown(
                        [DEFAULT_TEMPLATE, *TEMPLATES],
                        value=DEFAULT_TEMPLATE,
                        allow_custom_value=True,
                        label="Template",
                        info="A name, or a text with {a}, {b}, {c} and {d}.",
                    )
                    weight = gr.Slider(
                        -1,
                        1,
                        DEFAULT_WEIGHT,
                        step=0.1,
                        label="Weight of the biases",
                        info="Weight of the head and tail alone in marginal_bias, hypothesis_bias and pmi; with 0, "
                        "the first two predict the same as perplexity.",
                    )
                button = gr.Button("Answer", variant="primary")
        result = gr.HTML(css_template=STYLE, js_on_load=CLICK, apply_default_css=False)
        with gr.Accordion("Costs by permutation of a, b, c, d", open=False, visible=False) as details:
            by_order = gr.Dataframe(max_height=1000, pinned_columns=1)
        inputs, outputs = [stem, choices, name, scoring, template, weight], [result, by_order, details]
        for event in (button.click, stem.submit):
            event(answer, inputs, outputs)

        def use(event: gr.EventData, stem: str, choices: str) -> tuple[str, str]:
            return change_question(stem, choices, **event._data)

        result.click(use, [stem, choices], [stem, choices]).success(answer, inputs, outputs)
    return page


def answer(
    stem: str, choices: str, model: str, scoring: str, template: str, weight: float = DEFAULT_WEIGHT
) -> tuple[str, Any, Any]:
    """Answer a question, or show an error.

    Returns:
        The answer with the costs of the choices, or an error, as HTML; the table of all permutations; whether it is
        visible.
    """
    try:
        question = read_question(stem, choices)
        language_model = load(model)
        hints = list_hints(question, language_model)
        costs, by_order = score(question, language_model, scoring, template, weight)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        return box(f"<b>Error</b>: {html.escape(str(error))}", "#ffd7d5"), None, gr.update(visible=False)
    best = lowest_costs(torch.tensor(costs, dtype=torch.float64)).tolist()
    names = [" : ".join(pair) for pair in question.choices]
    tied = " or ".join(f"<b>{html.escape(name)}</b>" for name, lowest in zip(names, best, strict=True) if lowest)
    verdict = box(f"{html.escape(' : '.join(question.stem))} :: {tied}{' (a tie)' * (sum(best) > 1)}", "#d3f5dd")
    rows = "".join(
        f'<button data-choice="{index}" class="{"best" * best[index]}"><span>{html.escape(name)}</span>'
        f"<span>{cost:.4f}</span></button>"
        for index, (name, cost) in enumerate(zip(names, costs, strict=True))
    )
    table = f'<p>Cost of each choice; click one to ask with it as the pair.</p><div class="choices">{rows}</div>'
    return verdict + hints + table, style_orders(by_order, names), gr.update(visible=True)


def list_hints(question: Question, model: LanguageModel) -> str:
    """List the words that the vocabulary of a model does not have, with the nearest spellings to click, as HTML."""
    tokenizer, vocabulary, hints = model.tokenizer, whole_words(model), ""
    texts = [text for pair in (question.stem, *question.choices) for text in pair]
    for word in dict.fromkeys(" ".join(texts).split()):
        pieces = min((tokenizer.tokenize(text) for text in (f" {word}", word)), key=len)
        is_unknown = not pieces or tokenizer.unk_token in pieces
        near = (
            difflib.get_close_matches(word, vocabulary, MOST_SPELLINGS, 0.75) if is_unknown or len(pieces) > 1 else []
        )
        if not (is_unknown or near):
            continue
        named, buttons = html.escape(word), ""
        for spelling in map(html.escape, near):
            buttons += f' <button data-word="{named}" data-spelling="{spelling}">{spelling}</button>'
        split = f"is not in the vocabulary of the model, which splits it into {len(pieces)} tokens"
        unknown = "is unknown to the model; choices that differ only in unknown words tie"
        hints += (
            f"<p><b>{named}</b> {unknown if is_unknown else split}.{f' Did you mean{buttons}?' if near else ''}</p>"
        )
    return hints


def whole_words(model: LanguageModel) -> list[str]:
    """Return the words of a vocabulary; BPE and SentencePiece mark the tokens that begin one, WordPiece the others."""
    tokens = model.tokenizer.get_vocab()
    words = [token[1:] for token in tokens if token.startswith(("Ġ", "▁"))] or tokens
    return [*dict.fromkeys(word for word in words if word.isalpha())]


def change_question(
    stem: str, choices: str, choice: str | None = None, word: str = "", spelling: str = ""
) -> tuple[str, str]:
    """Exchange the pair and a choice, given by its index, or else replace a word by another spelling."""
    if choice is None:
        pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
        return re.sub(pattern, lambda _: spelling, stem), re.sub(pattern, lambda _: spelling, choices)
    lines = [line for line in choices.splitlines() if line.strip()]
    if int(choice) >= len(lines):  # they were changed since
        return stem, choices
    chosen, lines[int(choice)] = lines[int(choice)], stem
    return chosen.strip(), "\n".join(lines)


def read_question(stem: str, choices: str) -> Question:
    """Parse the stem pair and the choices, one pair per line."""
    pairs = [read_pair(line) for line in choices.splitlines() if line.strip()]
    return make_questions([read_pair(stem)], [pairs])[0]


def read_pair(text: str) -> tuple[str, str]:
    """Parse "word : language", "word, language" or "word language"."""
    words = [word.strip() for word in re.split(r"[:,;\t]", text)]
    if len(words) == 1:
        words = text.split()
    if len(words) != 2 or not all(words):
        raise ValueError(f"{text.strip()!r} is not a pair; enter two words separated by a colon.")
    return words[0], words[1]


@functools.lru_cache(maxsize=1)  # one, since two may not fit in memory
def load(model: str) -> LanguageModel:
    """Load a model; the last one is cached."""
    return LanguageModel.load(model)


def score(
    question: Question, model: LanguageModel, scoring: str, template: str, weight: float
) -> tuple[list[float], list[list[float]]]:
    """Return the costs of the choices (K) and of all permutations (24, K)."""
    kind = scoring_class(scoring)
    fields = {option.name for option in dataclasses.fields(kind)}
    options: dict[str, Any] = {option: weight for option in WEIGHTS if option in fields}
    if template not in ("", DEFAULT_TEMPLATE):
        options["template"] = template
    built = kind(**options)
    orders = built.permutation_costs(built.measure([question], Engine(model)).terms)[0].tolist()
    return orders[0], orders  # the first permutation keeps the order of the words


def style_orders(costs: list[list[float]], names: list[str]) -> Styler:
    """Format the costs of all permutations as a table, with the lowest cost of each row highlighted."""
    table = pd.DataFrame(
        [
            [" ".join("abcd"[word] for word in order), "yes" if order in POSITIVE_PERMUTATIONS else "no", *row]
            for order, row in zip(PERMUTATIONS, costs, strict=True)
        ],
        # Column names must be unique, but a choice may occur twice.
        columns=["permutation", "analogy holds", *(f"{index}. {name}" for index, name in enumerate(names, start=1))],
    )

    def mark(row: Any) -> list[str]:
        lowest = lowest_costs(torch.tensor(list(row)[2:], dtype=torch.float64)).tolist()
        return ["", "", *(HIGHLIGHT * best for best in lowest)]

    return table.style.format(precision=4).apply(mark, axis=1)


def box(content: str, color: str) -> str:
    """Format escaped text as a colored box."""
    return f'<div style="background:{color}; color:black; padding:0.8em 1em; border-radius:6px">{content}</div>'


if __name__ == "__main__":
    main()
