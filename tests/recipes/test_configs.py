import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage
from reproduction.published import read_published
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

from hf_sphere.data import ImageDataOptions, images as data_images, text as data_text
from hf_sphere.data.sources import BUNDLED
from hf_sphere.nn import SPHERIZATION_SETTINGS
from hf_sphere.prototypes import place_prototypes
from hf_sphere.training import find_task, start_run
from hf_sphere.training.optimization import build_scheduler, optimizer_from_arguments
from hf_sphere.training.tasks import Task, retrieval
from hf_sphere.training.tasks.classification import EvaluationArguments, ImageDataArguments
from hf_sphere.training.tasks.few_shot import FewShotArguments
from hf_sphere.training.tasks.image import EncoderArguments
from hf_sphere.utils.arguments import parse_arguments

CONFIGS = Path(__file__).parent.parent.parent / "recipes" / "configs"
PUBLISHED = read_published()
LANGUAGE = sorted((CONFIGS / "language").glob("*.yaml"))
CORRUPTIONS = sorted((CONFIGS / "hyperplanes" / "corruptions").glob("*.yaml"))
"""Not runs but overlays, passed as the second file of a run."""
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(LANGUAGE) - set(CORRUPTIONS))
"""Runs that train on images."""

# Description of the data sets: image column, label column, array shape for PIL, number of classes.
DATA = {
    "ylecun/mnist": ("image", "label", (28, 28), 10),
    "zalando-datasets/fashion_mnist": ("image", "label", (28, 28), 10),
    "uoft-cs/cifar10": ("img", "label", (32, 32, 3), 10),
    "uoft-cs/cifar100": ("img", "fine_label", (32, 32, 3), 100),
    "ufldl-stanford/svhn": ("image", "label", (32, 32, 3), 10),
    "data/prepared/imagenet200": ("image", "label", (64, 64, 3), 200),
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
"""Data sets whose splits have disjoint classes."""
IMAGES_OF_A_CLASS = dict.fromkeys(OPEN_SETS - {"data/prepared/sop"}, 4)
"""Images per class in each split, where it is not one: few-shot episodes use several images per class."""


FEW_SHOT, RETRIEVAL = find_task("few_shot"), find_task("retrieval")
OPEN_SET_TASKS = (FEW_SHOT, RETRIEVAL)


@functools.cache
def made_up(name: str, config_name: str | None = None) -> DatasetDict:
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


def test_every_configured_data_set_is_described():
    names = {parse(run)[1].dataset_name for run in RUNS}
    assert names <= set(DATA) | set(BUNDLED)


def task_of(run: Path) -> Task:
    if run.parent.name == "few_shot":
        return RETRIEVAL if run.stem.endswith("-pretraining") else FEW_SHOT
    named = (name for name in ("regression", "joint", "retrieval") if f"-{name}" in run.stem)
    return find_task(next(named, "classification"))


UNIFORM = {"output_dir": "run"}
"""Arguments that differ between any two runs."""


def parse(run: Path, *overlays: Path) -> tuple:
    """Arguments of the model, the data, the training and the task."""
    kind = find_task("masked_lm") if run in LANGUAGE else task_of(run)
    parts = parse_arguments(kind.arguments, [word for path in (run, *overlays) for word in ("--config", str(path))])
    return tuple(part for part in parts if not isinstance(part, EvaluationArguments))


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


HYPERPLANES = [run for run in RUNS if run.parent.name == "hyperplanes"]
CORRUPTED = [(CONFIGS / "hyperplanes" / "mnist-lenet9.yaml", corruption) for corruption in CORRUPTIONS]


@pytest.mark.parametrize(
    "files", [*((run,) for run in RUNS), *CORRUPTED], ids=lambda files: "-".join(path.stem for path in files)
)
def test_a_configuration_builds_and_takes_two_steps(files, tmp_path, monkeypatch):
    monkeypatch.setattr(data_images, "load_splits", made_up)
    monkeypatch.setattr(retrieval, "check_queries", lambda images: None)  # the few images have no neighbors
    run = files[0]
    task = task_of(run)
    model_args, data_args, args, *rest = parse(*files)
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
    model, data = prepared.model.train(), prepared.data
    optimizer = optimizer_from_arguments(model, args, next(data.train.epoch()))
    scheduler = build_scheduler(optimizer, args, steps_per_epoch=len(data.train))
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


PROTOTYPES = [run for run in RUNS if run.parent.name == "prototypes"]


def test_the_joint_runs_of_a_data_set_differ_only_in_the_task_weight():
    for data_set in ("omniart", "mnist"):
        runs = [run for run in PROTOTYPES if run.stem.startswith(f"{data_set}-joint-w")]
        arguments = [parse(run) for run in runs]
        weights = {values.task_weight for *_, values in arguments}
        assert weights == {0.01, 0.1, 0.25, 0.5, 0.9}
        same = [(m, d, replace(t, **UNIFORM), replace(v, task_weight=0.5)) for m, d, t, v in arguments]
        assert all(each == same[0] for each in same)


@pytest.mark.parametrize("run", [run for run in PROTOTYPES if run.stem.endswith("-words")], ids=lambda path: path.stem)
def test_class_name_runs_differ_from_plain_runs_only_in_the_prototypes(run):
    model, data, training = parse(run)
    plain_model, plain_data, plain = parse(run.with_stem(run.stem.removesuffix("-words")))
    assert model.prototypes_file is not None
    assert replace(model, prototypes_file=None) == plain_model
    assert data == plain_data
    assert replace(training, **UNIFORM) == replace(plain, **UNIFORM)


@pytest.mark.parametrize("run", [*RUNS, *LANGUAGE], ids=lambda path: path.stem)
def test_a_configuration_writes_to_its_own_folder(run):
    assert parse(run)[2].output_dir == f"outputs/{run.parent.name}/{run.stem}"


ADAMSRT = [run for run in RUNS if run.parent.name == "adamsrt" and run.stem in PUBLISHED]
UNPUBLISHED = [run for run in RUNS if run.parent.name == "adamsrt" and run not in ADAMSRT]


def test_every_row_of_the_optimizer_table_has_all_seven_optimizers():
    settings = {run.stem.rsplit("-", 1)[0] for run in ADAMSRT} - {"imagenet-resnet18"}
    assert len(settings) == 7
    names = {"sgd", "adam", "adamw", "adam_g", "sgd_mrt", "adam_s", "adam_srt"}
    imagenet = {f"imagenet-resnet18-{name}" for name in ("sgd", "adam", "adam_s", "adam_srt")}
    assert {run.stem for run in ADAMSRT} == {f"{setting}-{name}" for setting in settings for name in names} | imagenet


@pytest.mark.parametrize("run", ADAMSRT, ids=lambda path: path.stem)
def test_optimizer_runs_have_the_published_hyperparameters(run):
    published = PUBLISHED[run.stem]["setting"]
    _, _, training = parse(run)
    beta2 = published.get("betas", [0.9, 0.999])[1]
    decay = 0.01 if published["weight_decay"] is None else published["weight_decay"]  # AdamW's default
    assert (training.learning_rate, training.weight_decay) == (published["lr"], decay)
    assert (training.momentum, training.adam_beta1, training.adam_beta2) == (0.9, 0.9, beta2)
    assert (training.num_train_epochs, training.lr_milestones) == (published["epochs"], published["milestones"])
    assert (training.per_device_train_batch_size, training.lr_gamma) == (published["batch_size"], published["gamma"])


@pytest.mark.parametrize("run", ADAMSRT, ids=lambda path: path.stem)
def test_optimizer_runs_have_the_data_and_networks_of_the_paper(run):
    model, data, training = parse(run)
    assert (data.validation_fraction, training.load_best_model_at_end) == (0.05, True)
    assert model.initialization == "torch"
    name, net, _ = run.stem.split("-")
    if net == "vgg16":
        assert model.backbone_kwargs == {"hidden": 0, "drop_rate": 0.0, "conv_bias": False}
    crop = {"imagenet": (0, 0.08), "svhn": (0, None)}.get(name, (4, None))
    assert (data.crop_padding, data.random_resized_crop, data.horizontal_flip) == (*crop, name != "svhn")
    assert ((data.image_mean, data.image_std) == ([0.0], [1.0])) == (name == "svhn")
    assert len(data.image_mean) == len(data.image_std) == (1 if name == "svhn" else 3)


@pytest.mark.parametrize("run", [*ADAMSRT, *UNPUBLISHED], ids=lambda path: path.stem)
def test_optimizer_runs_differ_from_the_sgd_run_only_in_the_optimizer(run):
    (model, data, training), (sgd_model, sgd_data, sgd) = (
        parse(run),
        parse(run.with_stem(f"{run.stem.rsplit('-', 1)[0]}-sgd")),
    )
    assert training.optim == run.stem.rsplit("-", 1)[1]
    names = ("optim", "learning_rate", "weight_decay", "adam_beta2", "output_dir")
    names += ("momentum",) if run in UNPUBLISHED else ()
    assert (model, data) == (sgd_model, sgd_data)
    assert replace(training, **{name: getattr(sgd, name) for name in names}) == sgd


def test_paired_spherized_and_plain_runs_differ_only_in_the_head():
    # Few-shot runs have no head, the others have more variants than these two.
    apart = ("few_shot", "angular", "visualization", "cifar10_fast")
    spherized = [run for run in RUNS if run.stem.endswith("-spherized") and run.parent.name not in apart]
    assert spherized
    for run in spherized:
        plain = parse(run.with_stem(run.stem.replace("-spherized", "-plain")))
        model, data, training = parse(run)
        if run.stem.startswith("toy-"):  # two units instead of one, so that the inputs of the last layer are in a plane
            assert plain[0].backbone_kwargs == {"width": 2, "bias": True, "sigmoid": True}
            plain[0].backbone_kwargs.clear()
        assert (model.head, plain[0].head) == ("spherized", "softmax")
        assert replace(model, head=None, head_kwargs=None) == replace(plain[0], head=None, head_kwargs=None)
        assert data == plain[1]
        assert replace(training, **UNIFORM) == replace(plain[2], **UNIFORM)


PIXELS = {
    "ylecun/mnist": ([0.0], [1.0]),
    "zalando-datasets/fashion_mnist": ([0.286], [0.353]),
    "uoft-cs/cifar10": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "uoft-cs/cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}
"""Mean and standard deviation in the programs of the spherization paper."""
DECAYS = {
    "cifar10-cnn9": [79, 129],
    "cifar10": list(range(29, 300, 30)),
    "cifar100": [59, 119, 159],
    "fashion_mnist": [19, 39, 59, 79, 99],
}
"""Epochs after which its programs, which count from 1 and decay before an epoch, decrease the learning rate."""
SPHERIZATION = [run for run in RUNS if run.parent.name in ("spherization", "angular", "visualization")]


@pytest.mark.parametrize(
    "run", [run for run in SPHERIZATION if parse(run)[1].dataset_name not in BUNDLED], ids=lambda path: path.stem
)
def test_spherization_runs_have_the_pixels_and_decays_of_the_paper(run):
    _, data, training = parse(run)
    assert (data.image_mean, data.image_std) == PIXELS[data.dataset_name]
    decays = [epochs for name, epochs in DECAYS.items() if run.stem.startswith(f"{name}-")]
    assert training.lr_milestones == (decays[0] if decays else None)
    assert training.lr_scheduler_type == ("multistep" if decays else "constant")


VMF = [run for run in RUNS if run.parent.name == "vmf"]


def split_name(run: Path) -> tuple[str, str]:
    """The data and the head of a run of the comparison of heads."""
    setting, head = run.stem.rsplit("-", 1)
    return setting, head


def test_every_data_set_of_the_head_comparison_has_all_five_heads():
    heads = {"vmf", "cosine", "arcface", "hyperbolic", "softmax"}
    settings = {split_name(run)[0] for run in VMF} - {"digits"}
    assert settings == {
        *("mnist", "fashion_mnist", "cifar10", "cifar100"),
        *("omniglot-retrieval", "cub200-retrieval", "cars196-retrieval", "sop-retrieval"),
    }
    names = {f"{setting}-{head}" for setting in settings for head in heads}
    assert {run.stem for run in VMF} == names | {"digits-vmf"}


@pytest.mark.parametrize("run", VMF, ids=lambda path: path.stem)
def test_head_comparison_runs_differ_only_in_the_named_head_and_tuned_options(run):
    setting, head = split_name(run)
    (model, data, training, *rest), (vmf_model, vmf_data, vmf, *vmf_rest) = (
        parse(run),
        parse(run.with_stem(f"{setting}-vmf")),
    )
    assert model.head == head
    assert replace(model, head="vmf", head_kwargs=vmf_model.head_kwargs) == vmf_model
    assert (data, rest) == (vmf_data, vmf_rest)
    tuned = ("learning_rate", "momentum", "nesterov", "weight_decay", "output_dir")
    assert replace(training, **{name: getattr(vmf, name) for name in tuned}) == vmf


@pytest.mark.parametrize("run", [run for run in VMF if run.stem.startswith("cifar")], ids=lambda path: path.stem)
def test_cifar_runs_of_the_head_comparison_have_the_published_augmentation_and_stem(run):
    model, data, _ = parse(run)
    assert (data.crop_padding, data.crop_padding_mode, data.horizontal_flip, data.occlusion) == (4, "reflect", True, 8)
    assert model.backbone_kwargs == {"max_pool": True}


@pytest.mark.parametrize("run", [run for run in PROTOTYPES if "omniart" in run.stem], ids=lambda path: path.stem)
def test_all_omniart_runs_have_47_output_dimensions(run):
    assert parse(run)[0].embedding_dim == 47


@pytest.mark.parametrize("run", [run for run in VMF if "mnist-" in run.stem], ids=lambda path: path.stem)
def test_mnist_runs_of_the_head_comparison_have_the_published_pixels_and_initialization(run):
    model, data, _ = parse(run)
    assert (data.image_mean, data.image_std) == ([0.0], [1.0])
    assert (model.backbone, model.initialization) == ("lenet5_bn", "xavier")


@pytest.mark.parametrize(
    "run", [run for run in RUNS if getattr(parse(run)[1], "episodes", None)], ids=lambda path: path.stem
)
def test_an_episode_has_at_most_the_training_classes(run):
    _, data, _, *rest = parse(run)
    classes = 10 if data.dataset_name in BUNDLED else DATA[data.dataset_name][3]
    if task_of(run) in OPEN_SET_TASKS:
        classes = rest[0].train_classes or classes
        classes -= round(data.validation_fraction * classes)
    assert data.episode_classes <= classes


FEW_SHOT_RUNS = [run for run in RUNS if task_of(run) is FEW_SHOT]


@pytest.mark.parametrize("run", [run for run in FEW_SHOT_RUNS if "-spherized-" in run.stem], ids=lambda path: path.stem)
def test_spherized_few_shot_runs_differ_from_plain_runs_only_in_the_spherization(run):
    model, data, training, few_shot = parse(run)
    plain_model, plain_data, plain, plain_few_shot = parse(run.with_stem(run.stem.replace("-spherized-", "-plain-")))
    if run.stem.startswith("digits"):  # ours, with the setting and temperature that suit it
        assert few_shot.spherization == SPHERIZATION_SETTINGS["flat"]
        few_shot = replace(few_shot, temperature=plain_few_shot.temperature)
    else:
        assert few_shot.spherization == {"scaling": 5.0, "radius": 5.0}
    assert plain_few_shot == replace(few_shot, spherization=None)
    # The spherization replaces an activation that the plain embeddings do not have.
    options = {name: value for name, value in plain_model.backbone_kwargs.items() if name != "final_activation"}
    options |= {"final_norm": True} if model.backbone == "wrn28" else {}
    assert (model, data) == (replace(plain_model, backbone_kwargs=options), plain_data)
    assert ("final_activation" in plain_model.backbone_kwargs) == (model.backbone not in ("resnet12", "wrn28"))
    assert replace(training, **UNIFORM) == replace(plain, **UNIFORM)


@pytest.mark.parametrize(
    "run", [run for run in FEW_SHOT_RUNS if "conv4_maxpool" in run.stem], ids=lambda path: path.stem
)
def test_published_plain_conv4_differs_from_the_control_only_in_its_last_layer(run):
    model, data, training, few_shot = parse(run)
    control = run.with_stem(run.stem.replace("_maxpool", ""))
    control_model, control_data, control_training, control_few_shot = parse(control)
    options = {"backbone": "conv4", "backbone_kwargs": {"final_activation": False}}
    assert (replace(model, **options), data, few_shot) == (control_model, control_data, control_few_shot)
    assert model.backbone == "conv4_maxpool"
    assert run.stem in PUBLISHED
    assert replace(training, **UNIFORM) == replace(control_training, **UNIFORM)
    assert control.stem not in PUBLISHED


FINE_TUNED = [run for run in FEW_SHOT_RUNS if run.stem.endswith("-finetuned")]


def test_every_published_few_shot_run_exists_from_scratch_and_fine_tuned():
    published = {name for name in PUBLISHED if name.startswith("mini_imagenet-")}
    assert len(published) == 16
    assert published <= {run.stem for run in FEW_SHOT_RUNS}


@pytest.mark.parametrize("run", FINE_TUNED, ids=lambda path: path.stem)
def test_fine_tuned_few_shot_runs_differ_only_in_their_initial_weights(run):
    model, data, training, few_shot = parse(run)
    scratch_model, *others, scratch, scratch_few_shot = parse(run.with_stem(run.stem.removesuffix("-finetuned")))
    assert (replace(model, initial_weights=None), [data], few_shot) == (scratch_model, others, scratch_few_shot)
    assert training == replace(scratch, output_dir=training.output_dir)
    pretraining = CONFIGS / "few_shot" / f"{Path(model.initial_weights).name}.yaml"
    pretrained_model, pretrained_data, pretraining_arguments, _ = parse(pretraining)
    assert pretraining_arguments.output_dir == model.initial_weights
    names = ("dataset_name", "image_size", "image_mean", "image_std")
    assert all(getattr(pretrained_data, name) == getattr(data, name) for name in names)
    assert pretrained_model.backbone.startswith(model.backbone)


@pytest.mark.parametrize("run", [run for run in FEW_SHOT_RUNS if "-wrn28-" in run.stem], ids=lambda path: path.stem)
def test_wide_resnet_runs_have_the_images_and_the_optimizer_of_the_paper(run):
    _, data, training, few_shot = parse(run)
    assert (data.image_size, few_shot.temperature) == ([80], 128)
    assert (training.optim, training.nesterov, training.momentum) == ("sgd", True, 0.9)
    assert (training.learning_rate, training.weight_decay, training.lr_gamma) == (1e-4, 5e-4, 0.5)
    assert training.lr_milestones == list(range(9, 100, 10))


@pytest.mark.parametrize("run", FEW_SHOT_RUNS, ids=lambda path: path.stem)
def test_the_name_of_a_few_shot_run_matches_its_network_shots_and_metric(run):
    model, data, _, few_shot = parse(run)
    name, net, shots, _, metric, *_ = run.stem.split("-")
    assert Path(data.dataset_name).name == name
    assert model.backbone.removesuffix("_embedding") == net
    assert (f"{few_shot.shot}shot", few_shot.metric) == (shots, metric)


def test_every_data_set_of_the_hyperplane_study_has_all_networks():
    vggs = {f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "-bn")}
    small = {"lenet9", "alexnet", "mlp", "mlp-bottleneck"} | vggs
    names = {f"{data}-{net}" for data in ("mnist", "cifar10", "cifar100") for net in small}
    assert {run.stem for run in HYPERPLANES} == names | {f"imagenet-{net}" for net in {"alexnet"} | vggs}


@pytest.mark.parametrize("run", HYPERPLANES, ids=lambda path: path.stem)
def test_hyperplane_runs_have_the_named_network_clean_data_and_snapshots(run):
    model, data, training = parse(run)
    _, net, *kind = run.stem.split("-")
    normalized = model.backbone.endswith("_bn") if "imagenet" in run.stem else "batch_norm" not in model.backbone_kwargs
    assert model.backbone.split("_")[0] == net
    if net.startswith("vgg"):
        assert normalized == (kind == ["bn"])
    assert (model.head, data.label_noise, data.shuffled_pixels) == ("softmax", 0.0, None)
    assert not any((data.crop_padding, data.horizontal_flip, data.rotation, data.random_resized_crop))
    assert (training.snapshot_epochs, training.snapshot_until) == (10, 5)


@pytest.mark.parametrize("run", [run for run in HYPERPLANES if run.stem.endswith("-bn")], ids=lambda path: path.stem)
def test_batch_norm_runs_differ_only_in_batch_norm_and_learning_rate(run):
    model, data, training = parse(run)
    plain_model, plain_data, plain = parse(run.with_stem(run.stem.removesuffix("-bn")))
    options = {name: value for name, value in plain_model.backbone_kwargs.items() if name != "batch_norm"}
    assert replace(model, backbone=plain_model.backbone) == replace(plain_model, backbone_kwargs=options)
    assert data == plain_data
    assert replace(training, learning_rate=plain.learning_rate, output_dir=plain.output_dir) == plain


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda path: path.stem)
def test_a_corruption_applies_to_every_hyperplane_run(corruption):
    name, _, share = corruption.stem.partition("-")
    for run in HYPERPLANES:
        model, data, training = parse(run)
        corrupted_model, corrupted, memorising = parse(run, corruption)
        expected = {"label_noise": float(share)} if share else {name: "per_image"}
        assert model == corrupted_model
        assert corrupted == replace(data, **expected)
        assert memorising == replace(
            training, weight_decay=0.0, num_train_epochs=300, lr_scheduler_type="reduce_lr_on_plateau", lr_patience=10,
            metric_for_best_model="train_loss", early_stopping_patience=25,
        )  # fmt: skip


def test_a_corruption_sets_no_output_dir():
    assert len(CORRUPTIONS) == 3
    assert not any("output_dir" in path.read_text(encoding="utf-8") for path in CORRUPTIONS)


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


@pytest.mark.parametrize("run", LANGUAGE, ids=lambda path: path.stem)
def test_a_language_model_configuration_builds_and_takes_two_steps(run, tiny_models, tmp_path, monkeypatch):
    lines = Dataset.from_dict(
        {"text": ["", " = A title = \n", "The cat sat on the mat , and the dog did not . \n"] * 40}
    )
    splits = DatasetDict({"train": lines, "validation": lines, "test": lines})
    monkeypatch.setattr(data_text, "load_text_splits", lambda *_: splits)
    model_args, data_args, args = parse(run)
    assert (data_args.dataset_name, data_args.dataset_config_name) == ("Salesforce/wikitext", "wikitext-2-v1")
    model_args.model_name_or_path = str(tiny_models[model_args.model_name_or_path])
    data_args.max_seq_length = 32
    data_args.max_train_samples, args.per_device_train_batch_size = 8, 4
    args.output_dir = str(tmp_path / "run")
    prepared = find_task("masked_lm").prepare(start_run(args, model_args, data_args), model_args, data_args, args)
    model, data = prepared.model.train(), prepared.data
    assert type(model).__name__.startswith("Sphere") == ("-spherized" in run.stem)
    optimizer = optimizer_from_arguments(model, args, next(data.train.epoch()))
    scheduler = build_scheduler(optimizer, args, steps_per_epoch=len(data.train), higher_is_better=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
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
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_every_language_model_has_all_its_runs():
    large = {f"{name}-large-{start}" for name in ("bert", "roberta") for start in ("scratch", "finetuned")}
    assert {run.stem for run in LANGUAGE} == {
        f"{m}-{kind}" for m in (*large, "minilm") for kind in ("plain", "spherized", "spherized-radius5")
    }
    for run in LANGUAGE:
        assert parse(run)[0].from_scratch == ("-scratch-" in run.stem)


@pytest.mark.parametrize("run", [run for run in LANGUAGE if "-spherized" in run.stem], ids=lambda path: path.stem)
def test_spherized_language_model_runs_differ_from_plain_runs_only_in_the_spherization(run):
    model, data, training = parse(run)
    plain_model, plain_data, plain = parse(run.with_stem(run.stem.partition("-spherized")[0] + "-plain"))
    value = 5.0 if run.stem.endswith("-radius5") else 1.0
    assert model.spherized
    assert model.spherization_kwargs == {"scaling": value, "radius": value}  # the scaling is learned by default
    assert replace(model, spherized=False, spherized_layers=None, spherization_kwargs={}) == plain_model
    assert data == plain_data
    assert replace(training, **UNIFORM) == replace(plain, **UNIFORM)


ANGULAR = [run for run in RUNS if run.parent.name == "angular"]


def test_all_rows_of_the_angular_comparison_exist():
    operators = ("cosine", "linear", "sigmoid", "w_cosine", "w_linear", "w_sigmoid", "spherized")
    rows = {"plain", *(f"{layer}-{operator}" for layer in ("fc10", "fc256") for operator in operators)}
    assert {run.stem.removeprefix("cifar10-cnn9-") for run in ANGULAR} == rows


@pytest.mark.parametrize("run", ANGULAR, ids=lambda path: path.stem)
def test_angular_comparison_runs_differ_from_the_plain_run_only_in_the_layer(run):
    model, data, training = parse(run)
    plain_model, plain_data, plain = parse(run.with_stem("cifar10-cnn9-plain"))
    row = run.stem.removeprefix("cifar10-cnn9-")
    layer, _, operator = row.partition("-")
    own = {"fc10": {"operator": operator}, "fc256": {"hidden_layer": operator}}.get(layer, {})
    spherized = {"scaling": 5.0, "radius": 5.0}
    if operator == "spherized":
        own = {"fc10": spherized, "fc256": {"hidden_layer": operator, "hidden_kwargs": spherized}}[layer]
    in_head = layer == "fc10"
    head = ("spherized" if operator == "spherized" else "angular") if in_head else "softmax"
    backbone = plain_model.backbone_kwargs | ({} if in_head else own)
    assert (model.head, model.head_kwargs) == (head, own if in_head else {})
    assert model.backbone_kwargs == backbone
    assert replace(model, head=None, head_kwargs={}, backbone_kwargs={}) == replace(
        plain_model, head=None, head_kwargs={}, backbone_kwargs={}
    )
    assert data == plain_data
    assert replace(training, **UNIFORM) == replace(plain, **UNIFORM)


PICTURES = [run for run in RUNS if run.parent.name == "visualization"]


@pytest.mark.parametrize("run", PICTURES, ids=lambda path: path.stem)
def test_visualization_networks_have_the_dimension_in_their_name(run):
    model, *_ = parse(run)
    units = model.backbone_kwargs["units"] if model.head == "softmax" else model.embedding_dim
    assert f"mnist-{units + (model.head == 'spherized')}d-" in run.stem
