"""Registration with transformers, timm and PEFT, for any import order."""

import importlib.util
import sys

import pytest
import transformers
from fresh_python import run_fresh
from transformers.models.auto import configuration_auto, image_processing_auto, modeling_auto, tokenization_auto

import hf_sphere
from hf_sphere import registration
from hf_sphere.models.sphere_encoder import ENCODERS

NAMES = """
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto

for name, title in (("bert", "Bert"), ("roberta", "Roberta"), ("modernbert", "ModernBert")):
    config = configuration_auto.CONFIG_MAPPING["sphere_" + name]
    assert config.__name__ == "Sphere" + title + "Config"
    assert config in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
    assert config in tokenization_auto.TOKENIZER_MAPPING
"""

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
    "hf_sphere": "import hf_sphere" + NAMES,
    "library class": "from hf_sphere import SphereRobertaConfig" + NAMES,
    "AutoConfig": "from transformers import AutoConfig; import hf_sphere" + NAMES,
    "AutoModelForMaskedLM": "from transformers import AutoModelForMaskedLM; import hf_sphere" + NAMES,
    "AutoTokenizer": "from transformers import AutoTokenizer; import hf_sphere" + NAMES,
    "BertConfig": "from transformers import BertConfig; import hf_sphere" + NAMES,
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


# Registration of configurations and models modifies private tables of transformers. If they change, these tests must
# fail: compare `models/auto/configuration_auto.py` and `auto_factory.py` of the new version with those of this one.

READ_IN = "5.23.0"
TABLE_PARTS = ["_model_mapping", "_reverse_config_mapping", "_modules"]


def test_transformers_tables_have_the_attributes_used_by_registration():
    tables = [(modeling_auto, table, name) for table in registration._MODELS for name in TABLE_PARTS]
    for module, table, name in [(configuration_auto, "CONFIG_MAPPING", "_modules"), *tables]:
        part = getattr(getattr(module, table), name, None)
        assert isinstance(part, dict), (
            f"transformers {transformers.__version__} has no dict {table}.{name}, which registration.py fills "
            f"since transformers {READ_IN}; adapt it."
        )
    assert configuration_auto.CONFIG_MAPPING._mapping is configuration_auto.CONFIG_MAPPING_NAMES
    for table in registration._MODELS:
        assert getattr(modeling_auto, table)._model_mapping is getattr(modeling_auto, f"{table}_NAMES")


def test_every_module_with_a_hook_exists_and_every_registration_function_is_a_hook():
    hooked = [name for name in registration._HOOKS if name.partition(".")[0] == "transformers"]
    assert image_processing_auto.__name__ in hooked
    assert all(importlib.util.find_spec(name) for name in hooked)
    functions = {value for name, value in vars(registration).items() if name.startswith("_register_")}
    assert functions
    assert functions <= {*registration._HOOKS.values()}


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
