"""Re-initialization of VGG-11 (8 convolutions x 5 snapshots) with and without reuse of activations.

python benchmarks/reinitialization.py
"""

import timm
import torch
from common import ratio, report, row, time_in_turn
from torch import Tensor, nn

import hf_sphere  # noqa: F401  registers the backbone with timm
from hf_sphere.analysis.reinitialization import reinitialization_robustness
from hf_sphere.analysis.results import ReinitializationRobustness

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_IMAGES, BATCH, NUM_SNAPSHOTS = 1000, 250, 5


def main() -> None:
    net = new_net(0)
    snapshots = [new_net(1 + number).state_dict() for number in range(NUM_SNAPSHOTS)]
    images = torch.randn(NUM_IMAGES, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        labels = torch.cat([net(batch).argmax(-1) for batch in images.split(BATCH)])
    labels[::2] = torch.randint(10, (NUM_IMAGES // 2,), device=DEVICE)  # half correct, so that accuracies vary
    tables: dict[bool, ReinitializationRobustness] = {}

    def fill(reuse: bool) -> None:
        tables[reuse] = reinitialization_robustness(
            net, snapshots, lambda model: accuracy(model, images, labels), layers="conv", reuse_activations=reuse
        )

    seconds = time_in_turn({"reused": lambda: fill(True), "full": lambda: fill(False)}, rounds=1, warmup=0)
    difference = max(
        abs(cell - other)
        for name, layer in tables[True].layers.items()
        for cell, other in zip(layer.snapshots.values(), tables[False].layers[name].snapshots.values(), strict=True)
    )
    gain = ratio(seconds["full"], seconds["reused"])
    rows = [
        row("time of full passes / time with reused activations", gain, at_least=1.6),
        row("largest difference of accuracies", difference, at_most=0),
        row("seconds with reused activations", seconds["reused"][0]),
    ]
    report("reinitialization", rows, images=NUM_IMAGES, batch_size=BATCH, snapshots=NUM_SNAPSHOTS)


def new_net(seed: int) -> nn.Module:
    """Build VGG-11 with random weights and random statistics of its batch norms."""
    torch.manual_seed(seed)
    net = timm.create_model("vgg11_cifar", hidden=0, num_classes=10, in_chans=3).to(DEVICE)
    for _ in range(3):
        net.train()(torch.randn(100, 3, 32, 32, device=DEVICE))
    return net.eval()


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of correct predictions."""
    right = sum((model(x).argmax(-1) == y).sum() for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True))
    return float(right) / len(labels)


if __name__ == "__main__":
    main()
