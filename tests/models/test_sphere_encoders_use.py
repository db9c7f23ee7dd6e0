"""Invalid and unusual inputs to the spherized encoders."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_sphere import calibrate_spherization


def batches_of(family: Any, count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of four texts of six tokens each."""
    ids = torch.randint(5, 50, (count, 4, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids]


@pytest.fixture
def pair(family) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return family.model(), family.plain()


def new_map(model: Any) -> torch.Tensor:
    return model.base_model.encoder.layer[-1].output.spherical.linear.weight.detach().clone()


# Loading


def test_configuration_of_the_plain_encoder_is_rejected(family, tmp_path):
    family.plain().save_pretrained(tmp_path)
    plain = AutoConfig.from_pretrained(tmp_path)
    message = f"config must be a Sphere{family.name}Config; got a {family.name}Config. Omit it, or read it with"
    with pytest.raises(ValueError, match=message):
        family.model_class().from_pretrained(tmp_path, config=plain)


@pytest.mark.parametrize("as_path", [False, True], ids=["object", "path"])
def test_spherized_configuration_is_accepted(family, as_path, tmp_path):
    family.plain().save_pretrained(tmp_path)
    config = type(family.config()).from_pretrained(tmp_path, spherized_layers=[0])
    config.save_pretrained(tmp_path / "config")
    given = tmp_path / "config" if as_path else config
    model = family.model_class().from_pretrained(tmp_path, config=given)
    assert model.config.spherized_layer_indices == (0,)


# Calibration


@pytest.mark.parametrize("position", [0, 3, 7], ids=["first", "middle", "last"])
def test_padding_only_texts_do_not_change_the_fit(family, pair, position):
    model, reference = pair
    batches = batches_of(family, 8)
    padding = {name: torch.zeros_like(value) for name, value in batches[0].items()}
    padding = {name: value[:2] for name, value in padding.items()}
    (fit,) = calibrate_spherization(model, reference, batches, ridge=0.01)
    expected = new_map(model)
    (other,) = calibrate_spherization(model, reference, [*batches[:position], padding, *batches[position:]], ridge=0.01)
    assert other == fit
    torch.testing.assert_close(new_map(model), expected)


def test_texts_with_tokens_are_held_out_if_every_fifth_is_padding(family, pair):
    model, reference = pair
    batches = batches_of(family, 8)
    at_once = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    at_once["attention_mask"][4::5] = 0
    (fit,) = calibrate_spherization(model, reference, [at_once], ridge=0.01)
    assert fit.num_tokens == int(at_once["attention_mask"].sum())
    assert fit.explained_variance < 1


def test_padding_only_text_does_not_shift_others_in_the_batch(family, pair):
    model, reference = pair
    batches = batches_of(family, 8)
    for batch in batches:
        batch["attention_mask"][-1] = 0
    (fit,) = calibrate_spherization(model, reference, batches, ridge=0.01)
    at_once = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    (other,) = calibrate_spherization(model, reference, [at_once], ridge=0.01)
    assert other.explained_variance == pytest.approx(fit.explained_variance, rel=1e-6)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one long text " * 100, "texts must be an iterable of texts or batches; got one str"),
        ({"input_ids": torch.ones(9, 9)}, "texts must be an iterable of texts or batches; got one dict"),
        (
            [{"text": "a row of a data set"}],
            r"with input_ids; got the columns \['text'\]",
        ),
        ([["a", "b"]], "texts must be strings, or batches with input_ids; got a list"),
        ([torch.ones(2, 9)], "texts must be strings, or batches with input_ids; got a Tensor"),
    ],
    ids=["string", "batch", "rows", "lists", "tensors"],
)
def test_inputs_other_than_texts_or_batches_are_rejected(pair, texts, message):
    before = new_map(pair[0])
    with pytest.raises(ValueError, match=message):
        calibrate_spherization(*pair, texts)
    assert torch.equal(new_map(pair[0]), before)


def test_texts_without_a_tokenizer_are_rejected(pair):
    with pytest.raises(ValueError, match="the reference was not loaded from a checkpoint with a tokenizer"):
        calibrate_spherization(*pair, ["a text"] * 100)
