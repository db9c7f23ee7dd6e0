import pytest
import timm
import torch

from hf_sphere.hyperplanes import projection_statistics, reinitialization_robustness


def build():
    return timm.create_model("vgg11_cifar", hidden=0, num_classes=10, in_chans=3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build().eval()


def test_statistics_on_the_device_match_the_cpu(model, device):
    on_cpu = projection_statistics(model, "all")
    assert projection_statistics(model.to(device), "all") == on_cpu


def test_reinitialized_layers_on_the_device_give_the_accuracies_of_the_cpu(model, device):
    model = model.to(device)
    torch.manual_seed(1)
    images = torch.randn(100, 3, 32, 32, device=device)
    with torch.inference_mode():
        labels = torch.cat([model(batch).argmax(-1) for batch in images.split(64)])
    snapshot, options = build().state_dict(), {"layers": "conv", "num_random": 1, "fresh": build}

    @torch.inference_mode()
    def accuracy(net):
        pairs = zip(images.split(64), labels.split(64), strict=True)
        return float(sum((net(x).argmax(-1) == y).sum() for x, y in pairs) / len(labels))

    found = reinitialization_robustness(model, [snapshot], accuracy, **options)
    model, images, labels = model.cpu(), images.cpu(), labels.cpu()
    expected = reinitialization_robustness(model, [snapshot], accuracy, **options)
    assert found.accuracy == 1.0
    for name, layer in found.layers.items():
        assert layer.snapshots["0"] == pytest.approx(expected.layers[name].snapshots["0"], abs=0.02)
