"""transformers' common tests of configurations and models, run on every spherized encoder.

`make test-transformers` fetches those tests (see `tests/peers/fetch.py`) and runs this file; it is not named test_*
because the default suite does without network.
"""

import contextlib
import functools
import unittest
from typing import Any
from unittest import mock

import torch
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin

from hf_sphere import models
from hf_sphere.models.sphere_encoder import ENCODERS


class EncoderTester:
    """Sizes, a small configuration and inputs for the common tests."""

    is_training = True
    batch_size, seq_length = 5, 6
    num_hidden_layers, hidden_size, num_attention_heads = 2, 24, 3

    def __init__(self, prefix: str) -> None:
        self.config_class = getattr(models, f"{prefix}Config")

    def get_config(self) -> Any:
        sizes = {"num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads}
        sizes |= {"hidden_size": self.hidden_size, "intermediate_size": 40, "vocab_size": 90, "pad_token_id": 0}
        return self.config_class(**sizes, max_position_embeddings=40, type_vocab_size=2, num_labels=3)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config, shape = self.get_config(), (self.batch_size, self.seq_length)
        # No padding token among the ids: RoBERTa skips it when counting positions, which inputs_embeds cannot show.
        inputs = {"input_ids": torch.randint(config.pad_token_id + 1, config.vocab_size, shape)}
        lengths = torch.randint(2, self.seq_length + 1, (self.batch_size, 1))
        inputs["attention_mask"] = (torch.arange(self.seq_length) < lengths).long()
        return config, inputs


class ImageEncoderTester(EncoderTester):
    """The same for image encoders: a token for each of four patches and one for the image."""

    seq_length, mask_length, num_masks = 5, 4, 2

    def get_config(self) -> Any:
        sizes = {"num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads}
        sizes |= {"hidden_size": self.hidden_size, "intermediate_size": 40, "num_labels": 3}
        return self.config_class(**sizes, image_size=8, patch_size=4, num_channels=3)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.get_config(), {"pixel_values": torch.randn(self.batch_size, 3, 8, 8)}


class EncoderTests(ModelTesterMixin):
    """The common tests for one encoder."""

    model_tester_class: Any = EncoderTester

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.prefix = cls.__name__.removesuffix("Test")
        names = [name for name in models.__all__ if name.startswith(cls.prefix) and not name.endswith("Config")]
        cls.all_model_classes = tuple(getattr(models, name) for name in names)

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class(self.prefix)
        config_class = self.model_tester.config_class
        options = {config_class.attribute_map.get("hidden_size", "hidden_size"): 36}
        has_text = self.model_tester_class is EncoderTester
        self.config_tester = ConfigTester(self, config_class=config_class, has_text_modality=has_text, **options)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_reverse_loading_mapping(self) -> None:
        originals = {
            kind: functools.partialmethod(kind.save_pretrained, save_original_format=True)
            for kind in self.all_model_classes
        }  # by default, parameters keep their names in files
        with contextlib.ExitStack() as stack:
            for kind, save in originals.items():
                stack.enter_context(mock.patch.object(kind, "save_pretrained", save))
            super().test_reverse_loading_mapping()


class SphereModernBertTest(EncoderTests, unittest.TestCase):
    def use_larger_weights(self) -> None:
        config = self.model_tester.get_config()
        config.initializer_range = 0.5  # or attention is even, and positions change outputs by less than the tolerance
        self.model_tester.get_config = lambda: config

    def test_model_rope_scaling_from_config_1_dynamic(self) -> None:
        self.use_larger_weights()
        super().test_model_rope_scaling_from_config_1_dynamic()

    def test_model_rope_scaling_from_config_2_yarn(self) -> None:
        self.use_larger_weights()
        super().test_model_rope_scaling_from_config_2_yarn()


class SphereViTTest(EncoderTests, unittest.TestCase):
    model_tester_class = ImageEncoderTester
    test_resize_embeddings = False

    def test_model_get_set_embeddings(self) -> None:
        for model_class in self.all_model_classes:  # which embed patches, not tokens
            model = model_class(self.model_tester.get_config())
            assert model.get_input_embeddings() is model.base_model.embeddings.patch_embeddings
            assert model.get_output_embeddings() is None


for name in (f"Sphere{prefix}Test" for prefix in ENCODERS.values()):
    if name not in globals():
        globals()[name] = type(name, (EncoderTests, unittest.TestCase), {})
