"""Compare heads, losses, backbones or other settings on a dataset, with a verdict.

hf-sphere compare photos --heads softmax cosine arcface vmf --frozen --backbones timm_model=weights.safetensors
hf-sphere compare photos --settings table.yaml --output_dir outputs/comparison

Each is tuned alike, by scores on images that are never tested, and then run with all seeds. The same command resumes.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict

from hf_sphere import visualization
from hf_sphere.comparison.plan import Plan
from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import named_first, parse_arguments
from hf_sphere.utils.pages import draw_figure, draw_markdown, write_page

TRIALS = "trials.jsonl"
FILES = (TRIALS, "comparison.md", "comparison.html", "comparison.png", "comparison.json", output_dir.RUN_FILE)
FOLDERS = ("features", "models", "model", "finetuned")
FREE = {"output_dir", "overwrite_output_dir", "finetune"}


def main(argv: Sequence[str] | None = None) -> None:
    """Check the plan, run it, and write tables, figure and the best model."""
    (plan,) = parse_arguments((Plan,), named_first("dataset_name", argv), __doc__)
    from hf_sphere.comparison.planned import PlannedComparison

    planned = PlannedComparison(plan)
    folder, settings = planned.folder, asdict(plan) | planned.contents()
    finetuned, overwrite = folder / "finetuned", plan.overwrite_output_dir
    later = FREE | {"training"} if plan.frozen else FREE  # of a finished comparison that is continued by --finetune
    try:
        resume = output_dir.can_resume_results(folder, settings, ignored=later, overwrite=overwrite)
    except FileExistsError:
        if "num_settings" not in (output_dir.read_settings(folder) or {}) or (folder / TRIALS).exists():
            raise
        resume, overwrite = False, True  # a comparison that failed before its first trial
    if plan.finetune and (finetuned / TRIALS).exists():
        output_dir.can_resume_results(finetuned, settings, ignored=FREE, overwrite=overwrite)
    with output_dir.results_dir(folder, FILES, overwrite=overwrite, resume=resume):
        for path in [folder / name for name in FOLDERS if overwrite and (folder / name).exists()]:
            shutil.rmtree(path)
        for each in [folder, finetuned][: 1 + bool(plan.finetune)]:
            each.mkdir(exist_ok=True)
            output_dir.write_settings(each, settings)
        for results in planned.run():
            page, path = [draw_markdown(results.lines)], results.study.folder / "comparison.png"
            if results.comparison is not None:
                try:
                    visualization.plot_comparison(results.comparison, title=f"{plan.metric}, %", path=path)
                    page.insert(0, draw_figure(path))
                except ImportError as error:
                    print(f"no figure: {error}")
            write_page(path.with_suffix(".html"), f"Comparison on {plan.dataset_name}", page)
