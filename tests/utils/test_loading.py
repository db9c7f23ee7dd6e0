"""Loading of saved models."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from hf_sphere.utils.loading import load_model, load_pretrained


def test_the_state_of_a_training_run_is_no_model(tmp_path):
    state = tmp_path / "run" / "checkpoint-10"
    state.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is the state of a training run; its model is saved in \S*/run at the end"):
        load_pretrained(AutoConfig, state)


@pytest.mark.parametrize(("options", "expected"), [({}, torch.float32), ({"dtype": torch.float16}, torch.float16)])
def test_a_model_saved_in_bfloat16_is_loaded_in_the_dtype_asked_for(options, expected, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(**sizes)).bfloat16().save_pretrained(tmp_path)
    model = load_model(AutoModel, tmp_path, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
