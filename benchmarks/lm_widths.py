"""Whether the best learning rate of a language model moves with its width, and with its depth by the rules for it.

python benchmarks/lm_widths.py --data ../shared/data [--optimizers muon_hyperball] [--widths 64 128]
python benchmarks/lm_widths.py --data ../shared/data --depth [--optimizers muon_hyperball adamw_torch]

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

With `--depth`, the learning rate is tuned at width 64 and two layers, and used at width 256 and eight layers, with
`base_width=64,base_layers=2` for the optimizers that have these options. The loss there is compared with that of the
best learning rate of the large model, found with one seed in steps of two and of the square root of two; both have
three seeds. Muon-hyperball without these options, and the other optimizers, have one seed and steps of two. Runs have
half the batch and fewer steps. Writes `results/lm_depth.json`, whenever an optimizer is done.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
MEASURED = "muon_hyperball"
UNSCALED = "muon_hyperball without base"
WIDTH_ONLY = "muon_hyperball without base_layers"
TRANSFERRED = (MEASURED, UNSCALED, WIDTH_ONLY, BASELINE, "muon", "adamw_hyperball")
WIDTHS, HEAD, CONTEXT, VOCABULARY = (64, 128, 256), 32, 128, 1024
START = {"adamw_torch": -15, "muon_hyperball": -9, "muon": -11, "adamw_hyperball": -9, UNSCALED: -9, WIDTH_ONLY: -9}
"""The first learning rate is the square root of two to this power."""

Losses = tuple[float, float]
"""On the last tenth of the training text, and on the test text."""


class Size(NamedTuple):
    """Size of a model, and of its training and test."""

    width: int
    layers: int = 2
    steps: int = 120
    batch: int = 16
    test_blocks: int = 512


SMALL, LARGE = Size(64, 2, 100, 8, 128), Size(256, 8, 100, 8, 128)
BASE = f"base_width={SMALL.width},base_layers={SMALL.layers}"


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
        self.test = self.blocks(test)

    def blocks(self, text: str) -> Dataset:
        """Return the blocks of a text; its end is dropped."""
        ids = self.tokenizer.encode(text).ids
        rows = [ids[start : start + CONTEXT] for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
        return Dataset.from_dict({"input_ids": rows, "labels": rows})

    def run(self, work_dir: Path, optimizer: str, size: Size, lr: float, seed: int) -> Losses:
        """Train a model and return its losses per token."""
        transformers.set_seed(seed)
        width, name = size.width, optimizer.partition(" without")[0]
        of_groups = ["hyperball_on=matrices"] if name.endswith("_hyperball") else []
        if size == LARGE and optimizer not in (BASELINE, UNSCALED):
            of_groups.append(BASE.partition(",")[0] if optimizer == WIDTH_ONLY else BASE)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=size.layers,
                num_attention_heads=width // HEAD, max_position_embeddings=CONTEXT, use_cache=False,
            )
        )  # fmt: skip
        arguments = TrainingArguments(
            str(work_dir), optim=name, learning_rate=lr, weight_decay=0.1, warmup_steps=size.steps // 10,
            lr_scheduler_type="linear", max_steps=size.steps, per_device_train_batch_size=size.batch, seed=seed,
            use_cpu=True, optim_args=",".join(of_groups) or None, per_device_eval_batch_size=size.batch,
            save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", prediction_loss_only=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=self.train)
        trainer.train()
        parts = self.held_out, self.test.select(range(size.test_blocks))
        held_out, test = (trainer.evaluate(part)["eval_loss"] for part in parts)
        return held_out, test


def search(
    run: Callable[[float, int], Losses],
    start: int,
    losses: dict[float, list[Losses]],
    stages: Sequence[tuple[int, int]] = ((2, 1), (1, 1), (1, SEEDS)),
) -> float:
    """Return the best learning rate, and fill in the losses by learning rate.

    Args:
        run: Losses at a learning rate for a seed.
        start: The first learning rate, as a power of the square root of two.
        losses: An empty dictionary.
        stages: Powers of a step, and number of seeds, one after the other.
    """

    def loss(power: int, seeds: int) -> float:
        found = losses.setdefault(2 ** (power / 2), [])
        found += [run(2 ** (power / 2), seed) for seed in range(len(found), seeds)]
        held_out = statistics.mean(each[0] for each in found[:seeds])
        return held_out if math.isfinite(held_out) else math.inf

    best = start
    for step, seeds in stages:
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


def transfer(text: Text, work_dir: Path, optimizers: list[str]) -> None:
    """Use the best learning rate of a small model in a large one, by optimizer, and write what is done so far."""
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[Losses]]] = {}
    for optimizer in optimizers:
        rates: list[float] = []
        seeds = SEEDS if optimizer == MEASURED else 1
        for size in (SMALL, LARGE):
            what = f"{optimizer}, width {size.width}, {size.layers} layers"
            run = remembered(work_dir / f"{what}.jsonl", partial(text.run, work_dir, optimizer, size))
            losses: dict[float, list[Losses]] = {}
            start = round(2 * math.log2(rates[0])) if rates else START[optimizer]
            if rates:
                stages = ((2, 1), (1, 1)) if optimizer == MEASURED else ((2, 1),)
            else:  # equal for all that start with its name
                stages = ((2, 1), (1, 1), (1, SEEDS if optimizer.startswith(MEASURED) else 1))
            rates.append(search(run, start, losses, stages))
            moved, best = ([run(rate, seed) for seed in range(seeds)] for rate in (rates[0], rates[-1]))
            losses |= {rates[0]: moved, rates[-1]: best}
            rows.append(row(f"{what}: best learning rate", rates[-1]))
            rows.append(row(f"{what}: test loss", statistics.mean(test_losses(best))))
            if seeds > 1:
                rows.append(row(f"{what}: standard deviation over seeds", statistics.stdev(test_losses(best))))
            print(f"{what}: {rates[-1]:.3g}, {statistics.mean(test_losses(best)):.3f}", flush=True)
            curves[what] = {str(lr): losses[lr] for lr in sorted(losses)}
        rows.append(row(f"{optimizer}: best of the large model / best of the small one", rates[1] / rates[0]))
        what = f"{optimizer}: test loss at the best rate of the small model - best"
        cost = statistics.mean(test_losses(moved)) - statistics.mean(test_losses(best))
        interval = {"interval": difference(what, moved, best)["interval"]} if seeds > 1 else {}
        rows.append({**row(what, cost, at_most=0.02), **interval})
        rows.append(
            row(f"{optimizer}: test loss at the best rate of the small model", statistics.mean(test_losses(moved)))
        )
        about = {"seeds": SEEDS, "transformers": transformers.__version__, "base": BASE}
        report("lm_depth", rows, curves=curves, training_tokens=LARGE.steps * LARGE.batch * CONTEXT, **about)


def main() -> None:
    """Search for each optimizer and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Salesforce/wikitext")
    parser.add_argument("--depth", action="store_true", help="from width 64 and 2 layers to 256 and 8")
    parser.add_argument("--optimizers", nargs="+", choices=TRANSFERRED)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/lm_widths"))
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.set_verbosity_error()
    text = Text(options.data)
    if options.depth:
        transfer(text, options.work_dir, options.optimizers or list(TRANSFERRED))
        return
    options.optimizers = options.optimizers or list(OPTIMIZERS)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[float, list[Losses]]] = {}
    at_best: dict[str, dict[int, list[Losses]]] = {name: {} for name in options.optimizers}
    for optimizer in options.optimizers:
        rates: list[float] = []
        for width in options.widths:
            what = f"{optimizer}, width {width}"
            run = remembered(
                options.work_dir / f"{what}.jsonl", partial(text.run, options.work_dir, optimizer, Size(width))
            )
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
    about = {"seeds": SEEDS, "transformers": transformers.__version__, "training_tokens": 120 * 16 * CONTEXT}
    shown = {what: {str(lr): curve[lr] for lr in sorted(curve)} for what, curve in curves.items()}
    report("lm_widths", rows, curves=shown, **about)


if __name__ == "__main__":
    main()
