"""Gradio page: retrieval scores of a pasted table.

python evaluate_modules/retrieval_scores/app.py

Also the app of a Space. Requires gradio.
"""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before the import of gradio, which sends telemetry

import gradio as gr
import torch

from hf_sphere.metrics import retrieval_scores

EXAMPLE = "0, 1.0, 0.0\n0, 1.0, 0.1\n1, 0.0, 1.0\n1, 0.1, 1.0"


def compute(table: str, distance: str) -> dict[str, float]:
    """Compute the scores of lines "label, coordinate, coordinate, ..."."""
    try:
        rows = torch.tensor(
            [[float(value) for value in line.split(",")] for line in table.splitlines() if line.strip()]
        )
        if (rows[:, 0] % 1).any():
            raise ValueError("labels, the first column, must be integers.")
        return retrieval_scores(rows[:, 1:].contiguous(), rows[:, 0].long(), distance=distance)
    except (ValueError, IndexError) as error:
        raise gr.Error(f"expected lines such as 0, 1.0, 0.1 of the same length. {error}") from error


def build_page() -> gr.Interface:
    """Build the page."""
    table = gr.Textbox(EXAMPLE, lines=12, label="Label and coordinates of each embedding")
    distance = gr.Radio(["cosine", "euclidean"], value="cosine", label="Distance")
    scores = gr.JSON(label="Scores")
    return gr.Interface(compute, [table, distance], scores, title="Retrieval scores", flagging_mode="never")


if __name__ == "__main__":
    build_page().launch()
