import pytest
import torch
from torch import nn

from hf_sphere import SphereVisionConfig
from hf_sphere.geometry import spherize
from hf_sphere.nn import SPHERIZATION_SETTINGS, SphericalConv2d, SphericalLinear, Spherization, build_head
from hf_sphere.utils.modules import is_exporting


def test_feature_maps_match_golden_values(golden):
    values, about = golden("spherization"), golden("spherization").cases["conv"]
    layer = Spherization(about["n"], scaling=about["scaling"], radius=about["radius"], delta=about["delta"], dim=1)
    # The original program adds epsilon inside the logarithms; the results match up to that.
    torch.testing.assert_close(layer(values["conv.x"]), values["conv.original_y"], rtol=0, atol=1e-4)


def test_module_matches_the_function_at_every_pixel_for_its_number_of_features():
    x = torch.randn(2, 5, 3, 4)
    assert torch.equal(Spherization(4, scaling=2.0, radius=3.0, delta=1e-4)(x), spherize(x, 2.0, 3.0, 1e-4))
    expected = spherize(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(Spherization(5, dim=1)(x), expected)


def test_spherical_layers_are_spherization_and_a_bias_free_map_also_of_one_image():
    layer, x = SphericalLinear(6, 4, scaling=2.0), torch.randn(3, 6)
    torch.testing.assert_close(layer(x), spherize(x, 2.0) @ layer.linear.weight.T)
    assert layer.linear.bias is None
    layer, x = SphericalConv2d(3, 4, 3, stride=2, padding=1), torch.randn(2, 3, 9, 9)
    expected = nn.functional.conv2d(Spherization(3, dim=1)(x), layer.conv.weight, stride=2, padding=1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


@pytest.mark.settings(scaling=lambda value: {"learned": value}, radius=lambda value: {"learned": value})
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("radius", [True, False])
def test_scaling_and_radius_are_saved_and_parameters_with_gradients_only_if_learned(scaling, radius):
    layer = Spherization(4, scaling=2.0, radius=3.0, learn_scaling=scaling, learn_radius=radius)
    learned = {name: name in dict(layer.named_parameters()) for name in ("scaling", "radius")}
    assert learned == {"scaling": scaling, "radius": radius}
    restored = Spherization(4, learn_scaling=scaling, learn_radius=radius)
    restored.load_state_dict(layer.state_dict())
    assert (restored.scaling.item(), restored.radius.item()) == (2.0, 3.0)
    (layer(torch.randn(3, 4).requires_grad_()) * torch.arange(5)).sum().backward()
    assert all(parameter.grad.abs() > 0 for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fixed_values_are_exact_in_every_dtype(dtype):
    layer, x = Spherization(5, scaling=0.3, radius=1.1, learn_scaling=False), torch.randn(4, 5, dtype=dtype)
    for _ in range(2):  # without parameters, it need not be converted
        torch.testing.assert_close(layer(x), spherize(x, 0.3, 1.1), rtol=1e-14, atol=0)
        layer = layer.to(dtype)


@pytest.mark.parametrize(
    "layer", [Spherization(4, scaling=2.0), SphericalLinear(4, 2, scaling=2.0), SphericalConv2d(4, 2, 3, scaling=2.0)]
)
def test_reset_restores_the_initial_scaling(layer):
    spherization = layer if isinstance(layer, Spherization) else layer.spherization
    nn.init.constant_(spherization.scaling, 7.0)
    layer.reset_parameters()
    assert spherization.scaling.item() == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_result_has_the_autocast_dtype_and_the_radius(dtype):
    before, layer = nn.Linear(16, 4096), Spherization(4096, scaling=5.0, radius=5.0)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(before(torch.randn(4, 16)))
    assert y.dtype == dtype
    # Each of the 4,097 coordinates is rounded once to 8 or 11 bits.
    assert (y.double().norm(dim=-1) / 5 - 1).abs().max() < torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("layer", "shape", "backend"),
    [
        (Spherization(6), (4, 6), "aot_eager"),
        (SphericalLinear(6, 3), (4, 6), "inductor"),
        (SphericalConv2d(3, 2, 3), (2, 3, 8, 8), "aot_eager"),
    ],
)
def test_modules_compile_with_fullgraph(layer, shape, backend):
    x, compiled = torch.randn(shape), torch.compile(layer, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)


def test_export_supports_a_dynamic_batch_size_and_compiling_is_not_taken_for_it():
    layer = SphericalLinear(6, 3)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(layer, (torch.randn(4, 6),), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 6)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-6)
    assert torch.compile(lambda x: x + is_exporting(), backend="eager", fullgraph=True)(torch.zeros(1)) == 0


@pytest.mark.parametrize(("size", "delta"), [(1, 1e-6), (3, 0.5), (3072, 1e-6)])
def test_exported_map_equals_the_layer_also_where_angles_are_saturated(size, delta):
    layer = Spherization(size, scaling=5.0, radius=3.0, delta=delta)
    x = torch.stack([scale * torch.randn(size) for scale in (0.1, 1.0, 100.0)] + [torch.full((size,), -1e4)])
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-7)
    assert not any("cumprod" in str(node.target) for node in program.graph.nodes)  # which ONNX lacks


@pytest.mark.parametrize("name", SPHERIZATION_SETTINGS)
def test_settings_by_name_are_options_of_layer_head_and_image_models(name):
    settings = SPHERIZATION_SETTINGS[name]
    layers = [Spherization(4, **settings), build_head("spherized", 4, 3, **settings).classifier.spherization]
    assert [(layer.initial_scaling, layer.delta) for layer in layers] == [(settings["scaling"], settings["delta"])] * 2
    # A saved configuration has the numbers.
    assert SphereVisionConfig(backbone="lenet5", spherization=settings).to_dict()["spherization"] == settings


def test_settings_by_name_share_out_the_length_as_documented():
    x = torch.randn(4000, 64, dtype=torch.float64)
    layers = {name: Spherization(64, **settings).double() for name, settings in SPHERIZATION_SETTINGS.items()}
    share = {name: layer(x).detach().square().mean(0) for name, layer in layers.items()}
    assert share["steep"][:12].sum() > 0.8
    assert 0.15 < share["even"][:12].sum() < 0.25  # a fifth of the coordinates
    assert share["flat"][-1] > 0.6
