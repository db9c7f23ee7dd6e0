"""Muon for hidden matrices, AdamW for all other parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# torch.optim.Muon accepts no kernels.
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

from hf_sphere.optim.layout import Parts, check_axes, whole
from hf_sphere.optim.matrices import MatrixOptimizer, map_matrices


class Muon(MatrixOptimizer, torch.optim.AdamW):
    """Momentum orthogonalized by Newton-Schulz iterations, for hidden matrices; AdamW for all other parameters.

    The step of a matrix has the root mean square 0.2, so learning rates are as for AdamW. Kernels of
    convolutions (m, c, h, w) are matrices (m, c h w). Steps equal `torch.optim.Muon` with
    `adjust_lr_fn="match_rms_adamw"`, and of `torch.optim.AdamW`. Updates of sharded matrices are gathered one by one.

    Args:
        params: Parameter groups of `form_groups`; groups with `muon` contain the hidden matrices.
        lr: Learning rate.
        momentum: Momentum of hidden matrices; a scheduler that cycles momenta cycles it with the first beta.
        nesterov: Whether it is Nesterov's.
        ns_steps: Number of iterations.
        **options: Options of `torch.optim.AdamW`. `weight_decay` is decoupled and applies to all weights.

    Raises:
        RuntimeError: In a step, if a hidden matrix was flattened, as FSDP1 and DeepSpeed do.

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; the size of the step: Liu et
        al., "Muon is scalable for LLM training", arXiv:2502.16982.

    Example:
        >>> optimizer = build_optimizer(network, "muon", images, lr=2e-3, weight_decay=0.01)
    """

    rules_of = {"muon": {"muon": True}}
    group_key = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        **options: Any,
    ) -> None:
        self._own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "muon": False}
        super().__init__(params, lr=lr, **options)

    @classmethod
    def _choose_rules(cls, model: nn.Module, batch: Any, roles: Any, parts: Parts) -> dict[str, Any]:
        return {name: ("muon" if role.is_matrix else "adamw", role.value) for name, role in roles.items()}

    def _step(self) -> None:
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._step_muon(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super()._step()
        finally:
            self.param_groups = groups

    def _step_muon(self, group: dict[str, Any]) -> None:
        if "max_momentum" in group:  # OneCycleLR and CyclicLR cycle `betas` of optimizers that have them
            group["momentum"] = group["betas"][0]
        lr, keep = float(group["lr"]), group["momentum"]

        def orthogonalize(matrix: Tensor) -> Tensor:
            step = _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), group["ns_steps"], EPS)
            return step.to(torch.float32).mul_(_adjust_lr(1.0, "match_rms_adamw", matrix.shape))

        for name, parameter in zip(self._names(group), group["params"], strict=True):
            if parameter.grad is None:
                continue
            check_axes(name, parameter)
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros(())  # torch's AdamW expects it when it loads a state
            state["step"] += 1
            momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - keep)
            update = whole(parameter.grad.lerp(momentum, keep) if group["nesterov"] else momentum)
            update = map_matrices(orthogonalize, update, group.get("matrices"))
            if isinstance(parameter, DTensor):  # every process has the entire update
                update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(update, alpha=-lr)
