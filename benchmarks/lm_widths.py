"""Whether the best learning rate of a language model moves with its width: Muon-hyperball beside AdamW.

python benchmarks/lm_widths.py --data ../shared/data [--optimizers muon_hyperball] [--widths 64 128]

A Llama of two layers learns the validation text of WikiText-2, without its last tenth, by the stock Trainer of
transformers, in less than one epoch. The last tenth selects the learning rate, and the first tokens of the test text
measure the model. The hyperball optimizers keep the norm of all hidden matrices, since Llama has no scale-invariant
weight; AdamW updates the embedding and the output layer at the same rate. Tokens are those of a byte-level BPE of the
training text.

The best learning rate has the smallest loss on the last tenth: with one seed, the best in steps of two; from there in
steps of the square root of two; then by the mean of three seeds, until both neighbors of the best are worse. The
largest model is also trained at the best learning rate of the smallest one. Each run is appended to a file in
`--work_dir`, and those in it are not repeated: a stopped run continues, and widths or optimizers may run in turn,
before a last run with all of them collects the results. Writes `results/lm_widths.json`.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from common import report, row
from datasets import Dataset, load_dataset
from lr_transfer import SEEDS, remembered
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_sphere  # noqa: F401  registers the names of the optimizers
from hf_sphere.comparison.significance import difference_test

BASELINE = "adamw_torch"
OPTIMIZERS = ("adamw_torch", "muon_hyperball", "muon")
WIDTHS, LAYERS, HEAD, CONTEXT, VOCABULARY = (64, 128, 256), 2, 32, 128, 1024
BATCH, STEPS, TEST_BLOCKS = 16, 120, 512
START = {"adamw_torch": -15, "muon_hyperball": -9, "muon": -11}
"""The first learning rate is the square root of two to this power."""

Losses = tuple[float, float]
"""On the last tenth of the training text, and on the test text."""


class Text:
    """Blocks of tokens: for training, for selecting the learning rate, and of the test text."""

    def __init__(self, data: Path) -> None:
        known, test = (
            "".join(load_dataset(str(data / "Salesforce" / "wikitext"), split=split)["text"])
            for split in ("validation", "test")
        )
        known, held_out = known[: len(known) * 9 // 10], known[len(known) * 9 // 10 :]
        self.tokenizer = ByteLevelBPETokenizer()
        self.tokenizer.train_from_iterator([known], vocab_size=VOCABULARY, show_progress=False)
        self.train, self.held_out = self.blocks(known), self.blocks(held_out)
        self.test = self.blocks(test).select(range(TEST_BLOCKS))

    def blocks(self, text: str) -> Dataset:
        """Return the blocks of a text; its end is dropped."""
        ids = self.tokenizer.encode(text).ids
        rows = [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
        return Dataset.from_dict({"input_ids": rows, "labels": rows})

    def run(self, work_dir: Path, optimizer: str, width: int, lr: float, seed: int) -> Losses:
        """Train a model and return its losses per token."""
        transformers.set_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=LAYERS,
                num_attention_heads=width // HEAD, max_position_embeddings=CONTEXT, use_cache=False,
            )
        )  # fmt: skip
        arguments = TrainingArguments(
            str(work_dir), optim=optimizer, learning_rate=lr, weight_decay=0.1, warmup_steps=STEPS // 10,
            lr_scheduler_type="linear", max_steps=STEPS, per_device_train_batch_size=BATCH, seed=seed, use_cpu=True,
            optim_args="hyperball_on=matrices" if optimizer.endswith("_hyperball") else None,
            per_device_eval_batch_size=BATCH, save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", prediction_loss_only=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=self.train)
        trainer.train()
        held_out, test = (trainer.evaluate(part)["eval_loss"] for part in (self.held_out, self.test))
        return held_out, test


def search(run: Callable[[float, int], Losses], start: int, losses: dict[float, list[Losses]]) -> float:
    """Return the best learning rate, and fill in the losses by learning rate.

    Args:
        run: Losses at a learning rate for a seed.
        start: The first learning rate, as a power of the square root of two.
        losses: An empty dictionary.
    """

    def loss(power: int, seeds: int) -> float:
        found = losses.setdefault(2 ** (power / 2), [])
        found += [run(2 ** (power / 2), seed) for seed in range(len(found), seeds)]
        held_out = statistics.mean(each[0] for each in found[:seeds])
        return held_out if math.isfinite(held_out) else math.inf

    best = start
    for step, seeds in ((2, 1), (1, 1), (1, SEEDS)):
        while (better := min((best, best - step, best + step), key=lambda power: loss(power, seeds))) != best:
            best = better
    return 2 ** (best / 2)


def test_losses(losses: list[Losses]) -> list[float]:
    """Return the losses on the test text, by seed."""
    return [test for _, test in losses]


def difference(what: str, ours: list[Losses], theirs: list[Losses]) -> dict[str, Any]:
    """Return a row with the difference of test losses, paired by seed, and its 95 % interval."""
    result = difference_test(test_losses(ours), test_losses(theirs), "paired")
    return {**row(what, result.difference if result else 0.0), "interval": list(result.interval) if result else [0, 0]}


def main() -> None:
    """Search for each optimizer and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Salesforce/wikitext")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/lm_widths"))
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.set_verbosity_error()
    text = Text(options.data)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[float, list[Losses]]] = {}
    at_best: dict[str, dict[int, list[Losses]]] = {name: {} for name in options.optimizers}
    for optimizer in options.optimizers:
        rates: list[float] = []
        for width in options.widths:
            what = f"{optimizer}, width {width}"
            run = remembered(options.work_dir / f"{what}.jsonl", partial(text.run, options.work_dir, optimizer, width))
            curve = curves[what] = {}
            rates.append(search(run, START[optimizer], curve))
            print(f"{what}: {rates[-1]:.3g}", flush=True)
            losses = at_best[optimizer][width] = curve[rates[-1]]
            rows.append(row(f"{what}: best learning rate", rates[-1]))
            rows.append(row(f"{what}: test loss", statistics.mean(test_losses(losses))))
            rows.append(row(f"{what}: standard deviation over seeds", statistics.stdev(test_losses(losses))))
        rows.append(row(f"{optimizer}: best at the largest width / best at the smallest", rates[-1] / rates[0]))
        moved = curve[rates[0]] = [run(rates[0], seed) for seed in range(SEEDS)]
        rows.append(difference(f"{optimizer}: test loss at the best rate of the smallest width - best", moved, losses))
    for optimizer, width in itertools.product([name for name in at_best if name != BASELINE], options.widths):
        ours, theirs = at_best[optimizer][width], at_best[BASELINE][width]
        rows.append(difference(f"{optimizer}, width {width}: test loss - that of {BASELINE}", ours, theirs))
    about = {"seeds": SEEDS, "transformers": transformers.__version__, "training_tokens": STEPS * BATCH * CONTEXT}
    shown = {what: {str(lr): curve[lr] for lr in sorted(curve)} for what, curve in curves.items()}
    report("lm_widths", rows, curves=shown, **about)


if __name__ == "__main__":
    main()
