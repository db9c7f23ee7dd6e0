"""Weights that keep their norm, with steps that are a fixed fraction of it; AdamW with such steps."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_sphere.optim.invariance import find_scale_invariant_weights
from hf_sphere.optim.layout import Parts, check_axes, local, round_stochastically
from hf_sphere.optim.matrices import MatrixOptimizer, norms, set_norms
from hf_sphere.optim.roles import Role
from hf_sphere.utils.checks import check_choice


def hyperball(x: Tensor, update: Tensor, radius: float, lr: float) -> Tensor:
    """The rule: a step of length lr R along the update of the other optimizer, then back to the sphere of radius R."""
    y = x + lr * radius * update / update.norm()
    return radius * y / y.norm()


class Hyperball(MatrixOptimizer):
    """Base class which turns the update of another optimizer into a step on the sphere of the initial radius.

    The rule is the function `hyperball`, for tensors or, in groups with `matrices`, for each matrix in them. So `lr` is
    the length of a step relative to the weights, and weight decay has no effect on them. Weights in bfloat16 are
    rounded stochastically. The update must not depend on the weights except by decoupled weight decay.
    """

    group_key = "hyperball"
    group_options = {**MatrixOptimizer.group_options, "hyperball_on": "scale_invariant"}

    def _step(self) -> None:
        kept = []
        for group in self.param_groups:
            for name, parameter in zip(self._names(group), group["params"], strict=True):
                if group.get("hyperball", False) and parameter.grad is not None:
                    matrices, radius = group.get("matrices"), self.state[parameter].get("radius")
                    if radius is None:
                        check_axes(name, parameter)
                        radii = [float(norm) for norm in norms(parameter, matrices)]
                        if wrong := [norm for norm in radii if not 0 < norm < math.inf]:
                            raise ValueError(f"{name} has the norm {wrong[0]}, which cannot be kept; use another rule.")
                        # Numbers, as torch casts tensors that it loads; one alone, as flattened states may lack lists.
                        radius = radii if len(radii) > 1 else radii[0]
                    kept.append((parameter, parameter.clone(), group["lr"], matrices, radius))
        try:
            for parameter, *_ in kept:
                parameter.zero_()  # what the step of the other optimizer leaves here is its update
            super()._step()
        except BaseException:
            for parameter, before, *_ in kept:
                parameter.copy_(before)
            raise
        for index, (parameter, before, lr, matrices, radius) in enumerate(kept):
            state = self.state[parameter]
            state["radius"] = radius  # torch expects no state before the first step
            radii = [radius] if isinstance(radius, float) else radius
            moved = parameter.to(torch.promote_types(parameter.dtype, torch.float32))  # the parameter, or a copy
            set_norms(moved, [lr * radius for radius in radii], matrices)
            set_norms(moved.add_(before), radii, matrices)
            if parameter.dtype == torch.bfloat16:
                seed = int(state["step"]) * 1_000_003 + index  # equal on all processes and in resumed runs
                generator = torch.Generator(parameter.device).manual_seed(seed)
                local(parameter).copy_(round_stochastically(local(moved), generator))
            elif moved is not parameter:
                parameter.copy_(moved)

    @classmethod
    def _choose_rules(
        cls, model: nn.Module, batch: Any, roles: Any, parts: Parts, hyperball_on: str = "scale_invariant"
    ) -> dict[str, Any]:
        check_choice("hyperball_on", hyperball_on, ("scale_invariant", "matrices"))
        kept, of_matrices, *_ = [*cls.rules_of, "adamw"]
        scale_invariant, rules = find_scale_invariant_weights(model, batch), {}
        for name, role in roles.items():
            if not role.decays:
                rules[name] = "adamw", role.value
                continue
            tensor, invariant = model.get_parameter(name), name in scale_invariant.channel_dims
            if role is Role.STACK and scale_invariant.channel_dims.get(name) == (0,):
                parts.setdefault(name, ((0, *[1] * len(tensor)), f"{len(tensor)} matrices: invariant each"))
            hidden = role.is_matrix
            keeps = hidden if hyperball_on == "matrices" else invariant and (hidden or of_matrices == "adamw")
            matrices, _ = parts.get(name, (None, ""))
            at_zero = keeps and not all(map(bool, norms(tensor, matrices)))
            reason = "scale-invariant" if invariant else f"not scale-invariant: {scale_invariant.rejected[name]}"
            reason = "by hyperball_on" if keeps and not invariant else reason
            reason += f"; {'a' if matrices else 'its'} norm is 0" if at_zero else ""
            rule = kept if keeps and not at_zero else of_matrices if hidden else "adamw"
            rules[name] = rule, f"{role.value}; {reason}"
        return rules


class AdamWHyperball(Hyperball, torch.optim.AdamW):
    """AdamW whose scale-invariant weights keep their norm, with steps that are a fixed fraction of it.

    For these weights, `lr` is the length of a step relative to the norm; see `Hyperball`. For arguments, see
    `torch.optim.AdamW`.

    Reference:
        Wen, Dang, Lyu, Ma and Liang, "Fantastic pretraining optimizers and where to find them 2.1: hyperball
        optimization", 2025.

    Example:
        >>> optimizer = build_optimizer(network, "adamw_hyperball", images, lr=1e-2, adamw_lr_scale=0.1)
    """

    rules_of = {"adamw_hyperball": {"hyperball": True}}
