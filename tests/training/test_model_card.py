import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from transformers import PreTrainedConfig

import hf_sphere
from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.training.model_card import write_model_card
from hf_sphere.training.tasks import Description, Prepared


@dataclass
class Arguments:
    """The settings of the run."""

    learning_rate: float = 0.5
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    lr_scheduler_type: str = "constant"
    license: str = "mit"


def write(
    tmp_path: Path,
    model_id: str = "someone/a-model",
    metrics: Mapping[str, float] = MappingProxyType({"eval_accuracy": 0.987654321, "eval_loss": 0.0123456}),
    headline: Sequence[str] = ("accuracy",),
    model_class: str = "SphereVisionForImageClassification",
    pipeline_tag: str | None = "image-classification",
    settings: Mapping[str, Any] = MappingProxyType({"learning_rate": 0.25}),
    command: Sequence[str] = ("accelerate", "launch", "recipe.py", "--learning_rate", "0.25"),
    seconds: float = 42.0,
    metric: str = "eval_accuracy",
    results: Mapping[str, Any] = MappingProxyType({"epoch": 3.0, "best_epoch": None}),
    args: Arguments | None = None,
    **described: Any,
) -> ModelCard:
    """Write a card with the library's template and load it again."""
    texts = {"title": "A title", "summary": "A summary.", "dataset": "someone/a-dataset", "tags": ["spherized"]}
    description = Description(**texts | {"model": {"backbone": "`lenet5`"}} | described)
    folder = tmp_path / model_id
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(tmp_path):
        accelerator = SimpleNamespace(device=torch.device("cpu"))
        run = SimpleNamespace(args=args or Arguments(), output_dir=Path(model_id), accelerator=accelerator)
        run.settings = settings
        task = SimpleNamespace(pipeline_tag=pipeline_tag, headline=headline, arguments=(Arguments,))
        model = type(model_class, (), {"config": PreTrainedConfig()})()
        prepared = Prepared(model, SimpleNamespace(eval_split="test"), None, description, lambda *_: {})
        measured = {**metrics, **results, "train_runtime": seconds}
        write_model_card(run, task, prepared, measured, command, metric=metric)
        return ModelCard.load(Path(model_id, "README.md"))


def test_the_metadata_have_the_accuracy_task_dataset_library_tags_and_license(tmp_path):
    data = write(tmp_path).data
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.987654)
    found = (result.task_type, result.dataset_type, result.dataset_name, result.dataset_split)
    assert found == ("image-classification", "someone/a-dataset", "a-dataset", "test")
    assert (data.library_name, data.pipeline_tag, data.license) == ("hf_sphere", "image-classification", "mit")
    assert data.tags == ["hf_sphere", "hypersphere", "spherized"]
    path = tmp_path / "someone/a-model/.eval_results/results.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("someone/a-dataset", "accuracy", 0.987654)
    metrics = {"eval_accuracy": 0.5, "eval_mean_absolute_error": 2.5, "eval_loss": 1.0}
    card = write(tmp_path, metrics=metrics, headline=["accuracy", "mean_absolute_error"], pipeline_tag=None)
    found = [(result.task_type, result.metric_type, result.metric_value) for result in card.data.eval_results]
    assert found == [("other", "accuracy", 0.5), ("other", "mean_absolute_error", 2.5)]


def test_data_that_are_not_on_the_hub_are_not_linked_and_paths_are_not_published(tmp_path, monkeypatch):
    results = tmp_path / "someone/a-model/.eval_results/results.yaml"
    for dataset, is_on_hub in {"someone/a-dataset": True, "imdb": True, "digits": False, "a/folder/of": False}.items():
        assert write(tmp_path, dataset=dataset).data.datasets == ([dataset] if is_on_hub else None)
        assert results.exists() == is_on_hub
    (tmp_path / "my-images").mkdir()
    assert str(tmp_path) not in write(tmp_path, dataset=str(tmp_path / "my-images")).content
    monkeypatch.chdir(tmp_path)
    Path("someone/a-dataset").mkdir(parents=True)
    assert write(tmp_path).data.datasets is None


BREAKOUT = "x\n```\n# injected | cell"


@pytest.mark.parametrize("place", ["title", "summary", "settings", "model"])
def test_line_break_and_bar_do_not_leave_their_place(tmp_path, place):
    kinds = {"settings": {"a": BREAKOUT}, "model": {"a": BREAKOUT}}
    text = write(tmp_path, **{place: kinds.get(place, BREAKOUT)}).text
    assert not [line for line in text.splitlines() if line.startswith("# injected")]
    assert text.count("\n```") == write(tmp_path).text.count("\n```")
    assert r"| a | x \| y |" in write(tmp_path, settings={"a": "x | y"}).text


def test_the_text_has_the_details_of_the_run(tmp_path):
    text = write(tmp_path).text
    lines = ["# A title", "A summary.", "| backbone | `lenet5` |", "| learning_rate | 0.25 |"]
    lines += ["| eval_accuracy | 98.77 % |", "| eval_loss | 0.01235 |"]
    assert [line for line in lines if line not in text.splitlines()] == []
    assert "`pip install hf_sphere`" in text.partition("\n## ")[0]
    assert 'model_id = "someone/a-model"' in text
    assert 'pipeline("image-classification", model="someone/a-model")' in text
    assert "pipeline" not in write(tmp_path, model_class="SphereVisionForRegression", pipeline_tag=None).content
    assert f"hf_sphere {hf_sphere.__version__}," in text
    metrics = {"eval_mean_absolute_error": 12.3456, "eval_loss": 6.58, "eval_nll": 1.23}  # in its unit, not in percent
    text = write(tmp_path, metrics=metrics, headline=[], seconds=5400.0).text
    assert "| eval_mean_absolute_error | 12.35 |" in text
    assert "- `eval_loss`: mean training loss on the evaluation split, including a margin" in text
    assert "- `eval_nll`: mean negative log-likelihood of the classes, calibrated, without a margin" in text
    assert "Training took 90 min." in text
    for seconds, shown in ((42.4, "42 s"), (599.0, "599 s")):
        assert f"Training took {shown}." in write(tmp_path, seconds=seconds).text


def test_loading_code_is_valid_python(tmp_path):
    """It compiles, and its imports exist."""
    code = [
        block.split("```")[0]
        for block in write(tmp_path, model_class="SphereVisionForRegression").text.split("```python\n")
    ]
    for block in code[1:]:
        compile(block, "card", "exec")
    assert "from hf_sphere import SphereVisionForRegression, SphereVisionImageProcessor" in code[-1]
    assert hasattr(hf_sphere, "SphereVisionForRegression")
    assert hasattr(hf_sphere, "SphereVisionImageProcessor")
    code = write(tmp_path, model_class="SphereVisionForFewShotClassification", pipeline_tag=None).text.split(
        "```python\n"
    )[1]
    compile(code.split("```")[0], "card", "exec")
    assert "support_pixel_values=support" in code


def test_retrieval_card_shows_a_search(tmp_path, monkeypatch, capsys):
    config = SphereVisionConfig(
        backbone="linear_embedding", backbone_kwargs={"width": 8}, num_channels=3, image_size=8, head="cosine"
    )
    SphereVisionForImageClassification(config).save_pretrained(tmp_path / "model")
    processor = SphereVisionImageProcessor(
        num_channels=3, size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    card = write(tmp_path, pipeline_tag="image-feature-extraction", model_id="model")
    assert card.data.pipeline_tag == "image-feature-extraction"
    exec(card.text.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.startswith("[1, ")  # the query itself


COMMAND = ["accelerate", "launch", "my recipe.py", "--head_kwargs", "{scaling: 5.0}", "--lr_milestones", "1", "2"]


def shown_command(card: ModelCard) -> str:
    return card.text.split("```shell\n")[-1].split("\n```")[0]


def test_command_can_be_pasted_into_a_shell_and_is_wrapped_before_options(tmp_path):
    command = shown_command(write(tmp_path, command=COMMAND))
    assert shlex.split(command.replace("\\\n", "")) == COMMAND
    wrapped = [
        "accelerate launch 'my recipe.py' \\",
        "    --head_kwargs '{scaling: 5.0}' \\",
        "    --lr_milestones 1 2",
    ]
    assert command.splitlines() == wrapped


def test_the_card_states_how_the_epoch_was_chosen(tmp_path):
    best = Arguments(load_best_model_at_end=True)
    for args, metric, results, note in (
        (best, "eval_accuracy", {"epoch": 0.0, "best_epoch": None}, "the last epoch, 0; the evaluation split was"),
        (best, "eval_accuracy", {"epoch": 3.0, "best_epoch": 2}, "epoch 2, chosen by its accuracy on the evaluation"),
        (best, "train_loss", {"epoch": 3.0, "best_epoch": 2}, "epoch 2, chosen by its loss on the training split."),
    ):
        assert f"The model is from {note}" in write(tmp_path, args=args, metric=metric, results=results).text
