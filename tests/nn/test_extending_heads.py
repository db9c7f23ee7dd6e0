"""A head is a subclass of `Head` that sets `name`, in one file."""

import importlib
import sys

import pytest
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.nn import HEADS, build_head, heads

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


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Module of the toy head, which is unregistered afterwards."""
    (tmp_path / "toy_head.py").write_text(TOY_HEAD)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy_head")
    del sys.modules["toy_head"], HEADS["toy"]


def test_head_is_found_by_name_with_its_options(toy):
    head = build_head("toy", 5, 3, factor=2.0, label_smoothing=0.1)
    assert type(head) is HEADS["toy"] is toy.ToyHead  # and not the subclass without a name
    assert (head.factor, head.label_smoothing) == (2.0, 0.1)
    with pytest.raises(ValueError, match="head 'toy' has no option margin; its options are: factor, label_smoothing"):
        build_head("toy", 5, 3, margin=1.0)


def test_model_with_a_new_head_is_saved_and_loaded(toy, tmp_path):
    config = SphereVisionConfig(
        backbone="lenet5", num_channels=1, image_size=28, head="toy", head_kwargs={"factor": 3.0}, num_labels=4
    )
    model = SphereVisionForImageClassification(config).eval()
    assert type(model.head) is toy.ToyHead
    model.save_pretrained(tmp_path / "model")
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path / "model")
    images = torch.rand(2, 1, 28, 28)
    assert loaded.head.factor == 3.0
    assert torch.equal(loaded(images).logits, model(images).logits)


def test_files_in_the_heads_folder_are_imported(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY_HEAD)
    monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path)])
    before = dict(HEADS)
    try:
        heads.import_heads()
        assert heads.ToyHead is HEADS["toy"]
    finally:
        HEADS.clear()
        HEADS.update(before)
        del sys.modules["hf_sphere.nn.heads.toy"]
