"""The claims of SECURITY.md on what is never executed."""

import argparse
import ast
import builtins
import dataclasses
import functools
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import timm
import torch
import yaml
from accelerate import Accelerator
from case_selection import each
from doubles import Marker
from PIL import EpsImagePlugin, Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    ViTConfig,
    ViTModel,
)

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionImageProcessor,
    SphereVisionModel,
)
from hf_sphere.analogies import LanguageModel
from hf_sphere.data import ImageDataOptions, load_image_data
from hf_sphere.data.images import load_thumbnails
from hf_sphere.models.backbones import create_backbone
from hf_sphere.prototypes import embed_class_names
from hf_sphere.search import ImageEncoder, ImageSource
from hf_sphere.search.extract import load_embedding_model
from hf_sphere.training.checkpoints import RunState, load_checkpoint, save_checkpoint
from hf_sphere.training.optimization import start_average
from hf_sphere.training.tasks.masked_lm import TextModelArguments, build_language_model
from hf_sphere.utils.arguments import Options
from hf_sphere.utils.configs import YamlLoader, read_yaml
from hf_sphere.utils.loading import _TIMM_FILE_OPTIONS, load_model, load_pretrained
from hf_sphere.utils.model_sources import load_classifier

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("hf_sphere", "recipes", "analogy", "evaluate_modules", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TINY_BERT = ROOT / "tests" / "golden" / "analogy" / "tiny-bert"


@functools.cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in the sources: where, the called name, and the call."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_no_source_evaluates_text_or_unpickles():
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "yaml.unsafe_load", "yaml.full_load"}
    found = [where for where, name, _ in calls() if name in forbidden or name.split(".")[0] in ("pickle", "joblib")]
    assert found == []


def test_torch_files_are_read_with_weights_only():
    reads = [(where, ast.unparse(call)) for where, name, call in calls() if name in ("torch.load", "load_state_dict")]
    assert reads
    assert [where for where, call in reads if "weights_only=True" not in call] == []


def test_yaml_is_read_with_a_safe_loader():
    found = {ast.unparse(call).rpartition("=")[2] for _, name, call in calls() if name.startswith("yaml.load")}
    assert {each.partition(")")[0] for each in found} == {"YamlLoader", "loader"}
    assert get_type_hints(read_yaml)["loader"] == type[yaml.SafeLoader]
    assert issubclass(YamlLoader, yaml.SafeLoader)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        Options("{a: !!python/object/apply:os.getcwd []}")
    assert "could not determine a constructor" in str(refused.value.__cause__)


def test_every_image_is_opened_with_a_list_of_formats():
    opened = [(place, call) for place, name, call in calls() if name.endswith("Image.open")]
    assert opened
    assert [place for place, call in opened if "formats" not in {keyword.arg for keyword in call.keywords}] == []


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def gs_runs(tmp_path, monkeypatch):
    """A file that a stand-in for Ghostscript writes."""
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\necho run >> {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return ran


@pytest.fixture
def crafted(tmp_path):
    """A folder of two classes, and a file in it that is no PNG image."""
    for number in range(6):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(file)
    (tmp_path / "photos" / "a" / "x.png").write_bytes(EPS)
    return tmp_path / "photos" / "a" / "x.png"


def test_pillow_alone_would_start_ghostscript(gs_runs, crafted):
    with suppress(OSError, ValueError):  # the stand-in makes no image
        Image.open(crafted).load()
    assert gs_runs.exists()


def stream(folder: Path) -> Any:
    limits = {"max_train_samples": 7, "max_eval_samples": 7, "num_channels": 3, "image_size": [8]}
    known = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "eval_split": "train", "dataloader_num_workers": 0}
    return [*load_image_data(ImageDataOptions(str(folder), streaming=True, **limits, **known)).train.epoch()]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda file: load_image_data(ImageDataOptions(str(file.parent.parent))), id="training"),
        pytest.param(
            lambda file: load_image_data(ImageDataOptions(str(file.parent.parent), keep_in_memory="no")),
            id="training from disk",
        ),
        pytest.param(lambda file: stream(file.parent.parent), id="stream"),
        pytest.param(lambda file: ImageSource.of(file).open(0), id="query"),
        pytest.param(lambda file: ImageSource.of(file.parent.parent).open(3), id="image of a folder"),
        pytest.param(lambda file: ImageSource.of([Image.open(file)]), id="image in memory"),
        pytest.param(
            lambda file: ImageSource.of([{"image": {"bytes": file.read_bytes(), "path": None}}]).open(0), id="bytes"
        ),
        pytest.param(lambda file: SphereVisionImageProcessor()(Image.open(file)), id="processor"),
    ],
)
def test_no_image_starts_ghostscript(use, gs_runs, crafted):
    with pytest.raises(ValueError, match=r"cannot identify|EPS|can be decoded|cannot be decoded"):
        use(crafted)
    assert not gs_runs.exists()


def test_a_thumbnail_that_would_start_ghostscript_is_black(gs_runs, crafted):
    thumbnails = load_thumbnails(str(crafted.parent.parent), ["train"], torch.arange(7))
    assert thumbnails.amax((1, 2, 3)).count_nonzero() == 5  # one image is black
    assert not gs_runs.exists()


def test_a_pickled_checkpoint_of_a_model_is_not_executed(tmp_path):
    config = SphereVisionConfig(backbone="linear_embedding", num_channels=1, image_size=6)
    config.save_pretrained(tmp_path)
    torch.save({"weight": Marker(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only|pickle"):
        SphereVisionModel.from_pretrained(tmp_path)
    assert not (tmp_path / "executed").exists()


# Everything that a process reads


@dataclasses.dataclass
class Reads:
    """What was read since the start of a test."""

    weights_only: list[Any] = dataclasses.field(default_factory=list)  # of every `torch.load`
    unpickled: list[str] = dataclasses.field(default_factory=list)  # every global of Python's own unpickler
    opened: list[Path] = dataclasses.field(default_factory=list)


RECORDS: list[Reads] = []


def hook(event: str, args: tuple) -> None:
    for reads in RECORDS or ():  # None when Python ends
        if event == "pickle.find_class":
            reads.unpickled.append(".".join(args))
        elif event == "open" and isinstance(args[0], str | Path):
            reads.opened.append(Path(args[0]))


@pytest.fixture(scope="session")
def _hooked():
    sys.addaudithook(hook)  # for the rest of the process


@pytest.fixture
def reads(_hooked, monkeypatch) -> Iterator[Reads]:
    record, load = Reads(), torch.load

    def recorded(*args: Any, **options: Any) -> Any:
        record.weights_only.append(options.get("weights_only"))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", recorded)
    RECORDS.append(record)
    yield record
    RECORDS.remove(record)


LINEAR = {"backbone": "linear_embedding", "num_channels": 1, "image_size": 6}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "image_size": 32}


def save_pickled(model: Any, folder: Path) -> str:
    """Save a model with weights of `torch.save`; return the folder."""
    model.config.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return str(folder)


def read_classifier(folder: Path) -> None:
    model = SphereVisionForImageClassification(SphereVisionConfig(**LINEAR, head="softmax"))
    load_embedding_model(save_pickled(model, folder))


def read_encoder(folder: Path) -> None:
    load_embedding_model(save_pickled(ViTModel(ViTConfig(**SMALL)), folder))


def read_weights_of_an_encoder(folder: Path) -> None:
    name = save_pickled(ViTModel(ViTConfig(**SMALL)), folder)
    SphereVisionModel(SphereVisionConfig(backbone=name), pretrained=f"{name}/pytorch_model.bin")


def read_weights_of_a_backbone(folder: Path) -> None:
    folder.mkdir()
    torch.save(create_backbone("lenet5", num_channels=1, image_size=28).state_dict(), folder / "lenet.pth")
    create_backbone("lenet5", num_channels=1, image_size=28, pretrained=f"{folder}/lenet.pth")


def read_model_of_timm(folder: Path) -> None:
    timm.models.save_for_hf(timm.create_model("test_resnet"), folder, safe_serialization=False)
    load_embedding_model(str(folder))


def read_language_model(folder: Path) -> None:
    shutil.copytree(TINY_BERT, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    LanguageModel.load(str(folder))


def read_checkpoint(folder: Path) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    start_average(model, 0.9, accelerator)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    load_checkpoint(accelerator, save_checkpoint(accelerator, folder, RunState(), keep=1))


@pytest.mark.parametrize(
    "read",
    [
        read_classifier,
        read_encoder,
        read_weights_of_an_encoder,
        read_weights_of_a_backbone,
        read_model_of_timm,
        read_language_model,
        read_checkpoint,
    ],
)
def test_every_torch_file_of_a_process_is_read_with_weights_only(read, reads, tmp_path):
    read(tmp_path / "folder")
    assert reads.weights_only
    assert set(reads.weights_only) == {True}
    assert reads.unpickled == []


def settings_that_load(other: Path) -> dict[str, dict[str, Any]]:
    """Configurations of which each would load `other`, a folder, a file in it, or code."""
    file, timm_wrapper = str(other / "weights.pth"), {"model_type": "timm_wrapper", "architecture": "test_resnet"}
    options: dict[str, Any] = {name: file for name in ("checkpoint_path", "pretrained", "cache_dir")}
    options |= {name: {"file": file} for name in ("pretrained_cfg", "pretrained_cfg_overlay")}
    kernel, sphere = {"attn_implementation": "kernels-community/any"}, {"model_type": "sphere_vision"}
    detector = {"model_type": "timm_backbone", "backbone": f"local-dir:{other}", "backbone_config": {"a": 1}}
    return {
        **{name: sphere | {"backbone": "test_resnet", "backbone_kwargs": {name: options[name]}} for name in options},
        **{f"wrapped {name}": timm_wrapper | {"model_args": {name: options[name]}} for name in options},
        "nested options": sphere | {"backbone_kwargs": {"block": [{"checkpoint_path": file}]}},
        "nested configuration": sphere | {"backbone_config": timm_wrapper | {"model_args": {"checkpoint_path": file}}},
        "nested folder": sphere | {"backbone_config": timm_wrapper | {"architecture": f"local-dir:{other}"}},
        "nested kernel": sphere | {"backbone_config": {"model_type": "vit", **SMALL, **kernel}},
        "folder": sphere | {"backbone": str(other)},
        "folder beside the program": sphere | {"backbone": "other"},
        "model of the Hub": {"model_type": "dpt", "backbone": "gpt2"},
        "nested model of the Hub": sphere | {"backbone_config": {"model_type": "dpt", "backbone": "gpt2"}},
        "folder of timm": timm_wrapper | {"architecture": f"local-dir:{other}"},
        "folder of a detector": {"model_type": "dpt", "backbone_config": detector},
        "kernel": {"model_type": "vit", **SMALL, **kernel},
        "kernel of the experts": {"model_type": "vit", **SMALL, "_experts_implementation": {"": "owner/any"}},
    }


@pytest.mark.parametrize("case", settings_that_load(Path()))
def test_a_configuration_that_would_load_something_else_is_refused_before_a_file_is_opened(
    case, reads, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    other, folder = tmp_path / "other", tmp_path / "model"
    for path in (other, folder):
        path.mkdir()
    ViTConfig(**SMALL).save_pretrained(other)
    torch.save({"weight": Marker(tmp_path / "executed")}, other / "weights.pth")
    settings = settings_that_load(other)[case]
    (folder / "config.json").write_text(json.dumps(settings))
    torch.save({"weight": Marker(tmp_path / "executed")}, folder / "pytorch_model.bin")
    reads.opened.clear()
    uses = [load_embedding_model]
    uses += [SphereVisionModel.from_pretrained, AutoModel.from_pretrained] * (settings["model_type"] == "sphere_vision")
    for use in uses:
        with pytest.raises(Exception, match=r"reads files|would load another model|names the kernel"):
            use(str(folder))
    assert not [
        path
        for path in reads.opened
        if other in path.absolute().parents or (path.parent == folder and path.suffix == ".bin")
    ]
    assert not (tmp_path / "executed").exists()


def test_every_option_of_timm_that_loads_is_known():
    harmless = {"model_name", "scriptable", "exportable", "no_jit", "kwargs"}
    assert {*inspect.signature(timm.create_model).parameters} - harmless == {*_TIMM_FILE_OPTIONS}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a language model, to change."""
    return shutil.copytree(TINY_BERT, tmp_path / "model")


@pytest.mark.parametrize("with_model", [True, False])
def test_an_adapter_beside_a_model_is_refused(with_model, reads, folder):
    for file in () if with_model else ("config.json", "model.safetensors"):
        (folder / file).unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(TINY_BERT)}))
    reads.opened.clear()
    with pytest.raises(ValueError, match="has an adapter; merge it"):
        load_model(AutoModel, str(folder))
    assert not [path for path in reads.opened if TINY_BERT in path.parents]


# Models with custom code


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch) -> Path:
    """A model whose folder has Python code for all of its parts; the user would agree to run it."""
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n")
    names = ["AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForImageClassification"]
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "with_code", "auto_map": {name: "code.Anything" for name in names}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Anything", "auto_map": {"AutoTokenizer": ["code.Anything", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return folder


USES: dict[str, Callable[[str], Any]] = {
    "training": lambda name: build_language_model(TextModelArguments(model_name_or_path=name)),
    "tokenizer": lambda name: load_pretrained(AutoTokenizer, name),
    "analogies": LanguageModel.load,
    "embeddings": load_embedding_model,
    "projections": load_classifier,
    "prototypes": lambda name: embed_class_names(["a", "b"], name),
}


def test_custom_code_would_be_run_by_transformers_if_the_user_agreed(with_code, tmp_path):
    with pytest.raises(Exception, match="Anything"):
        AutoConfig.from_pretrained(with_code)
    assert (tmp_path / "executed").exists()


@each("use")
@pytest.mark.parametrize("use", USES)
def test_custom_code_of_a_model_is_not_run(use, with_code, tmp_path):
    with suppress(ValueError, OSError):
        USES[use](str(with_code))
    assert not (tmp_path / "executed").exists()


def processors_that_load(other: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """File of a model's folder and its contents, which would run code of `other`, or read a file there."""
    audio = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(other)}
    code = {"auto_map": {"AutoImageProcessor": f"{other}--code.Anything"}, "image_processor_type": "Anything"}
    one_former = {"image_processor_type": "OneFormerImageProcessor", "repo_path": str(other)}
    return {
        "model of a processor": (
            "processor_config.json",
            {"processor_class": "CLIPProcessor", "audio_tokenizer": audio},
        ),
        "model beside a processor": ("audio_tokenizer_config.json", audio),
        "code of an image processor": ("preprocessor_config.json", code),
        "code of a nested image processor": ("processor_config.json", {"image_processor": code}),
        "file of classes": ("preprocessor_config.json", one_former | {"class_info_file": "classes.json"}),
        "path of classes": ("preprocessor_config.json", one_former | {"class_info_file": f"{other}/classes.json"}),
    }


@each("case")
@pytest.mark.parametrize("case", processors_that_load(Path()))
def test_a_processor_does_not_load_anything_else(case, with_code, reads, tmp_path):
    folder = tmp_path / "encoder"
    CLIPModel(CLIPConfig(text_config=SMALL, vision_config=SMALL)).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    shutil.copy(TINY_BERT / "tokenizer.json", folder)
    (with_code / "classes.json").write_text(json.dumps({"0": {"name": "cat", "isthing": 1}}))
    name, values = processors_that_load(with_code)[case]
    (folder / name).write_text(json.dumps(values))
    reads.opened.clear()
    with suppress(ValueError):
        ImageEncoder(str(folder))
    assert not [path for path in reads.opened if with_code in path.parents]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "adapter_config.json"])
@pytest.mark.parametrize("target", [None, "/dev/zero"])
def test_a_pipe_or_device_in_the_folder_of_a_model_is_not_read(name, target, folder):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if target is None else (folder / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        LanguageModel.load(str(folder))


@pytest.mark.parametrize("name", ["BertweetTokenizer", "MecabTokenizer"])
def test_a_tokenizer_that_fails_in_any_way_is_an_error_with_its_name(name, folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ValueError, match="model cannot be loaded as AutoTokenizer"):
        LanguageModel.load(str(folder))


def test_every_automatic_class_is_told_not_to_run_custom_code():
    loads = [
        (where, ast.unparse(call))
        for where, name, call in calls()
        if re.search(r"Auto\w*\.from_pretrained$", name) and not where.startswith(("benchmarks", "examples"))
    ]
    assert loads == []  # but by load_pretrained
    with mock.patch.object(AutoConfig, "from_pretrained") as load:
        load_pretrained(AutoConfig, TINY_BERT)
    assert load.call_args.kwargs == {"trust_remote_code": False}


def test_each_promise_names_tests_that_exist(root):
    text = (root / "SECURITY.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| ") and "promise" not in row]
    named = [re.findall(r"`([\w/]*test_\w+\.py)`", row) for row in rows]
    assert len(rows) == 15
    assert all(named)
    assert all((root / "tests" / name).is_file() for names in named for name in names)
