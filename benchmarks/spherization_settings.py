"""How slope and floor of the spherization share out a vector's length and its gradient over the coordinates.

python benchmarks/spherization_settings.py

Inputs are standard normal, as after a linear map with the usual initialization; so are the gradients of the outputs.
Writes `results/spherization_settings.json` and, for a picture, `results/pictures/spherization_settings.json`.
"""

import torch
from common import keep_for_pictures, report, row
from torch import Tensor

from hf_sphere.geometry import spherize

WIDTH = 64
SAMPLES = 20_000
SCALINGS = (0.25, 0.5, 1.0, 2.0, 5.0)
DELTAS = (1e-6, 0.1, 0.5, 0.9)
DRAWN = {"steep: 5, 1e-6": (5.0, 1e-6), "1, 1e-6": (1.0, 1e-6), "even: 1, 0.1": (1.0, 0.1), "flat: 1, 0.5": (1.0, 0.5)}


def spread(scaling: float, delta: float, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return, by coordinate, mean squares (n + 1), variances (n + 1), gradient sizes (n), and the participation ratio.

    Mean squares sum to 1. The participation ratio of the covariance's eigenvalues counts the directions in which the
    points vary, from 1 to n + 1.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64).requires_grad_()
    points = spherize(x, scaling, 1.0, delta)
    points.backward(torch.randn(points.shape, generator=generator, dtype=torch.float64))
    assert x.grad is not None
    values = points.detach()
    eigenvalues = torch.linalg.eigvalsh(values.T.cov())
    participation = float(eigenvalues.sum().square() / eigenvalues.square().sum())
    return values.square().mean(0), values.var(0), x.grad.square().mean(0).sqrt(), participation


def main() -> None:
    """Measure all settings, and keep the curves of some of them."""
    rows, table = [], []
    for scaling in SCALINGS:
        for delta in DELTAS:
            squares, variances, gradients, participation = spread(scaling, delta)
            fifth = WIDTH // 5
            entry = {
                "scaling": scaling,
                "delta": delta,
                "length_in_first_fifth": float(squares[:fifth].sum()),
                "length_in_last_coordinate": float(squares[-1]),
                "varying_length": float(variances.sum()),
                "directions": participation,
                "gradient_first_to_last_fifth": float(gradients[:fifth].mean() / gradients[-fifth:].mean()),
                "weight_range": float((variances.max() / variances.min()).sqrt()),
            }
            table.append(entry)
            name = f"scaling {scaling:g}, delta {delta:g}: "
            rows.append(row(name + "share of the squared length in the first fifth", entry["length_in_first_fifth"]))
            rows.append(row(name + "directions that vary, of 65", participation))
    keep()
    report("spherization_settings", rows, width=WIDTH, samples=SAMPLES, settings=table)


def keep() -> None:
    """Keep length and gradient by coordinate."""
    curves = {}
    for name, setting in DRAWN.items():
        squares, _, gradients, _ = spread(*setting)
        curves[name] = {"length": (100 * squares.cumsum(0)).tolist(), "gradient": gradients.tolist()}
    keep_for_pictures("spherization_settings", curves)


if __name__ == "__main__":
    main()
