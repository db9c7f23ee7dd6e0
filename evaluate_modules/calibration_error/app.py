"""Gradio page: calibration errors of a pasted table.

python evaluate_modules/calibration_error/app.py

Also the app of a Space. Requires gradio.
"""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry

import gradio as gr
import torch

from hf_sphere.metrics import calibration_errors

EXAMPLE = "0.9, 1\n0.9, 1\n0.6, 1\n0.6, 0"


def compute(table: str) -> dict[str, float]:
    """Compute both errors of lines "confidence, 1 if correct else 0"."""
    try:
        rows = [[float(value) for value in line.split(",")] for line in table.splitlines() if line.strip()]
        confidences, correct = torch.tensor(rows, dtype=torch.float64).T.contiguous()
        if not ((correct == 0) | (correct == 1)).all():
            raise ValueError("the second column must be 1 (correct) or 0.")
        return calibration_errors(confidences, correct.bool())
    except ValueError as error:
        raise gr.Error(f"expected lines such as 0.9, 1. {error}") from error


def build_page() -> gr.Interface:
    """Build the page."""
    table = gr.Textbox(EXAMPLE, lines=12, label="Confidence, and 1 if the prediction is correct, else 0")
    return gr.Interface(compute, table, gr.JSON(label="Errors"), title="Calibration error", flagging_mode="never")


if __name__ == "__main__":
    build_page().launch()
