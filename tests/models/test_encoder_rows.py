"""Every row of the table of encoders: its classes, checkpoints, calibration and registration."""

import copy
import inspect
import json
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel, Trainer, TrainingArguments, ViTImageProcessor
from transformers.models.auto import image_processing_auto, modeling_auto, tokenization_auto

import hf_sphere
from hf_sphere import calibrate_spherization, registration
from hf_sphere.geometry import spherize
from hf_sphere.models.sphere_text import encoders
from hf_sphere.models.sphere_text.encoders import ENCODERS, IMAGE_TASKS, Encoder
from hf_sphere.optim.groups import collect_parameter_options

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24}
TEXT = {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 0}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1}
MORE = {"distilbert": {"hidden_dim": 24}}  # its name of the intermediate size

every_row = pytest.mark.parametrize("row", ENCODERS, ids=lambda row: row.model_type)
every_class = pytest.mark.parametrize(
    ("row", "task"),
    [(row, task) for row in ENCODERS for task in row.tasks],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
BY_TYPE = {row.model_type: row for row in ENCODERS}
PRE_NORM = [row for row in ENCODERS if row.norm]


def sizes(row: Encoder, **options: Any) -> dict[str, Any]:
    kind = IMAGES if row.tasks == IMAGE_TASKS else TEXT
    return SIZES | kind | MORE.get(row.model_type, {}) | options


def sphere_class(row: Encoder, part: str) -> Any:
    return getattr(hf_sphere, f"Sphere{row.prefix}{part}")


def plain(row: Encoder, task: str = "Model", **options: Any) -> Any:
    torch.manual_seed(3)
    return row.load_class(task)(row.load_class("Config")(**sizes(row, **options))).eval()


def spherized(row: Encoder, task: str = "Model", **options: Any) -> Any:
    torch.manual_seed(3)
    return sphere_class(row, task)(sphere_class(row, "Config")(**sizes(row, **options))).eval()


def batch(row: Encoder, count: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if row.tasks == IMAGE_TASKS:
        return {"pixel_values": torch.randn(count, 1, 8, 8, generator=generator)}
    ids = torch.randint(5, 50, (count, 6), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def output(model: nn.Module, row: Encoder) -> Tensor:
    return model(**batch(row))[0]


def layer_of(model: Any, row: Encoder, index: int) -> Any:
    return model.base_model.get_submodule(row.layers)[index]


def record(module: nn.Module) -> list[Any]:
    """Record the (input, output) pairs of a module."""
    calls: list[Any] = []
    module.register_forward_hook(lambda _, given, result: calls.append((given[0], result)))
    return calls


# Classes


@every_class
def test_model_without_spherized_layers_matches_the_plain_model_exactly(row, task):
    model, reference = spherized(row, task, spherized_layers=[]), plain(row, task)
    mine, its = model.state_dict(), reference.state_dict()
    assert list(mine) == list(its)
    assert all(torch.equal(mine[name], its[name]) for name in its)
    assert torch.equal(output(model, row), output(reference, row))


@every_row
def test_spherized_feed_forward_matches_the_formula(row):
    model = spherized(row, spherized_layers=[1], spherization_scaling=2.0, spherization_delta=0.1)
    layer = layer_of(model, row, 1)
    first, second = record(layer.get_submodule(row.first_map)), record(layer.get_submodule(row.second_map))
    output(model, row)
    [(_, values)], [(_, mapped)] = first, second
    if row.activation is None:  # gated
        gated, gate = values.chunk(2, dim=-1)
        values = F.gelu(gated) * gate
    linear = layer.get_submodule(row.second_map).linear
    expected = spherize(values, torch.tensor(2.0), torch.tensor(1.0), 0.1) @ linear.weight.T
    torch.testing.assert_close(mapped, expected, rtol=1e-5, atol=1e-6)


@every_row
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_clone_has_the_same_outputs_and_its_own_weights(row, clone):
    model = spherized(row)
    expected = output(model, row)
    other = clone(model)
    assert type(other) is type(model)
    assert torch.equal(output(other, row), expected)
    with torch.no_grad():
        layer_of(other, row, 2).get_submodule(row.second_map).linear.weight.zero_()
    assert not torch.equal(output(other, row), expected)
    assert torch.equal(output(model, row), expected)


@every_class
def test_help_shows_signature_and_docstring(row, task):
    model, config = sphere_class(row, task), sphere_class(row, "Config")
    assert next(iter(inspect.signature(model).parameters)) == "config"
    assert f"`{row.prefix}{task}` of transformers with spherized feed-forwards" in pydoc.render_doc(model)
    assert "spherized_layers" in inspect.signature(config).parameters
    assert "spherized_layers: Indices of the encoder layers" in pydoc.render_doc(config)
    assert ("head: Name of the head" in pydoc.render_doc(config)) == (row.tasks == IMAGE_TASKS)


@pytest.mark.parametrize("row", [BY_TYPE["distilbert"], *PRE_NORM], ids=lambda row: row.model_type)
def test_model_compiles_with_fullgraph(row):
    torch.compiler.reset()
    model = spherized(row)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, row), output(model, row), rtol=1e-5, atol=1e-6)


@every_class
def test_subclass_with_a_constructor_of_its_own_keeps_the_weights(row, task):
    parent = sphere_class(row, task)

    class Longer(parent):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.before = {name: value.clone() for name, value in self.state_dict().items()}
            self.post_init()

    head = {"head": "cosine"} if task == "ForImageClassification" else {"spherized_classifier": True}
    model = Longer(sphere_class(row, "Config")(**sizes(row, **head)))
    after = model.state_dict()
    assert list(after) == list(model.before)
    assert all(torch.equal(after[name], value) for name, value in model.before.items())


def test_replaced_map_in_a_replica_is_that_of_the_replica():
    # `nn.DataParallel` copies modules without constructing them.
    layer = layer_of(spherized(BY_TYPE["bert"]), BY_TYPE["bert"], 2)
    replica = layer.output._replicate_for_data_parallel()
    replica.spherical = nn.Identity()
    assert replica.dense is replica.spherical


def test_all_encoders_return_attentions_though_no_bare_model_was_built_before():
    program = """from test_encoder_rows import ENCODERS, batch, spherized
for row in ENCODERS:
    model = spherized(row, row.tasks[-1], attn_implementation="eager")
    result = model(**batch(row), output_hidden_states=True, output_attentions=True)
    print(row.model_type, len(result.hidden_states), len(result.attentions))
"""
    folder = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert run.stdout.splitlines() == [f"{row.model_type} 4 3" for row in ENCODERS], run.stderr


# Checkpoints


@every_class
def test_plain_checkpoint_lacks_only_the_spherical_maps(row, task, tmp_path):
    reference = plain(row, task)
    reference.save_pretrained(tmp_path)
    model, info = sphere_class(row, task).from_pretrained(tmp_path, spherized_layers=[0, -1], output_loading_info=True)
    missing = info.pop("missing_keys")
    parent = row.second_map.rpartition(".")[0]
    prefix = "" if task == "Model" else f"{model.base_model_prefix}."
    assert missing == {
        f"{prefix}{row.layers}.{index}.{parent}.spherical.{name}"
        for index in (0, 2)
        for name in ("linear.weight", "spherization.scaling", "spherization.radius")
    }
    assert not any(info.values())
    before = reference.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name not in missing)


@every_class
def test_saved_model_is_loaded_by_the_auto_class(row, task, tmp_path):
    model = spherized(row, task, spherized_layers=[0, 2], learn_spherization_radius=True)
    model.save_pretrained(tmp_path)
    auto = AutoModel if task == "Model" else getattr(modeling_auto, f"AutoModel{task}")
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info.values())
    assert torch.equal(output(loaded, row), output(model, row))


def test_saved_tensors_have_the_names_in_the_model(tmp_path):
    model = spherized(BY_TYPE["vit"], "Model")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())


def test_image_encoder_reads_the_names_of_older_checkpoints(tmp_path):
    row = BY_TYPE["vit"]
    plain(row).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "encoder.layer.0.intermediate.dense.weight" in set(file.keys())  # not the names in the model
    _, info = sphere_class(row, "Model").from_pretrained(tmp_path, spherized_layers=[], output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("fresh", [True, False])
def test_new_map_has_the_initialization_of_the_encoder(fresh, tmp_path):
    row, options = BY_TYPE["modernbert"], {"hidden_size": 32, "intermediate_size": 96}
    if fresh:
        model = spherized(row, **options)
    else:
        plain(row, **options).save_pretrained(tmp_path)
        model = sphere_class(row, "Model").from_pretrained(tmp_path)
    new, old = layer_of(model, row, 2).mlp.spherical.linear.weight, layer_of(model, row, 0).mlp.Wo.weight
    assert new.std().item() == pytest.approx(old.std().item(), rel=0.05)
    assert new.std().item() < 0.6 * layer_of(model, row, 2).mlp.Wi.weight.std().item()  # not that of all linear maps


@every_row
def test_checkpoint_of_other_spherized_layers_is_rejected(row, tmp_path):
    spherized(row, spherized_layers=[0]).save_pretrained(tmp_path)
    message = r"the layers \[0\] are spherized, but the configuration has spherized_layers \[1\]"
    with pytest.raises(ValueError, match=message):
        sphere_class(row, "Model").from_pretrained(tmp_path, spherized_layers=[1])


# Calibration


def batches(row: Encoder) -> list[dict[str, Tensor]]:
    return [{name: value.roll(index, dims=-1) for name, value in batch(row, 100).items()} for index in (0, 3)]


@every_row
def test_calibration_brings_the_encoder_close_to_the_plain_one(row):
    reference, model = plain(row, initializer_range=0.3), spherized(row, initializer_range=0.3)
    model.load_state_dict(reference.state_dict(), strict=False)
    before = (output(model, row) - output(reference, row)).square().mean()
    [fit] = calibrate_spherization(model, reference, batches(row))
    assert fit.layer == 2
    assert fit.explained_variance > 0.5
    assert (output(model, row) - output(reference, row)).square().mean() < before / 2


@pytest.mark.parametrize("row", PRE_NORM, ids=lambda row: row.model_type)
def test_calibration_compensates_for_earlier_layers_if_the_norm_comes_first(row):
    options = {"initializer_range": 0.3}
    reference, model = plain(row, **options).double(), spherized(row, spherized_layers=[0, 1], **options).double()
    model.load_state_dict(reference.state_dict(), strict=False)
    given = batches(row)
    calibrate_spherization(model, reference, given, ridge=0.0)
    spherical = layer_of(model, row, 1).get_submodule(row.second_map)
    points = record(spherical.linear)
    mine, its = record(layer_of(model, row, 1)), record(layer_of(reference, row, 1))
    for inputs in given:
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        model(**inputs)
        reference(**inputs)
    error = torch.cat([own - other for (_, own), (_, other) in zip(mine, its, strict=True)])
    inputs = torch.cat([points for points, _ in points])
    # The error of a least-squares fit is orthogonal to its inputs.
    assert error.square().mean() > 1e-6
    assert torch.einsum("bln,blh->nh", inputs, error).abs().max() < 1e-7


def test_reference_of_another_encoder_is_rejected():
    with pytest.raises(ValueError, match="the reference must be a distilbert model; got a bert model"):
        calibrate_spherization(spherized(BY_TYPE["distilbert"]), plain(BY_TYPE["bert"]), [])


def test_texts_for_an_image_encoder_are_rejected():
    row = BY_TYPE["vit"]
    with pytest.raises(ValueError, match="texts must be batches with pixel_values; got a str"):
        calibrate_spherization(spherized(row), plain(row), ["a text"])


# Registration


@every_row
def test_processor_is_that_of_the_plain_encoder(row):
    images = row.tasks == IMAGE_TASKS
    table = image_processing_auto.IMAGE_PROCESSOR_MAPPING if images else tokenization_auto.TOKENIZER_MAPPING
    assert table[sphere_class(row, "Config")] == table[row.load_class("Config")]


def test_image_processor_of_a_plain_checkpoint_is_loaded_with_the_spherized_one(tmp_path):
    spherized(BY_TYPE["vit"]).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is ViTImageProcessor


@every_row
def test_row_is_the_only_place_that_names_an_encoder(row, root):
    if row.model_type in ("bert", "roberta"):
        return  # the examples of docstrings use them
    named = [
        path.name for path in (root / "hf_sphere").rglob("*.py*") if row.prefix in path.read_text("utf-8", "ignore")
    ]
    assert named == ["encoders.py"]


@every_class
def test_row_defines_public_names_and_entries_of_the_auto_tables(row, task):
    name = f"Sphere{row.prefix}{task}"
    for package in (hf_sphere, hf_sphere.models):
        assert {name, f"Sphere{row.prefix}Config"} <= {*package.__all__} & {*dir(package)}
        assert getattr(package, name) is sphere_class(row, task)
    assert any(table.get(row.sphere_model_type) == name for table in registration._MODELS.values())


def test_added_row_defines_the_models_of_an_encoder(monkeypatch, tmp_path):
    row = encoders.replace(encoders.BERT, model_type="camembert", prefix="Camembert")
    monkeypatch.setattr(encoders, "ENCODERS", [*ENCODERS, row])
    model = spherized(row, "ForTokenClassification", bos_token_id=5)
    assert model.config.model_type == "sphere_camembert"
    model.save_pretrained(tmp_path)
    assert json.loads(Path(tmp_path, "config.json").read_text())["architectures"] == [
        "SphereCamembertForTokenClassification"
    ]
    assert torch.equal(output(type(model).from_pretrained(tmp_path), row), output(model, row))


# Heads of the image classifier


@pytest.mark.parametrize("head", ["cosine", "spherized", "vmf"])
def test_image_classifier_with_a_head_trains_and_is_saved(head, tmp_path):
    row = BY_TYPE["vit"]
    model = spherized(row, "ForImageClassification", head=head, num_labels=4).train()
    labels = torch.tensor([0, 1, 3])
    result = model(**batch(row), labels=labels)
    expected = model.head(model.base_model(**batch(row)).last_hidden_state[:, 0].detach(), labels)
    if head != "vmf":  # which samples
        torch.testing.assert_close(result.loss, expected.loss)
    result.loss.backward()
    assert all(weight.grad is not None for weight in model.head.parameters())
    assert all(name.startswith("head.") for name in collect_parameter_options(model))
    model.eval().save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(loaded(**batch(row)).logits, model(**batch(row)).logits)


def test_image_classifier_with_a_head_returns_the_attentions_of_the_encoder():
    row = BY_TYPE["vit"]
    model = spherized(row, "ForImageClassification", head="cosine", attn_implementation="eager")
    attentions = model(**batch(row), output_attentions=True).attentions
    assert len(attentions) == 3
    torch.testing.assert_close(attentions, model.base_model(**batch(row), output_attentions=True).attentions)


def test_head_replaces_the_classifier_of_a_plain_checkpoint(tmp_path):
    row = BY_TYPE["vit"]
    plain(row, "ForImageClassification").save_pretrained(tmp_path)
    kind = sphere_class(row, "ForImageClassification")
    model, info = kind.from_pretrained(tmp_path, spherized_layers=[], head="cosine", output_loading_info=True)
    assert info.pop("missing_keys") == {name for name in model.state_dict() if name.startswith("head.")}
    assert not any(info.values())
    assert all(value.isfinite().all() for value in model.head.state_dict().values())


def test_head_and_spherized_classifier_exclude_each_other():
    with pytest.raises(StrictDataclassClassValidationError, match="leave it out, or set head to None"):
        spherized(BY_TYPE["vit"], head="cosine", spherized_classifier=True)


# Bad input


def test_encoder_without_a_row_is_an_error_that_shows_how_to_write_one():
    with pytest.raises(
        AttributeError, match=r"no attribute 'SphereDebertaModel'.*add a row to ENCODERS in .*Encoder\("
    ):
        _ = hf_sphere.SphereDebertaModel


@pytest.mark.parametrize("name", ["nothing", "_private"])
def test_other_unknown_names_are_not_taken_for_encoders(name):
    with pytest.raises(AttributeError, match=name) as caught:
        getattr(hf_sphere, name)
    assert "ENCODERS" not in str(caught.value)


@every_row
@pytest.mark.parametrize("value", [0, float("nan"), float("inf")])
def test_scaling_of_zero_or_not_finite_is_rejected(row, value):
    with pytest.raises(StrictDataclassClassValidationError, match="spherization_scaling must be finite and not 0; got"):
        sphere_class(row, "Config")(spherization_scaling=value)


# Training by the Trainer


def five_rows(row: Encoder, task: str) -> list[dict[str, Tensor]]:
    """Examples with 1, 0, 6, 6 and 2 targets, or, with one label each, 1, 0, 1, 1 and 1."""
    inputs = batch(row, 5)
    labels = torch.tensor([0, -100, 1, 1, 0])
    if task in ("ForMaskedLM", "ForTokenClassification"):
        places = torch.arange(6) >= torch.tensor([1, 0, 6, 6, 2])[:, None]
        tokens = inputs["input_ids"]
        labels = (tokens if task == "ForMaskedLM" else tokens % 2).masked_fill(places, -100)
    return [{name: values[place] for name, values in {**inputs, "labels": labels}.items()} for place in range(5)]


def after_a_step(model: Any, rows: list[dict[str, Tensor]], size: int, steps: int, folder: Path) -> dict[str, Tensor]:
    """Return the weights after one step of gradient descent on accumulated batches, without dropout."""
    model.train = lambda mode=True: model
    arguments = TrainingArguments(
        str(folder), max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0, use_cpu=True, report_to="none",
        per_device_train_batch_size=size, gradient_accumulation_steps=steps, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    return model.state_dict()


@pytest.mark.parametrize(("row", "task"), [(row, task) for row in ENCODERS for task in row.tasks if task != "Model"])
def test_accumulated_batches_with_unequal_numbers_of_targets_match_one_batch(row, task, tmp_path):
    rows = five_rows(row, task)
    if row.tasks == IMAGE_TASKS:
        rows = [
            {name: value.double() if value.is_floating_point() else value for name, value in r.items()} for r in rows
        ]
    whole, parts = (after_a_step(spherized(row, task).double(), rows, size, 5 // size, tmp_path) for size in (5, 1))
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_loss_of_a_batch_is_its_share_of_the_targets_of_a_step(return_dict):
    model = spherized(BY_TYPE["bert"], "ForMaskedLM")
    ids = batch(BY_TYPE["bert"])["input_ids"]
    labels = ids.masked_fill(torch.arange(6) > 1, -100)  # six targets
    mean = model(ids, labels=labels).loss
    found = model(ids, labels=labels, return_dict=return_dict, num_items_in_batch=torch.tensor(24))[0]
    torch.testing.assert_close(found, mean / 4)
