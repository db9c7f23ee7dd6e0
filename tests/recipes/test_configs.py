from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage

from hf_sphere.data import images as data_images
from hf_sphere.data.sources import EMBEDDED
from hf_sphere.training import ImageDataArguments, ModelArguments, TrainingArguments, parse_arguments
from hf_sphere.training.optimization import build_optimizer, build_scheduler

CONFIGS = Path(__file__).parent.parent.parent / "recipes" / "configs"
RUNS = sorted(CONFIGS.rglob("*.yaml"))

# What the Hub's data sets look like: image column, label column, shape as PIL wants it, classes.
HUB = {
    "ylecun/mnist": ("image", "label", (28, 28), 10),
    "zalando-datasets/fashion_mnist": ("image", "label", (28, 28), 10),
    "uoft-cs/cifar10": ("img", "label", (32, 32, 3), 10),
    "uoft-cs/cifar100": ("img", "fine_label", (32, 32, 3), 100),
    "ufldl-stanford/svhn": ("image", "label", (32, 32, 3), 10),
}


def made_up(name: str, config_name: str | None = None) -> DatasetDict:
    if name in EMBEDDED:
        return EMBEDDED[name]()
    image, label, shape, classes = HUB[name]
    pixels = np.random.default_rng(0).integers(0, 256, (classes, *shape), dtype=np.uint8)
    features = Features({image: Image(), label: ClassLabel(num_classes=classes)})
    rows = {image: [PILImage.fromarray(p) for p in pixels], label: list(range(classes))}
    split = Dataset.from_dict(rows, features=features)
    return DatasetDict({"train": split, "test": split})


def test_every_data_set_of_the_configurations_is_described_above():
    names = {parse(run)[1].dataset_name for run in RUNS}
    assert names <= set(HUB) | set(EMBEDDED)


def parse(run: Path) -> tuple[ModelArguments, ImageDataArguments, TrainingArguments]:
    return parse_arguments((ModelArguments, ImageDataArguments, TrainingArguments), ["--config", str(run)])


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_a_configuration_builds_and_takes_two_steps(run, load_recipe, tmp_path, monkeypatch):
    recipe = load_recipe("train_image_classification")
    monkeypatch.setattr(data_images, "load_splits", made_up)
    model_args, data_args, args = parse(run)
    data_args.cache_dir = str(tmp_path)
    data_args.max_train_samples = 8
    args.per_device_train_batch_size = 4
    args.output_dir = str(tmp_path / "run")
    start = recipe.start_run(args, model_args, data_args)
    data = recipe.load_data(data_args, args, start)
    model = recipe.build_model(model_args, args, data).train()
    optimizer = build_optimizer(model, args, next(data.train.epoch()))
    scheduler = build_scheduler(optimizer, args, steps_per_epoch=len(data.train))
    before = [parameter.detach().clone() for parameter in model.head.parameters()]
    losses = []
    for batch in data.train.epoch():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.head.parameters(), strict=True))


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_a_configuration_writes_to_a_folder_of_its_own(run):
    assert parse(run)[2].output_dir == f"outputs/{run.parent.name}/{run.stem}"


ADAMSRT = [run for run in RUNS if run.parent.name == "adamsrt"]


def test_every_setting_of_the_optimiser_table_has_all_seven_optimisers():
    settings = {run.stem.rsplit("-", 1)[0] for run in ADAMSRT}
    assert len(settings) == 7
    names = {"sgd", "adam", "adamw", "adam_g", "sgd_mrt", "adam_s", "adam_srt"}
    assert {run.stem for run in ADAMSRT} == {f"{setting}-{name}" for setting in settings for name in names}


@pytest.mark.parametrize("run", ADAMSRT, ids=lambda path: path.stem)
def test_a_run_of_the_table_differs_from_its_sgd_run_only_in_the_optimiser(run):
    (model, data, training), (sgd_model, sgd_data, sgd) = (
        parse(run),
        parse(run.with_stem(f"{run.stem.rsplit('-', 1)[0]}-sgd")),
    )
    assert training.optimizer == run.stem.rsplit("-", 1)[1]
    names = ("optimizer", "learning_rate", "weight_decay", "adam_beta2", "output_dir")
    assert (model, data) == (sgd_model, sgd_data)
    assert replace(training, **{name: getattr(sgd, name) for name in names}) == sgd


def test_spherized_and_plain_runs_come_in_pairs_that_differ_only_in_the_head():
    spherized = [run for run in RUNS if run.stem.endswith("-spherized")]
    assert spherized
    for run in spherized:
        plain = parse(run.with_stem(run.stem.replace("-spherized", "-plain")))
        model, data, training = parse(run)
        assert (model.head, plain[0].head) == ("spherized", "softmax")
        assert replace(model, head=None, head_kwargs=None) == replace(plain[0], head=None, head_kwargs=None)
        assert data == plain[1]
        assert replace(training, output_dir="") == replace(plain[2], output_dir="")
