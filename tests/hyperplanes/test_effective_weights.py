"""The weights of other people's layers are those that their forward passes use."""

import copy

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.falcon.modeling_falcon import FalconLinear

from hf_sphere.hyperplanes import distance_from_initialization, iterate_layers, projection_statistics
from hf_sphere.hyperplanes.effective_weights import effective_weight
from hf_sphere.hyperplanes.layers import find_layers
from hf_sphere.nn import AngularConv2d, AngularLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

HOOKS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
STANDARDIZED = [
    timm.layers.StdConv2d,
    timm.layers.StdConv2dSame,
    timm.layers.ScaledStdConv2d,
    timm.layers.ScaledStdConv2dSame,
    WeightStandardizedConv2d,
]


class Normalized(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


class Doubled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


class Activated(nn.Conv2d):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.BatchNorm2d(sizes[1])

    def forward(self, x):
        return self.norm(super().forward(x)).relu()


class LowRank(nn.Linear):
    """A linear layer with factors of its own, as of loralib."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.first, self.second = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))

    def forward(self, x):
        return super().forward(x) + x @ self.first.T @ self.second.T


class WithOffset(nn.Conv2d):
    def forward(self, x, offset):
        return super().forward(x + offset)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Linear])
def test_the_attribute_of_a_hook_may_be_outdated(hook, kind):
    sizes = (4, 6) if kind is nn.Linear else (4, 6, 3)
    trained, loaded = hook(kind(*sizes)), hook(kind(*sizes))
    loaded.load_state_dict(trained.state_dict())
    stale = loaded.weight
    distance = distance_from_initialization(trained, loaded, "all").layers[""]
    assert distance.l2 == pytest.approx(0, abs=1e-6)
    assert loaded.weight is stale  # reading changes nothing
    found = effective_weight(loaded, "")
    loaded.eval()(torch.zeros(1, *((4,) if kind is nn.Linear else (4, 5, 5))))
    assert torch.equal(found, loaded.weight)
    assert not torch.equal(found, stale)


def test_reading_a_spectral_norm_in_training_mode_leaves_its_buffers():
    for normalize in (nn.utils.spectral_norm, parametrizations.spectral_norm):
        layer = normalize(nn.Linear(5, 4)).train()
        before = copy.deepcopy(dict(layer.named_buffers()))
        first = effective_weight(layer, "")
        assert torch.equal(effective_weight(layer, ""), first)
        assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())
        assert layer.training


@pytest.mark.parametrize("build", STANDARDIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_standardized_filters_have_no_projection_whatever_their_mean(build, dtype):
    layer = build(3, 8, 3).to(dtype)
    for shift in (0.0, 1.0):
        with torch.no_grad():
            layer.weight.add_(shift)
        found = projection_statistics(layer)
        assert found.net.projections == (0.0,) * 8
        assert found.net.sign_p_value in (None, 1.0)


def test_the_same_function_has_the_distance_zero():
    layer = timm.layers.StdConv2d(3, 4, 3)
    shifted = copy.deepcopy(layer)
    with torch.no_grad():
        shifted.weight.add_(shifted.weight.std())
    assert distance_from_initialization(shifted, layer).layers[""].l2 < 1e-6


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Normalized(3, 4), lambda weight: F.normalize(weight)),
        (Doubled(3, 4, 3), lambda weight: 2 * weight),
        (AngularConv2d(3, 4, 3), lambda weight: weight / weight.flatten(1).norm(dim=1)[:, None, None, None]),
        (AngularLinear(3, 4, "sigmoid"), lambda weight: F.normalize(weight)),
    ],
)
def test_a_weight_that_the_forward_pass_changes_is_computed(layer, expected):
    torch.testing.assert_close(effective_weight(layer, "").float(), expected(layer.weight.detach()))


@pytest.mark.parametrize(
    "layer",
    [
        *(nn.Conv2d(3, 4, 3), timm.layers.Conv2dSame(3, 4, 3, stride=2), timm.layers.Linear(3, 4)),
        *(FalconLinear(3, 3), FalconLinear(3, 4), Activated(3, 4, 3)),
    ],
)
def test_a_weight_that_the_forward_pass_keeps_is_the_stored_tensor(layer):
    assert effective_weight(layer, "") is layer.weight


def test_a_hook_that_scales_the_weight_is_called():
    layer = nn.Linear(3, 4)
    layer.raw = layer._parameters.pop("weight")
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.raw / 3**0.5))
    layer.register_forward_hook(lambda *_: pytest.fail("the model was run"))
    torch.testing.assert_close(effective_weight(layer, ""), layer.raw.detach() / 3**0.5)
    assert not hasattr(layer, "weight")


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (LowRank(3, 4), r"not multiply its input by one weight, but by \[\(4, 3\), \(2, 3\)"),
        (WithOffset(3, 4, 3), "missing 1 required positional argument: 'offset'"),
    ],
)
def test_a_weight_that_cannot_be_determined_is_refused(layer, problem):
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 4, 3), "head": layer})
    with pytest.raises(ValueError, match=rf"head, a .*cannot be determined: .*{problem}.*pass the state dict"):
        projection_statistics(model, "all")
    assert list(projection_statistics(model.state_dict(), "all").layers) == ["stem", "head"]


def test_weights_of_a_module_are_not_compared_with_stored_ones_that_differ(tmp_path):
    layer = nn.Sequential(timm.layers.StdConv2d(3, 4, 3))
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    for pair in ((layer, tmp_path), (layer.state_dict(), layer)):
        with pytest.raises(ValueError, match=r"0 changes its weight in its forward pass.* Pass both as modules"):
            distance_from_initialization(*pair)
    assert distance_from_initialization(layer.state_dict(), tmp_path).layers["0"].l2 == 0


class TestAdapters:
    @pytest.fixture
    def adapted(self):
        """Build a model with an adapter of PEFT on its linear layers."""
        peft = pytest.importorskip("peft")

        def build(method="LoraConfig", **options):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 2))
            return peft.get_peft_model(model, getattr(peft, method)(target_modules=["2"], **options))

        return build

    @pytest.mark.parametrize("method", ["LoraConfig", "IA3Config", "OFTConfig"])
    def test_a_layer_with_an_adapter_is_refused(self, adapted, method):
        model = adapted(method, **({"feedforward_modules": []} if method == "IA3Config" else {}))
        with pytest.raises(ValueError, match=r"model\.2.* belongs to an adapter.*merge_and_unload"):
            projection_statistics(model, "linear")
        assert list(find_layers(model, "conv")) == ["base_model.model.0"]
        assert list(find_layers(model.merge_and_unload(), "linear")) == ["2", "3"]

    def test_a_module_that_is_saved_with_an_adapter_is_refused(self, adapted):
        with pytest.raises(ValueError, match=r"3\.original_module belongs to an adapter"):
            find_layers(adapted(modules_to_save=["3"]).base_model.model[3:], "linear")

    def test_factors_in_a_file_are_refused(self, adapted, tmp_path):
        model = adapted()
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors belongs to an adapter"):
            list(iterate_layers(tmp_path, "linear"))
        with pytest.raises(ValueError, match=r"model\.2\.base_layer belongs to an adapter"):
            list(iterate_layers(model.state_dict(), "linear"))
        factors = {name: value for name, value in model.state_dict().items() if "lora_" in name}
        with pytest.raises(ValueError, match=r"model\.2\.lora_A\.default belongs to an adapter"):
            list(iterate_layers(factors, "linear"))

    @pytest.mark.parametrize("name", ["base_layer.0", "exploration_head", "flora"])
    def test_other_layers_are_not_taken_for_adapters(self, name):
        assert [layer.name for layer in iterate_layers({f"{name}.weight": torch.randn(2, 2)}, "linear")] == [name]
