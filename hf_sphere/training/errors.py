"""Errors that end a run with a message for the user."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


class TrainingDivergedError(RuntimeError):
    """The loss or a weight became NaN or infinite."""


class TrainingInterruptedError(RuntimeError):
    """Training was stopped by a signal, after a checkpoint was written."""
