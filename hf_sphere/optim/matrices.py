"""Optimizers with a rule for hidden matrices: which tensors hold several, their rules, and their learning rates."""

import fnmatch
import re
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_sphere.optim.groups import NamedOptimizer, ParameterGroups, Rule, form_groups
from hf_sphere.optim.layout import Matrices, Parts, whole
from hf_sphere.optim.roles import Role, find_roles
from hf_sphere.utils.checks import check_choice, check_integer, check_number
from hf_sphere.utils.modules import unwrap


class MatrixOptimizer(NamedOptimizer):
    """Base class of the optimizers with a rule for hidden matrices, and AdamW for all other parameters."""

    # Group options by name, first those of the rule that gives the class its name.
    rules_of: ClassVar[dict[str, dict[str, Any]]]
    group_options = {"adamw_lr_scale": 1.0, "separate": False, "base_width": 0, "base_layers": 0, "rules": None}
    unsupported = ("amsgrad", "differentiable", "maximize")

    @classmethod
    @abstractmethod
    def _choose_rules(cls, *args: Any, **options: Any) -> dict[str, tuple[str, str]]:
        """Return the rule of each parameter with two or more axes, and the reason, by name."""

    @classmethod
    def form_groups(
        cls,
        model: nn.Module,
        batch: Any = None,
        *,
        lr: float = 1e-3,
        adamw_lr_scale: float = 1.0,
        rules: Mapping[str, str] | None = None,
        separate: bool | Mapping[str, int] = False,
        base_width: int = 0,
        base_layers: int = 0,
        **options: Any,
    ) -> ParameterGroups:
        """Split parameters by their rules; for the options, see `build_optimizer`."""
        check_number("adamw_lr_scale", adamw_lr_scale, "[0, inf)")
        model = unwrap(model)
        roles, tensors = find_roles(model, batch), dict(model.named_parameters())
        parts = find_matrices(model, roles, separate)
        by_rule = {**cls.rules_of, "adamw": {} if adamw_lr_scale == 1.0 else {"lr": lr * adamw_lr_scale}}
        chosen = {name: ("adamw", Role.NORM.value) for name in tensors}
        chosen |= cls._choose_rules(model, batch, roles, parts, **options)
        by_name = {n: Rule(rule, why, by_rule[rule], roles.get(n, Role.NORM)) for n, (rule, why) in chosen.items()}
        for pattern, kept in (rules or {}).items():
            check_choice(f"the rule of pattern {pattern!r}", kept, by_rule)
            matching = [name for name in fnmatch.filter(tensors, pattern) if kept == "adamw" or tensors[name].ndim > 1]
            if not matching:
                kind = "parameter" if kept == "adamw" else "parameter with two or more axes"
                raise ValueError(f"pattern {pattern!r} of rules matches no {kind}.")
            by_name |= dict.fromkeys(matching, Rule(kept, f"matches {pattern}", by_rule[kept]))
        for name, (split, why) in parts.items():
            if (rule := by_name[name]).name != "adamw":
                with_parts = {**rule.options, "matrices": split}
                by_name[name] = replace(rule, reason=f"{rule.reason}; {why}", options=with_parts)
        if base_width or base_layers:
            for name, factor in rate_factors(model, roles, by_name, base_width, base_layers).items():
                if factor != 1:
                    rule = by_name[name]
                    scaled = {**rule.options, "lr": rule.options.get("lr", lr) * factor}
                    scaled |= {} if roles.get(name, Role.NORM).decays else {"weight_decay": 0.0}
                    by_name[name] = replace(rule, reason=f"{rule.reason}; lr x {factor:.3g}", options=scaled)
        groups = form_groups(model, by_name, Rule("adamw", options=by_rule["adamw"]), roles)
        if next(iter(by_rule)) not in (used := sorted({rule.name for rule in groups.rules.values()})):
            what = f"has the rule {next(iter(by_rule))}, so the optimizer is {' and '.join(used)}"
            how = f"Print {cls.__name__}.form_groups(model) for the reasons."
            warnings.warn(f"no weight of {type(model).__name__} {what}. {how}", stacklevel=2)
        return groups


WIDTH_POWERS = {"adamw": 1.0, "muon": 0.5, "adamw_hyperball": 0.5, "muon_hyperball": 0.0}
"""Power of base width / width in the learning rate of a hidden matrix, by its rule.

It keeps the change of a layer's output per step, relative to the output. For n inputs, a step of AdamW is aligned with
them, so it changes the output by lr n; one of Muon has root mean square 0.2 lr and equal singular values, so by lr
sqrt(n). A step of relative length lr is a fraction lr of the output with equal singular values, and lr sqrt(n) if
aligned. Inputs of first layers, embeddings, biases and norms do not become more with the width.
"""


def rate_factors(
    model: nn.Module, roles: Mapping[str, Role], rules: Mapping[str, Rule], base_width: int, base_layers: int
) -> dict[str, float]:
    """Return the learning rates of trainable parameters relative to those of the base model, by name.

    `base_width` and `base_layers` are those of the base model, or 0 for those of the model. Outputs of L layers are
    summed: they begin uncorrelated, so that the sum grows like sqrt(L), but their changes are correlated, and their sum
    grows like L.

    Reference:
        Yang et al., "Tensor Programs V", arXiv:2203.03466, and "VI", arXiv:2310.02244; Ren et al., "Rethinking language
        model scaling under transferable hypersphere optimization", arXiv:2603.28743, for Muon with constant norms.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if unknown := [name for name in names if roles.get(name) is Role.UNKNOWN]:
        why = "their role is unknown; pass a batch that uses them, or freeze them"
        raise ValueError(f"the learning rates of {', '.join(unknown)} cannot be scaled: {why}.")
    lists: dict[str, set[str]] = defaultdict(set)  # lists of modules with hidden matrices, with the prefixes of names
    for name, role in roles.items() if base_layers else ():
        match = re.match(r"((?:.*?\.)??)\d+\.", name)  # the first list: of layers, not one of experts in each
        if match and role in (Role.HIDDEN, Role.STACK):
            lists[match[1]].add(match[0])
    lists = {name: entries for name, entries in lists.items() if len(entries) > 1} or lists  # a head may be in one, too
    if len({len(entries) for entries in lists.values()}) > 1:
        found = ", ".join(f"{name.removesuffix('.')} has {len(entries)}" for name, entries in lists.items())
        raise ValueError(f"base_layers needs lists of equally many layers, but {found}; use lr_scales instead.")
    count = max(map(len, lists.values()), default=0)
    layers = tuple(entry for entries in lists.values() for entry in entries)
    size: Any = getattr(getattr(model, "config", None), "hidden_size", None) if base_width else 0
    if not isinstance(size, int):
        outputs = [name for name, role in roles.items() if role in (Role.OUTPUT, Role.TIED)]
        widths = {model.get_parameter(name).shape[1] for name in outputs}
        if len(widths) != 1:
            why = f"its config has no hidden_size, and its output layers have {sorted(widths) or 'no'} inputs"
            raise ValueError(f"base_width needs the width of the model, but {why}; use lr_scales instead.")
        (size,) = widths
    for option, base, limit in (("base_width", base_width, size), ("base_layers", base_layers, count)):
        if check_integer(option, base, 0) > limit:
            raise ValueError(f"{option} must be at most that of the model, {limit}; got {base}. Tune a smaller model.")
    factors = {}
    for name in names:
        role = roles.get(name, Role.NORM)
        power = WIDTH_POWERS[rules[name].name] if role in (Role.HIDDEN, Role.STACK) else 0.0
        power = 1.0 if role in (Role.OUTPUT, Role.TIED) else power
        depth = (base_layers / count) ** 0.5 if base_layers and name.startswith(layers) else 1.0
        factors[name] = (base_width / size if base_width else 1.0) ** power * depth
    return factors


FUSED = {
    "torch.nn.modules.activation.MultiheadAttention": "in_proj_weight",
    "timm.layers.attention.Attention": "qkv.weight",
    "timm.layers.attention.AttentionRope": "qkv.weight",
    "timm.models.beit.Attention": "qkv.weight",
    "timm.models.eva.EvaAttention": "qkv.weight",
    "timm.models.swin_transformer.WindowAttention": "qkv.weight",
    "timm.models.vision_transformer_relpos.RelPosAttention": "qkv.weight",
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": "c_attn.weight",
    "transformers.models.modernbert.modeling_modernbert.ModernBertAttention": "Wqkv.weight",
    "transformers.models.phi3.modeling_phi3.Phi3Attention": "qkv_proj.weight",
}
"""Fused weight by class, where queries, keys and values follow each other; elsewhere heads may be interleaved."""


def find_matrices(model: nn.Module, roles: dict[str, Role], separate: bool | Mapping[str, int]) -> Parts:
    """Return the hidden matrices and stacks that hold several matrices by name, with these and the reason in words.

    `separate` is True for those of `FUSED` and for experts whose module has their number as `num_experts`; or a mapping
    for further ones, too, from patterns of names to the number of equal matrices along the first axis (the second one
    of a `Conv1D` of transformers). Stacks that are found become hidden matrices in `roles`.
    """
    found: Parts = {}
    names = {weight: name for name, weight in model.named_parameters()}
    axes = {name: 0 for name, role in roles.items() if role.is_matrix or role is Role.STACK}
    for prefix, module in model.named_modules() if separate else ():
        path, count = f"{type(module).__module__}.{type(module).__qualname__}", getattr(module, "num_experts", None)
        for name, weight in ((names[weight], weight) for weight in module._parameters.values() if weight is not None):
            if roles.get(name) is Role.STACK and count == len(weight):
                found[name] = (0, *[1] * len(weight)), f"{count} matrices: experts"
            elif path == "transformers.pytorch_utils.Conv1D" and name in axes:
                axes[name] = 1
        fused = f"{prefix}.{FUSED[path]}".removeprefix(".") if path in FUSED else ""
        if fused in axes and not getattr(module, "is_cross_attention", False):
            axis = int("GPT2" in path)
            size = model.get_parameter(fused).shape[axis]
            keys = module.num_key_value_heads * module.head_dim if "Phi3" in path else size // 3
            found[fused] = (axis, size - 2 * keys, keys, keys), "3 matrices: fused qkv"
    for pattern, count in separate.items() if isinstance(separate, Mapping) else ():
        if not (matching := fnmatch.filter(axes, pattern)):
            raise ValueError(f"pattern {pattern!r} of separate matches no hidden matrix and no stack of matrices.")
        for name in matching:
            size = model.get_parameter(name).shape[axes[name]]
            if count < 1 or size % count:
                raise ValueError(f"separate must give {name} a number of matrices that divides {size}; got {count!r}.")
            found[name] = (axes[name], *[size // count] * count), f"{count} matrices: matches {pattern}"
    roles |= dict.fromkeys(found, Role.HIDDEN)
    return found


def map_matrices(function: Callable[[Tensor], Tensor], tensor: Tensor, matrices: Matrices | None) -> Tensor:
    """Apply a function to each matrix (m, n) in a tensor; kernels (m, c, h, w) are matrices (m, c h w)."""
    axis, *sizes = matrices or (0, len(tensor))
    is_stack = matrices is not None and tensor.ndim == 3 and set(sizes) == {1}
    results = [function(p[0] if is_stack else p.flatten(1)).view(p.shape) for p in tensor.split(sizes, axis)]
    return torch.cat(results, axis)


def norms(tensor: Tensor, matrices: Matrices | None) -> list[Tensor]:
    """Return the norm of a tensor, or that of each matrix in it; sharded ones are gathered."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if matrices is None:
        return [whole(torch.linalg.vector_norm(wide))]
    others = [axis for axis in range(tensor.ndim) if axis != matrices[0]]
    return [part.norm() for part in whole(torch.linalg.vector_norm(wide, dim=others)).split(matrices[1:])]


def set_norms(tensor: Tensor, lengths: Sequence[float | Tensor], matrices: Matrices | None) -> None:
    """Scale a tensor in place to the only one of the lengths, or each matrix in it to its own; one of norm 0 stays."""
    least, sizes = torch.finfo(tensor.dtype).tiny, norms(tensor, matrices)
    factor, *_ = factors = [length / size.clamp_min(least) for length, size in zip(lengths, sizes, strict=True)]
    if matrices is not None:
        shape = [-1 if axis == matrices[0] else 1 for axis in range(tensor.ndim)]
        factor = torch.cat([each.expand(size) for each, size in zip(factors, matrices[1:], strict=True)]).view(shape)
        if isinstance(tensor, DTensor):
            factor = DTensor.from_local(factor, tensor.device_mesh)
    tensor.mul_(factor)
