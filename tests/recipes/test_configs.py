import copy
import functools
import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage
from reproduction.entries import SCRIPTS
from reproduction.old_options import restore_options
from reproduction.published import read_published
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training_runs import ROOT
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

from hf_sphere.data import ImageDataOptions, sources as data_sources, text as data_text
from hf_sphere.data.sources import BUNDLED
from hf_sphere.prototypes import place_prototypes
from hf_sphere.training import RecipeArguments, find_task, start_run
from hf_sphere.training.optimization import build_scheduler, optimizer_from_arguments
from hf_sphere.training.tasks import Task, retrieval
from hf_sphere.training.tasks.classification import EvaluationArguments, ImageDataArguments
from hf_sphere.training.tasks.few_shot import FewShotArguments
from hf_sphere.training.tasks.image import EncoderArguments
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.configs import TABLES, config_names, load_config, read_yaml

PUBLISHED = read_published()
NAMES = [PurePosixPath(name) for name in config_names()]
LANGUAGE = [name for name in NAMES if name.parent.name == "language"]
CORRUPTIONS = [name for name in NAMES if name.parent.name == "corruptions"]
"""Not runs but overlays, passed as the second configuration of a run."""
RUNS = [name for name in NAMES if name not in (*LANGUAGE, *CORRUPTIONS)]
"""Runs that train on images."""

# Description of the datasets: image column, label column, array shape for PIL, number of classes.
DATA = {
    "ylecun/mnist": ("image", "label", (28, 28), 10),
    "zalando-datasets/fashion_mnist": ("image", "label", (28, 28), 10),
    "uoft-cs/cifar10": ("img", "label", (32, 32, 3), 10),
    "uoft-cs/cifar100": ("img", "fine_label", (32, 32, 3), 100),
    "ufldl-stanford/svhn": ("image", "label", (32, 32, 3), 10),
    "data/prepared/imagenet200": ("image", "label", (32, 32, 3), 200),
    "data/prepared/cub200": ("image", "label", (24, 30, 3), 200),
    "data/prepared/omniart": ("image", "label", (30, 24, 3), 46),
    "tanganke/stanford_cars": ("image", "label", (24, 30, 3), 196),
    "ILSVRC/imagenet-1k": ("image", "label", (24, 30, 3), 1000),
    # Number of images per split; the real splits have more.
    "data/prepared/sop": ("image", "label", (24, 24, 3), 60),
    "data/prepared/omniglot": ("image", "label", (105, 105), 60),
    "data/prepared/mini_imagenet": ("image", "label", (24, 24, 3), 6),
    "data/prepared/tiered_imagenet": ("image", "label", (24, 24, 3), 6),
    "data/prepared/cub": ("image", "label", (24, 24, 3), 6),
}
OPEN_SETS = {f"data/prepared/{name}" for name in ("sop", "omniglot", "mini_imagenet", "tiered_imagenet", "cub")}
"""Datasets whose splits have disjoint classes."""
IMAGES_OF_A_CLASS = dict.fromkeys(OPEN_SETS - {"data/prepared/sop"}, 4)
"""Images per class in each split, where it is not one: few-shot episodes use several images per class."""


FEW_SHOT, RETRIEVAL = find_task("few_shot"), find_task("retrieval")
OPEN_SET_TASKS = (FEW_SHOT, RETRIEVAL)


@functools.cache
def made_up(name: str, config_name: str | None = None, **_: object) -> DatasetDict:
    if name in BUNDLED:
        return BUNDLED[name]()
    image, label, shape, classes = DATA[name]
    labels = [index for index in range(classes) for _ in range(IMAGES_OF_A_CLASS.get(name, 1))]
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    features = Features({image: Image(), label: ClassLabel(num_classes=3 * classes if name in OPEN_SETS else classes)})
    rows = {image: [PILImage.fromarray(p) for p in pixels], label: labels}
    if name.endswith("omniart"):
        features["year"] = Value("float32")
        rows["year"] = np.linspace(980.0, 1932.0, len(labels)).tolist()
    train = test = validation = Dataset.from_dict(rows, features=features)
    if name in OPEN_SETS:
        test, validation = (
            Dataset.from_dict(rows | {label: [n * classes + index for index in labels]}, features=features)
            for n in (1, 2)
        )
    return DatasetDict({"train": train, "test": test, "validation": validation})


def test_a_name_occurs_once_in_a_table_and_each_run_has_one():
    tables = [read_yaml(path) for path in TABLES.glob("*.yaml")]
    for groups in tables:
        names = [name for group, values in groups.items() for name in (group, *values.get("runs", {}))]
        assert len(names) == len(set(names)), names
    assert len(NAMES) == sum(len(group.get("runs", {})) for groups in tables for group in groups.values())


TASKS = {script: task for task, script in SCRIPTS.items()}


def task_of(run: PurePosixPath) -> Task:
    return find_task(TASKS[load_config(str(run)).recipe])


def parse_all(run: PurePosixPath, *words: str) -> tuple:
    return parse_arguments(task_of(run).arguments, ["--config", str(run), *words])


@functools.cache
def parse(run: PurePosixPath, *overlays: PurePosixPath) -> tuple:
    """Arguments of the model, the data, the training and the task; read only."""
    parts = parse_all(run, *(word for name in overlays for word in ("--config", str(name))))
    return tuple(part for part in parts if not isinstance(part, EvaluationArguments))


FROZEN = json.loads((Path(__file__).parent.parent / "golden" / "configurations.json").read_text(encoding="utf-8"))
"""Digests of the arguments of all configurations when they were files of their own, and the names of the arguments."""


def digest_of(run: PurePosixPath) -> str:
    """Return the digest of the arguments of a configuration."""
    parts = parse_all(run, *(["--output_dir", "unused"] if run in CORRUPTIONS else []))
    settings = {name: value for part in parts for name, value in vars(part).items()}
    precision = next(part.mixed_precision for part in parts if isinstance(part, RecipeArguments))
    values = {**restore_options(settings), "mixed_precision": precision}
    values = {name: value for name, value in values.items() if name in FROZEN["arguments"]}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]


def test_configurations_have_the_settings_of_before():
    assert {str(run): digest_of(run) for run in NAMES} == FROZEN["digests"]


def settings_of_run(files: tuple[PurePosixPath, ...]) -> dict[str, Any]:
    """Return what the code path of a run depends on: a name of a run stands for these."""
    configs = [load_config(str(path)) for path in files]
    values = {name: value for config in configs for name, value in config.settings.items()}
    names = ("dataset_name", "backbone", "head", "optimizer", "lr_scheduler_type", "operator", "label_noise")
    return {"recipe": configs[0].recipe, **{name: values.get(name) for name in names}}


def take_two_steps(prepared: Any, args: RecipeArguments, **options: bool) -> None:
    """Train with the optimizer and the schedule of the arguments; the losses are finite and weights change."""
    model, data = prepared.model.train(), prepared.data
    optimizer = optimizer_from_arguments(model, args, next(data.train.epoch()))
    scheduler = build_scheduler(optimizer, args, steps_per_epoch=len(data.train), **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for batch in data.train.epoch():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        losses.append(loss.item())
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def make_small(task: Task, model_args: EncoderArguments, data_args: ImageDataOptions, *rest: Any) -> None:
    """Reduce image size, batch size and held-out fraction to fit a few images."""
    if data_args.image_size is not None and max(data_args.image_size) > 96:
        data_args.image_size = [64] if model_args.backbone == "alexnet" else [32]
        if str(model_args.backbone).startswith("vgg"):
            model_args.backbone_kwargs["mlp_ratio"] = 1 / 64  # the first hidden layer has 100 million weights
    for few_shot in (part for part in rest if isinstance(part, FewShotArguments)):
        few_shot.way, few_shot.shot, few_shot.query = 2, 2, 2
        few_shot.episodes_per_epoch = 2 * few_shot.episodes_per_step
        few_shot.validation_episodes, few_shot.eval_episodes = 3, 4
        if model_args.backbone in ("resnet12", "wrn28"):
            data_args.image_size = [16]
    if isinstance(data_args, ImageDataArguments) and data_args.episodes is not None:
        data_args.episode_classes, data_args.episode_examples, data_args.episodes_per_epoch = 2, 2, 2
    if task not in OPEN_SET_TASKS:
        data_args.validation_fraction = 0.0  # it would require two images per class


CORRUPTED = [(PurePosixPath("hyperplanes/mnist-lenet9"), corruption) for corruption in CORRUPTIONS]


@pytest.mark.settings(files=settings_of_run)
@pytest.mark.parametrize(
    "files", [*((run,) for run in RUNS), *CORRUPTED], ids=lambda files: "-".join(path.name for path in files)
)
def test_a_configuration_builds_and_takes_two_steps(files, tmp_path, monkeypatch):
    monkeypatch.setattr(data_sources, "load_splits", made_up)
    monkeypatch.setattr(retrieval, "check_queries", lambda images: None)  # the few images have no neighbors
    run = files[0]
    task = task_of(run)
    model_args, data_args, args, *rest = copy.deepcopy(parse(*files))
    model_args.pretrained_backbone = False  # the weights are on the Hub
    model_args.initial_weights = None  # the result of another run
    make_small(task, model_args, data_args, *rest)
    data_args.cache_dir = str(tmp_path)
    data_args.dataloader_num_workers = 0
    if task is not FEW_SHOT:
        data_args.max_train_samples = 8
        data_args.max_eval_samples = 8
        args.per_device_train_batch_size = 4
    args.output_dir = str(tmp_path / "run")
    if getattr(model_args, "prototypes_file", None) is not None:
        model_args.prototypes_file = str(tmp_path / "prototypes.safetensors")
        classes = DATA[data_args.dataset_name][3]
        placement = place_prototypes(classes, model_args.embedding_dim, method="sgd", max_iterations=1)
        placement.save(model_args.prototypes_file)
    rest = rest or [kind() for kind in task.arguments if kind is EvaluationArguments]
    prepared = task.prepare(start_run(args, model_args, data_args, *rest), model_args, data_args, args, *rest)
    take_two_steps(prepared, args)


ADAMSRT = [run for run in RUNS if run.parent.name == "adamsrt" and run.name in PUBLISHED]


def test_every_row_of_the_optimizer_table_has_all_seven_optimizers():
    settings = {run.name.rsplit("-", 1)[0] for run in ADAMSRT} - {"imagenet-resnet18"}
    assert len(settings) == 7
    names = {"sgd", "adam", "adamw", "adam_g", "sgd_mrt", "adam_s", "adam_srt"}
    imagenet = {f"imagenet-resnet18-{name}" for name in ("sgd", "adam", "adam_s", "adam_srt")}
    assert {run.name for run in ADAMSRT} == {f"{setting}-{name}" for setting in settings for name in names} | imagenet


@pytest.mark.parametrize("run", ADAMSRT, ids=lambda path: path.name)
def test_optimizer_runs_have_the_published_hyperparameters(run):
    published = PUBLISHED[run.name]["setting"]
    _, _, training = parse(run)
    beta2 = published.get("betas", [0.9, 0.999])[1]
    decay = 0.01 if published["weight_decay"] is None else published["weight_decay"]  # AdamW's default
    assert (training.learning_rate, training.weight_decay) == (published["lr"], decay)
    assert (training.momentum, training.adam_beta1, training.adam_beta2) == (0.9, 0.9, beta2)
    assert (training.num_train_epochs, training.lr_milestones) == (published["epochs"], published["milestones"])
    assert (training.per_device_train_batch_size, training.lr_gamma) == (published["batch_size"], published["gamma"])


FEW_SHOT_RUNS = [run for run in RUNS if task_of(run) is FEW_SHOT]


def test_every_published_few_shot_run_exists_from_scratch_and_fine_tuned():
    published = {name for name in PUBLISHED if name.startswith("mini_imagenet-")}
    assert len(published) == 16
    assert published <= {run.name for run in FEW_SHOT_RUNS}


# Language models


@pytest.fixture(scope="module")
def tiny_models(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a BERT model and a RoBERTa configuration, with a tokenizer of 400 tokens."""
    bert, roberta = root / "tests" / "golden" / "analogy" / "tiny-bert", tmp_path_factory.mktemp("roberta")
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokenizer.save_pretrained(roberta)
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=66, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    RobertaForMaskedLM(config).save_pretrained(roberta)
    return {"bert-large-cased": bert, "sentence-transformers/all-MiniLM-L6-v2": bert, "roberta-large": roberta}


@pytest.mark.parametrize("run", LANGUAGE, ids=lambda path: path.name)
def test_a_language_model_configuration_builds_and_takes_two_steps(run, tiny_models, tmp_path, monkeypatch):
    texts = ["", " = A title = \n", "The cat sat on the mat , and the dog did not . \n"] * 40
    splits = DatasetDict(dict.fromkeys(("train", "validation", "test"), Dataset.from_dict({"text": texts})))
    monkeypatch.setattr(data_text, "load_splits", lambda *_, **__: splits)
    model_args, data_args, args = parse(run)
    assert (data_args.dataset_name, data_args.dataset_config_name) == ("Salesforce/wikitext", "wikitext-2-v1")
    model_args.model_name_or_path = str(tiny_models[model_args.model_name_or_path])
    data_args.max_seq_length = 32
    data_args.max_train_samples, args.per_device_train_batch_size = 8, 4
    args.output_dir = str(tmp_path / "run")
    prepared = find_task("masked_lm").prepare(start_run(args, model_args, data_args), model_args, data_args, args)
    assert type(prepared.model).__name__.startswith("Sphere") == ("-spherized" in run.name)
    take_two_steps(prepared, args, higher_is_better=False)


ACCELERATE = ROOT / "recipes" / "accelerate_configs"


@pytest.mark.parametrize("path", sorted(ACCELERATE.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_accepts_the_configuration(path: Path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    nested = config.deepspeed_config or {}
    assert (ROOT / nested.get("deepspeed_config_file", "")).exists()


def test_the_page_names_each_configuration():
    text = (ACCELERATE / "README.md").read_text()
    assert [path for path in ACCELERATE.glob("*.yaml") if str(path.relative_to(ROOT)) not in text] == []
