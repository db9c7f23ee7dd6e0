"""Measure the errors of the von Mises-Fisher functions and gradients in float64 against 40-digit arithmetic.

Writes `results/vmf_accuracy.json`.
"""

from typing import Any

import mpmath
import torch
from common import report, row

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import log_vmf_normalizer, mean_resultant_length
from hf_sphere.geometry.bessel import mean_resultant_length_derivative

DIMS = [2, 3, 5, 16, 128, 512, 768, 2048, 4096]
KAPPAS = [10.0**k for k in range(-3, 7)]


def exact(dim: int, kappa: float) -> tuple[float, float, float]:
    """Return log C_d(kappa), A_d(kappa) and A_d'(kappa), which is the mean gradient of the cosine of a sample."""
    with mpmath.workdps(40):
        nu, k = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(kappa)
        # Series and asymptotic expansions of the Bessel functions, evaluated with 40 correct digits.
        low, high = (mpmath.besseli(order, k, maxterms=10**7) for order in (nu, nu + 1))
        length = high / low
        log_normalizer = nu * mpmath.log(k) - (nu + 1) * mpmath.log(2 * mpmath.pi) - mpmath.log(low)
        return float(log_normalizer), float(length), float(1 - length**2 - (dim - 1) * length / k)


def errors(dim: int, kappa: float, draws: int = 20_000) -> dict[str, Any]:
    log_normalizer, length, slope = exact(dim, kappa)
    k = torch.tensor(kappa, dtype=torch.float64)
    # The gradient of a coordinate-wise linear function of samples estimates A'; its noise is given beside its error.
    count = max(200, draws // dim)
    many = k.expand(count).clone().requires_grad_()
    axis = torch.eye(1, dim, dtype=torch.float64)[0]
    cosines = VonMisesFisher(axis, many, validate_args=False).rsample()[:, 0]
    (gradient,) = torch.autograd.grad(cosines.sum(), many)
    noise = (gradient.std() / count**0.5).item()
    return {
        "d": dim,
        "kappa": kappa,
        "log_normalizer": abs(log_vmf_normalizer(k, dim).item() - log_normalizer) / max(1, dim, kappa),
        "mean_resultant_length": abs(mean_resultant_length(k, dim).item() / length - 1),
        "slope": abs(mean_resultant_length_derivative(k, dim).item() / slope - 1),
        "sampled_gradient_standard_errors": abs(gradient.mean().item() - slope) / max(noise, 1e-12 * slope),
        "sampled_gradient_noise": noise / slope,
    }


def main() -> None:
    torch.manual_seed(0)
    table = [errors(dim, kappa) for dim in DIMS for kappa in KAPPAS]

    def worst(name: str) -> float:
        return max(value[name] for value in table)

    where = "d = 2..4096, kappa = 1e-3..1e6"
    report(
        "vmf_accuracy",
        [
            row(f"{where}: log C_d, largest error / max(1, d, kappa)", worst("log_normalizer"), at_most=1e-12),
            row(f"{where}: A_d, largest relative error", worst("mean_resultant_length"), at_most=1e-12),
            row(f"{where}: A_d', largest relative error", worst("slope"), at_most=1e-9),
            row(
                f"{where}: gradients of samples, largest difference in standard errors",
                worst("sampled_gradient_standard_errors"),
                at_most=4.5,
            ),
        ],
        table=table,
    )


if __name__ == "__main__":
    main()
