"""`TrainingArguments(optim="adam_srt")`: makes the optimisers known to the stock Trainer of transformers.

Both places are private in transformers: the enumeration of names in `training_args`, the table of handlers in
`trainer_optimizer`. Nothing else in the library touches them; `tests/optim/test_trainer.py` fails when they change.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_sphere.optim.names import OPTIMIZERS, optimizer_class


def register_names(training_args: ModuleType) -> None:
    """Add the names to `OptimizerNames`; calling it again changes nothing."""
    names: Any = training_args.OptimizerNames
    for value in OPTIMIZERS:
        if value in names._value2member_map_:
            continue
        key = value.upper()
        member = str.__new__(names, value)
        member._name_, member._value_ = key, value
        member._sort_order_ = len(names._member_names_)
        names._member_names_.append(key)
        names._member_map_[key] = names._value2member_map_[value] = member
        type.__setattr__(names, key, member)


def register_handlers(trainer_optimizer: ModuleType) -> None:
    """Add a handler for each name; calling it again changes nothing."""
    for value in OPTIMIZERS:
        trainer_optimizer._OPTIMIZER_HANDLERS.setdefault(value, _handle)


def _handle(context: Any) -> tuple[type, dict[str, Any]]:
    """Choose class and arguments from the `TrainingArguments`, with parameter groups found in the model."""
    from hf_sphere.optim.groups import radial_parameter_groups

    name = context.args.optim.value
    settings = {**context.optimizer_kwargs, "weight_decay": context.args.weight_decay}
    if OPTIMIZERS[name].is_adam:
        settings |= context.adam_kwargs
    settings |= _parse(name, context.optim_args)
    for position, key in enumerate(("beta1", "beta2")):
        if key in settings:
            betas = list(settings["betas"])
            betas[position] = settings.pop(key)
            settings["betas"] = tuple(betas)
    if context.model is not None:
        try:
            settings["params"] = radial_parameter_groups(context.model)
        except ValueError as error:
            raise ValueError(
                f"optim={name!r} could not find the scale-invariant weights: {error} For the Trainer: "
                f"Trainer(..., optimizer_cls_and_kwargs=({OPTIMIZERS[name].class_name}, "
                '{"params": radial_parameter_groups(model, batch), "lr": ...})).'
            ) from error
    return optimizer_class(name), settings


def _parse(name: str, given: dict[str, str]) -> dict[str, Any]:
    """Read `optim_args`, which are strings.

    Raises:
        ValueError: On an unknown key or a value that cannot be read.
    """
    kinds = _COMMON | (_ADAM if OPTIMIZERS[name].is_adam else _SGD)
    values = {}
    for key, text in given.items():
        if key not in kinds:
            raise ValueError(f"optim_args of {name} has no key {key!r}; its keys are {', '.join(sorted(kinds))}.")
        try:
            values[key] = kinds[key](text)
        except ValueError as error:
            raise ValueError(f"optim_args: {key}={text} cannot be read; {key} is {_WANTED[kinds[key]]}.") from error
    return values


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_WANTED: dict[Callable[[str], Any], str] = {float: "a number", _read_bool: "true or false", str: "a word"}
_COMMON: dict[str, Callable[[str], Any]] = {
    "lr": float,
    "weight_decay": float,
    "decoupled_weight_decay": _read_bool,
    "low_precision": str,
    "foreach": _read_bool,
    "fused": _read_bool,
    "maximize": _read_bool,
    "capturable": _read_bool,
}
_ADAM: dict[str, Callable[[str], Any]] = {"beta1": float, "beta2": float, "eps": float}
_SGD: dict[str, Callable[[str], Any]] = {"momentum": float, "dampening": float}
