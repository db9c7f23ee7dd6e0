"""Steps on ResNet-18, compared with torch's optimizers, and for Adam-SRT with a plain implementation of the rule.

python benchmarks/optimizers.py
"""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from common import ratio, report, row, time_in_turn
from safetensors import safe_open
from torch import Tensor, nn

from hf_sphere.models.backbones import create_backbone
from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT, build_optimizer, parameter_groups, scale_invariant_groups
from hf_sphere.optim.roles import find_roles

DECAY = 1e-4
BACKBONE = "resnet18_cifar"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("muon", "muon_hyperball", "adamw_hyperball")
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "optimizers.safetensors"


def main() -> None:
    logging.getLogger("hf_sphere").setLevel(
        logging.ERROR
    )  # some golden cases have no scale-invariant group, on purpose
    device = DEVICE
    torch.manual_seed(0)
    net = create_backbone(BACKBONE, num_channels=3, image_size=32)
    net = nn.Sequential(net, nn.Linear(net.num_features, 10)).to(device)
    weights = sum(p.numel() for p in net.parameters())
    fused_adam = torch.optim.Adam(parameter_groups(with_gradients(net)), fused=True)
    fused_adam_l2 = torch.optim.Adam(parameter_groups(with_gradients(net)), weight_decay=DECAY, fused=True)
    fused_adamw = torch.optim.AdamW(parameter_groups(with_gradients(net)), weight_decay=DECAY, fused=True)
    fused_sgd = torch.optim.SGD(
        parameter_groups(with_gradients(net)), lr=0.1, momentum=0.9, weight_decay=DECAY, fused=True
    )
    adam_srt = AdamSRT(scale_invariant_groups(with_gradients(net)), fused=True)
    adam_srt_l2 = AdamSRT(scale_invariant_groups(with_gradients(net)), weight_decay=DECAY, fused=True)
    sgd_mrt = SGDMRT(scale_invariant_groups(with_gradients(net)), lr=0.1, momentum=0.9, weight_decay=DECAY, fused=True)
    adam_srt_compiled = AdamSRT(scale_invariant_groups(with_gradients(net)), fused=True, compile=True)
    sgd_mrt_compiled = SGDMRT(
        scale_invariant_groups(with_gradients(net)),
        lr=0.1, momentum=0.9, weight_decay=DECAY, fused=True, compile=True,
    )  # fmt: skip
    steps: dict[str, Callable[[], object]] = {
        "fused Adam": fused_adam.step,
        "Adam-SRT": adam_srt.step,
        "fused Adam, L2": fused_adam_l2.step,
        "Adam-SRT, L2": adam_srt_l2.step,
        "fused AdamW": fused_adamw.step,
        "fused SGD": fused_sgd.step,
        "SGD-MRT": sgd_mrt.step,
        "Adam-SRT, compiled": adam_srt_compiled.step,
        "SGD-MRT, compiled": sgd_mrt_compiled.step,
        "plain Adam-SRT, L2": PlainAdamSRT(with_gradients(net)).step,
    }
    of_torch = torch_muon(with_gradients(net))
    steps["Muon of torch"] = lambda: [optimizer.step() for optimizer in of_torch]
    for name in NAMES:
        steps[name] = build_optimizer(with_gradients(net), name, example(net), weight_decay=DECAY).step
    if device == "cuda":
        capturable = AdamSRT(scale_invariant_groups(with_gradients(net)), weight_decay=DECAY, capturable=True)
        steps["Adam-SRT, CUDA graph"] = capture(capturable.step)
        adamw = torch.optim.AdamW(
            parameter_groups(with_gradients(net)), weight_decay=DECAY, fused=True, capturable=True
        )
        steps["fused AdamW, CUDA graph"] = capture(adamw.step)
        muon = build_optimizer(with_gradients(net), "muon", example(net), weight_decay=DECAY, capturable=True)
        steps["muon, CUDA graph"] = capture(muon.step)
        in_graph = torch_muon(with_gradients(net), capturable=True)
        steps["Muon of torch, CUDA graph"] = capture(lambda: [optimizer.step() for optimizer in in_graph])
    seconds = time_in_turn(steps, rounds=15, warmup=4)
    state = sum(t.numel() for s in adam_srt.state.values() for t in s.values())
    on_cpu = device == "cpu"
    at_most = 2.5 if on_cpu else None
    rows = [
        row("Adam-SRT / fused Adam, time", ratio(seconds["Adam-SRT"], seconds["fused Adam"]), at_most=at_most),
        row(
            "Adam-SRT / fused Adam, both with L2 decay",
            ratio(seconds["Adam-SRT, L2"], seconds["fused Adam, L2"]),
            at_most=at_most,
        ),
        row("SGD-MRT / fused SGD, time", ratio(seconds["SGD-MRT"], seconds["fused SGD"]), at_most=at_most),
        row(
            "compiled Adam-SRT / fused Adam, time",
            ratio(seconds["Adam-SRT, compiled"], seconds["fused Adam"]),
            at_most=1.6 if on_cpu else None,
        ),
        row(
            "compiled SGD-MRT / fused SGD, time",
            ratio(seconds["SGD-MRT, compiled"], seconds["fused SGD"]),
            at_most=1.8 if on_cpu else None,
        ),
        row(
            "plain form of the rule / Adam-SRT, time",
            ratio(seconds["plain Adam-SRT, L2"], seconds["Adam-SRT, L2"]),
            at_least=7 if on_cpu else None,
        ),
        row(
            "Adam-SRT / fused AdamW, time",
            ratio(seconds["Adam-SRT, L2"], seconds["fused AdamW"]),
            at_most=None if on_cpu else 1.3,
        ),
        row("muon / torch's Muon and AdamW, time", ratio(seconds["muon"], seconds["Muon of torch"]), at_most=1.1),
        row("muon_hyperball / muon, time", ratio(seconds["muon_hyperball"], seconds["muon"])),
        row("adamw_hyperball / fused AdamW, time", ratio(seconds["adamw_hyperball"], seconds["fused AdamW"])),
        row("state of Adam-SRT, numbers per weight", state / weights, at_most=1.05),
        row("golden trajectories, largest relative error", golden_error(), at_most=1e-5),
    ]
    if device == "cuda":
        rows.append(
            row(
                "Adam-SRT / fused AdamW, both in a CUDA graph",
                ratio(seconds["Adam-SRT, CUDA graph"], seconds["fused AdamW, CUDA graph"]),
                at_most=1.3,
            )
        )
        muon_times = seconds["muon, CUDA graph"], seconds["Muon of torch, CUDA graph"]
        rows.append(row("muon / torch's Muon and AdamW, both in a CUDA graph", ratio(*muon_times), at_most=1.1))
    rows += [row(f"{name}, ms per step", 1e3 * sorted(times)[len(times) // 2]) for name, times in seconds.items()]
    report("optimizers", rows, weights=weights)


def with_gradients(net: nn.Module) -> nn.Module:
    """Return a copy of the network with separate gradients."""
    net = copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return net


def torch_muon(net: nn.Module, *, capturable: bool = False) -> list[torch.optim.Optimizer]:
    """Build torch's Muon, for kernels viewed as matrices, and its AdamW for all other parameters, as `muon` does."""
    hidden = {name for name, role in find_roles(net, example(net)).items() if role.is_matrix}
    matrices = []
    for name, parameter in net.named_parameters():
        if name in hidden:
            matrices.append(nn.Parameter(parameter.detach().flatten(1)))
            matrices[-1].grad = parameter.grad.flatten(1)
    others = [parameter for name, parameter in net.named_parameters() if name not in hidden]
    muon = torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, weight_decay=DECAY, fused=True, capturable=capturable)]


def example(net: nn.Module) -> Tensor:
    """Return input of the network."""
    return torch.randn(4, 3, 32, 32, device=next(net.parameters()).device)


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Capture a step in a CUDA graph, as is done for short training steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class PlainAdamSRT:
    """The published rule, one parameter after another, with copies that move the groups to the last axis."""

    def __init__(self, net: nn.Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.parameters = list(net.parameters())
        self.lr, self.betas, self.eps = lr, betas, 1e-8
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """Take a step."""
        self.count += 1
        for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
            g = parameter.grad + DECAY * parameter
            if parameter.ndim < 4:
                x, m, v = self.adam(parameter, g, first, second, g * g, 1)
            else:
                order, back = (1, 2, 3, 0), (3, 0, 1, 2)
                x, g, m, v = (tensor.permute(order).contiguous() for tensor in (parameter, g, first, second))
                y, m, v = self.adam(x, g, m, v, dot(g, g), x[..., 0].numel())
                v = v * dot(x, x) / dot(y, y)
                m = (dot(x, y) * m - dot(m, y) * x) / dot(y, y)
                x, m, v = (tensor.permute(back) for tensor in (y, m, v))
            parameter.copy_(x)
            first.copy_(m)
            second.copy_(v)

    def adam(self, x: Tensor, g: Tensor, m: Tensor, v: Tensor, squares: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Update by Adam with precomputed squares of the gradient."""
        beta1, beta2 = self.betas
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * squares
        m_hat, v_hat = m / (1 - beta1**self.count), v / (1 - beta2**self.count)
        return x - self.lr * dim**0.5 * m_hat / (v_hat.sqrt() + self.eps), m, v


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over all axes but the last, expanded to the shape of the arguments."""
    return (a * b).sum((0, 1, 2), keepdim=True).expand_as(a)


def golden_error() -> float:
    """Return the largest relative error over all cases, steps and tensors of the golden trajectories."""
    kinds = {"adam_srt": AdamSRT, "adam_s": AdamS, "adam_g": AdamG, "sgd_mrt": SGDMRT}
    worst = 0.0
    with safe_open(GOLDEN, "pt") as file:
        for case in json.loads(file.metadata()["cases"]):
            name = case["case"]
            kind = kinds[max((k for k in kinds if name.startswith(k)), key=len)]
            start = {part: file.get_tensor(f"param.{part}") for part in ("conv", "linear", "bias")}
            group = case["conv_group"]
            if name == "adam_g":
                start["conv"], group = file.get_tensor("adam_g.param.conv"), {"channel_dims": [0]}
            weights = {part: nn.Parameter(value.clone()) for part, value in start.items()}
            rest = {"params": [weights["linear"], weights["bias"]]}
            optimizer = kind([{"params": [weights["conv"]], **group}, rest], **case["hyperparameters"])
            for step in range(6):
                for part, weight in weights.items():
                    weight.grad = file.get_tensor(f"grad{step}.{part}")
                optimizer.step()
                for part, weight in weights.items():
                    expected = file.get_tensor(f"{name}.step{step}.{part}")
                    worst = max(worst, ((weight - expected).norm() / expected.norm()).item())
    return worst


if __name__ == "__main__":
    main()
