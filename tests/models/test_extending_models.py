"""A head is a named subclass of `Head`, and a backbone a decorated function; for encoders see `docs/extending.md`."""

import importlib
import sys

import pytest
import timm
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import BACKBONES
from hf_sphere.nn import HEADS, build_head

TOY_HEAD = """
from torch import nn

from hf_sphere.nn import Head


class ToyHead(Head):
    name = "toy"

    def __init__(self, embedding_dim, num_classes, *, factor=1.0, **options):
        super().__init__(embedding_dim, num_classes, **options)
        self.factor = factor
        self.linear = nn.Linear(embedding_dim, num_classes)

    def compute_logits(self, embeddings):
        return self.factor * self.linear(embeddings)


class BaseOfToys(ToyHead):
    pass
"""
TOY_BACKBONE = '''
from hf_sphere.models.backbones import EmbeddingNet, register_backbone


@register_backbone
def toy_backbone(*, in_chans=3, width=6, **net):
    """A convolution and an average."""
    layers = nn.Sequential(nn.Conv2d(in_chans, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return EmbeddingNet(layers, width, **net)
'''


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Module of the toys, which are unregistered afterwards."""
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toys.py").write_text(TOY_HEAD + TOY_BACKBONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("toys")
    del sys.modules["toys"], HEADS["toy"], BACKBONES["toy_backbone"]


def test_parts_are_found_by_name_with_their_options(toys):
    head = build_head("toy", 5, 3, factor=2.0, label_smoothing=0.1)
    assert type(head) is HEADS["toy"] is toys.ToyHead  # and not the subclass without a name
    assert (head.factor, head.label_smoothing) == (2.0, 0.1)
    with pytest.raises(ValueError, match="head 'toy' has no option margin; its options are: factor, label_smoothing"):
        build_head("toy", 5, 3, margin=1.0)
    assert timm.create_model("toy_backbone", num_classes=7, width=5)(torch.rand(2, 3, 8, 8)).shape == (2, 7)
    assert BACKBONES["toy_backbone"] is timm.model_entrypoint("toy_backbone")


def test_model_with_new_parts_is_saved_and_loaded(toys, tmp_path):
    options = {"backbone": "toy_backbone", "backbone_kwargs": {"width": 9}, "head": "toy", "head_kwargs": {"factor": 3}}
    model = SphereVisionForImageClassification(SphereVisionConfig(**options, num_channels=1, num_labels=4)).eval()
    assert type(model.head) is toys.ToyHead
    model.save_pretrained(tmp_path / "model")
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path / "model")
    images = torch.rand(2, 1, 32, 32)
    assert (loaded.base_model.embedding_dim, loaded.head.factor) == (9, 3.0)
    assert torch.equal(loaded(images).logits, model(images).logits)
