"""What the optimisers on the sphere share: groups with `channel_dims`, their state, the flow of a step."""

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_sphere.optim.blocks import Block, portions, scratch_for
from hf_sphere.optim.channels import check_shards, group_size, local, one_a_group, resolve_channel_dims
from hf_sphere.optim.open_parameter import OpenParameter
from hf_sphere.optim.precision import LOW_PRECISION, at_least_float32, is_low
from hf_sphere.optim.rules import Number

logger = logging.getLogger(__name__)

Group = dict[str, Any]


class SphereOptimizer(Optimizer):
    """Base of the optimisers: torch's own step for ordinary parameters, a rule of the sphere for radial ones.

    A subclass inherits from this class and from the torch optimiser that it generalises, and says what its momentum is
    called, how it builds up, and which rule it follows.

    Args:
        params: Parameters or groups of them.
        own: Defaults of the settings that torch's optimiser does not know.
        **options: Arguments of torch's optimiser.
    """

    momentum_key: ClassVar[str]
    has_second_moment: ClassVar[bool]

    def __init__(self, params: Any, own: dict[str, Any], **options: Any) -> None:
        self.check_settings({**own, **options})
        self._own_defaults = own
        self._axes: dict[Tensor, int] = {}  # how many axes each parameter had when it came
        super().__init__(params, **options)
        unsearched = all(group["channel_dims"] is None and not group.get("param_names") for group in self.param_groups)
        if unsearched:  # groups with names come from radial_parameter_groups, which has warned by itself
            logger.warning(
                "No parameter group of %s has channel_dims, so every step is torch's own. "
                "radial_parameter_groups(model) makes groups that have them.",
                type(self).__name__,
            )
        # Loss scaling is left to GradScaler: it unscales the gradients and skips the step where they overflow.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters.

        Args:
            param_group: `params`, and settings that differ from the defaults, `channel_dims` or `channel_wise` among
                them.

        Raises:
            ValueError: If a setting is out of range or does not fit the parameters.
        """
        # torch's __init__ has just made `defaults`, and comes here for the first group before it returns.
        self.defaults.update(self.__dict__.pop("_own_defaults", {}))
        param_group = dict(param_group)  # the caller's stays as it is, for another optimiser
        given = {"channel_dims": None, "channel_wise": False} | {
            key: param_group[key] for key in ("channel_dims", "channel_wise") if key in param_group
        }
        if not {"channel_dims", "channel_wise"} & set(param_group):
            given = {key: self.defaults[key] for key in given}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_settings(group)
            names = self._names(group)
            for name, parameter in zip(names, group["params"], strict=True):
                self._check_parameter(name, parameter, group)
            group["channel_dims"] = resolve_channel_dims(names, group["params"], **given)
            group.pop("channel_wise", None)
            # An optimiser that was copied or unpickled has forgotten it: torch keeps defaults, state and groups alone.
            self.__dict__.setdefault("_axes", {}).update({p: p.ndim for p in group["params"]})
        except ValueError:
            self.param_groups.pop()
            raise

    def check_settings(self, settings: Group) -> None:
        """Refuse settings out of range.

        Raises:
            ValueError: With the setting, its value and what is allowed.
        """
        for name in ("lr", "weight_decay"):
            if not isinstance(settings[name], (int, float, Tensor)) or not settings[name] >= 0.0:
                raise ValueError(f"{name} must be a number that is not negative; got {settings[name]!r}.")
        if not isinstance(settings.get("channel_wise", False), bool):
            raise ValueError(f"channel_wise is True or False; got {settings['channel_wise']!r}.")
        if settings["decoupled_weight_decay"] and settings["lr"] * settings["weight_decay"] >= 1.0:
            raise ValueError(
                f"decoupled weight decay of {settings['weight_decay']} at lr {settings['lr']} leaves nothing of the "
                "weights in one step; lr * weight_decay must be below 1."
            )
        for name in ("nesterov", "amsgrad", "differentiable"):
            if settings.get(name):
                raise ValueError(f"{type(self).__name__} has no {name} form; leave {name} out.")
        if settings["low_precision"] not in LOW_PRECISION:
            raise ValueError(f"low_precision can be {', '.join(LOW_PRECISION)}; got {settings['low_precision']!r}.")
        if settings["low_precision"] == "stochastic" and settings["capturable"]:
            raise ValueError(
                "stochastic rounding draws new numbers each step, which a captured graph cannot: use "
                "low_precision='master' with capturable=True."
            )

    def _check_parameter(self, name: str, parameter: Tensor, group: Group) -> None:
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}; {type(self).__name__} takes real floating-point numbers.")
        if group["low_precision"] == "stochastic" and parameter.dtype == torch.float16:
            raise ValueError(f"{name} is float16; stochastic rounding is for bfloat16: use low_precision='master'.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; the gradients are only read.

        Args:
            closure: Evaluates the model anew and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: On sparse gradients, on shards that cut through groups, on a CUDA graph without `capturable`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        seeds = itertools.count()
        for group in self.param_groups:  # before anything is changed
            self._check_capture(group)
            self._check_shards(group)
        for group in self.param_groups:
            ordinary: list[Tensor] = []
            radial: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients: build the embedding with sparse=False."
                    )
                is_radial = self._is_radial(parameter, group)
                self._init_state(parameter, group, is_radial)
                if not is_radial:
                    ordinary.append(parameter)
                elif local(parameter).numel():
                    radial[parameter.device, parameter.dtype].append(parameter)
                else:
                    self.state[parameter]["step"] += 1  # no group of it is here, but the steps are everybody's
            if ordinary:
                opened = self._open(group, ordinary)
                self._step_of_torch(group, ordinary, opened)
                self._close(group, ordinary, opened, seeds)
            for parameters in radial.values():
                opened = self._open(group, parameters, group["channel_dims"])
                self._step_on_sphere(group, parameters, opened)
                self._close(group, parameters, opened, seeds)
        return loss

    def _open(self, group: Group, parameters: list[Tensor], dims: tuple[int, ...] | None = None) -> list[OpenParameter]:
        mode, key = group["low_precision"], self.momentum_key
        return [OpenParameter(parameter, self.state[parameter], mode, key, dims) for parameter in parameters]

    def _close(
        self, group: Group, parameters: list[Tensor], opened: list[OpenParameter], seeds: "itertools.count[int]"
    ) -> None:
        for parameter, part in zip(parameters, opened, strict=True):
            # Seeds follow from the step alone: replicas round alike, and so does a run that is resumed.
            draws = group["low_precision"] == "stochastic"
            part.close(int(self.state[parameter]["step"]) * 1_000_003 + next(seeds) if draws else 0)

    def _step_on_sphere(self, group: Group, parameters: list[Tensor], opened: list[OpenParameter]) -> None:
        decay, shrink = self._decay(group)
        blocks = []
        for parameter, part in zip(parameters, opened, strict=True):
            state = self.state[parameter]
            state["step"] += 1
            moment = local(state["exp_avg_sq"]).view(-1) if self.has_second_moment else part.weight.new_empty(0)
            # A number where that costs no wait for the device.
            on_host = state["step"].device.type == "cpu" and not torch.compiler.is_compiling()
            step = state["step"].item() if on_host else state["step"]
            blocks.append(Block(part.weight, part.gradient, part.momentum, moment, step))
        together = list(portions(blocks, group["foreach"]))
        largest = max([block.weight.numel() for portion in together for block in portion])
        memory = blocks[0].weight.new_empty(largest)
        rule = self._rule
        if torch.compiler.is_compiling() and memory.device.type == "cpu":
            rule = torch.compiler.disable(rule)  # Inductor's C++ backend fails on norms of what it updates (torch 2.15)
        for portion in together:
            rule(portion, scratch_for(portion, memory), group, decay, shrink)

    def _decay(self, group: Group) -> tuple[float, Number]:
        """L2 weight decay, and the factor by which decoupled weight decay shrinks the weights."""
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            lr = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
            return 0.0, 1 - lr * group["weight_decay"]
        return group["weight_decay"], 1.0

    def _step_of_torch(self, group: Group, parameters: list[Tensor], opened: Sequence[OpenParameter]) -> None:
        """Step ordinary parameters with torch's functional optimiser."""
        raise NotImplementedError

    def _rule(
        self, blocks: list[Block], scratch: Sequence[Tensor | None], group: Group, decay: float, shrink: Number
    ) -> None:
        """Step groups of radial weights, all on one device and of one dtype.

        Args:
            blocks: The groups.
            scratch: Room for a matrix like each block's.
            group: Settings.
            decay: L2 weight decay, 0 where it is decoupled.
            shrink: Factor of decoupled weight decay, else 1.
        """
        raise NotImplementedError

    def _is_radial(self, parameter: Tensor, group: Group) -> bool:
        dims = group["channel_dims"]
        if dims is None or not self._keeps_momentum(group):
            return False
        if parameter.ndim != self.__dict__.get("_axes", {}).get(parameter, parameter.ndim):
            raise RuntimeError(
                f"channel_dims {list(dims)} do not fit a parameter that has become {parameter.ndim}-dimensional: it "
                "was flattened after the optimiser was built. FSDP2 (fully_shard) keeps filters whole."
            )
        return group_size(parameter, dims) > 1

    def _check_shards(self, group: Group) -> None:
        for number, parameter in enumerate(group["params"]):
            if isinstance(parameter, DTensor) and parameter.grad is not None and self._is_radial(parameter, group):
                check_shards(self._names(group)[number], parameter, group["channel_dims"])

    @staticmethod
    def _names(group: Group) -> list[str]:
        return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]

    def _keeps_momentum(self, group: Group) -> bool:
        return True

    def _init_state(self, parameter: Tensor, group: Group, is_radial: bool) -> None:
        state = self.state[parameter]
        keys = [self.momentum_key] if self._keeps_momentum(group) else []
        if self.has_second_moment:
            keys.append("exp_avg_sq")
        low = is_low(parameter.dtype)
        if not low and "step" in state and all([key in state for key in keys]):
            return  # nearly always
        if low and group["low_precision"] == "master" and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32)
        if "step" not in state:
            on_device = group["capturable"] or group["fused"]
            double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            state["step"] = torch.zeros(
                (), dtype=torch.float64 if double else torch.float32, device=parameter.device if on_device else "cpu"
            )
        for key in keys:
            dtype = self._state_dtype(key, parameter, group)
            if key in state:
                state[key] = state[key].to(dtype)  # other settings may ask for another precision than before
            elif key == "exp_avg_sq" and is_radial:
                state[key] = one_a_group(parameter, group["channel_dims"], dtype)
            else:
                state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)

    def _state_dtype(self, key: str, parameter: Tensor, group: Group) -> torch.dtype:
        """As torch has it, the parameter's own; at least float32 where it costs little or precision was asked for."""
        whole = key == "exp_avg_sq" and self._is_radial(parameter, group)
        whole |= key == "master" or group["low_precision"] != "nearest"
        return at_least_float32(parameter.dtype) if whole else parameter.dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also that of a model in another dtype.

        Args:
            state_dict: What `state_dict()` returned.

        Raises:
            ValueError: If it is no state of this optimiser, or does not fit the groups.
        """
        wanted = set(self.defaults) - {"channel_wise"}
        lacking = {key for group in state_dict["param_groups"] for key in wanted - set(group)}
        if lacking:
            raise ValueError(
                f"this is no state of {type(self).__name__}: its groups lack {', '.join(sorted(lacking))}."
            )
        for number, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            for key in ("channel_dims", "param_names"):
                before, now = saved.get(key), group.get(key)
                if (key == "channel_dims" or (before and now)) and _plain(before) != _plain(now):
                    raise ValueError(
                        f"{key} of parameter group {number} is {_plain(before)} in the state and {_plain(now)} in the "
                        "optimiser: it was saved with other groups. Build the optimiser from the same ones."
                    )
        super().load_state_dict(state_dict)
        # torch casts every tensor to the dtype of its parameter; those kept in higher precision are taken again.
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        owners = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for index, (parameter, group) in zip(indices, owners, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                dtype = value.dtype if key == "step" else self._state_dtype(key, parameter, group)
                if self.state[parameter][key].dtype != dtype:
                    self.state[parameter][key] = value.to(device=parameter.device, dtype=dtype)

    def _check_capture(self, group: Group) -> None:
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if captured and not group["capturable"]:
            raise RuntimeError(f"a CUDA graph is being captured: build {type(self).__name__} with capturable=True.")


def _plain(value: Any) -> Any:
    return None if value is None else list(value)
