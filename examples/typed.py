"""A program with types, checked by `mypy --strict`: a model, a loss, an optimizer, prototypes and scores.

python examples/typed.py
"""

import torch
from torch import Tensor, nn

from hf_sphere import SphereBertConfig, SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.cluster import SphericalKMeans
from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import spherize
from hf_sphere.losses import ArcFaceLoss
from hf_sphere.metrics import expected_calibration_error, retrieval_scores
from hf_sphere.nn import SphericalLinear, Spherization
from hf_sphere.ood import OODDetector
from hf_sphere.optim import AdamSRT, build_optimizer, scale_invariant_groups
from hf_sphere.prototypes import Placement, place_prototypes


class Encoder(nn.Module):
    """Linear map, spherization, and a loss with class vectors."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(inputs, 32, bias=False), nn.BatchNorm1d(32))
        self.sphere = Spherization(32, radius=2.0)
        self.loss = ArcFaceLoss(33, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of (B, inputs) with labels (B,)."""
        points: Tensor = self.sphere(self.first(x))
        loss: Tensor = self.loss(points, labels)
        return loss


def train(model: Encoder, images: Tensor, labels: Tensor) -> float:
    """Take a step for network and class vectors and return the loss."""
    optimizer = build_optimizer(model, "adam_srt", (images, labels), lr=1e-3)
    value: Tensor = model(images, labels)
    torch.autograd.backward(value)
    optimizer.step()
    return float(value.detach())


def main() -> None:
    """Use each part once and print what it returns."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 20), torch.randint(4, (64,))
    print(f"loss {train(Encoder(20, classes=4), images, labels):.2f}")
    print(SphericalLinear(20, 3)(images).shape)
    network = nn.Sequential(nn.Linear(20, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    groups: AdamSRT = AdamSRT(scale_invariant_groups(network, images), lr=1e-3)
    placement: Placement = place_prototypes(4, 3)
    print(f"{len(groups.param_groups)} parameter groups, separation {placement.separation:.2f}")
    embeddings = spherize(images)
    scores: dict[str, float] = retrieval_scores(embeddings, labels)
    error: float = expected_calibration_error(torch.rand(64), torch.rand(64) < 0.5)
    print(f"Recall@1 {scores['recall_at_1']:.2f}, calibration error {error:.2f}")
    direction: Tensor = VonMisesFisher(placement.prototypes[0], torch.tensor(10.0)).sample()
    clusters = SphericalKMeans(3, random_state=0).fit(embeddings.numpy()).labels_
    detector = OODDetector(score="knn", k=5).fit_embeddings(embeddings[:32])
    print(direction.shape, len(set(clusters.tolist())), detector.score_embeddings(embeddings[32:]).shape)
    print(SphereBertConfig(num_hidden_layers=3, spherized_layers=[-1]).spherized_layer_indices)
    config = SphereVisionConfig(backbone="lenet5", head="cosine", num_channels=1, image_size=28, num_labels=10)
    print(SphereVisionForImageClassification(config).config.head)


if __name__ == "__main__":
    main()
