import pytest
import torch

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import Augmentation, ImagesInMemory
from hf_sphere.geometry import angles_to_cartesian, cartesian_to_angles, spherize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("function", [spherize, angles_to_cartesian, cartesian_to_angles])
@pytest.mark.parametrize("n", [2, 39, 40, 3000])
def test_values_and_gradients_equal_those_of_the_cpu(function, n):
    x = torch.randn(64, n, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        values = x.to(device).requires_grad_()
        y = function(values)
        (gradient,) = torch.autograd.grad((y * torch.arange(y.shape[-1], device=device)).sum(), values)
        results.append((y.cpu(), gradient.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def test_the_norm_is_the_radius_in_float32():
    norms = spherize(4 * torch.randn(64, 8192, device="cuda"), 5.0, 5.0).double().norm(dim=-1)
    assert (norms / 5 - 1).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_under_autocast_is_finite(dtype):
    config = SphereVisionConfig(backbone="vgg11_cifar", num_labels=10)
    model = SphereVisionForImageClassification(config).cuda()
    with torch.autocast("cuda", dtype=dtype):
        output = model(torch.randn(8, 3, 32, 32, device="cuda"), labels=torch.arange(8, device="cuda"))
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_batches_are_made_on_the_device_and_equal_those_of_the_cpu():
    images, labels = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8), torch.arange(50)
    options = {"batch_size": 16, "mean": [0.5] * 3, "std": [0.2] * 3, "shuffle": True}
    options["augmentation"] = Augmentation(crop_padding=4, horizontal_flip=True)
    on_cpu = list(ImagesInMemory(images, labels, device="cpu", **options).epoch())
    on_gpu = list(ImagesInMemory(images, labels, device="cuda", **options).epoch())
    assert all(batch["pixel_values"].is_cuda for batch in on_gpu)
    for first, second in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(first["pixel_values"], second["pixel_values"].cpu())
        assert torch.equal(first["labels"], second["labels"].cpu())
