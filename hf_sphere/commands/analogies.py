r"""Evaluate language models on word analogies: select configurations on validation questions, report on test questions.

hf-sphere analogies --model_name_or_path bert-base-cased outputs/language/minilm-spherized \
    --benchmarks sat u2 u4 google bats --output_dir outputs/analogies
hf-sphere analogies --model_name_or_path <folder> --scorings perplexity --max_questions 20

The scorings are described in `analogy/README.md`. Templates, weights and aggregations are searched on the validation
questions. The test questions are answered with the best configuration, and with the default one, without search. What
the columns of the printed table mean is printed below it.

Results are written to `all_results.json` and `results.csv`, predictions to `predictions.json` and a plot to
`analogies.png`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hf_sphere import analogies, visualization
from hf_sphere.analogies.prompts import TEMPLATES, scoring_names, template_text
from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import SEED, Arguments, argument, parse_arguments

FILES = ("all_results.json", "results.csv", "predictions.json", "analogies.png", "run.json")


@dataclass
class AnalogyArguments(Arguments):
    """Models, questions and scorings."""

    model_name_or_path: list[str] = argument(help="Masked, causal or embedding models: folders or Hub ids.")
    output_dir: str = argument("outputs/analogies", "Output directory.")
    overwrite_output_dir: bool = argument(False, "Replace the results in output_dir.")
    dataset_name: str = argument("relbert/analogy_questions", "Questions: Hub id or folder.")
    dataset_revision: str | None = argument(None, "Revision of the dataset on the Hub.")
    benchmarks: list[str] = argument(("sat", "u2", "u4", "google", "bats"), "Configurations of the dataset.")
    validation_split: str = argument("validation", "Split to select configurations on.")
    test_split: str = argument("test", "Split to report accuracies on.")
    scorings: list[str] = argument(
        ("marginal_bias", "embedding_similarity"),
        "Scorings of the choices; those that a model does not support are skipped with a message.",
        choices=scoring_names,
    )
    templates: list[str] = argument(
        tuple(TEMPLATES), "Templates to search: names, or texts with {a}, {b}, {c} and {d}. The first one is untuned."
    )
    grid: Literal["full", "published", "none"] = argument(
        "full", "Search all weights and aggregations, those of the paper, or only templates."
    )
    max_questions: int | None = argument(None, "Maximum number of questions per split, for a quick test.", ge=1)
    seed: int = argument(0, "Seed of the sample of questions.", **SEED)
    batch_size: int | None = argument(None, "Sequences per batch; chosen for speed by default.", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = argument(
        None, "Type of the weights; by default bfloat16 on GPUs that support it."
    )
    disable_tqdm: bool = argument(False, "Disable progress bars.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model_name_or_path", "benchmarks", "scorings", "templates"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name))))
        for template in self.templates:
            template_text(template)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate every model, and write the results and a plot."""
    (args,) = parse_arguments((AnalogyArguments,), argv, __doc__)
    import torch
    import transformers

    from hf_sphere.analogies.evaluation import LEGEND, evaluate_model, write_results
    from hf_sphere.analogies.questions import answers_of, sample_questions
    from hf_sphere.analogies.scoring import Engine
    from hf_sphere.utils.loading import load_pretrained

    def load(name: str, split: str) -> list[analogies.Question]:
        loaded = analogies.load_questions(args.dataset_name, name, split, revision=args.dataset_revision)
        answers_of(loaded)  # raises an error if one is missing
        return sample_questions(loaded, args.max_questions, seed=args.seed)

    output, overwrite = Path(args.output_dir), args.overwrite_output_dir
    output_dir.check_results_dir(output, overwrite=overwrite)
    for name in args.model_name_or_path:
        # A wrong name fails before the first model runs.
        load_pretrained(transformers.AutoConfig, name)
    benchmarks = {name: (load(name, args.validation_split), load(name, args.test_split)) for name in args.benchmarks}
    with output_dir.results_dir(output, FILES, overwrite=overwrite):
        # Words are embedded without a template.
        templates = {name: [None] if name == "embedding_similarity" else args.templates for name in args.scorings}
        results = []
        for name in args.model_name_or_path:
            model = analogies.LanguageModel.load(name, dtype=getattr(torch, args.dtype) if args.dtype else None)
            engine = Engine(model, args.batch_size, args.disable_tqdm)
            results += evaluate_model(engine, benchmarks, templates, args.grid)
        output_dir.write_settings(output, asdict(args))
        write_results(output / output_dir.RESULTS_FILE, results, benchmarks)
        print(f"{LEGEND}\nsaved {output / output_dir.RESULTS_FILE}, results.csv and predictions.json")
        try:
            visualization.plot_analogy_accuracies(results, title="word analogies", path=output / "analogies.png")
            print(f"saved {output / 'analogies.png'}")
        except ImportError as error:
            print(f"no plot: {error}")
