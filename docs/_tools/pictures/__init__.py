"""The pictures of the pages."""

from pictures import networks, settings, theory, training  # noqa: F401  (they register their pictures)
from pictures.style import FOLDER, PICTURES, ROOT, draw, save

__all__ = ["FOLDER", "PICTURES", "ROOT", "draw", "save"]
