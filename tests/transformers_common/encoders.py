"""transformers' common tests of configurations and models, run on the spherized text encoders.

`make test-transformers` fetches those tests (see `fetch.py`) and runs this file; it is not named test_* because the
default suite does without network.
"""

import unittest
from typing import Any, ClassVar

import torch
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin

from hf_sphere import (
    SphereBertConfig,
    SphereBertForMaskedLM,
    SphereBertForSequenceClassification,
    SphereBertModel,
    SphereRobertaConfig,
    SphereRobertaForMaskedLM,
    SphereRobertaForSequenceClassification,
    SphereRobertaModel,
)


class EncoderTester:
    """Sizes, a small configuration and inputs for the common tests."""

    is_training = True
    batch_size, seq_length = 5, 6
    num_hidden_layers, hidden_size, num_attention_heads = 2, 24, 3

    def __init__(self, config_class: type) -> None:
        self.config_class = config_class

    def get_config(self) -> Any:
        sizes = {"num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads}
        sizes |= {"hidden_size": self.hidden_size, "intermediate_size": 40, "vocab_size": 90}
        return self.config_class(**sizes, max_position_embeddings=40, type_vocab_size=2, num_labels=3)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config, shape = self.get_config(), (self.batch_size, self.seq_length)
        # No padding token among the ids: RoBERTa skips it when counting positions, which inputs_embeds cannot show.
        inputs = {"input_ids": torch.randint(config.pad_token_id + 1, config.vocab_size, shape)}
        inputs["token_type_ids"] = torch.randint(0, config.type_vocab_size, shape)
        lengths = torch.randint(2, self.seq_length + 1, (self.batch_size, 1))
        inputs["attention_mask"] = (torch.arange(self.seq_length) < lengths).long()
        return config, inputs


class EncoderTests(ModelTesterMixin):
    """The common tests for one family of encoders."""

    config_class: ClassVar[type]

    def setUp(self) -> None:
        self.model_tester = EncoderTester(self.config_class)
        self.config_tester = ConfigTester(self, config_class=self.config_class, hidden_size=36)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class SphereBertTest(EncoderTests, unittest.TestCase):
    config_class = SphereBertConfig
    all_model_classes = (SphereBertModel, SphereBertForMaskedLM, SphereBertForSequenceClassification)


class SphereRobertaTest(EncoderTests, unittest.TestCase):
    config_class = SphereRobertaConfig
    all_model_classes = (SphereRobertaModel, SphereRobertaForMaskedLM, SphereRobertaForSequenceClassification)
