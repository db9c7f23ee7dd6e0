"""Registration with transformers, timm and PEFT, for any import order."""

import importlib
import sys
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import transformers
from fresh_python import run_fresh
from torch import nn
from transformers.models.auto import configuration_auto, image_processing_auto, modeling_auto, tokenization_auto

import hf_sphere
from hf_sphere import registration
from hf_sphere.models.backbones import BACKBONES, EmbeddingNet, register_backbone
from hf_sphere.models.sphere_encoder import ENCODERS
from hf_sphere.nn import HEADS, Head, build_head

TEXT = """
from transformers import AutoConfig, AutoModelForMaskedLM
from transformers.models.auto import modeling_auto, tokenization_auto

for name in ("bert", "roberta"):
    config = AutoConfig.for_model("sphere_" + name, num_hidden_layers=1, vocab_size=20, hidden_size=8,
                                  num_attention_heads=2, intermediate_size=8)
    model = AutoModelForMaskedLM.from_config(config)
    assert type(model).__name__ == "Sphere" + name.title() + "ForMaskedLM"
    assert modeling_auto.MODEL_MAPPING[type(config)].__name__ == "Sphere" + name.title() + "Model"
    assert tokenization_auto.TOKENIZER_MAPPING[type(config)].__name__ == name.title() + "Tokenizer"
"""

IMAGES = """
import timm
from transformers import AutoConfig, AutoModelForImageClassification

assert timm.is_model("lenet5")
config = AutoConfig.for_model("sphere_vision", backbone="lenet5", num_channels=1, image_size=28)
assert type(AutoModelForImageClassification.from_config(config)).__name__ == "SphereVisionForImageClassification"
assert AutoConfig.for_model("sphere_vision").backbone == "resnet18_cifar"
"""

ADAPTERS = """
from peft.utils import constants

assert constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["sphere_bert"] == ["query", "value"]
"""

# transformers imports its modules lazily; each of these cases imports a different one first.
CASES = {
    "hf_sphere": "import hf_sphere" + TEXT,
    "library class": "from hf_sphere import SphereRobertaConfig" + TEXT,
    "AutoConfig": "from transformers import AutoConfig; import hf_sphere" + TEXT,
    "AutoModelForMaskedLM": "from transformers import AutoModelForMaskedLM; import hf_sphere" + TEXT,
    "AutoTokenizer": "from transformers import AutoTokenizer; import hf_sphere" + TEXT,
    "BertConfig": "from transformers import BertConfig; import hf_sphere" + TEXT,
    "pipeline": "from transformers import pipeline; import hf_sphere" + TEXT + IMAGES,
    "timm": "import timm, hf_sphere" + IMAGES,
    "peft": "import peft, hf_sphere" + TEXT + ADAPTERS,
    "hf_sphere without timm": (
        "import sys; sys.modules['torchvision'] = sys.modules['timm'] = None; import hf_sphere" + TEXT
    ),
}


@pytest.mark.parametrize("first", CASES)
def test_models_are_registered_whatever_is_imported_first(first):
    if first == "peft":
        pytest.importorskip("peft")
    ended = run_fresh([sys.executable, "-c", CASES[first]], capture_output=True, text=True, hugging_face=False)
    assert ended.returncode == 0, ended.stderr


def test_peft_supports_the_encoders_wherever_it_supports_the_plain_ones():
    constants = pytest.importorskip("peft.utils.constants")
    tables = [value for name, value in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
    tables = [table for table in tables if isinstance(table, dict) and ENCODERS.keys() & table.keys()]
    assert tables
    for table in tables:
        for name in ENCODERS.keys() & table.keys():
            assert table[f"sphere_{name}"] == table[name]


def test_every_configuration_and_common_task_model_is_registered():
    tables = [getattr(modeling_auto, name) for name in registration._MODELS]
    found = {model for table in tables for names in [table._model_mapping.values()] for model in names}
    ours = {
        name for name in hf_sphere.models.__all__ if name.startswith("Sphere") and ("Model" in name or "For" in name)
    }
    no_task_of_transformers = {
        f"SphereVisionFor{kind}" for kind in ("FewShotClassification", "JointPrediction", "Regression")
    }
    assert ours - found == no_task_of_transformers
    assert {name for name in hf_sphere.models.__all__ if name.endswith("Config")} == set(
        registration._CONFIGURATIONS.values()
    )


@pytest.mark.parametrize("model_type", sorted(registration._CONFIGURATIONS))
def test_auto_tables_map_to_the_library_classes(model_type):
    config = configuration_auto.CONFIG_MAPPING[model_type]
    assert config is getattr(hf_sphere, registration._CONFIGURATIONS[model_type])
    assert config.model_type == model_type
    for table, models in registration._MODELS.items():
        if model_type in models:
            assert getattr(modeling_auto, table)[config] is getattr(hf_sphere, models[model_type])
            assert config in getattr(modeling_auto, table)


def test_registration_is_idempotent_and_leaves_plain_models():
    assert configuration_auto.CONFIG_MAPPING["bert"] is transformers.BertConfig
    assert modeling_auto.MODEL_MAPPING[transformers.BertConfig] is transformers.BertModel
    assert tokenization_auto.TOKENIZER_MAPPING[transformers.RobertaConfig] is transformers.RobertaTokenizer
    tables = [modeling_auto.MODEL_MAPPING._model_mapping, configuration_auto.CONFIG_MAPPING_NAMES]
    before = [dict(table) for table in tables]
    registration.register()
    registration._register_models(modeling_auto)
    registration._register_configurations(configuration_auto)
    assert [dict(table) for table in tables] == before


@pytest.mark.parametrize("model_type", ENCODERS)
def test_processors_are_registered_with_the_public_function(model_type, monkeypatch):
    images, own = model_type == "vit", getattr(hf_sphere, f"Sphere{ENCODERS[model_type]}Config")
    auto = image_processing_auto.AutoImageProcessor if images else tokenization_auto.AutoTokenizer
    table = image_processing_auto.IMAGE_PROCESSOR_MAPPING if images else tokenization_auto.TOKENIZER_MAPPING
    assert table[own] == table[configuration_auto.CONFIG_MAPPING[model_type]]
    module = importlib.import_module(f"hf_sphere.models.sphere_encoder.{model_type}")  # the first import registers, too
    registered = []
    monkeypatch.setattr(auto, "register", lambda config, *args, **kwargs: registered.append(config))
    registration._register_encoder(module)
    assert registered == [own]


def test_own_heads_and_backbones_are_found_by_name_with_their_options():
    with mock.patch.dict(HEADS), mock.patch.dict(BACKBONES):

        class ToyHead(Head):
            name = "toy"

            def __init__(self, embedding_dim: int, num_classes: int, *, factor: float = 1.0, **options: Any) -> None:
                super().__init__(embedding_dim, num_classes, **options)
                self.factor = factor

        class BaseOfToys(ToyHead):
            pass

        @register_backbone
        def toy_backbone(*, in_chans: int = 3, width: int = 6, **net: Any) -> nn.Module:
            layers = nn.Sequential(nn.Conv2d(in_chans, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            return EmbeddingNet(layers, width, **net)

        head = build_head("toy", 5, 3, factor=2.0, label_smoothing=0.1)
        assert type(head) is HEADS["toy"] is ToyHead  # and not the subclass without a name
        assert (head.factor, head.label_smoothing) == (2.0, 0.1)
        with pytest.raises(ValueError, match="head 'toy' has no option margin; its options are: factor, label_smooth"):
            build_head("toy", 5, 3, margin=1.0)
        assert timm.create_model("toy_backbone", num_classes=7, width=5)(torch.rand(2, 3, 8, 8)).shape == (2, 7)
        assert BACKBONES["toy_backbone"] is timm.model_entrypoint("toy_backbone")
