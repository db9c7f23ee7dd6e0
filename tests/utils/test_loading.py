"""Loading of saved models."""

import pytest
from transformers import AutoConfig

from hf_sphere.utils.loading import load_pretrained


def test_the_state_of_a_training_run_is_no_model(tmp_path):
    state = tmp_path / "run" / "checkpoint-10"
    state.mkdir(parents=True)
    with pytest.raises(ValueError, match="is the state of a training run, without a model; use "):
        load_pretrained(AutoConfig, state)
