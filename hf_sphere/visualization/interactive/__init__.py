"""Embeddings on an interactive sphere: one HTML page that needs no network (extra `plotly`)."""

from hf_sphere.visualization.interactive.page import check_plotly, write_interactive_sphere

__all__ = ["check_plotly", "write_interactive_sphere"]
