from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from architectures import described
from sklearn.datasets import load_digits
from timm.optim import _optim_factory
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, trainer_optimizer, training_args
from transformers.training_args import OptimizerNames

from hf_sphere import registration
from hf_sphere.optim import SGDMRT, AdamSRT, StepDiagnosticsCallback, parameter_groups, scale_invariant_groups
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.optim.sphere_optimizer import SphereOptimizer

KINDS = {name: optimizer_class(name) for name in optimizer_names()}


@pytest.fixture(scope="module")
def digits() -> list[dict[str, Any]]:
    """scikit-learn's digits in the format of the Trainer."""
    digits = load_digits()
    images = torch.tensor(digits.images[:480, None], dtype=torch.float32) / 8 - 1
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, digits.target, strict=False)]


class ConvNet(nn.Module):
    """Conv, batch norm, dropout, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.linear = nn.Linear(72, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(self.dropout(self.norm(self.conv(pixel_values)).relu()).flatten(1))
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


def small_net() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet()


def arguments(tmp_path: Path, **options: Any) -> TrainingArguments:
    """Create arguments of a short run without reporting."""
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 5}
    size = {"per_device_train_batch_size": 32, "num_train_epochs": 2, "learning_rate": 1e-2}
    return TrainingArguments(**{"output_dir": str(tmp_path / "run")} | quiet | size | options)


def optimizer_of(args: TrainingArguments, model: nn.Module | None = None, **options: Any) -> torch.optim.Optimizer:
    return Trainer(model or small_net(), args, **options).create_optimizer()


def test_parts_in_evaluation_mode_are_grouped_as_the_trainer_trains_them(tmp_path):
    model = small_net()
    model.norm.eval()  # as a pretrained part of a new model
    groups = optimizer_of(arguments(tmp_path, optim="adam_srt"), model).param_groups
    assert [group["param_names"] for group in groups if group["channel_dims"] is not None] == [["conv.weight"]]


# Private tables of transformers. If one of these tests fails, adapt the optimizer hooks of hf_sphere/registration.py to
# the new version.


@pytest.mark.parametrize("name", KINDS)
def test_the_name_and_its_handler_are_registered_in_transformers(name):
    member = getattr(OptimizerNames, name.upper())
    assert member is OptimizerNames(name) is OptimizerNames[name.upper()]
    assert member in list(OptimizerNames)
    assert (member.name, member.value, member == name) == (name.upper(), name, True)
    assert trainer_optimizer._OPTIMIZER_HANDLERS[member].__module__ == "hf_sphere.registration"


def test_repeated_registration_has_no_effect():
    registry = _optim_factory.default_registry

    def tables():
        ours = list(OptimizerNames), dict(trainer_optimizer._OPTIMIZER_HANDLERS)
        return *ours, dict(registry._optimizers), registry.create_optimizer

    before = tables()
    registration._register_optimizer_names(training_args)
    registration._register_optimizer_handlers(trainer_optimizer)
    registration._register_optimizers_with_timm(_optim_factory)
    assert tables() == before


# From arguments to an optimizer


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, SphereOptimizer)])
def test_the_name_creates_the_class_with_scale_invariant_groups_and_the_settings_that_it_has(name, tmp_path):
    adam = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_epsilon": 1e-5}
    optimizer = optimizer_of(arguments(tmp_path, optim=name, learning_rate=0.5, weight_decay=0.1, **adam))
    own = {"momentum": 0.9} if name == "sgd_mrt" else {"betas": (0.7, 0.8), "eps": 1e-5}
    assert optimizer.param_groups[0].items() >= {"lr": 0.5, **own}.items()
    assert type(optimizer) is KINDS[name]
    assert described(optimizer) == [
        ((0,), 0.1, ["conv.weight"]),
        (None, 0.1, ["linear.weight"]),
        (None, 0.0, ["conv.bias", "norm.weight", "norm.bias", "linear.bias"]),
    ]


def settings(optimizer: torch.optim.Optimizer, *names: str) -> list[Any]:
    """Settings of the group of scale-invariant weights."""
    return [optimizer.param_groups[0][name] for name in names]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("adam_srt", "lr=0.25", {"lr": 0.25}),
        ("adam_srt", "beta1=0.5", {"betas": (0.5, 0.999)}),
        ("adam_srt", "beta1=0.5, beta2=0.6, eps=1e-4", {"betas": (0.5, 0.6), "eps": 1e-4}),
        ("adam_srt", "decoupled_weight_decay=False", {"decoupled_weight_decay": False}),
        ("adam_srt", "maximize=no,foreach=0", {"maximize": False, "foreach": False}),
        ("adam_srt", "low_precision=stochastic", {"low_precision": "stochastic"}),
        ("sgd_mrt", "momentum=0.5,dampening=0.25", {"momentum": 0.5, "dampening": 0.25}),
        ("sgd_mrt", "decoupled_weight_decay=true", {"decoupled_weight_decay": True}),
        ("muon", "ns_steps=6", {"ns_steps": 6}),
    ],
)
@pytest.mark.filterwarnings("ignore:no weight of ConvNet")
def test_optim_args_take_precedence_but_do_not_enable_weight_decay_of_norms(name, text, expected, tmp_path):
    optimizer = optimizer_of(arguments(tmp_path, optim=name, optim_args=text, weight_decay=0.1))
    assert settings(optimizer, *expected) == list(expected.values())
    assert [type(value) for value in settings(optimizer, *expected)] == [type(value) for value in expected.values()]
    assert optimizer.param_groups[-1]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adam_srt", "momentum=0.9", "optim_args of adam_srt has no option momentum; its options are: beta1, beta2, "),
        ("sgd_mrt", "eps=1", r"optim_args of sgd_mrt has no option eps; its options are: .*dampening, .*momentum, "),
        ("adam_srt", "eps=small", "could not convert string to float: 'small'"),
        ("muon", "ns_steps=5.5", "invalid literal for int.*5.5"),
        ("adam_srt", "maximize=maybe", "invalid truth value maybe"),
    ],
)
def test_invalid_optim_args_are_rejected(name, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        optimizer_of(arguments(tmp_path, optim=name, optim_args=text))


def test_class_and_settings_or_groups_can_be_passed_to_the_trainer(tmp_path):
    optimizer = optimizer_of(arguments(tmp_path), optimizer_cls_and_kwargs=(AdamSRT, {"lr": 0.5, "betas": (0.5, 0.6)}))
    assert type(optimizer) is AdamSRT
    assert settings(optimizer, "lr", "betas", "channel_dims") == [0.5, (0.5, 0.6), None]  # the Trainer's own groups
    model = small_net()
    given = {"params": scale_invariant_groups(model), "lr": 0.5}
    optimizer = optimizer_of(arguments(tmp_path), model, optimizer_cls_and_kwargs=(SGDMRT, given))
    assert settings(optimizer, "channel_dims") == [(0,)]


# Training


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_callback_logs_diagnostics_at_the_requested_interval(is_ours, tmp_path, digits):
    model = small_net()
    given = (None if is_ours else torch.optim.AdamW(parameter_groups(model)), None)
    args = arguments(tmp_path, optim="adam_srt", max_steps=6, logging_strategy="no")
    trainer = Trainer(model, args, train_dataset=digits, optimizers=given)
    trainer.add_callback(StepDiagnosticsCallback(trainer.log, every=2))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "scale_invariant/step_angle" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    quantities = ("effective_learning_rate", "effective_direction_norm", "step_angle", "weight_norm", "anisotropy")
    names = {f"scale_invariant/{quantity}{layer}" for quantity in quantities for layer in ("", "/conv")}
    assert all(names <= entry.keys() for entry in logged)
    assert all(entry["scale_invariant/step_angle/conv"] > 0 for entry in logged[:2])  # the last learning rate is 0


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "rate"), [("adam_srt", 1e-2), ("adam_s", 1e-2), ("adam_g", 1e-2), ("sgd_mrt", 0.1)])
def test_the_unmodified_trainer_can_train(name, rate, tmp_path, digits):
    trainer = Trainer(small_net(), arguments(tmp_path, optim=name, learning_rate=rate), train_dataset=digits)
    trainer.train()
    assert losses(trainer)[-1] < 0.6 * losses(trainer)[0]
    assert [group["param_names"] for group in trainer.optimizer.param_groups][:2] == [
        ["conv.weight"],
        ["linear.weight"],
    ]


@pytest.mark.parametrize(("name", "rate"), [("sgd_mrt", 0.1), ("muon_hyperball", 1e-2)])
def test_a_resumed_run_matches_an_uninterrupted_run(name, rate, digits, tmp_path):
    def train(folder: str, **options: Any) -> dict[str, Tensor]:
        model = small_net()
        model.linear = nn.Sequential(nn.Linear(72, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
        schedule = {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
        saves = {"output_dir": tmp_path / folder, "save_strategy": "steps", "save_steps": 10}  # 8 steps per epoch
        args = arguments(tmp_path, optim=name, learning_rate=rate, **schedule, **saves)
        trainer = Trainer(model, args, train_dataset=digits)
        trainer.train(**options)
        return {key: value.clone() for key, value in trainer.model.state_dict().items()}

    unbroken = train("unbroken")
    saved = torch.load(tmp_path / "unbroken" / "checkpoint-10" / "optimizer.pt", weights_only=True)
    assert name == "muon_hyperball" or saved["param_groups"][0]["channel_dims"] == (0,)
    resumed = train("resumed", resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-10"))
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["muon", "adam_srt"])
@pytest.mark.filterwarnings("ignore:.* has no scale-invariant weight")
def test_sentence_transformers_are_trained_with_groups_of_the_loss(name, root, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(str(root / "tests" / "golden" / "analogy" / "tiny-bert"))
    model = st.SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")
    loss, texts, labels = CosineSimilarityLoss(model), ["the cat", "the lamp"], [0.1, 0.9]
    data = datasets.Dataset.from_dict({"a": texts, "b": texts[::-1], "label": labels})

    def trainer(**options: Any) -> Trainer:
        short = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"}
        args = st.SentenceTransformerTrainingArguments(str(tmp_path), optim=options.pop("optim", "sgd"), **short)
        return st.SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, **options)

    with pytest.raises(ValueError, match=r"Pass a batch to build_optimizer or form_groups"):
        trainer(optim=name).train()
    batch = [model.preprocess(texts), model.preprocess(texts[::-1])], torch.tensor(labels)
    groups = KINDS[name].form_groups(loss, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer(optimizer_cls_and_kwargs=(KINDS[name], {"params": groups, "lr": 0.1})).train()
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    hidden = {key for key, rule in groups.rules.items() if rule.name == "muon"}
    assert bool(hidden) == (name == "muon")
    assert all(".layer." in key for key in hidden)
