"""Convert MiniLM with several slopes and floors of the spherization: how well it fits, and what lower precision costs.

python benchmarks/minilm.py [--encoder sentence-transformers/all-MiniLM-L6-v2] [--steps 100]

The feed-forward of the last layer is spherized with each setting and fitted to the plain encoder on the validation text
of WikiText-2, without training. Sentence embeddings (mean over the tokens) of lines of the test text are compared with
the plain encoder's, and with the same encoder's in lower precision, in which either all linear maps are converted, or
all but the one after the spherization. Word analogies are those of the recipe with the embeddings of single words. For
perplexities, the plain encoder is first trained as a masked language model by the recipe, and then converted.

Needs torchao. Everything runs on one CPU thread, about a quarter of an hour of processor time; finished parts in the
output folder are not repeated.
"""

import argparse
import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from common import report, row
from torch import Tensor
from torchao import quantization
from transformers import AutoTokenizer, BertForMaskedLM, BertModel, PreTrainedTokenizerBase

from hf_sphere import SphereBertConfig, SphereBertForMaskedLM, SphereBertModel, fit_spherization
from hf_sphere.data.options import TextDataOptions
from hf_sphere.data.sources import load_splits
from hf_sphere.data.text import load_text_data
from hf_sphere.models import SpherizationFit
from hf_sphere.nn.layers import names_kept_in_float32
from hf_sphere.utils.commands import COMMANDS

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
SETTINGS = {
    f"scaling {scaling:g}, delta {delta:g}": {"scaling": scaling, "delta": delta}
    for scaling, delta in ((5.0, 1e-6), (1.0, 1e-6), (1.0, 0.1), (1.0, 0.5), (0.5, 0.5))
}
PRECISIONS = ("float16", "bfloat16", "int8 weights", "int8 weights and activations")
BENCHMARKS = ("sat", "u2", "u4", "google", "bats")


def main() -> None:
    """Convert, measure and evaluate; finished parts in the output folder are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="Hub id or folder")
    parser.add_argument("--wikitext", default=local("Salesforce/wikitext"), help="Hub id or folder")
    parser.add_argument("--analogies", default=local("relbert/analogy_questions"), help="Hub id or folder")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "minilm")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the masked language model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()  # about the new head

    embedding = {name: cached(args, f"embedding-{name}", measure_embeddings) for name in ("plain", *SETTINGS)}
    for name, accuracies in evaluate_analogies(args).items():
        embedding[name]["analogies"] = accuracies
    train_plain(args)
    language = {name: cached(args, f"language-{name}", measure_language_model) for name in ("plain", *SETTINGS)}
    rows = []
    for name, entry in embedding.items():
        rows.append(row(f"{name}: largest weight of the map after the spherization", entry["largest_weight"]))
        rows.append(row(f"{name}: cosine, all maps with int8 weights", entry["cosines"]["int8 weights"]["mean"]))
    for name, entry in language.items():
        rows.append(row(f"{name}: perplexity", entry["float32"]))
        rows.append(row(f"{name}: perplexity, all maps with int8 weights", entry["int8 weights"]))
    report("minilm", rows, embedding=embedding, language=language, steps=args.steps)


def cached(args: argparse.Namespace, name: str, measure: Callable[[argparse.Namespace, str], Any]) -> Any:
    """Return the result of `measure` for a setting, read from the output folder if it is there."""
    path = args.output_dir / f"{folder_name(name)}.json"
    if not path.is_file():
        args.output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measure(args, name.partition("-")[2])), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def measure_embeddings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Convert the encoder with a setting, save it, and measure it on sentences of the test text."""
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    reference = BertModel.from_pretrained(args.encoder, add_pooling_layer=False).eval()
    texts = load_splits(args.wikitext, "wikitext-2-v1")
    sentences = [line for line in texts["test"]["text"] if len(line.split()) >= 20][:128]
    entry: dict[str, Any] = {}
    model, maps = reference, [reference.encoder.layer[-1].output.dense]
    if name != "plain":
        model, fit = convert(args.encoder, name, reference, SphereBertModel, texts["validation"]["text"])
        expected = embed(reference, tokenizer, sentences)
        entry["explained_variance"] = fit.explained_variance
        entry["cosine_to_plain"] = summary(F.cosine_similarity(embed(model, tokenizer, sentences), expected))
        maps = [model.get_submodule(spherical).linear for spherical in names_kept_in_float32(model)]
    model.save_pretrained(args.output_dir / folder_name(name))
    tokenizer.save_pretrained(args.output_dir / folder_name(name))
    entry["largest_weight"] = max(float(linear.weight.detach().abs().max()) for linear in maps)
    entry["cosines"] = lower_precision(model, tokenizer, sentences)
    return entry


@torch.no_grad()
def measure_language_model(args: argparse.Namespace, name: str) -> dict[str, float]:
    """Convert the trained masked language model with a setting, and return its perplexity by precision."""
    folder = str(args.output_dir / "trained")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForMaskedLM.from_pretrained(folder).eval()
    if name != "plain":
        texts = load_splits(args.wikitext, "wikitext-2-v1")["validation"]["text"]
        model, _ = convert(folder, name, model, SphereBertForMaskedLM, texts)
    options = TextDataOptions(
        args.wikitext, "wikitext-2-v1", train_split="validation", eval_split="test", max_eval_samples=100
    )
    batches = list(load_text_data(options, tokenizer, block_length=128, progress=False).evaluation.epoch())
    perplexities = {}
    for precision in ("float32", "int8 weights"):
        reduced = model if precision == "float32" else reduce(copy.deepcopy(model), precision, set())
        counts = [int((batch["labels"] != -100).sum()) for batch in batches]
        losses = [float(reduced(**batch).loss) * count for batch, count in zip(batches, counts, strict=True)]
        perplexities[precision] = math.exp(sum(losses) / sum(counts))
    return perplexities


def convert(folder: str, name: str, reference: Any, model_class: Any, texts: list[str]) -> tuple[Any, SpherizationFit]:
    """Spherize the last layer of a checkpoint with a setting, and fit it to the plain model."""
    settings = {f"spherization_{key}": value for key, value in SETTINGS[name].items()}
    config = SphereBertConfig.from_pretrained(folder, **settings)
    options = {"add_pooling_layer": False} if model_class is SphereBertModel else {}
    model = model_class.from_pretrained(folder, config=config, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (fit,) = fit_spherization(model, reference, texts, tokenizer=tokenizer, max_tokens=16_384)
    return model, fit


def lower_precision(
    model: Any, tokenizer: PreTrainedTokenizerBase, sentences: list[str]
) -> dict[str, dict[str, float]]:
    """Return cosines of the embeddings to those in float32, by precision.

    For int8 also with the maps after a spherization in float32, as the quantizers of transformers leave them.
    """
    expected = embed(model, tokenizer, sentences)
    spherical = names_kept_in_float32(model)
    cases = {precision: (precision, set[str]()) for precision in PRECISIONS}
    if spherical:
        cases |= {f"{name}, others": (name, spherical) for name in PRECISIONS if name.startswith("int8")}
    return {
        case: summary(F.cosine_similarity(embed(reduce(copy.deepcopy(model), *how), tokenizer, sentences), expected))
        for case, how in cases.items()
    }


def reduce(model: Any, precision: str, left_out: set[str]) -> Any:
    """Convert a model to a lower precision in place, except the named modules."""
    if precision in ("float16", "bfloat16"):
        kept = {name: copy.deepcopy(model.get_submodule(name)) for name in left_out}
        model.to(getattr(torch, precision))
        for name, module in kept.items():
            model.set_submodule(name, module)
        return model
    config = {
        "int8 weights": quantization.Int8WeightOnlyConfig,
        "int8 weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
    }[precision]()

    def chosen(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and name.rpartition(".")[0] not in left_out

    quantization.quantize_(model, config, filter_fn=chosen)
    return model


@torch.no_grad()
def embed(model: Any, tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> Tensor:
    """Return the mean over the tokens of the last hidden state, (N, d), of sentences cut to 64 tokens."""
    embeddings = []
    for start in range(0, len(sentences), 16):
        batch = tokenizer(
            sentences[start : start + 16], truncation=True, max_length=64, padding=True, return_tensors="pt"
        )
        states = model(**batch).last_hidden_state.double()
        mask = batch["attention_mask"][..., None]
        embeddings.append((states * mask).sum(1) / mask.sum(1))
    return torch.cat(embeddings)


def evaluate_analogies(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return test accuracies in percent by encoder and benchmark, of the embeddings of single words."""
    names = {folder_name(name): name for name in ("plain", *SETTINGS)}
    output = args.output_dir / "analogies"
    run_recipe(
        *("analogies", "--model_name_or_path", *(str(args.output_dir / folder) for folder in names)),
        *("--dataset_name", args.analogies, "--benchmarks", *BENCHMARKS, "--scorings", "embedding_similarity"),
        *("--grid", "none", "--output_dir", str(output)),
        *("--disable_tqdm", "--overwrite_output_dir"),
    )
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    accuracies: dict[str, dict[str, float]] = {}
    for result in [*results["results"], *results["averages"]]:
        name = names[Path(result["model"]).name]
        accuracies.setdefault(name, {})[result["benchmark"]] = 100 * result["eval_accuracy"]
    return accuracies


def train_plain(args: argparse.Namespace) -> None:
    """Train the plain encoder as a masked language model with the recipe, on the validation text."""
    output = args.output_dir / "trained"
    if (output / "all_results.json").is_file():
        return
    run_recipe(
        *("train_masked_lm", "--config", "language/minilm-plain"),
        *("--model_name_or_path", args.encoder, "--dataset_name", args.wikitext, "--train_split", "validation"),
        *("--eval_split", "test", "--max_train_samples", str(4 * args.steps), "--max_eval_samples", "100"),
        *("--output_dir", str(output), "--disable_tqdm", "--overwrite_output_dir"),
    )


def run_recipe(name: str, *options: str) -> None:
    """Run a job, or a training by the name of its script, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["-m", "hf_sphere.commands.main", *COMMANDS.get(name, name).split(), *options]
    subprocess.run([sys.executable, *words], env=environment, check=True)


def summary(cosines: Tensor) -> dict[str, float]:
    """Return the mean and the smallest of cosines."""
    return {"mean": float(cosines.mean()), "smallest": float(cosines.min())}


def folder_name(setting: str) -> str:
    """Return the name of a setting as the name of a folder."""
    return setting.replace(", ", "-").replace(" ", "")


def local(name: str) -> str:
    """Return the folder of a dataset beside the repository if there is one, else its name on the Hub."""
    return str(DATA / name) if (DATA / name).is_dir() else name


if __name__ == "__main__":
    main()
