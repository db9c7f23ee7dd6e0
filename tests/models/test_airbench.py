import pytest
import torch
from torch import nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.models.backbones import create_backbone
from hf_sphere.models.backbones.airbench import PatchWhitening
from hf_sphere.training import initialize_from_data


@pytest.fixture
def pictures() -> torch.Tensor:
    """Images whose pixels are correlated within and between channels, with different variances."""
    torch.manual_seed(0)
    mixed = torch.einsum("dc,bchw->bdhw", torch.randn(3, 3), torch.randn(200, 3, 12, 12))
    return nn.functional.avg_pool2d(mixed, 3, 1)


def new_model(**options) -> SphereVisionForImageClassification:
    config = SphereVisionConfig(backbone="airbench_cifar", image_size=16, num_labels=4, **options)
    return SphereVisionForImageClassification(config)


def responses(layer: PatchWhitening, images: torch.Tensor) -> torch.Tensor:
    """Responses of the filters, (patches, filters)."""
    return layer(images).movedim(1, -1).flatten(0, 2).detach()


def test_responses_of_untrained_filters_are_uncorrelated_with_unit_variance(pictures):
    layer = PatchWhitening(3, epsilon=0.0)
    layer.initialize_from_data(pictures)
    torch.testing.assert_close(responses(layer, pictures)[:, :12].T.cov(), torch.eye(12), rtol=0, atol=1e-4)
    assert torch.equal(layer.weight[:12], -layer.weight[12:])
    assert dict(layer.named_parameters()).keys() == {"bias"}
    layer = PatchWhitening(1, epsilon=0.25)
    layer.initialize_from_data(torch.ones(4, 1, 5, 5))
    torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.full((8,), 2.0))


def test_convolutions_begin_as_identities_and_gains_of_batch_norms_are_fixed():
    net = create_backbone("airbench_cifar", num_channels=3, image_size=32)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    widths = [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)]
    assert [(c.in_channels, c.out_channels) for c in convs] == widths
    for conv in convs:
        x = torch.randn(2, conv.in_channels, 5, 5)
        torch.testing.assert_close(conv(x)[:, : conv.in_channels], x)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [list(dict(n.named_parameters())) for n in norms] == [["bias"]] * 6
    narrow = create_backbone("airbench_cifar", num_channels=3, image_size=12, widths=[16, 40])
    assert narrow(torch.rand(2, 3, 12, 12)).shape == (2, 40)


def test_recipes_whiten_a_new_network_once_also_if_it_is_saved(pictures, tmp_path):
    model = new_model(head="softmax").eval()
    backbone = model.base_model.backbone
    assert backbone.needs_data_initialization
    initialize_from_data(model, [{"pixel_values": pictures}])
    expected = PatchWhitening(3)
    expected.initialize_from_data(pictures)
    assert torch.equal(backbone.layers[0].weight, expected.weight)
    assert not backbone.needs_data_initialization
    initialize_from_data(model, [{"pixel_values": 2 * pictures}])
    assert torch.equal(backbone.layers[0].weight, expected.weight)
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    assert not loaded.base_model.backbone.needs_data_initialization
    assert loaded.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True)
    torch.testing.assert_close(loaded(pictures).logits, model(pictures).logits)


def test_head_is_initialized_from_embeddings_of_the_whitened_network(pictures):
    model, whitened = new_model(head="vmf"), new_model(head="vmf")
    whitened.load_state_dict(model.state_dict())
    whitened.base_model.backbone.initialize_from_data(pictures)
    for each in (model, whitened):
        initialize_from_data(each, [{"pixel_values": pictures}])
    torch.testing.assert_close(model.state_dict(), whitened.state_dict())
