"""The client of the test hub: a process whose `HF_ENDPOINT` is the server.

python hub_client.py push FILE          upload small models of every family, and write what is loaded again to FILE
python hub_client.py train FILE RUN     train and publish the folder RUN, then load all models of FILE
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    BertTokenizer,
    RobertaTokenizer,
    ViTImageProcessor,
)
from transformers.utils import logging

import hf_sphere
from hf_sphere import SphereVisionImageProcessor
from hf_sphere.models.sphere_encoder import ENCODERS
from hf_sphere.utils.modules import digest_weights

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

VISION = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 4}, "num_channels": 1, "image_size": 6}
VISION_CLASSES = {
    "SphereVisionModel": {},
    "SphereVisionForImageClassification": {"head": "vmf", "num_labels": 3},
    "SphereVisionForRegression": {"embedding_dim": 2, "value_range": [0.0, 1.0]},
    "SphereVisionForJointPrediction": {"embedding_dim": 4, "value_range": [0.0, 1.0], "num_labels": 3},
    "SphereVisionForFewShotClassification": {},
}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
IMAGES = {"image_size": 6, "patch_size": 3, "num_channels": 1}
WORDS = {word: number for number, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", "<mask>", *"abcdefghij"])}
BERT_WORDS = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"])}


def build() -> dict[str, tuple[Any, Any]]:
    """Build models and processors of every vision class, all classes of the first encoder, and one of each other."""
    torch.manual_seed(0)
    built: dict[str, tuple[Any, Any]] = {}
    for name, options in VISION_CLASSES.items():
        config = hf_sphere.SphereVisionConfig(**VISION, **options)
        built[name] = (
            getattr(hf_sphere, name)(config),
            SphereVisionImageProcessor(size=6, num_channels=1, image_mean=[0.3], image_std=[0.2]),
        )
    tokenizers = {"Roberta": RobertaTokenizer(vocab=WORDS, merges=[])}
    pixels = ViTImageProcessor(size={"height": 6, "width": 6}, image_mean=[0.3], image_std=[0.2])
    for encoder, prefix in ENCODERS.items():
        is_text = encoder != "vit"
        options = SIZES | ({"vocab_size": 50, "pad_token_id": 0} if is_text else IMAGES)
        processor = tokenizers.get(prefix, BertTokenizer(vocab=BERT_WORDS)) if is_text else pixels
        tasks = ["ForTokenClassification" if is_text else "ForImageClassification"]
        if encoder == "bert":
            tasks += ["Model", "ForMaskedLM", "ForSequenceClassification"]
        for name in (f"Sphere{prefix}{task}" for task in tasks):
            kind = getattr(hf_sphere, name)
            built[name] = kind(kind.config_class(**options)), processor
    return built


def describe(model: Any, processor: Any) -> dict[str, Any]:
    """Return digests of the weights and of the settings of the processor, and an example of its output."""
    if is_image(model):
        settings = hashlib.sha256(processor.to_json_string().encode()).hexdigest()
        example = processor(torch.arange(36, dtype=torch.uint8).view(1, 6, 6), return_tensors="pt")
    else:
        settings, example = "", processor("a b j", return_tensors="pt")
    return {
        "class": type(model).__name__,
        "weights": digest_weights(model),
        "settings": settings,
        "example": {name: value.tolist() for name, value in example.items()},
    }


def is_image(model: Any) -> bool:
    return model.main_input_name == "pixel_values"


def load(repo: str) -> dict[str, Any]:
    """Download a model by the class in its configuration, its processor and its card."""
    (name,) = AutoConfig.from_pretrained(repo).architectures
    model, report = getattr(hf_sphere, name).from_pretrained(repo, output_loading_info=True)
    assert not any(report.values()), report
    processor = (AutoImageProcessor if is_image(model) else AutoTokenizer).from_pretrained(repo)
    return describe(model, processor) | {"tags": ModelCard.load(repo).data.tags}


def push(repo: str, model: Any, processor: Any) -> str:
    """Upload a model and its processor; repeat an upload that fails, and return its error."""
    failure = ""
    for part in (model, processor):
        try:
            part.push_to_hub(repo)
        except Exception as error:
            failure = type(error).__name__
            part.push_to_hub(repo)
    return failure


def main(task: str, file: str, run: str = "") -> None:
    logging.disable_progress_bar()
    if task == "push":
        seen = {}
        for name, (model, processor) in build().items():
            failure = push(f"tester/{name}", model, processor)
            seen[name] = {"failure": failure, "before": describe(model, processor), "after": load(f"tester/{name}")}
        Path(file).write_text(json.dumps(seen))
        return
    import train_image_classification

    from hf_sphere.commands import publish

    words = ["--dataset_name", "digits", "--backbone", "linear_embedding", "--backbone_kwargs", "{width: 8}"]
    words += ["--max_train_samples", "64", "--num_train_epochs", "1", "--output_dir", run]
    words += ["--disable_tqdm", "--cache_dir", f"{run}-cache"]
    train_image_classification.main(words)
    try:
        publish.main([run, "--repo_id", "digits-model"])
    except ConnectionError as error:
        print(error)
    publish.main([run, "--repo_id", "digits-model"])
    publish.main([str(ROOT / "hub_cards" / "mnist-lenet5-plain"), "--repo_id", "tester/lenet5", "--private"])
    names = json.loads(Path(file).read_text())
    loaded = {name: load(f"tester/{name}") for name in [*names, "digits-model", "lenet5"]}
    card = ModelCard.load("tester/digits-model")
    info = HfApi().model_info("tester/digits-model")
    results = {"loaded": loaded, "card": card.content, "files": [file.rfilename for file in info.siblings]}
    Path(file).with_name("trained.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
