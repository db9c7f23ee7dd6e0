"""How a model uses each of its weights, by the module that owns it and by the graph of a forward pass."""

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.utils._pytree import tree_map_only

from hf_sphere.optim.invariance import call, differentiable, open_trial
from hf_sphere.utils.modules import unwrap


class Role(enum.Enum):
    """What a parameter is for, with the description in the printed groups."""

    HIDDEN = "hidden matrix"
    INPUT = "hidden matrix, the first one"
    EMBEDDING = "embedding"
    TIED = "embedding and output layer"
    INDEXED = "embedding, whose rows are indexed"
    OUTPUT = "output layer"
    STACK = "the axes of its matrices are unknown"
    THIN = "one of its first two axes is 1"
    NORM = "bias, norm or scalar: no weight decay"
    ELEMENTWISE = "scale, bias, position or token: no weight decay"
    LISTED = "in no_weight_decay() of the model"
    UNKNOWN = "role unknown: no operation of torch on it in a forward pass"

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a hidden matrix."""
        return self in (Role.HIDDEN, Role.INPUT)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to the parameter."""
        return self not in (Role.NORM, Role.ELEMENTWISE, Role.LISTED)


Use = enum.Enum("Use", "PRODUCT KERNEL EMBEDDED INDEXED ELEMENTWISE CUSTOM")
"""How an operation uses a parameter: as a factor of a product, the kernel of a convolution, a table of `F.embedding`, a
table that is indexed, an operand of an operation on elements, such as a sum, or that of an `autograd.Function`."""
Uses = dict[str, set[Use]]

_OPERATIONS = {
    Use.PRODUCT: "Mm Addmm Bmm Baddbmm Addbmm Mv Addmv Dot Linear GroupedMm Trilinear Cdist EuclideanDist MkldnnLinear "
    "MkldnnRnnLayer CudnnRnn MiopenRnn",
    Use.KERNEL: "Convolution MkldnnConvolution",
    Use.EMBEDDED: "Embedding EmbeddingBag",
    Use.INDEXED: "Index IndexSelect Gather",
}
_USES = {operation: use for use, operations in _OPERATIONS.items() for operation in operations.split()}
"""Use of the operands of a node of autograd, by the name of its operation."""
_SEVERAL = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_OWNERS: dict[Any, Use] = {
    (nn.Linear, nn.Bilinear, *_SEVERAL): Use.PRODUCT,
    _ConvNd: Use.KERNEL,
    (nn.Embedding, nn.EmbeddingBag): Use.EMBEDDED,
    (nn.LayerNorm, nn.RMSNorm): Use.ELEMENTWISE,
}
_SUMS = ("Add", "Sub", "Addcmul", "Lerp", "Cat")


def find_roles(model: nn.Module, batch: Any = None, *, required: bool = True) -> dict[str, Role]:
    """Find what the parameters with two or more axes are for, by name.

    The module that owns a parameter determines that if it is one of torch, else the operations on it in a forward pass,
    which is `required` for the output layers, the last ones before each output, and may fail otherwise. A hidden matrix
    is a factor of matrix products or the kernel of a convolution. Scales, biases, positions, tokens, tables, output
    layers, parameters in the `no_weight_decay()` of the model or a part, kernels of depthwise convolutions and stacks
    of matrices, such as those of experts, are not. Matrices in one parameter along its first axis, such as queries,
    keys and values, or the gates of an LSTM, are a single one.
    """
    model = unwrap(model)
    owned = uses_by_owner(model)
    # Those in the `no_weight_decay()` of the model and its parts, and those marked as in Mamba.
    listed = {name for name, weight in model.named_parameters() if getattr(weight, "_no_weight_decay", False)}
    for prefix, module in model.named_modules():
        if hasattr(type(module), "no_weight_decay"):
            listed |= {f"{prefix}.{name}".removeprefix(".") for name in module.no_weight_decay()}
    weights, roles = dict[str, nn.Parameter](), dict[str, Role]()
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weights[name] = weight
            roles[name] = Role.LISTED if name in listed else _role(weight, owned[name])
    is_open = {name for name, role in roles.items() if role is Role.UNKNOWN and weights[name].requires_grad}
    if required or is_open - collect_parameter_options(model).keys():
        try:
            with open_trial(model, batch) as (trial, batch):
                uses, inputs, outputs = _trace(trial, batch)
                if unused := dict(trial.named_parameters()).keys() - uses.keys():  # training skips layers at random
                    more, first, last = _trace(trial.eval(), batch)
                    uses |= {name: more[name] for name in unused & more.keys()}
                    inputs, outputs = inputs | first & unused, outputs | last & unused
        except ValueError:
            if required:
                raise
            return roles
        for name, weight in weights.items():
            if roles[name] is Role.HIDDEN and required and name not in uses:
                roles[name] = Role.UNKNOWN
            elif roles[name] is not Role.LISTED:
                roles[name] = _role(weight, owned[name], uses.get(name, set()), is_output=name in outputs)
                if roles[name] is Role.HIDDEN and name in inputs:
                    roles[name] = Role.INPUT
    return roles


def _role(weight: Tensor, owned: set[Use], seen: Set[Use] = frozenset(), *, is_output: bool = False) -> Role:
    """Return the role of a weight from its uses by the module of torch that owns it, and those in a forward pass."""
    if Use.ELEMENTWISE in owned or (weight.ndim > 2 and weight.squeeze().ndim < 2 and not owned):
        return Role.NORM
    if Use.EMBEDDED in owned | seen:
        return Role.TIED if is_output and Use.PRODUCT in owned | seen else Role.EMBEDDING
    if is_output:
        return Role.OUTPUT
    if not owned and Use.INDEXED in seen and Use.PRODUCT in seen:
        return Role.INDEXED
    if not (owned | seen) & {Use.PRODUCT, Use.KERNEL}:
        return Role.ELEMENTWISE if seen - {Use.CUSTOM} else Role.UNKNOWN
    if weight.ndim > 2 and not owned and Use.KERNEL not in seen:
        return Role.STACK
    return Role.HIDDEN if min(weight.shape[:2]) > 1 else Role.THIN


def collect_parameter_options(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Return the `parameter_options` of a model and its parts by full parameter name; those of outer parts prevail."""
    names = dict(model.named_parameters()).keys()
    by_name: dict[str, Mapping[str, Any]] = {}
    for prefix, module in reversed([*model.named_modules()]):
        # Attributes of the type: wrappers, such as those of PEFT, have those of the wrapped module.
        options = module.parameter_options() if hasattr(type(module), "parameter_options") else {}
        if missing := set() if prefix else set(options) - names:
            raise ValueError(f"parameter_options names parameters that the model lacks: {', '.join(sorted(missing))}.")
        for name, values in options.items():
            if (path := f"{prefix}.{name}".removeprefix(".")) in names:
                by_name[path] = values
    return by_name


def uses_by_owner(model: nn.Module) -> Uses:
    """Return the uses of weights that torch's own modules determine, by name of the parameter."""
    names = {weight: name for name, weight in model.named_parameters()}
    uses: Uses = defaultdict(set)
    for module in model.modules():
        owned = {name: (name, weight) for name, weight in module._parameters.items() if weight is not None}
        for name, parametrizations in _parametrizations(module):
            originals = dict(parametrizations.named_parameters(recurse=False))
            if isinstance(next(parametrizations.children()), _WeightNorm):
                uses[names[originals["original0"]]].add(Use.ELEMENTWISE)
                owned["original1"] = name, originals["original1"]
            elif "original" in originals:
                owned["original"] = name, originals["original"]
        for name, weight in owned.values():
            is_weight = name in ("weight", "weight_orig", "weight_v")  # of pruning, and of weight norm
            is_matrix = "bias" not in name if isinstance(module, _SEVERAL) else is_weight
            for kinds, use in _OWNERS.items():
                if isinstance(module, kinds) and (is_matrix or use is Use.ELEMENTWISE):
                    uses[names[weight]].add(use)
    return uses


def _parametrizations(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    is_parametrized = parametrize.is_parametrized(module)
    return module.get_submodule("parametrizations").named_children() if is_parametrized else ()


class _Value(NamedTuple):
    """Result of a node of the graph."""

    has_data: bool
    weights: frozenset[str] = frozenset()  # from which it is computed, if it is from them alone
    last: frozenset[int] = frozenset()  # products by weights that end in it, with no other one after them
    before: frozenset[int] = frozenset()  # all products by weights on which it depends


def _trace(trial: nn.Module, batch: Any) -> tuple[Uses, set[str], set[str]]:
    """Return uses by name of the parameter in a forward pass, and the names of the weights of first and output layers.

    A weight is used where it, or a value from weights alone, first meets data. An output layer is in a product that an
    output ends in (`last`), and on which no other product depends (`inner`). A product that is added to what it was
    computed from, as at the end of an encoder, is not one.
    """
    tensors, owned = dict(trial.named_parameters()), uses_by_owner(trial)
    names = {weight: name for name, weight in tensors.items()}
    matrices = {name for name, uses in owned.items() if uses & {Use.PRODUCT, Use.KERNEL}}
    made: dict[Node, set[str]] = {}  # of parametrized weights, with their parameters
    with torch.enable_grad(), parametrize.cached():
        for weight in names:
            weight.requires_grad_(weight.is_floating_point())
        for module in trial.modules():
            for name, parametrizations in _parametrizations(module):
                node = get_gradient_edge(getattr(module, name)).node
                made[node] = {names[weight] for weight in parametrizations.parameters(recurse=False)}
        try:
            copies = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()).clone(), batch)
            output = call(trial, copies)
        except RuntimeError:  # the model sets requires_grad of its input, as wav2vec 2.0 does
            output = call(trial, batch)
    outputs = differentiable(output)  # kept, since torch 2.11 frees nodes of custom functions with them
    ends = [get_gradient_edge(leaf).node for leaf in outputs]
    graph: dict[Node, list[Node]] = {}
    pending = [*ends]
    while pending:
        if (node := pending.pop()) not in graph:
            graph[node] = [source for source, _ in node.next_functions if source is not None]
            pending += graph[node]
    uses: Uses = defaultdict(set)
    products: list[_Value] = []  # weights, and the products before
    inner: set[int] = set()
    values: dict[Node | None, _Value] = {}
    for node in TopologicalSorter(graph).static_order():  # each after its operands
        if hasattr(node, "variable"):
            name = names.get(node.variable, "")
            values[node] = _Value(not name, frozenset({name} - {""}))
            continue
        kind = node.name().rpartition("::")[2].partition("Backward")[0]
        is_custom = isinstance(node, BackwardCFunction) or "CppNode" in node.name()
        use = Use.CUSTOM if is_custom else _USES.get(kind, Use.ELEMENTWISE)
        is_product = use in (Use.PRODUCT, Use.KERNEL)
        sources = [values.get(source) for source, _ in node.next_functions]
        present = [value for value in sources if value]
        weights = frozenset[str]().union(*(value.weights for value in present))
        last = frozenset[int]().union(*(value.last for value in present))
        before = frozenset[int]().union(*(value.before for value in present))
        # Factors of lower rank than the highest one are learned tokens, not weights of a layer.
        ranks = {}
        for value in present:
            if value.weights:
                is_table = any(Use.INDEXED in uses[name] for name in value.weights)
                ranks[value] = _MATRIX if value.weights & matrices else _TABLE if is_table else _OTHER
        highest = max(ranks.values(), default=0)
        has_data = use is Use.EMBEDDED or any(value.has_data for value in present)
        if is_product and not has_data:  # a token or a constant by a layer, unless it is one weight by another
            is_constant = None in sources and kind not in ("Mv", "Dot")  # those of spectral norms
            has_data = min(ranks.values()) < highest or (is_constant and highest == _MATRIX)
        applied: set[str] = set()
        if has_data:
            summand = sources[0] if is_product and kind.startswith(("Add", "Badd")) else None
            for value, rank in ranks.items():
                is_factor = use is not Use.ELEMENTWISE and not (is_product and (rank < highest or value is summand))
                for name in value.weights:
                    uses[name].add(use if is_factor else Use.ELEMENTWISE)
                applied |= {name for name in value.weights if is_factor and tensors[name].ndim > 1}
        elif is_product or use is Use.INDEXED:
            for name in weights:
                if is_product or tensors[name].ndim == 2:  # of more than two axes, matrices are selected
                    uses[name].add(use)
        elif (
            len(ranks) > 1 and (gains := {n for n in weights - owned.keys() if tensors[n].squeeze().ndim < 2}) < weights
        ):
            for name in gains:  # of weights
                uses[name].add(Use.ELEMENTWISE)
            weights -= gains
        if applied:
            inner |= before
            last = frozenset({len(products)})
            before |= last
            products.append(_Value(True, frozenset(applied), before=before))
        elif kind in _SUMS and _is_residual(node, sources, products):
            last = frozenset({_RESIDUAL})
        values[node] = _Value(has_data, frozenset() if has_data else weights, last, before)
        if node in made:
            values[node] = _Value(False, values[node].weights | made[node])
    final = {index for node in ends for index in values[node].last} - inner - {_RESIDUAL}
    first = {name for product in products if len(product.before) == 1 for name in product.weights}
    return uses, first, {name for index in final for name in products[index].weights}


_RESIDUAL = -1
_TABLE, _OTHER, _MATRIX = range(3)


def _is_residual(node: Node, sources: list[_Value | None], products: list[_Value]) -> bool:
    """Return whether two summands of one shape end in products, and one depends on the other."""
    shapes = [source and source._input_metadata[index].shape for source, index in node.next_functions]
    for (a, shape), (b, other) in itertools.combinations(zip(sources, shapes, strict=True), 2):
        if a and b and a.last and b.last and shape and (shape == other or "Cat" in node.name()):
            pairs = [(i, y) for x, y in ((a, b), (b, a)) for i in x.last]
            if any(i == _RESIDUAL or products[i].before & y.last for i, y in pairs):
                return True
    return False
