"""Texts of the contact sheet stay in their cells."""

from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from hf_sphere.commands.search import CELL, TEXT, draw_contact_sheet


def test_long_names_do_not_reach_the_next_cell():
    picture = Image.new("RGB", (32, 32), "black")
    index = SimpleNamespace(classes=lambda mark: ["a long name " * 5 + mark], open_image=lambda row: picture)
    neighbors = SimpleNamespace(
        rows=torch.zeros(1, 2, dtype=torch.long),
        distances=torch.full((1, 2), 0.123456),
        accepted=torch.tensor([[True, False]]),
        p_values=torch.full((1, 2), 0.0123),
        queries={"file": [f"{'name' * 20}.jpg"]},
    )
    sheet = np.asarray(draw_contact_sheet(index, neighbors, [picture]))
    assert sheet.shape == (CELL + TEXT, 3 * CELL, 3)
    for edge in range(1, 3):
        assert (sheet[CELL:, edge * CELL - 3 : edge * CELL + 2] == 255).all()
    rows = (sheet[CELL:] < 255).any(axis=(1, 2))
    assert rows.any()
    assert not rows[-1]  # the last line is not cut
