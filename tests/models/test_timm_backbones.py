"""Backbones of timm in image models: sizes of images, last activations, suggested names."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import create_backbone, ends_in_activation


def test_backbones_support_an_image_size_that_is_not_their_own(tmp_path):
    names = ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "mobilenetv3_small_050"]
    for backbone, image_size in ((name, size) for name in names for size in (64, [96, 32])):
        config = SphereVisionConfig(backbone=backbone, image_size=image_size, num_labels=5)
        model, x = SphereVisionForImageClassification(config).eval(), torch.randn(1, 3, *config.input_size)
        assert model(x).logits.shape == (1, 5)
        if backbone == names[0]:
            model.save_pretrained(tmp_path)
            loaded = SphereVisionForImageClassification.from_pretrained(tmp_path).eval()
            assert torch.equal(loaded(x).logits, model(x).logits)
    net = create_backbone("vit_tiny_patch16_224", num_channels=3, image_size=64, img_size=32)  # an option overrides it
    assert net.patch_embed.img_size == (32, 32)


class Shared(nn.Module):
    """A backbone that uses one norm and one matrix twice, the matrix in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.num_features = 8
        self.first, self.last = nn.Linear(64, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last[1].weight = self.last[0].weight
        self.norm = nn.BatchNorm1d(8)
        self.norms = nn.ModuleList([self.norm, self.norm])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        for layer, norm in zip(self.last, self.norms, strict=True):
            x = norm(layer(x))
        return x


@pytest.fixture
def shared(monkeypatch) -> None:
    """Register the backbone."""
    from timm.models import _registry

    monkeypatch.setitem(_registry._model_entrypoints, "shared", lambda pretrained=False, **options: Shared())


@pytest.mark.parametrize("backbone", ["coat_lite_tiny", "shared"])
@torch.no_grad()
def test_a_backbone_with_shared_tensors_is_saved_and_loaded(backbone, shared, tmp_path):
    side, channels = (8, 1) if backbone == "shared" else (32, 3)
    config = SphereVisionConfig(backbone=backbone, image_size=side, num_channels=channels, num_labels=3)
    model, x = SphereVisionForImageClassification(config), torch.randn(4, channels, side, side)
    model(x)  # changes the statistics of batch norms
    model.eval().save_pretrained(tmp_path)
    loaded, report = SphereVisionForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(loaded.eval()(x).logits, model(x).logits)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_training_of_a_backbone_with_shared_tensors_is_resumed_exactly(shared, tmp_path):
    config = SphereVisionConfig(backbone="shared", image_size=8, num_channels=1, num_labels=3, head="cosine")
    rows = [{"pixel_values": torch.randn(1, 8, 8), "labels": index % 3} for index in range(8)]
    options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    models = [SphereVisionForImageClassification(config) for _ in range(2)]
    for model, checkpoint in zip(models, (None, str(tmp_path / "checkpoint-1")), strict=True):
        args = TrainingArguments(str(tmp_path), disable_tqdm=True, **options)
        Trainer(model, args, train_dataset=rows).train(resume_from_checkpoint=checkpoint)
    trained, resumed = (model.state_dict() for model in models)
    assert all(torch.equal(trained[name], resumed[name]) for name in trained)


ENDS = {"vit_tiny_patch16_224": False, "swin_tiny_patch4_window7_224": False, "convnext_atto": False}
ENDS |= {"mixer_s32_224": False, "resnet18": True, "vgg11": True, "densenet121": True, "mobilenetv3_small_050": True}


def test_last_activation_is_recognized():
    for backbone, expected in ENDS.items():
        with torch.device("meta"):
            net = create_backbone(backbone, num_channels=3, image_size=224)
        assert ends_in_activation(net) == expected, backbone
