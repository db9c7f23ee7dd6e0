"""Several matrices in one tensor: experts in a stack, and fused queries, keys and values."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_sphere.optim.layout import Matrices, Parts, whole
from hf_sphere.optim.roles import Role

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
