import pytest
import torch
from torch import nn

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import Augmentation, ImagesInMemory
from hf_sphere.distributions import HypersphericalUniform, VonMisesFisher
from hf_sphere.geometry import (
    angles_to_cartesian,
    cartesian_to_angles,
    concentration_from_mean_resultant_length,
    log_vmf_normalizer,
    mean_resultant_length,
    spherize,
)
from hf_sphere.geometry.bessel import mean_resultant_length_derivative
from hf_sphere.geometry.sampling import fixed_noise, points_from_noise
from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT, find_scale_invariant_weights, scale_invariant_groups


@pytest.mark.parametrize("function", [spherize, angles_to_cartesian, cartesian_to_angles])
@pytest.mark.parametrize("n", [2, 39, 40, 3000])
def test_values_and_gradients_match_the_cpu(function, n, device):
    x = torch.randn(64, n, dtype=torch.float64)
    results = []
    for place in ("cpu", device):
        values = x.to(place).requires_grad_()
        y = function(values)
        (gradient,) = torch.autograd.grad((y * torch.arange(y.shape[-1], device=place)).sum(), values)
        results.append((y.cpu(), gradient.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_norm_is_the_radius_in_float32(device):
    norms = spherize(4 * torch.randn(64, 8192, device=device), 5.0, 5.0).double().norm(dim=-1)
    assert (norms / 5 - 1).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_under_autocast_is_finite(dtype, device):
    config = SphereVisionConfig(backbone="vgg11_cifar", num_labels=10)
    model = SphereVisionForImageClassification(config).to(device)
    with torch.autocast(device, dtype=dtype):
        output = model(torch.randn(8, 3, 32, 32, device=device), labels=torch.arange(8, device=device))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_batches_are_created_on_the_device_and_match_the_cpu(device):
    images, labels = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8), torch.arange(50)
    options = {"batch_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3, "shuffle": True}
    options["augmentation"] = Augmentation(crop_padding=4, horizontal_flip=True)
    on_cpu = list(ImagesInMemory(images, labels, device="cpu", **options).epoch())
    on_gpu = list(ImagesInMemory(images, labels, device=device, **options).epoch())
    assert all(batch["pixel_values"].device.type == device for batch in on_gpu)
    for first, second in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(first["pixel_values"], second["pixel_values"].cpu())
        assert torch.equal(first["labels"], second["labels"].cpu())


def trained(kind, device, steps=4, capture=False, **options):
    """Weights of a small network after some steps with given gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.GroupNorm(1, 8)
    )
    gradients = [[torch.randn_like(p) for p in net.parameters()] for _ in range(steps)]
    net = net.to(device)
    optimizer = kind(scale_invariant_groups(net), lr=0.01, weight_decay=0.1, **options)
    for parameter, value in zip(net.parameters(), gradients[0], strict=True):
        parameter.grad = value.to(device)
    take_step = optimizer.step
    if capture:
        saved = [p.detach().clone() for p in net.parameters()]
        take_step = captured(optimizer)
        for parameter, value in zip(net.parameters(), saved, strict=True):
            parameter.data.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    for values in gradients:
        for parameter, value in zip(net.parameters(), values, strict=True):
            parameter.grad.copy_(value)
        take_step()
    return [p.detach().cpu() for p in net.parameters()]


def captured(optimizer):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


OPTIMIZERS = [AdamS, AdamSRT, AdamG, SGDMRT]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}, {"capturable": True}], ids=str)
def test_optimizer_steps_match_the_cpu(kind, options, device):
    torch.testing.assert_close(trained(kind, device, **options), trained(kind, "cpu"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("cuda")
def test_step_can_be_captured_in_a_cuda_graph(kind, device):
    graph = trained(kind, device, capture=True, capturable=True)
    torch.testing.assert_close(graph, trained(kind, "cpu"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("cuda")
def test_learning_rate_on_the_device_can_change_between_replays(kind, device):
    weight = nn.Parameter(torch.randn(4, 9, device=device))
    weight.grad = torch.randn_like(weight)
    rate = torch.tensor(0.1, device=device)
    replay = captured(kind([weight], lr=rate, channel_dims=[0], capturable=True))
    rate.zero_()
    before = weight.detach().clone()
    replay()
    torch.testing.assert_close(weight.detach(), before)
    rate.fill_(0.1)
    replay()
    assert (weight - before).abs().max() > 1e-4


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("cuda")
def test_capture_without_capturable_is_rejected(kind, device):
    with pytest.raises(RuntimeError, match="capturable=True"):
        trained(kind, device, capture=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradient_that_overflows_under_loss_scaling_skips_the_step(kind, device):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = kind(scale_invariant_groups(net), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**15)
    before = net[0].weight.detach().clone()
    scaler.scale(net(torch.randn(8, 4, device=device)).square().sum()).backward()
    net[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net[0].weight, before)
    assert scaler.get_scale() == 2.0**14


@pytest.mark.usefixtures("cuda")
def test_finding_scale_invariant_weights_is_robust_to_tf32(device):
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32))
    torch.set_float32_matmul_precision("high")
    found = find_scale_invariant_weights(net.to(device))
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert found.channel_dims == {"0.weight": (0,), "3.weight": (0,)}


@pytest.mark.parametrize(
    "function", [log_vmf_normalizer, mean_resultant_length, concentration_from_mean_resultant_length]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("dim", [2, 3, 128, 2048])
def test_concentration_functions_and_two_derivatives_match_the_cpu(function, dtype, bound, dim, device):
    results = []
    for place in ("cpu", device):
        values = torch.linspace(0.01, 0.9, 40, dtype=dtype, device=place, requires_grad=True)
        y = function(values, dim)
        (first,) = torch.autograd.grad(y.sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), values)
        results.append([part.detach().cpu() for part in (y, first, second)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(("dim", "kappa"), [(2, 3.0), (3, 1.0), (16, 12.0), (128, 40.0), (512, 701.0)])
def test_samples_on_the_device_match_the_mean_and_its_derivative(dim, kappa, device):
    loc = torch.eye(dim, device=device)[0]
    concentration = torch.full((50_000,), kappa, device=device, requires_grad=True)
    points = VonMisesFisher(loc, concentration).rsample()
    (slopes,) = torch.autograd.grad(points[:, 0].sum(), concentration)
    assert (points.norm(dim=-1) - 1).abs().max() < 1e-5
    exact = torch.tensor(kappa, dtype=torch.float64)
    for draws, function in [(points[:, 0], mean_resultant_length), (slopes, mean_resultant_length_derivative)]:
        draws = draws.detach().double().cpu()
        assert (draws.mean() - function(exact, dim)).abs() < 4 * draws.std() / 50_000**0.5


@pytest.mark.parametrize("dim", [2, 3, 128])
def test_same_noise_gives_the_same_point_on_both_devices(dim, device):
    loc = nn.functional.normalize(torch.randn(1000, dim, dtype=torch.float64), dim=-1)
    concentration, results = 50 * torch.rand(1000, dtype=torch.float64), []
    noise = fixed_noise((1000,), dim, 0, loc.dtype, loc.device)
    for place in ("cpu", device):
        kappa = concentration.to(place).requires_grad_()
        points = points_from_noise(loc.to(place), kappa, type(noise)(*(part.to(place) for part in noise)))
        (slope,) = torch.autograd.grad(points.cumsum(-1).sum(), kappa)
        results.append((points.detach().cpu(), slope.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("cuda")
def test_device_generator_is_reproducible(device):
    for distribution in (
        VonMisesFisher(torch.eye(5, device=device)[0], torch.tensor(3.0, device=device)),
        HypersphericalUniform(5, device=device),
    ):
        draws = [distribution.rsample((9,), torch.Generator(device).manual_seed(seed)) for seed in (7, 7, 8)]
        assert draws[0].device.type == device
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
