import runpy
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from doubles import hub
from huggingface_hub import ModelCard
from PIL import Image
from training_runs import DIGITS, output_on_digits, same, weights
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_sphere import SphereVisionConfig
from hf_sphere.commands import publish
from hf_sphere.data import ImageDataOptions
from hf_sphere.nn import HEADS
from hf_sphere.training import RecipeArguments
from hf_sphere.training.tasks.classification import ModelArguments, build_classifier
from hf_sphere.training.tasks.image import Setup

RECIPE = "train_image_classification"
QUICK = DIGITS
EXAMPLE = ["--lr_scheduler_type", "linear", "--num_train_epochs", "3", "--per_device_train_batch_size", "32"]
EXAMPLE += ["--disable_tqdm"]
# Dropout and augmentation make the run depend on random numbers.
RANDOM = ["--backbone_kwargs", "{width: 32, drop_rate: 0.3}", "--head", "softmax", "--crop_padding", "1"]


# Output


def test_the_saved_model_and_processor_reproduce_the_reported_accuracy(finished, results_of):
    results, (output, labels) = results_of(finished), output_on_digits(finished)
    assert results["eval_accuracy"] > 0.5
    assert (output.logits.argmax(-1) == labels).float().mean().item() == pytest.approx(results["eval_accuracy"])
    assert results["history"][-1]["eval_loss"] == pytest.approx(results["eval_loss"])
    assert results["train_samples_per_second"] * results["train_runtime"] == pytest.approx(2 * 200)  # two epochs
    config = AutoModelForImageClassification.from_pretrained(finished).config
    assert config.id2label == {index: str(index) for index in range(10)}


@pytest.mark.parametrize("head", sorted(HEADS))
def test_every_head_trains(train, results_of, head):
    assert results_of(train("--head", head, "--num_train_epochs", "4"))["eval_accuracy"] > 0.4


# The evaluation split in the model card


def note(folder: Path) -> str:
    (line,) = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("The model is from")]
    return line


def test_the_card_states_whether_the_evaluation_split_was_used(finished, train):
    assert "the evaluation split was not used for selection" in note(finished)
    assert "the evaluation split itself (optimistic)" in note(train("--load_best_model_at_end"))
    for words in (["--early_stopping_patience", "1"], ["--lr_scheduler_type", "reduce_lr_on_plateau"]):
        assert "was not used for selection" not in note(train(*words, "--overwrite_output_dir"))


def test_drawings_on_transparency_have_the_color_of_the_processor(train, tmp_path):
    drawings = tmp_path / "drawings"
    for shade, name in ((0, "ink"), (90, "paint")):
        (drawings / name).mkdir(parents=True)
        for number in range(8):
            drawing = Image.new("LA", (8, 8))
            drawing.paste((shade, 255), (number % 4, 0, 8, 8))
            drawing.save(drawings / name / f"{number}.png")
    folder = train("--dataset_name", str(drawings), "--eval_split", "train", "--background_color", "200", "200", "200")
    assert AutoImageProcessor.from_pretrained(folder).background_color == [200, 200, 200]


def test_images_of_one_class_are_an_error_that_says_what_to_do(train, tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.new("L", (8, 8), number).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "metadata.csv").write_text("file_name,label\n0.png,all\n1.png,all\n")
    with pytest.raises(ValueError, match="images are of one class, all: put the images into one folder per class, or"):
        train("--dataset_name", str(tmp_path / "photos"))


# Errors


def test_a_saved_model_is_not_evaluated_on_other_classes(train, finished):
    words = ["--model_name_or_path", str(finished), "--dataset_name", "two_clusters", "--num_train_epochs", "0"]
    with pytest.raises(ValueError, match=r"has 2 classes \(.*trained on 10 classes"):
        train(*words)


# A loop of one's own


def test_the_example_of_a_loop_has_the_numbers_of_the_recipe(
    root, cache, recipe, run_main, run_alone, results_of, monkeypatch, tmp_path, capsys
):
    words = ["--image_size", "28", "--max_train_samples", "200", "--learning_rate", "0.002", *cache]
    run_main(recipe, [*words, *EXAMPLE, "--output_dir", str(tmp_path / "recipe")])
    capsys.readouterr()
    example = root / "examples" / "train_with_accelerate.py"
    monkeypatch.setattr("sys.argv", [str(example), *words, "--output_dir", str(tmp_path / "own")])
    run_alone(runpy.run_path, str(example), run_name="__main__")
    shown = [f"accuracy {100 * entry['eval_accuracy']:.2f} %" for entry in results_of(tmp_path / "recipe")["history"]]
    assert [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()] == shown
    assert same(weights(tmp_path / "own"), weights(tmp_path / "recipe"))
    assert shown[-1].capitalize() in ModelCard.load(tmp_path / "own" / "README.md").text


def test_the_example_of_a_loop_is_one_page_without_the_training_of_the_library(root):
    text = (root / "examples" / "train_with_accelerate.py").read_text()
    assert text.count("\n") <= 80
    assert "hf_sphere.training" not in text


# Label smoothing


@pytest.mark.parametrize("source", ["new", "saved"])
def test_label_smoothing_is_applied_to_the_loss_and_saved_with_the_model(finished, source, tmp_path):
    options = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 32}}
    model_args = ModelArguments(model_name_or_path=str(finished) if source == "saved" else None, **options)
    shape = SimpleNamespace(channels=1, height=8, width=8)
    data = SimpleNamespace(shape=shape, class_names=[str(digit) for digit in range(10)])
    args = RecipeArguments(output_dir="unused", label_smoothing_factor=0.3)
    model, labels = build_classifier(Setup(model_args, ImageDataOptions(), args, data)), torch.arange(4)
    output = model(torch.randn(4, 1, 8, 8), labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels, label_smoothing=0.3))
    model.save_pretrained(tmp_path)
    assert SphereVisionConfig.from_pretrained(tmp_path).head_kwargs == {"label_smoothing": 0.3}


# Trackers, the Hub


def test_no_file_and_no_output_has_a_token_or_an_uploaded_absolute_path(train, tmp_path, monkeypatch, capfd):
    tokens, uploads = ["hf_" + "a" * 34, "hf_" + "b" * 34], {}
    monkeypatch.setattr("huggingface_hub.HfApi", hub(uploads))
    monkeypatch.setenv("HF_TOKEN", tokens[0])
    # The second one as if pasted into the wrong option.
    folder = train("--license", tokens[1])
    publish.main([str(folder), "--repo_id", "digits"])
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path for path, content in written.items() if any(token.encode() in content for token in tokens)] == []
    captured = capfd.readouterr()
    assert not any(token in captured.out + captured.err for token in tokens)
    ((repo, files),) = uploads.items()
    assert repo == "me/digits"
    assert [name for name in files if str(tmp_path).encode() in written[folder / name]] == []


# Separate processes

SCRIPT = "recipes/train_image_classification.py"


@pytest.mark.slow
def test_a_run_resumed_after_ctrl_c_ends_like_an_uninterrupted_one(start, train, cache, tmp_path):
    words = [*RANDOM, "--num_train_epochs", "20", "--save_epochs", "20"]
    folder = tmp_path / "run"
    process = start(SCRIPT, *QUICK, *cache, "--output_dir", folder, *words, "--save_steps", "3")
    while process.poll() is None and not list(folder.glob("checkpoint-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "--resume_from_checkpoint latest" in printed
    last = max(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
    assert f"Stopped at step {last} of 200" in printed
    resumed = train(*words, "--resume_from_checkpoint", "latest")
    assert same(weights(resumed), weights(train(*words, name="unbroken")))
