"""The commands that train, by the names that configurations, output folders and results record."""

from contextvars import ContextVar

COMMANDS = {
    "train_image_classification": "train classification",
    "train_image_retrieval": "train retrieval",
    "train_image_regression": "train regression",
    "train_joint_prediction": "train joint",
    "train_few_shot": "train few-shot",
    "train_masked_lm": "train masked-lm",
}
"""Words after `hf-sphere`, by the name of the script in `recipes`."""

running: ContextVar[str | None] = ContextVar("running", default=None)
"""The command that the user started, for the usage line and errors."""


def command_of(script: str | None) -> str:
    """Return the command of a script, or the name of a script that is not ours."""
    return f"hf-sphere {COMMANDS[script]}" if script in COMMANDS else str(script)
