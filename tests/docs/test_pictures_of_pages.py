"""The pictures of the pages: drawn by one program, from committed results, readable on a phone and without colors."""

import functools
import itertools
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")
import pictures
from figure_texts import problems
from matplotlib.colors import to_rgb
from pictures import style

from hf_sphere.visualization.figures import COLORS, LINE_COLORS

PAGES = {path: path.read_text("utf-8") for path in pictures.ROOT.glob("docs/**/*.md")}
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
"""Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009."""


draw = functools.cache(pictures.draw)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_texts_have_nine_points_on_a_phone_and_are_neither_cut_nor_covered(name):
    for file, figure in draw(name).items():
        assert figure.get_figwidth() * 96 <= 358, file  # pixels of the column at 390, where it is not scaled
        assert problems(figure) == [], file


def test_every_picture_of_a_page_is_drawn_and_every_drawn_one_is_shown():
    drawn = {f"{file}.svg" for name in pictures.PICTURES for file in draw(name)}
    shown = {name for page in PAGES.values() for name in re.findall(r"!\[[^]]*\]\((?:\.\./)*pictures/([^)]*)\)", page)}
    assert shown == drawn == {path.name for path in pictures.FOLDER.iterdir()}
    others = [path.name for path in pictures.ROOT.glob("docs/**/*.*") if path.suffix in (".png", ".jpg", ".gif")]
    assert others == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_files_show_the_committed_results(name):
    for file, figure in draw(name).items():
        written = (pictures.FOLDER / f"{file}.svg").read_text("utf-8")
        assert style.digest(figure) in written, f"run `python docs/_tools/pictures {name}`"


def test_alt_texts_are_sentences_and_captions_are_short():
    for path, page in PAGES.items():
        for alt, caption in re.findall(r"!\[([^]]*)\]\([^)]*pictures/[^)]*\)\n\n\*([^*]+)\*\n", page):
            assert len(alt.split()) > 3, path
            assert len(caption.split()) <= 60, path


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(color: np.ndarray) -> np.ndarray:
    """Return CIELAB of a linear color, for the white of D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    xyz = np.array(to_xyz) @ color.clip(0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", [np.eye(3), np.array(DEUTERANOPIA)], ids=["usual", "deuteranopia"])
@pytest.mark.parametrize(
    ("colors", "apart"), [(LINE_COLORS, 25), (style.DARK_LINES, 25), (COLORS, 17)], ids=["light", "dark", "classes"]
)
def test_colors_are_apart(colors, apart, vision):
    points = [lab(vision @ linear(color)) for color in colors]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(points, 2)) > apart


@pytest.mark.parametrize(("colors", "paper"), [(LINE_COLORS, style.PAPER), (style.DARK_LINES, style.DARK_PAPER)])
def test_names_in_the_colors_of_lines_are_legible(colors, paper):
    for color in colors:
        low, high = sorted(linear(each) @ [0.2126, 0.7152, 0.0722] for each in (color, paper))  # luminances
        assert (high + 0.05) / (low + 0.05) > 4.5
