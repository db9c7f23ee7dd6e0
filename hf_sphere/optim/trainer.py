"""Optimizers from transformers' `TrainingArguments`, for `TrainingArguments(optim="adam_srt")`.

`hf_sphere/registration.py` registers `optimizer_for_trainer` with transformers.
"""

from collections.abc import Callable
from typing import Any

from accelerate.utils import str_to_bool

from hf_sphere.optim.named import NamedOptimizer
from hf_sphere.optim.names import optimizer_class


def optimizer_for_trainer(context: Any) -> tuple[type[NamedOptimizer], dict[str, Any]]:
    """Return class and arguments of an optimizer from transformers' `OptimizerContext`, with groups found in the model.

    Raises:
        ValueError: If `optim_args` has an unknown key or a value that cannot be parsed, or if the radially invariant
            weights cannot be found.
    """
    name = context.args.optim.value
    kind = optimizer_class(name)
    supported = kind.option_defaults()
    options = {**context.optimizer_kwargs, "weight_decay": context.args.weight_decay}
    options |= {key: value for key, value in context.adam_kwargs.items() if key in supported}
    options |= _parse(name, context.optim_args, {**supported, **kind.group_options})
    of_groups = {key: options.pop(key) for key in kind.group_options if key in options}
    if "betas" in supported:
        betas = options.pop("betas", supported["betas"])
        options["betas"] = (options.pop("beta1", betas[0]), options.pop("beta2", betas[1]))
    if context.model is not None:
        if "adamw_lr_scale" in kind.group_options:
            of_groups["lr"] = options["lr"]
        options["params"] = kind.form_groups(context.model, **of_groups)
    return kind, options


def _parse(name: str, given: dict[str, str], supported: dict[str, Any]) -> dict[str, Any]:
    """Parse `optim_args`, which are strings, by the types of the defaults; the default None marks a boolean option."""
    defaults = {key: value for key, value in supported.items() if not key.startswith("channel_")}
    if "betas" in defaults:
        defaults["beta1"], defaults["beta2"] = defaults.pop("betas")
    options = {}
    for key, text in given.items():
        if key not in defaults:
            raise ValueError(f"optim_args of {name} has no key {key!r}; its keys are {', '.join(sorted(defaults))}.")
        read, expected = _READERS[type(defaults[key])]
        try:
            options[key] = read(text)
        except ValueError as error:
            raise ValueError(f"optim_args: {key}={text} cannot be parsed; {key} must be {expected}.") from error
    return options


_READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    float: (float, "a number"),
    int: (float, "a number"),  # torch has `weight_decay: float = 0`
    str: (str, "a string"),
    bool: (lambda text: bool(str_to_bool(text)), "true or false"),
    type(None): (lambda text: bool(str_to_bool(text)), "true or false"),
}
"""Parser of an option and description of its values, by the type of its default."""
