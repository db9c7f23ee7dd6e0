"""transformers' common tests of configurations and models, run on the image models; see `encoders.py`."""

import copy
import unittest
from typing import Any
from unittest import mock

import torch
from transformers import set_seed
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereVisionModel,
)
from hf_sphere.models.sphere_vision import modeling_sphere_vision as modeling


class VisionTester:
    """A small configuration and inputs for the common tests."""

    is_training = True
    batch_size = 5

    def get_config(self) -> SphereVisionConfig:
        values = {"embedding_dim": 6, "value_range": [0.0, 1.0]}
        return SphereVisionConfig(backbone="resnet20_cifar", image_size=16, num_labels=3, **values)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.get_config(), {"pixel_values": torch.randn(self.batch_size, 3, 16, 16)}


class SphereVisionTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        SphereVisionModel,
        SphereVisionForImageClassification,
        SphereVisionForRegression,
        SphereVisionForJointPrediction,
    )
    has_attentions = False
    test_resize_embeddings = False

    def setUp(self) -> None:
        self.model_tester = VisionTester()
        self.config_tester = ConfigTester(
            self,
            config_class=SphereVisionConfig,
            has_text_modality=False,
            common_properties=["num_channels", "image_size", "num_labels"],
        )

    def _prepare_for_class(self, inputs_dict: Any, model_class: type, return_labels: bool = False) -> Any:
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class is SphereVisionForRegression:
            inputs["labels"] = torch.full((self.model_tester.batch_size,), 0.5)
        if return_labels and model_class is SphereVisionForJointPrediction:
            inputs["labels"] = torch.zeros(self.model_tester.batch_size, dtype=torch.long)
            inputs["regression_labels"] = torch.full((self.model_tester.batch_size,), 0.5)
        return inputs

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    # Replaced tests, which assume a transformer with token embeddings, or that transformers initializes each layer

    def test_hidden_states_output(self) -> None:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            by_argument = model_class(copy.deepcopy(config)).eval()(**inputs, output_hidden_states=True)
            config.output_hidden_states = True
            by_config = model_class(copy.deepcopy(config)).eval()(**inputs)
            for output in (by_argument, by_config):
                shapes = [tuple(state.shape[1:]) for state in output.hidden_states]
                assert shapes == [(16, 16, 16), (16, 16, 16), (32, 8, 8), (64, 4, 4), (64, 4, 4)]
            config.output_hidden_states = False

    def test_model_get_set_embeddings(self) -> None:
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert model.get_input_embeddings() is None
            assert model.get_output_embeddings() is None

    def test_can_init_all_missing_weights(self) -> None:
        build = modeling.build_backbone

        def build_seeded(*args: Any, **kwargs: Any) -> torch.nn.Module:
            set_seed(42)  # timm initializes a backbone in its constructor, where the common test sets no seed
            return build(*args, **kwargs)

        with mock.patch.object(modeling, "build_backbone", build_seeded):
            super().test_can_init_all_missing_weights()
