import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetModel

from hf_sphere.hyperplanes import iterate_layers
from hf_sphere.utils.snapshots import save_snapshot


def small_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=6))


def small_bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    return BertModel(BertConfig(**sizes, vocab_size=11, max_position_embeddings=6))


def small_resnet():
    return ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[8, 8], depths=[1, 2], layer_type="basic"))


def read(source, layers="all"):
    return {layer.name: layer for layer in iterate_layers(source, layers, include_1x1=True)}


def assert_same(found, expected, prefix=""):
    assert found.keys() == {name.removeprefix(prefix) for name in expected}
    for name, layer in expected.items():
        same = found[name.removeprefix(prefix)]
        assert (same.kind, same.dim) == (layer.kind, layer.dim)
        assert torch.equal(same.weight, layer.weight)


def write(tmp_path, tensors=None):
    """Write tensors to model.safetensors and return the folder."""
    save_file(tensors or {"conv.weight": torch.randn(2, 3, 3, 3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("build", [small_bert, small_resnet])
@pytest.mark.parametrize("max_shard_size", ["5GB", "3KB"])
def test_files_have_the_layers_of_their_model(build, max_shard_size, tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (max_shard_size == "3KB")
    assert_same(read(tmp_path), read(model))
    assert_same(read(model.state_dict()), read(model))


TABLES = ["embeddings.word_embeddings", "model.embed_tokens", "wte", "shared", "decoder.relative_attention_bias"]
TABLES += ["tok_emb", "rotary.emb", "quantizer.codebook", "embedding_table"]
LINEAR = ["emb_proj", "embeddings_project", "embed_out", "patch_embed.proj", "lm_head"]


@pytest.mark.parametrize("name", [*TABLES, *LINEAR])
def test_embedding_tables_without_a_bias_are_not_linear_layers(name):
    state = {f"{name}.weight": torch.randn(4, 3), "other.weight": torch.randn(2, 2)}
    assert (name in read(state)) == (name in LINEAR)
    assert name in read({**state, f"{name}.bias": torch.randn(4)})
    assert (name in read({**state, f"{name}.bias": torch.randn(5)})) == (name in LINEAR)


def test_names_are_sorted_numerically_and_tied_tensors_of_a_state_dict_count_once(tmp_path):
    folder = write(tmp_path, {f"layers.{number}.weight": torch.randn(2, 2) for number in (10, 9, 1)})
    assert list(read(folder)) == ["layers.1", "layers.9", "layers.10"]
    assert list(read(write(tmp_path, nn.Linear(2, 3).state_dict()))) == [""]
    weight = torch.randn(3, 3)
    state = {"first.weight": weight, "second.weight": weight, "third.weight": weight.clone()}
    assert list(read(state)) == ["first", "third"]


PARTS = [
    nn.utils.parametrizations.weight_norm,
    nn.utils.weight_norm,
    lambda m: prune.random_unstructured(m, "weight", 1),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("normalize", PARTS)
def test_weights_stored_in_parts_require_the_model(normalize, tmp_path):
    model = nn.Sequential(normalize(nn.Conv1d(2, 3, 3)))
    with pytest.raises(ValueError, match=r"0 has a weight that is quantized or stored in parts .* Pass the model"):
        read(write(tmp_path, {name: value.contiguous() for name, value in model.state_dict().items()}))
    assert list(read(model)) == ["0"]


def test_a_stack_of_weights_is_no_layer_and_standardized_ones_need_the_model():
    model = nn.ModuleDict({"experts": timm.layers.CondConv2d(2, 3, 3, bias=True), "head": nn.Linear(3, 2)})
    assert list(read(model.state_dict())) == list(read(model)) == ["head"]
    with pytest.raises(ValueError, match="0 has a weight that is quantized or stored in parts"):
        read(nn.Sequential(timm.layers.ScaledStdConv2d(2, 3, 3)).state_dict())


def test_layers_of_a_snapshot_have_the_order_of_the_model(tmp_path):
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "body": nn.Conv2d(4, 4, 3), "a_head": nn.Linear(4, 2)})
    found = [layer.name for layer in iterate_layers(save_snapshot(model, tmp_path, 0), "all")]
    assert found == ["stem", "body", "a_head"]
    other = tmp_path / "model.safetensors"  # without an epoch, the order may be anything
    save_file({f"{name}.weight": torch.ones(2, 2) for name in "ba"}, other, metadata={"order": "null"})
    assert list(read(other)) == ["a", "b"]


def ambiguous(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x.weight": torch.ones(2, 2)}, folder / "b.safetensors")


def incomplete(folder):
    index = {"weight_map": {"conv.weight": "model.safetensors", "fc.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 200), ValueError, "is damaged or not a safe"),
        (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, r"no \*\.safetensors.*save_pret"),
        (ambiguous, FileNotFoundError, r"has a\.safetensors, b\.safetensors; pass"),
        (incomplete, KeyError, r"fc\.weight"),
    ],
)
def test_a_folder_without_one_readable_checkpoint_is_refused(change, error, message, tmp_path):
    folder = write(tmp_path)
    change(folder)
    with pytest.raises(error, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: small_gpt2().state_dict(), r"h\.0\.attn\.c_attn is stored with the inputs first, "),
        (lambda: {"fc.weight": torch.ones(4, 3).to(torch.int8)}, "fc is quantized"),
        (lambda: {"fc.weight": torch.ones(4, 3).to(torch.float8_e4m3fn)}, "fc is quantized"),
        (lambda: {"fc.qweight": torch.ones(4, dtype=torch.int32)}, "fc has a weight that is quantized"),
        (lambda: {"model": {"fc.weight": torch.ones(2, 2)}}, "0 tensors has no layer"),
        (lambda: {"conv.weight": torch.ones(2, 3, 1, 1)}, r"layers='linear' .* has 1 1x1 conv\. Choose layers="),
    ],
)
def test_weights_that_cannot_be_read_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        read(state(), "linear" if "linear" in message else "all")
