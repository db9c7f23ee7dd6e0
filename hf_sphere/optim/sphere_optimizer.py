"""Base class of the optimizers: parameter groups with `channel_dims`, their state, and the flow of a step."""

import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, zeros
from torch.optim.optimizer import _device_dtype_check_for_fused

from hf_sphere.optim import fast_step, layout
from hf_sphere.optim.fast_step import Block, Flags, Number, Portion, RowMath
from hf_sphere.optim.groups import NamedOptimizer, ParameterGroups, scale_invariant_groups
from hf_sphere.utils.checks import check_choice

Group = dict[str, Any]

NOT_PACKED = ("cpu", "mps", "xpu")
"""Devices without sums of segments, or where several passes over memory cost more than kernels."""


class SphereOptimizer(NamedOptimizer):
    """Base of the optimizers: torch's step for ordinary parameters, a rule on the sphere for scale-invariant ones.

    An optimizer of your own overrides `rule`. It inherits from `AdamS`, with the options, the state and the ordinary
    step of Adam, or from `SGDMRT`, for SGD. If it sets `name`, it is registered under it.

    With `compile=True`, the first step compiles the update of scale-invariant weights by inductor (up to a minute for
    a ResNet-18 on a CPU, seconds if it is in inductor's cache). Schedules and resumed runs do not compile again, and
    values equal the eager step up to rounding, unless a step shrinks a norm to less than the root of the machine
    epsilon, where the transport is limited. On a CPU, it requires a C++ compiler. To compile the entire step instead,
    use `torch.compile(lambda: optimizer.step(), fullgraph=True)` with a tensor as learning rate and `fused=False`.

    The optimizers of this library describe their steps by `_numbers_of_rule`, `_accumulate` and `_moved`, for several
    parameters at once and for compilers. `AdamS` and `SGDMRT` also inherit from the torch optimizer, set `momentum_key`
    and `has_second_moment`, and implement `_step_of_torch`.

    Example:
        >>> class SphereSGD(SGDMRT):
        ...     def rule(self, x, g, m, v, t, group):
        ...         m = group["momentum"] * m + g
        ...         y = x - group["lr"] * m
        ...         return y * x.norm(dim=1, keepdim=True) / y.norm(dim=1, keepdim=True), m, v
        >>> optimizer = SphereSGD(scale_invariant_groups(network, images), lr=0.1)
    """

    momentum_key: ClassVar[str]  # in the state
    has_second_moment: ClassVar[bool]  # `exp_avg_sq` in the state
    group_key = "channel_dims"
    own_defaults = {"channel_dims": None, "low_precision": "nearest", "compile": False}
    unsupported = ("nesterov", "amsgrad", "differentiable")

    def __init__(self, params: Any, **options: Any) -> None:
        extra = {name: options.pop(name, default) for name, default in self.own_defaults.items()}
        self.check_group({**self.option_defaults(), **extra, **options, "params": []})
        self._own = extra
        self._axes: dict[Tensor, int] = {}  # number of axes of each parameter when it was added
        super().__init__(params, **options)

    @classmethod
    def form_groups(cls, model: nn.Module, batch: Any = None) -> ParameterGroups:
        """Split the parameters of a model; see `scale_invariant_groups`."""
        return scale_invariant_groups(model, batch)

    def check_group(self, group: Group) -> None:
        """See `NamedOptimizer`; complete the group."""
        super().check_group(group)
        check_choice("low_precision", group["low_precision"], ("nearest", "stochastic", "master"))
        if group["decoupled_weight_decay"] and group["lr"] * group["weight_decay"] >= 1.0:
            rate = f"{group['weight_decay']} at lr {group['lr']}"
            raise ValueError(f"decoupled weight decay of {rate} would remove the weights in one step.")
        dims = group["channel_dims"] if group["channel_dims"] is None else tuple(group["channel_dims"])
        for name, parameter in zip(self._names(group), group["params"], strict=True):
            if not parameter.is_floating_point():
                raise ValueError(f"{name} is {parameter.dtype}; {type(self).__name__} requires real floating point.")
            if group["low_precision"] == "stochastic" and parameter.dtype == torch.float16:
                raise ValueError(f"{name} is float16; stochastic rounding is for bfloat16: use low_precision='master'.")
            axes = [dim for dim in dims or () if type(dim) is int and 0 <= dim < parameter.ndim]
            if dims is not None and len({*axes}) < len(dims):
                shape = f"of shape {list(parameter.shape)}, such as [0]; got {list(dims)}"
                raise ValueError(f"channel_dims must be axes of {name}, {shape}.")
        if dims is not None:  # parameters whose groups have one weight each are ordinary
            is_ordinary = group["params"] and all(len(dims) == parameter.ndim for parameter in group["params"])
            group["channel_dims"] = None if is_ordinary else tuple(sorted(dims))
        group.pop("compile", None)
        # Missing after copying or unpickling: torch keeps only defaults, state and groups.
        self.__dict__.setdefault("_axes", {}).update({p: p.ndim for p in group["params"]})

    def _step(self) -> None:
        compiles = self.defaults["compile"] or torch.compiler.is_compiling()
        pending: dict[Any, list[tuple[Block, Group]]] = defaultdict(list)
        opened: list[tuple[Tensor, layout.OpenParameter, str]] = []
        self._init_group()  # before any parameter changes
        for group in self.param_groups:
            batches: dict[Any, list[Tensor]] = defaultdict(list, ordinary=[])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self._is_scale_invariant(parameter, group):
                    batches["ordinary"].append(parameter)
                elif layout.local(parameter).numel():
                    batches[parameter.device, parameter.dtype].append(parameter)
                else:
                    self.state[parameter]["step"] += 1  # no local groups, but the step is counted
            mode, key = group["low_precision"], self.momentum_key
            for kind, parameters in batches.items():
                dims = None if kind == "ordinary" else group["channel_dims"]
                tensors = [layout.OpenParameter(p, self.state[p], mode, key, dims) for p in parameters]
                opened += [(p, own, mode) for p, own in zip(parameters, tensors, strict=True)]
                if dims is None and parameters:
                    self._step_of_torch(group, parameters, tensors)
                elif parameters:
                    torch._foreach_add_([self.state[p]["step"] for p in parameters], 1)
                    blocks = [self._block(p, own) for p, own in zip(parameters, tensors, strict=True)]
                    if compiles:
                        pending[kind if self._has_fast_rule() else (kind, id(group))] += [(b, group) for b in blocks]
                    else:
                        self._step_on_sphere(group, blocks)
        for items in pending.values():
            self._step_compiled(items)
        seeds = itertools.count()
        for parameter, own, mode in opened:
            # The seed depends on the step alone, so that replicas and resumed runs round identically.
            own.close(int(self.state[parameter]["step"]) * 1_000_003 + next(seeds) if mode == "stochastic" else 0)

    def _block(self, parameter: Tensor, tensors: layout.OpenParameter) -> Block:
        state = self.state[parameter]
        moment = layout.local(state["exp_avg_sq"]).view(-1) if self.has_second_moment else tensors.weight.new_empty(0)
        # A Python number, if reading it does not synchronize with the device.
        on_host = state["step"].device.type == "cpu" and not torch.compiler.is_compiling()
        step = state["step"].item() if on_host else state["step"]
        return Block(tensors.weight, tensors.gradient, tensors.momentum, moment, step)

    def _step_on_sphere(self, group: Group, blocks: list[Block]) -> None:
        batches, weight = list(fast_step.portions(blocks, group["foreach"])), blocks[0].weight
        packs = weight.device.type not in NOT_PACKED
        sizes = [sum([b.weight.numel() for b in portion]) for portion in batches if not packs or len(portion) == 1]
        memory = weight.new_empty(max(sizes, default=0) if self._has_fast_rule() else 0)
        for portion in batches:
            if self._has_fast_rule():
                rows = (fast_step.PackedPortion if packs and len(portion) > 1 else Portion)(portion, memory)
                numbers = self._numbers(group, rows.t, rows.dim)
                *_, v = self._update(rows, rows.x, rows.g, rows.m, rows.v, self._flags(group), *numbers)
                rows.close(v)
            else:
                fast_step.update_all(*self._arguments([(block, group) for block in portion]))

    def _step_compiled(self, items: list[tuple[Block, Group]]) -> None:
        """Update blocks of one device and dtype by a compiled function."""
        update, blocks, numbers = self._arguments(items)
        if torch.compiler.is_compiling():  # by the caller
            fast_step.update_all(update, blocks, numbers)
            return
        if "_compiled" not in self.__dict__:  # neither copied nor pickled
            # A copy of the code, as torch limits how many variants of one it compiles.
            own = FunctionType(fast_step.update_all.__code__.replace(), fast_step.update_all.__globals__)
            self._compiled = torch.compile(own, dynamic=False, options=fast_step.INDUCTOR)
        # Numbers are a tensor, so that a schedule or the number of the step does not compile again.
        flat, x = [number for own in numbers for number in own], blocks[0][0]
        if any(isinstance(number, Tensor) for number in flat):
            table = torch.stack([n.to(x) if isinstance(n, Tensor) else x.new_full((), n) for n in flat])
        else:
            table = x.new_tensor(flat)
        self._compiled(update, blocks, table.view(len(blocks), -1))

    def _arguments(self, items: list[tuple[Block, Group]]) -> tuple[Any, list[tuple[Any, ...]], list[list[Number]]]:
        """Return the arguments of `update_all`, with flags as constants that a compiler can omit."""
        update: Any = type(self)._update
        if not self._has_fast_rule():
            update = partial(self._follow_rule, {k: v for k, v in items[0][1].items() if k not in ("params", "lr")})
        blocks = [(b.weight, b.gradient, b.momentum, b.second_moment, self._flags(group)) for b, group in items]
        return update, blocks, [self._numbers(group, b.step, b.weight.shape[1]) for b, group in items]

    def _has_fast_rule(self) -> bool:
        return type(self).rule is SphereOptimizer.rule

    def _flags(self, group: Group) -> Flags:
        decays, shrinks = (
            isinstance(value, Tensor) or value != none for value, none in zip(self._decay(group), (0, 1), strict=True)
        )
        return Flags(group["maximize"], decays, shrinks)

    def _numbers(self, group: Group, t: Number, dim: Number) -> list[Number]:
        """Return L2 weight decay, the factor of decoupled decay, and those of the rule."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            is_read = lr.device.type == "cpu" and not torch.compiler.is_compiling()
            lr = lr.item() if is_read else lr.squeeze()
        own = self._numbers_of_rule(group, t, lr, dim)
        return [*self._decay(group), *(own if self._has_fast_rule() else (t, lr))]

    def _decay(self, group: Group) -> tuple[float, Number]:
        """Return the L2 weight decay, and the factor of decoupled weight decay."""
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
            return 0.0, 1 - lr * group["weight_decay"]
        return group["weight_decay"], 1.0

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[layout.OpenParameter]) -> None:
        """Update ordinary parameters with torch's functional optimizer."""
        raise NotImplementedError  # an abstract method would leave them as they are

    def rule(
        self, x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Number, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new weights and moments of K groups of D scale-invariant weights; the arguments are only read.

        Weights of norm 0, which have no direction, are not updated.

        Args:
            x: Weights (K, D), after decoupled weight decay. A row is a group, such as a filter before a BatchNorm.
            g: Gradient (K, D), with L2 weight decay, to be minimized.
            m: First moment (K, D), zero before the first step.
            v: Second moment (K, 1), zero before the first step; of `SGDMRT`, always zero.
            t: Number of the step, from 1.
            group: Options of the parameter group, such as `lr`, `betas` and `momentum`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `rule`.")

    def _follow_rule(
        self, group: Group, rows: RowMath, x: Any, g: Any, m: Any, v: Tensor, flags: Flags, *numbers: Number
    ) -> tuple[Tensor, ...]:
        decay, shrink, t, lr = numbers
        x = x * shrink
        values = x, m, v if len(v) else x.new_zeros(len(x), 1)
        gradient = (-g if flags.maximize else g).to(x.dtype) + decay * x
        new = self.rule(x, gradient, *values[1:], t, {**group, "lr": lr})
        if (shapes := [tuple(v.shape) for v in new]) != (expected := [tuple(v.shape) for v in values]):
            needed = f"return x, m and v of shapes {expected}"
            raise ValueError(f"rule of {type(self).__name__} must {needed}; got {shapes}.")
        at_zero = fast_step.is_zero(rows.spread(rows.norm(x)))
        return tuple(torch.where(at_zero, *pair) for pair in zip(values, new, strict=True))

    @classmethod
    def _update(
        cls, rows: RowMath, x: Any, g: Any, m: Any, v: Tensor, flags: Flags, *numbers: Number
    ) -> tuple[Any, Any, Tensor]:
        """Return the new weights and moments, from the numbers of `_numbers`; `Portion` changes them in place."""
        decay, shrink, *own = numbers
        m, v, size = cls._accumulate(rows, rows.gradient(x, g, flags, decay), m, v, *own)
        length = rows.norm(x)
        size = torch.where(fast_step.is_zero(length), torch.zeros_like(length), size)
        y = rows.subtract(rows.scale(x, shrink) if flags.shrinks else x, size, m)
        return cls._moved(rows, x, y, m, v, length, size, flags, shrink)

    @classmethod
    @abstractmethod
    def _accumulate(cls, rows: RowMath, g: Any, m: Any, v: Tensor, *numbers: Number) -> tuple[Any, Tensor, Number]:
        """Return the new moments and the step size, from the numbers of `_numbers_of_rule`."""

    @classmethod
    def _moved(cls, rows: RowMath, x: Any, y: Any, m: Any, v: Tensor, *about: Any) -> tuple[Any, Any, Tensor]:
        """Return weights and moments after the step to y; `about` are the other arguments of `RowMath.transport`."""
        return y, m, v

    @abstractmethod
    def _numbers_of_rule(self, group: Group, t: Number, lr: Number, dim: Number) -> tuple[Number, ...]:
        """Return the numbers of a step."""

    def _is_scale_invariant(self, parameter: Tensor, group: Group) -> bool:
        dims = group["channel_dims"]
        if dims is None or not self._keeps_momentum(group):
            return False
        if parameter.ndim != self.__dict__.get("_axes", {}).get(parameter, parameter.ndim):
            what = f"channel_dims {list(dims)} do not fit a parameter that is now {parameter.ndim}-dimensional"
            how = "FSDP2 (fully_shard) keeps the shape of parameters"
            raise RuntimeError(f"{what}: it was flattened after the optimizer was built. {how}.")
        return layout.group_size(parameter, dims) > 1

    def _init_group(self, *_: Any) -> Any:
        """Check the groups and create the states; torch's compiler runs a method of this name untraced."""
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        for group in self.param_groups:
            if is_captured and not group["capturable"]:
                raise RuntimeError(f"a CUDA graph is being captured: build {type(self).__name__} with capturable=True.")
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if isinstance(parameter, DTensor) and self._is_scale_invariant(parameter, group):
                    layout.check_shards(self._names(group)[index], parameter, group["channel_dims"])
                state = self.state[parameter]
                keys = [self.momentum_key] * self._keeps_momentum(group) + ["exp_avg_sq"] * self.has_second_moment
                low = parameter.dtype.itemsize < 4
                if not low and "step" in state and all([key in state for key in keys]):
                    continue  # the usual case
                if low and group["low_precision"] == "master" and "master" not in state:
                    state["master"] = parameter.detach().to(torch.float32)
                if "step" not in state:
                    if group["fused"]:
                        _device_dtype_check_for_fused(parameter)
                    on_device = group["capturable"] or group["fused"]
                    double = torch.get_default_dtype() == torch.float64 and not group["fused"]
                    dtype, device = torch.float64 if double else torch.float32, parameter.device if on_device else "cpu"
                    state["step"] = torch.zeros((), dtype=dtype, device=device)
                for key in keys:
                    if key in state:  # the options may have changed since the last step
                        state[key] = state[key].to(self._state_dtype(key, parameter, group))
                    else:
                        state[key] = self.initial_state(key, parameter, group)

    def _keeps_momentum(self, group: Group) -> bool:
        return True

    def initial_state(self, key: str, parameter: Tensor, group: Group) -> Tensor:
        """Return a tensor of the state other than `step` before the first step."""
        dtype = self._state_dtype(key, parameter, group)
        if key == "exp_avg_sq" and self._is_scale_invariant(parameter, group):
            shape = [size if dim in group["channel_dims"] else 1 for dim, size in enumerate(parameter.shape)]
            if isinstance(parameter, DTensor):  # sharded like the parameter
                return zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
            return torch.zeros(shape, dtype=dtype, device=parameter.device)
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    def _state_dtype(self, key: str, parameter: Tensor, group: Group) -> torch.dtype:
        """Return the parameter's dtype, as in torch; at least float32 for small tensors and in the precise modes."""
        precise = key == "exp_avg_sq" and self._is_scale_invariant(parameter, group)
        precise |= key == "master" or group["low_precision"] != "nearest"
        return torch.promote_types(parameter.dtype, torch.float32) if precise else parameter.dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which may have been saved with parameters of another dtype; see `NamedOptimizer`."""
        super().load_state_dict(state_dict)
        # torch casts every tensor to the dtype of its parameter; restore those in higher precision.
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        owners = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in zip(indices, owners, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step" and self.state[parameter][key].dtype != self._state_dtype(key, parameter, group):
                    self.state[parameter][key] = value.to(parameter.device, self._state_dtype(key, parameter, group))
