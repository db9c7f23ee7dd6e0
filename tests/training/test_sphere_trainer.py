"""The Trainer of transformers with our callback and optimizer, compared with the training loop of the recipes."""

import copy
import functools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from case_selection import each
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedConfig, Trainer, TrainingArguments, trainer_optimizer
from two_processes import run_two

from hf_sphere import (
    SphereTrainer,
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereViTConfig,
    SphereViTForImageClassification,
    training,
)
from hf_sphere.data import ImageBatches, ImageDataOptions, ImagesInMemory, load_image_data
from hf_sphere.losses import SupConLoss, trainer_loss
from hf_sphere.nn import HEADS, build_head
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.training import SphereCallback, TrainingLoop, create_optimizer, initialize_from_data

BATCH = 131  # eleven equal batches of the 1,442 training digits; a single one that is left over is dropped
OPTIONS = {
    "arcface": {"margin_warmup_epochs": 1, "log_temperature": -2.773, "temperature_lr": 0.1},
    "vmf": {"temperature_lr": 0.1},
    "prototype summed": {"reduction": "sum"},
}


@pytest.fixture(scope="module")
def digits() -> ImageBatches:
    return load_image_data(ImageDataOptions("digits"), batch_size=BATCH, progress=False).train


def make_model(
    head: str = "cosine",
    side: int = 8,
    backbone: str = "linear_embedding",
    model_class: Any = SphereVisionForImageClassification,
    **options: Any,
) -> Any:
    torch.manual_seed(1)
    config = {"num_channels": 1, "image_size": side, "num_labels": 10, "head": head} | options
    width = {"backbone_kwargs": {"width": 16}} if backbone == "linear_embedding" else {}
    return model_class(SphereVisionConfig(backbone=backbone, **width, **config))


def images(count: int = 24, side: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(1, side, side, generator=generator), "labels": n % 10} for n in range(count)]


def with_ignored(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**row, "labels": -100 if number % 3 == 0 else row["labels"]} for number, row in enumerate(rows)]


def arguments(tmp_path: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0}
    quiet |= {"seed": 0, "lr_scheduler_type": "constant"}
    plain = {"num_train_epochs": 1, "learning_rate": 0.01, "weight_decay": 0.1}
    return TrainingArguments(**{"output_dir": str(tmp_path / "run")} | quiet | plain | options)


def losses_of_recipe(tmp_path: Path, model: Any, batches: ImageBatches, **options: Any) -> list[float]:
    """Return a function that trains a model with the loop of the recipes and returns the loss of each forward pass."""
    plain = {"num_train_epochs": 1, "learning_rate": 0.01, "weight_decay": 0.1, "optim": "adamw"} | options
    args = training.RecipeArguments(str(tmp_path / "recipe"), disable_tqdm=True, **plain)
    initialize_from_data(model, batches)
    loop = TrainingLoop(model, batches, args, Accelerator(cpu=True), evaluate=lambda _: {"accuracy": 0.0})
    losses = record_losses(model)
    loop.run()
    return losses


def record_losses(model: nn.Module) -> list[float]:
    losses: list[float] = []

    def record(module: nn.Module, given: Any, output: Any) -> None:
        if output.loss is not None:  # not in the search for scale-invariant weights
            losses.append(output.loss.item())

    model.register_forward_hook(record)
    return losses


def train(trainer: Trainer, **options: Any) -> list[float]:
    losses = record_losses(trainer.model)
    trainer.train(**options)
    return losses


# The same curves as the recipes


@pytest.mark.parametrize("head", [*sorted(HEADS), "prototype summed"])
@pytest.mark.settings(head=lambda head: {"head": head})
def test_every_head_has_the_loss_curve_of_the_recipe_also_with_the_trainer_of_transformers(head, digits, tmp_path):
    model, options = make_model(head.split()[0], head_kwargs=OPTIONS.get(head)), {}
    if head == "prototype summed":
        options = {"optim": "sgd", "learning_rate": 1e-4}
    momentum = {"momentum": 0.0} if options else {}
    expected = losses_of_recipe(tmp_path, copy.deepcopy(model), digits, **options, **momentum)
    if head == "softmax":
        args, copied = arguments(tmp_path, per_device_train_batch_size=1), copy.deepcopy(model)
        of_transformers = train(Trainer(copied, args, train_dataset=digits, data_collator=digits.collate))
        assert of_transformers == pytest.approx(expected, rel=0, abs=1e-6)
    losses = train(SphereTrainer(model, arguments(tmp_path, **options), train_dataset=digits))
    assert len(losses) == 11
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"optim": "adam_srt"}, {"optim": "adam_srt"}),
        ({"optim": "sgd"}, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    ],
)
def test_optimizer_has_the_loss_curve_of_the_recipe(ours, theirs, digits, tmp_path):
    # In float64, as the two loops divide the loss at different places, which training amplifies.
    model = make_model("vmf", 28, "lenet5_bn").double()
    model.sphere_vision.backbone.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    batches = ImagesInMemory(
        torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8), torch.arange(40) % 10, batch_size=10, mean=[0.5],
        std=[0.3], shuffle=True,
    )  # fmt: skip
    expected = losses_of_recipe(tmp_path, copy.deepcopy(model), batches, num_train_epochs=2, **ours)
    losses = train(SphereTrainer(model, arguments(tmp_path, num_train_epochs=2, **theirs), train_dataset=batches))
    assert losses == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize(("head", "options"), [("vmf", {"temperature_lr": 0.1}), ("adaface", {})])
def test_callback_and_optimizer_train_like_the_trainer_also_if_it_is_passed_the_callback(tmp_path, head, options):
    models, given = [make_model(head, head_kwargs=options) for _ in range(3)], {"train_dataset": images()}
    args = arguments(tmp_path, num_train_epochs=2, per_device_train_batch_size=4)
    own = {"callbacks": [SphereCallback()], "optimizers": (create_optimizer(models[0], args), None)}
    losses = train(Trainer(models[0], args, **given, **own))
    assert losses == train(SphereTrainer(models[1], args, **given))
    assert losses == train(SphereTrainer(models[2], args, **given, callbacks=[SphereCallback()]))
    for model in models[1:]:
        torch.testing.assert_close(dict(model.named_buffers()), dict(models[0].named_buffers()), rtol=0, atol=0)


VALUES = {"embedding_dim": 4, "value_range": [0.0, 1.0]}
OTHERS = {
    "several classes": (SphereVisionForImageClassification, {"problem_type": "multi_label_classification"}),
    "values": (SphereVisionForRegression, VALUES),
    "sum over values": (SphereVisionForRegression, VALUES | {"regression_kwargs": {"reduction": "sum"}}),
    "values of -100": (SphereVisionForRegression, VALUES | {"value_range": [-100.0, 0.0]}),
    "class 156": (SphereVisionForImageClassification, {"num_labels": 200}),
    "classes and values": (SphereVisionForJointPrediction, VALUES),
}
ACCUMULATED = [(SphereTrainer, name, {}) for name in HEADS if name != "proxy_anchor"]  # no mean over examples
ACCUMULATED += [(Trainer, name, {}) for name in ("arcface", "softmax", "spherized", "vmf")]
ACCUMULATED += [(Trainer, name, {"class_weights": [*range(1, 11)]}) for name in ("arcface", "softmax")]
ACCUMULATED += [(kind, "prototype", {"reduction": "sum"}) for kind in (Trainer, SphereTrainer)]
ACCUMULATED += [(SphereTrainer, name, {}) for name in OTHERS]


@pytest.mark.parametrize(("trainer", "head", "options"), ACCUMULATED, ids=str)
@pytest.mark.settings(head=lambda head: {"head": head}, options=lambda options: {"options": [*options]})
def test_accumulated_batches_of_unequal_size_match_one_batch(trainer, head, options, tmp_path):
    """Compare the models after steps on one batch, and on three of which the last is smaller."""
    data, make, states = with_ignored(images()), functools.partial(make_model, head, head_kwargs=options), []
    if head in OTHERS:
        model_class, more = OTHERS[head]
        data, make = images(7), functools.partial(make_model, model_class=model_class, **more)
        for number, row in enumerate(data):
            if head == "several classes":
                row["labels"] = torch.arange(10).remainder(number + 2).eq(0).double()
            elif head == "class 156":  # as int8, it is -100
                row["labels"] = torch.tensor(156 if number < 4 else number, dtype=torch.uint8)
            elif head == "values of -100":
                row["labels"] = torch.tensor(-100.0 if number < 4 else -number).double()
            else:
                row["regression_labels" if "classes" in head else "labels"] = torch.tensor(number / 7).double()
    for size, steps in ((len(data), 1), (math.ceil(len(data) / 3) + 1, 3)):
        model = make().double()
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer(model, arguments(tmp_path, optim="sgd", num_train_epochs=2, **sizes), train_dataset=data).train()
        states.append(dict(model.named_parameters()))
        if trainer is SphereTrainer:
            states[-1] |= dict(model.named_buffers())
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("trainer", "head", "steps", "expected"),
    [
        (Trainer, "proxy_anchor", 2, "its loss compares all examples of a batch. Use a larger batch"),
        (SphereTrainer, "proxy_anchor", 2, "its loss compares all examples of a batch. Use a larger batch"),
        (SphereTrainer, "own proxy_anchor", 2, "Head 'proxy_anchor' does not train as with one large batch"),
        (Trainer, "adaface", 2, "every part updates its running statistics. Use SphereTrainer"),
        (SphereTrainer, "adaface", 2, None),
        (Trainer, "arcface", 2, None),
        (Trainer, "proxy_anchor", 1, None),
    ],
)
def test_a_loss_that_accumulation_changes_is_reported_once(trainer, head, steps, expected, tmp_path, caplog):
    args = arguments(tmp_path, gradient_accumulation_steps=steps, per_device_train_batch_size=4)
    model = Own(head.split()[1]) if head.startswith("own") else make_model(head)
    trainer(model, args, train_dataset=images()).train()
    found = [message for message in caplog.messages if "where it is divided" in message]
    assert len(found) == (expected is not None)
    assert all(str(expected) in message for message in found)


@pytest.mark.parametrize(("trainer", "steps", "count"), [(Trainer, 2, 1), (Trainer, 1, 0), (SphereTrainer, 2, 0)])
def test_values_that_a_trainer_does_not_count_are_reported_once(trainer, steps, count, tmp_path, caplog):
    data = [{**row, "labels": -100.0 if number % 3 else 0.0} for number, row in enumerate(images())]
    args = arguments(tmp_path, gradient_accumulation_steps=steps, per_device_train_batch_size=4)
    model = make_model(model_class=SphereVisionForRegression, **VALUES | {"value_range": [-100.0, 0.0]})
    trainer(model, args, train_dataset=data).train()
    assert sum("does not count labels of -100" in message for message in caplog.messages) == count


def test_resumed_run_matches_an_uninterrupted_one(digits, tmp_path):
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5, "max_steps": 16}
    expected = train(SphereTrainer(make_model("vmf"), arguments(tmp_path, **options), train_dataset=digits))
    resumed = SphereTrainer(make_model("vmf"), arguments(tmp_path, **options), train_dataset=digits)
    losses = train(resumed, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert losses == expected[5:]


RESUMED = {
    "another batch size": {"per_device_train_batch_size": 16},
    "accumulation": {"gradient_accumulation_steps": 2},
    "the same, in equal steps": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("change", RESUMED)
@pytest.mark.parametrize("step", [4, 6])
def test_run_is_not_resumed_at_another_place_of_the_data(change, step, tmp_path):
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 8}
    SphereTrainer(make_model("cosine"), arguments(tmp_path, **options), train_dataset=images(48)).train()
    resumed = SphereTrainer(
        make_model("cosine"), arguments(tmp_path, **options | RESUMED[change]), train_dataset=images(48)
    )
    refusal = pytest.raises(ValueError, match=rf"was at epoch \S+ after {step} steps, which are \S+ epochs now; repeat")
    with nullcontext() if change == "the same, in equal steps" else refusal:
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))


# Optimizer


def test_parameters_have_the_options_of_the_head(tmp_path):
    model = make_model("vmf", head_kwargs={"temperature_lr": 0.5})
    groups = SphereTrainer(model, arguments(tmp_path)).create_optimizer().param_groups
    found = {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}
    assert found["head.log_temperature"] == (0.5, 0.0)
    assert found["head.weight"] == (0.01, 0.0)
    others = {name: options for name, options in found.items() if not name.startswith("head.")}
    assert {options for name, options in others.items() if name.endswith("weight")} == {(0.01, 0.1)}


# Initialization from data


def test_initialization_does_not_change_the_order_of_the_data(tmp_path):
    first = []
    for given in (False, True):
        model = make_model("vmf")
        if given:
            initialize_from_data(model, [{"pixel_values": torch.stack([row["pixel_values"] for row in images()])}])
        model.register_forward_pre_hook(
            lambda m, _, batch: first.append((m.training, batch["labels"])), with_kwargs=True
        )
        SphereTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=images()).train()
    one, other = (labels.tolist() for training, labels in first if training)
    assert one == other


class Own(nn.Module):
    """A model of a user: a backbone, and one of our heads under another name."""

    def __init__(self, head: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 6)
        self.classes = build_head(head, 6, 10, **options)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        output = self.classes(self.linear(pixel_values.flatten(1)), labels)
        return {"loss": output.loss, "logits": output.logits}


def test_a_head_in_a_model_of_a_user_is_initialized_from_data(tmp_path):
    model, data = Own("vmf"), images()
    expected = copy.deepcopy(model)
    pixels = torch.stack([row["pixel_values"] for row in data]).flatten(1)
    expected.classes.initialize_from_data(expected.linear(pixels).detach())
    SphereTrainer(model, arguments(tmp_path, max_steps=1, learning_rate=0.0), train_dataset=data).train()
    for name, value in expected.classes.state_dict().items():
        torch.testing.assert_close(model.classes.state_dict()[name], value)


class Views(Own):
    """It passes its head two views of each image, by keywords."""

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        views = torch.stack([pixel_values, pixel_values.flip(3)], 1).flatten(0, 1).flatten(1)
        return {"loss": self.classes(embeddings=self.linear(views), labels=labels.repeat_interleave(2)).loss}


class Plain(nn.Module):
    """A model without a head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(pixel_values.flatten(1)), labels)}


def make_encoder() -> SphereViTForImageClassification:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = {"num_channels": 1, "image_size": 8, "patch_size": 4, "num_labels": 10}
    return SphereViTForImageClassification(SphereViTConfig(**sizes, **config))


MODELS = {
    "views": lambda: Views("vmf"),
    "plain": Plain,
    "encoder": make_encoder,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.settings(kind=lambda kind: {"kind": kind})
def test_models_and_batches_of_a_user_can_be_trained(kind, tmp_path, digits):
    model = MODELS[kind]()
    before = copy.deepcopy(model.state_dict())
    assert SphereTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=images()).train().global_step == 2
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters() if "weight" in name)
    assert not any(head.needs_data_initialization for head in heads_of(model))
    if kind == "plain":
        assert SphereTrainer(model, arguments(tmp_path), eval_dataset=digits).evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_the_margin_of_a_head_in_a_model_of_a_user_begins_after_its_warmup(streamed, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(images())

    model, margins = Own("arcface", margin_warmup_epochs=2), []
    model.classes.register_forward_pre_hook(lambda head, _: margins.append(head.active_margin / head.margin))
    data = Stream() if streamed else images()
    args = arguments(tmp_path, max_steps=4, per_device_train_batch_size=24)
    SphereTrainer(model, args, train_dataset=data).train()
    assert margins == [0, 0, 1, 1]


# Label smoothing


def test_label_smoothing_of_the_arguments_is_that_of_the_head(tmp_path):
    smoothed = make_model("arcface", head_kwargs={"label_smoothing": 0.1})
    expected = train(SphereTrainer(smoothed, arguments(tmp_path), train_dataset=images()))
    model, own = make_model("arcface"), Own("arcface")
    trainer = SphereTrainer(model, arguments(tmp_path, label_smoothing_factor=0.1), train_dataset=images())
    assert train(trainer) == expected
    assert model.config.head_kwargs == {"label_smoothing": 0.1}
    own.config = PreTrainedConfig()  # read by the Trainer
    options = {"args": arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1), "train_dataset": images()}
    for given in ({"model": own}, {"model_init": lambda: make_model("arcface")}):
        trainer = SphereTrainer(**given, **options)
        trainer.train()
        assert heads_of(trainer.model)[0].label_smoothing == 0.1


# Logs


def test_effective_learning_rates_are_logged_and_the_model_is_initialized(tmp_path, caplog):
    model = make_model("vmf", 28, "lenet5_bn")
    args = arguments(tmp_path, optim="adam_srt", max_steps=4)
    trainer = SphereTrainer(model, args, train_dataset=images(side=28), diagnostics_steps=2)
    trainer.train()
    name = "scale_invariant/effective_learning_rate"
    assert [entry["step"] for entry in trainer.state.log_history if name in entry] == [2, 4]
    assert not model.head.needs_data_initialization
    assert "is trained without" not in caplog.text


# Bad input


def test_bad_input_is_refused(monkeypatch, tmp_path):
    factory = lambda: None  # noqa: E731
    monkeypatch.setitem(trainer_optimizer._OPTIMIZER_HANDLERS, "adafactor", lambda context: (factory, {}))
    with pytest.raises(ValueError, match=r"optim adafactor .* the options of head\..* would be lost"):
        create_optimizer(make_model(), arguments(tmp_path, optim="adafactor"))
    trainers = [SphereTrainer(make_model("vmf"), arguments(tmp_path), train_dataset=images()) for _ in range(2)]
    prepare, of_process = Trainer._prepare_for_training, PartialState()
    for kind, trainer in zip((DistributedType.FSDP, DistributedType.DEEPSPEED), trainers, strict=True):

        def prepared(self: Trainer, *args: Any, kind: DistributedType = kind) -> Any:
            """Sharding needs several GPUs; only its name is set, where all processes have been prepared."""
            result = prepare(self, *args)
            monkeypatch.setitem(of_process.__dict__, "distributed_type", kind)
            return result

        monkeypatch.setattr(SphereTrainer, "_prepare_for_training", prepared)
        with pytest.raises(ValueError, match="call initialize_from_data before creating the Trainer"):
            trainer.train()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="head 'vmf' has no label smoothing; leave label_smoothing_factor out"):
        SphereTrainer(make_model("vmf"), arguments(tmp_path, label_smoothing_factor=0.1))
    values = make_model("softmax", problem_type="regression")
    with pytest.raises(ValueError, match="a regression has no label smoothing; leave label_smoothing_factor out"):
        SphereTrainer(values, arguments(tmp_path, label_smoothing_factor=0.1))
    model = Own("prototype", reduction="sum")
    trainer = SphereTrainer(model, arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=images())
    with pytest.raises(ValueError, match="the Trainer would average the loss, a sum, over 2 batches"):
        trainer.train()
    pixels = torch.zeros(8, 1, 8, 8, dtype=torch.uint8)
    options = {"batch_size": 2, "mean": [0.5], "std": [0.3], "shuffle": True, "num_processes": 2}
    batches = ImagesInMemory(pixels, torch.zeros(8, dtype=torch.long), **options)
    with pytest.raises(ValueError, match=r"the image batches are for 2 process\(es\), but 1 are running"):
        SphereTrainer(make_model(), arguments(tmp_path), train_dataset=batches).train()


class OwnPairs(nn.Module):
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return SupConLoss()(embeddings, labels)


PAIRS = {
    "pairs": {},
    "pairs in parts": {"gradient_accumulation_steps": 2},
    "pairs in parts, counted per process": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "own pairs": {},
}


def _train(rank: int, folder: str, processes: int) -> None:
    args = functools.partial(
        TrainingArguments, folder, per_device_train_batch_size=8 // processes, optim="sgd", max_steps=4,
        learning_rate=0.01, max_grad_norm=0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    vmf, cosine = make_model("vmf", head_kwargs={"num_samples": 2}), make_model("cosine")
    SphereTrainer(vmf, args(), train_dataset=images(32)).train()
    Trainer(cosine, args(), train_dataset=with_ignored(images(32))).train()
    models = {"vmf": vmf, "cosine": cosine}
    for name, options in PAIRS.items():
        models[name], data = (
            make_model("cosine"),
            with_ignored([{**row, "labels": row["labels"] % 2} for row in images(32)]),
        )
        loss = trainer_loss(OwnPairs(), gathers=True) if name == "own pairs" else trainer_loss(SupConLoss())
        SphereTrainer(models[name], args(**options), train_dataset=data, compute_loss_func=loss).train()
    models["values"] = make_model(model_class=SphereVisionForRegression, **VALUES | {"value_range": [-100.0, 0.0]})
    data = [{**row, "labels": -100.0 if number % 3 == 0 else 0.0} for number, row in enumerate(images(32))]
    SphereTrainer(models["values"], args(), train_dataset=data).train()
    if rank == 0:
        torch.save({name: model.state_dict() for name, model in models.items()}, f"{folder}/{processes}.pt")


@pytest.fixture(scope="module")
def of_two_and_one(tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("two_processes")
    run_two(_train, str(folder), 2)
    _train(0, str(folder), 1)
    return [torch.load(folder / f"{processes}.pt") for processes in (2, 1)]


@each("name")
@pytest.mark.parametrize("name", ["vmf", "cosine", *PAIRS, "values"])
def test_two_processes_match_one_also_with_unequal_numbers_of_targets(of_two_and_one, name):
    two, one = (states[name] for states in of_two_and_one)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_a_calibration_does_not_outlive_training_also_of_a_resumed_run(tmp_path):
    for options in ({}, {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}):
        model = make_model()
        model.config.calibration = {"temperature": 4.0}
        args = arguments(tmp_path, max_steps=1 + len(options), save_strategy="steps", save_steps=1)
        trainer = SphereTrainer(SphereVisionForImageClassification(model.config), args, train_dataset=images())
        trainer.train(**options)
        trainer.save_model(str(tmp_path / "saved"))
        assert SphereVisionConfig.from_pretrained(tmp_path / "saved").calibration is None
