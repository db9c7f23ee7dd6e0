"""Embeddings on an interactive sphere: one HTML page that works offline (extra `plotly`)."""

from hf_sphere.visualization.interactive.page import check_plotly, write_interactive_sphere

__all__ = ["check_plotly", "write_interactive_sphere"]
