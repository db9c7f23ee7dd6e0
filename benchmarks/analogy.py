"""Compare analogy scores with the published ones, and measure their speed and the cost of a spherized BERT layer.

python benchmarks/analogy.py --encoder sentence-transformers/all-MiniLM-L6-v2 --dataset relbert/analogy_questions

Writes `results/analogy.json`. Without an encoder, a random BERT of the same size with a word-level tokenizer is used;
without a dataset, the golden questions. `--quick` uses two questions instead of ten.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from common import ratio, report, row, time_in_turn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
from transformers.models.bert.modeling_bert import BertLayer

from hf_sphere import SphereBertConfig, SphereBertModel
from hf_sphere.analogies import (
    LanguageModel,
    Question,
    load_questions,
    make_questions,
    measure_questions,
    score_questions,
    search_configurations,
)
from hf_sphere.analogies.evaluation import PUBLISHED_GRID
from hf_sphere.analogies.language_model import perplexities, scored_sequences
from hf_sphere.analogies.prompts import PERMUTATIONS, Sentence
from hf_sphere.analogies.scoring import MarginalBias, Measurements

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "analogy"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN_LENGTH, PLAIN_BATCH = 32, 32
PLAIN_SENTENCES = 32
"""Number of sentences timed with the plain scheme before and after ours; all sentences would take half an hour."""


def golden_questions() -> list[dict[str, Any]]:
    """Load the golden cases with their questions."""
    asked = {
        (one["config"], one["split"], one["index"]): one for one in json.loads((GOLDEN / "questions.json").read_text())
    }
    cases = json.loads((GOLDEN / "scores.json").read_text())["questions"]
    for case in cases:
        one = asked[case["config"], case["split"], case["index"]]
        (case["question"],) = make_questions([one["stem"]], [one["choice"]], [one["answer"]])
    return cases


def compare_with_golden() -> list[dict[str, Any]]:
    """Compare perplexities, scores and predictions with the reference."""
    model = LanguageModel.load(GOLDEN / "tiny-bert", device=DEVICE, dtype=torch.float32)
    perplexity_error = score_error = 0.0
    predictions = wrong = 0
    for case in golden_questions():
        question, template = case["question"], case["template"]
        expected = torch.cat(
            [torch.tensor(case[f"{side}_perplexities"], dtype=torch.float64).T for side in ("positive", "negative")]
        )
        measured = measure_questions([question], model, template=template).terms[0, 0]
        perplexity_error = max(perplexity_error, float((measured / expected - 1).abs().max()))
        answers = [(measured[0].argmin().item(), case["perplexity_index_0_prediction"])]
        for biased in case["marginal_bias_index_0"]:
            weights = {name: biased[name] for name in ("weight_head", "weight_tail")}
            costs = score_questions([question], model, "marginal_bias", template=template, **weights).costs[0]
            difference = costs - torch.tensor(biased["score"], dtype=torch.float64)
            score_error = max(score_error, float(difference.abs().max()))
            answers.append((costs.argmin().item(), biased["prediction"]))
        predictions += len(answers)
        wrong += sum(ours != theirs for ours, theirs in answers)
    return [
        row("golden pseudo-perplexities: largest relative difference", perplexity_error, at_most=1e-4),
        row("golden marginal-bias scores: largest difference", score_error, at_most=1e-4),
        row(f"golden predictions that differ, of {predictions}", wrong, at_most=0),
    ]


def load_masked_model(encoder: str | None, questions: list[Question]) -> tuple[LanguageModel, str]:
    """Build a masked model of the size of MiniLM, with a seeded random head; also return its description."""
    torch.manual_seed(0)
    if encoder is not None:
        transformers.utils.logging.set_verbosity_error()  # transformers warns about the new head
        model = AutoModelForMaskedLM.from_pretrained(encoder)
        config, name = model.config, Path(encoder).name
        about = f"{name} as {type(model).__name__}, {config.num_hidden_layers} layers, {config.hidden_size} wide"
        return LanguageModel.load(model.to(DEVICE), AutoTokenizer.from_pretrained(encoder)), about
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertForMaskedLM(config)
    about = "a random BERT, 6 layers, 384 wide, word-level tokenizer"
    return LanguageModel.load(model.to(DEVICE), whole_words(questions)), about


def whole_words(questions: list[Question]) -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer for the questions; the golden tokenizer has about one token per letter."""
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    words = (word for question in questions for pair in (question.stem, *question.choices) for word in pair)
    known = dict.fromkeys([*special.values(), "[PAD]", "is", "to", "what", *" ".join(words).split()])
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, "[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", **special)


def grid_sentences(questions: list[Question]) -> list[Sentence]:
    """Return the sentences of all heads with all tails in all permutations, for one template."""
    scoring = MarginalBias()
    return [one for question in questions for order in PERMUTATIONS for one in scoring.sentences(question, order)]


@torch.inference_mode()
def plain_perplexities(model: LanguageModel, sentences: list[Sentence]) -> Tensor:
    """Compute pseudo-perplexities the usual way: one padded row per mask, all logits."""
    tokenizer = model.tokenizer
    rows, places, tokens, counts = [], [], [], []
    for sentence in sentences:
        ids = tokenizer(sentence.text)["input_ids"]
        scored = [place for place, token in enumerate(ids) if token not in tokenizer.all_special_ids]
        for place in scored:
            rows.append([*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]])
            places.append(place)
            tokens.append(ids[place])
        counts.append(len(scored))
    length = max(PLAIN_LENGTH, *map(len, rows))
    losses = []
    for start in range(0, len(rows), PLAIN_BATCH):
        some = slice(start, start + PLAIN_BATCH)
        padded = tokenizer.pad({"input_ids": rows[some]}, padding="max_length", max_length=length, return_tensors="pt")
        logits = model.model(**padded.to(DEVICE)).logits.log_softmax(-1)
        losses.append(-logits[torch.arange(len(logits)), places[some], tokens[some]].double().cpu())
    return torch.stack([part.mean().exp() for part in torch.cat(losses).split(counts)])


def compare_with_plain(model: LanguageModel, questions: list[Question]) -> list[dict[str, Any]]:
    """Measure sentences per second of our scheme and of the plain scheme, and the sources of the difference."""
    model.model.eval()
    sentences = grid_sentences(questions)
    chosen = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(0))[: 2 * PLAIN_SENTENCES].tolist()
    plain_perplexities(model, sentences[:2])
    perplexities(model, sentences[:2])
    plain_seconds, plain = 0.0, []
    for half in (chosen[:PLAIN_SENTENCES], chosen[PLAIN_SENTENCES:]):
        start = time.perf_counter()
        plain.append(plain_perplexities(model, [sentences[number] for number in half]))
        plain_seconds += time.perf_counter() - start
        if len(plain) == 1:
            start = time.perf_counter()
            ours = perplexities(model, sentences)
            our_seconds = time.perf_counter() - start
    speeds = len(sentences) / our_seconds, len(chosen) / plain_seconds
    sequences = scored_sequences(model, sentences)
    scored = sum(len(targets) for targets in sequences.values())
    return [
        row("plain scheme: sentences per second", speeds[1]),
        row(f"ours, {len(sentences):,} sentences: sentences per second", speeds[0]),
        row("ours / plain scheme, speed", speeds[0] / speeds[1], at_least=4),
        row("of that, factor from running repeated rows once", scored / len(sequences)),
        row("largest relative difference of the two", float((ours[chosen] / torch.cat(plain) - 1).abs().max()), 1e-4),
    ]


def search_speed() -> list[dict[str, Any]]:
    """Time the grids of one template on random perplexities of 374 questions, the size of SAT.

    The best accuracy of a grid is what a selection reaches by chance on the questions of the search.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = [("c", "d")] * 5
    questions = make_questions(
        [("a", "b")] * 374, [pairs] * 374, torch.randint(5, (374,), generator=generator).tolist()
    )
    values = torch.rand(374, len(PERMUTATIONS), 5, 5, generator=generator, dtype=torch.float64) * 1000 + 1
    scoring = MarginalBias()
    terms = torch.stack([scoring.terms(of_question.flatten(-2)) for of_question in values], dim=1)
    measurements = Measurements(scoring, questions, terms)
    rows = []
    for what, grid, bound in (("published grid", PUBLISHED_GRID, 2.0), ("full grid", None, None)):
        seconds, result = [], None
        for _ in range(3):
            start = time.perf_counter()
            result = search_configurations(measurements, grid=grid)
            seconds.append(time.perf_counter() - start)
        rows.append(
            row(f"{what}, {len(result):,} configurations x 374 questions: seconds", min(seconds), at_most=bound)
        )
        rows.append(row(f"{what}: best accuracy on these questions with random scores", result.accuracy.max().item()))
    return rows


def compare_layers() -> list[dict[str, Any]]:
    """Time the forward and backward pass of a spherized and a plain layer of BERT-base."""
    config = SphereBertConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layers = {"plain": BertLayer(config).to(DEVICE), "spherized": SphereBertModel(config).encoder.layer[0].to(DEVICE)}
    states = torch.randn(8, 128, config.hidden_size, device=DEVICE, requires_grad=True)
    gradient = torch.randn_like(states)

    def train(name: str) -> None:
        states.grad = None
        layers[name].zero_grad()
        output = layers[name](states)
        (output[0] if isinstance(output, tuple) else output).backward(gradient)

    seconds = time_in_turn({name: lambda name=name: train(name) for name in layers}, rounds=15)
    return [
        row("spherized / plain layer, BERT-base, 8 x 128, time", ratio(seconds["spherized"], seconds["plain"]), 1.25),
        row("plain layer, forward + backward, ms", 1e3 * min(seconds["plain"])),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", help="Hub id or folder of an encoder with a tokenizer")
    parser.add_argument("--dataset", help="Hub id or folder of the questions")
    parser.add_argument("--quick", action="store_true", help="two questions instead of ten")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    golden = compare_with_golden()
    if args.dataset is None:
        questions, source = list(dict.fromkeys(case["question"] for case in golden_questions())), "golden questions"
    else:
        questions, source = load_questions(args.dataset, "sat", "validation"), "sat, validation"
    questions = questions[: 2 if args.quick else 10]
    model, name = load_masked_model(args.encoder, questions)
    rows = [*golden, *compare_with_plain(model, questions), *search_speed(), *compare_layers()]
    report("analogy", rows, encoder=name, questions=source)


if __name__ == "__main__":
    main()
