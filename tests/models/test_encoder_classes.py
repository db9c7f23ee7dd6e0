"""Every spherized encoder: its classes, checkpoints, registration, heads and training."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_selection import some_rows
from fresh_python import run_fresh
from safetensors import safe_open
from small_encoders import BERT, EVERY, VIT, Encoder, every_class, every_encoder
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel, Trainer, TrainingArguments, ViTImageProcessor
from transformers.models.auto import modeling_auto

import hf_sphere
from hf_sphere.geometry import spherize
from hf_sphere.models.sphere_encoder import modeling_sphere_encoder
from hf_sphere.optim.groups import collect_parameter_options


def record(module: nn.Module) -> list[Any]:
    """Record the (input, output) pairs of a module."""
    calls: list[Any] = []
    module.register_forward_hook(lambda _, given, result: calls.append((given[0], result)))
    return calls


# Classes


@every_class
def test_model_without_spherized_layers_matches_the_plain_model_exactly(encoder, task):
    model, plain = encoder.model(task, spherized_layers=[]), encoder.plain(task)
    weights, expected = model.state_dict(), plain.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert torch.equal(encoder.output(model), encoder.output(plain))
    assert not any(name.endswith("spherical") for name, _ in plain.named_modules())


@every_class
def test_each_module_is_built_once_and_in_the_order_of_the_plain_model(encoder, task, monkeypatch):
    built: list[tuple[int, ...]] = []
    build = nn.Linear.__init__

    def record_shape(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        built.append(tuple(self.weight.shape))

    monkeypatch.setattr(nn.Linear, "__init__", record_shape)
    model = encoder.model(task)
    assert sorted(built) == sorted(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
    plain = [name for name in encoder.plain(task).state_dict() if not name.endswith((".bias", "_ids"))]
    assert [name for name in model.state_dict() if name in plain] == [n for n in plain if n in model.state_dict()]


@every_encoder
def test_a_version_of_transformers_that_builds_other_classes_or_decorates_constructors_is_an_error(
    encoder, monkeypatch
):
    plain = encoder.plain_class("Model")
    original = plain.__init__
    with monkeypatch.context() as patch:
        patch.setattr(modeling_sphere_encoder, "_in_layers", lambda layers, plain, spherized: plain)
        with pytest.raises(RuntimeError, match="layers are not spherized: this version of transf"):
            encoder.model()
    monkeypatch.setattr(plain, "__init__", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    with pytest.raises(RuntimeError, match="layers are not spherized"):
        encoder.model("Model")


@every_encoder
def test_spherized_feed_forward_matches_the_formula(encoder):
    model = encoder.model(spherized_layers=[1], spherization_scaling=2.0, spherization_delta=0.1)
    spherical = encoder.spherical(model, 1)
    paths = {"modernbert": "mlp.Wi", "vit": "mlp.fc1", "distilbert": "ffn.lin1"}
    first = record(encoder.layer(model, 1).get_submodule(paths.get(encoder.model_type, "intermediate.dense")))
    second = record(spherical)
    encoder.output(model)
    [(_, values)], [(_, mapped)] = first, second
    if encoder.model_type == "modernbert":  # gated
        gated, gate = values.chunk(2, dim=-1)
        values = F.gelu(gated) * gate
    expected = spherize(values, torch.tensor(2.0), torch.tensor(1.0), 0.1) @ spherical.linear.weight.T
    torch.testing.assert_close(mapped, expected, rtol=1e-5, atol=1e-6)


@every_class
def test_class_is_written_in_the_file_of_its_encoder_with_a_docstring(encoder, task):
    model, config, plain = encoder.model_class(task), encoder.model_class("Config"), encoder.plain_class(task)
    assert getattr(hf_sphere, model.__name__) is model
    file = Path(inspect.getsourcefile(model))
    assert file == Path(inspect.getsourcefile(config))
    assert file.stem == encoder.model_type
    assert f"class {model.__name__}(" in inspect.getsource(model)
    assert f"`{plain.__name__}` of transformers with spherized feed-forwards" in model.__doc__
    assert "spherized_layers" in inspect.signature(config).parameters


@every_class
def test_subclass_with_a_constructor_of_its_own_keeps_the_weights(encoder, task):
    class Longer(encoder.model_class(task)):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.before = {name: value.clone() for name, value in self.state_dict().items()}
            self.post_init()

    head = {"head": "cosine"} if task == "ForImageClassification" else {"spherized_classifier": True}
    model = Longer(encoder.config(**head))
    after = model.state_dict()
    assert list(after) == list(model.before)
    assert all(torch.equal(after[name], value) for name, value in model.before.items())


@some_rows("task")
@pytest.mark.parametrize(
    ("encoder", "task"),
    [(BERT, "ForMaskedLM"), (BERT, "ForSequenceClassification"), *((each, "Model") for each in EVERY[1:])],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_model_compiles_with_fullgraph(encoder, task):
    torch.compiler.reset()
    model = encoder.model(task)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(encoder.output(compiled), encoder.output(model), rtol=1e-5, atol=1e-6)


def test_all_encoders_return_attentions_though_no_bare_model_was_built_before():
    program = """from small_encoders import EVERY
for encoder in EVERY:
    model = encoder.model(attn_implementation="eager")
    result = model(**encoder.batch(), output_hidden_states=True, output_attentions=True)
    print(encoder.model_type, len(result.hidden_states), len(result.attentions))
"""
    folder = Path(__file__).parents[1]
    run = run_fresh([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert run.stdout.splitlines() == [f"{encoder.model_type} 4 3" for encoder in EVERY], run.stderr


# Checkpoints


@every_class
@pytest.mark.parametrize("layers", [[], [0, 2]], ids=str)
def test_plain_checkpoint_lacks_only_the_spherical_maps(encoder, task, layers, tmp_path):
    plain = encoder.plain(task)
    plain.save_pretrained(tmp_path)
    kind = encoder.model_class(task)
    model, info = kind.from_pretrained(tmp_path, spherized_layers=layers, output_loading_info=True)
    missing = info.pop("missing_keys")
    bare = encoder.model_class("Model")
    prefix = "" if task == "Model" else f"{model.base_model_prefix}."
    parent = bare.plain_map_path.rpartition(".")[0]
    assert missing == {
        f"{prefix}{bare.layers_path}.{index}.{parent}.spherical.{name}"
        for index in layers
        for name in ("linear.weight", "spherization.scaling", "spherization.radius")
    }
    assert not any(info.values())
    before = plain.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name not in missing)


@every_class
def test_saved_model_is_loaded_by_the_auto_class(encoder, task, tmp_path):
    model = encoder.model(task, spherized_layers=[0, 2])  # the scaling is a parameter, and the radius a buffer
    for index in (0, 2):  # values that differ from those of a new model
        spherization = encoder.spherical(model, index).spherization
        spherization.scaling.data.fill_(1.75)
        spherization.radius.data.fill_(2.5)
    model.save_pretrained(tmp_path)
    auto = AutoModel if task == "Model" else getattr(modeling_auto, f"AutoModel{task}")
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info.values())
    layer = {"distilbert": "ffn", "modernbert": "mlp", "vit": "mlp"}.get(encoder.model_type, "output")
    names = [name for name in encoder.layer(loaded, 2).state_dict() if "spher" in name]
    assert names == [f"{layer}.spherical.{n}" for n in ("spherization.scaling", "spherization.radius", "linear.weight")]
    assert torch.equal(encoder.output(loaded), encoder.output(model))
    spherization = encoder.spherical(loaded, 2).spherization
    assert (spherization.scaling.item(), spherization.radius.item()) == (1.75, 2.5)


def test_image_encoder_saves_its_own_names_and_reads_those_of_older_checkpoints_and_their_processor(tmp_path):
    model = VIT.model("Model")
    model.save_pretrained(tmp_path / "own")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "own")
    assert type(AutoImageProcessor.from_pretrained(tmp_path / "own")) is ViTImageProcessor
    VIT.plain("Model").save_pretrained(tmp_path)
    names = []
    for folder in (tmp_path / "own", tmp_path):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == set(model.state_dict())
    assert "encoder.layer.0.intermediate.dense.weight" in names[1]  # not the names in the model
    _, info = VIT.model_class("Model").from_pretrained(tmp_path, spherized_layers=[], output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("fresh", [True, False])
def test_new_map_has_the_initialization_of_the_encoder(fresh, tmp_path):
    encoder, options = Encoder("modernbert"), {"hidden_size": 32, "intermediate_size": 96}
    if fresh:
        model = encoder.model("Model", **options)
    else:
        encoder.plain("Model", **options).save_pretrained(tmp_path)
        model = encoder.model_class("Model").from_pretrained(tmp_path)
    new, old = encoder.spherical(model).linear.weight, encoder.layer(model, 0).mlp.Wo.weight
    assert new.std().item() == pytest.approx(old.std().item(), rel=0.05)
    assert new.std().item() < 0.6 * encoder.layer(model, 2).mlp.Wi.weight.std().item()  # not that of all linear maps


# Registration and heads of the image classifier


@pytest.mark.parametrize("head", ["cosine", "spherized", "vmf"])
def test_image_classifier_with_a_head_trains_returns_attentions_and_is_saved(head, tmp_path):
    model = VIT.model("ForImageClassification", head=head, num_labels=4, attn_implementation="eager").train()
    labels = torch.tensor([0, 1, 3])
    result = model(**VIT.batch(), labels=labels, output_attentions=True)
    attentions = model.base_model(**VIT.batch(), output_attentions=True).attentions
    torch.testing.assert_close(result.attentions, attentions)
    expected = model.head(model.base_model(**VIT.batch()).last_hidden_state[:, 0].detach(), labels)
    if head != "vmf":  # which samples
        torch.testing.assert_close(result.loss, expected.loss)
    result.loss.backward()
    assert all(weight.grad is not None for weight in model.head.parameters())
    assert all(name.startswith("head.") for name in collect_parameter_options(model))
    model.eval().save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(loaded(**VIT.batch()).logits, model(**VIT.batch()).logits)


def test_head_replaces_the_classifier_of_a_plain_checkpoint(tmp_path):
    VIT.plain("ForImageClassification").save_pretrained(tmp_path)
    kind = VIT.model_class("ForImageClassification")
    model, info = kind.from_pretrained(tmp_path, spherized_layers=[], head="cosine", output_loading_info=True)
    assert info.pop("missing_keys") == {name for name in model.state_dict() if name.startswith("head.")}
    assert not any(info.values())
    assert all(value.isfinite().all() for value in model.head.state_dict().values())


# Training by the Trainer


def five_examples(encoder: Encoder, task: str) -> list[dict[str, Tensor]]:
    """Examples in float64 with 1, 0, 6, 6 and 2 targets, or, with one label each, 1, 0, 1, 1 and 1."""
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in encoder.batch(5).items()}
    labels = torch.tensor([0, -100, 1, 1, 0])
    if task in ("ForMaskedLM", "ForTokenClassification"):
        ignored = torch.arange(6) >= torch.tensor([1, 0, 6, 6, 2])[:, None]
        tokens = inputs["input_ids"]
        labels = (tokens if task == "ForMaskedLM" else tokens % 2).masked_fill(ignored, -100)
    return [{name: values[index] for name, values in {**inputs, "labels": labels}.items()} for index in range(5)]


def after_a_step(model: Any, examples: list[dict[str, Tensor]], size: int, folder: Path) -> dict[str, Tensor]:
    """Return the weights after one step of gradient descent on accumulated batches, without dropout."""
    model.train = lambda mode=True: model
    arguments = TrainingArguments(
        str(folder), max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0, use_cpu=True, report_to="none",
        per_device_train_batch_size=size, gradient_accumulation_steps=5 // size, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=examples).train()
    return model.state_dict()


@pytest.mark.parametrize(
    ("encoder", "task"), [(each, task) for each in EVERY for task in each.tasks if task != "Model"]
)
def test_accumulated_batches_with_unequal_numbers_of_targets_match_one_batch(encoder, task, tmp_path):
    examples = five_examples(encoder, task)
    whole, parts = (after_a_step(encoder.model(task).double(), examples, size, tmp_path) for size in (5, 1))
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    before = encoder.model(task).double().state_dict()
    unmoved = {name for name, value in whole.items() if torch.equal(value, before[name])}
    assert all(name.endswith("radius") for name in unmoved if "spherical" in name or "classifier" in name)


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_loss_of_a_batch_is_its_share_of_the_targets_of_a_step(return_dict):
    model = BERT.model("ForMaskedLM")
    ids = BERT.batch()["input_ids"]
    labels = ids.masked_fill(torch.arange(6) > 1, -100)  # six targets
    mean = model(ids, labels=labels).loss
    loss = model(ids, labels=labels, return_dict=return_dict, num_items_in_batch=torch.tensor(24))[0]
    torch.testing.assert_close(loss, mean / 4)
