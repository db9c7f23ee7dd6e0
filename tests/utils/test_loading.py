"""Loading of saved models."""

import pytest
from transformers import AutoConfig

from hf_sphere.utils.loading import load_pretrained


def test_the_state_of_a_training_run_is_no_model(tmp_path):
    state = tmp_path / "run" / "checkpoint-10"
    state.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is the state of a training run; its model is saved in \S*/run at the end"):
        load_pretrained(AutoConfig, state)
