"""Interactive sphere with 10,000 points and images: size of the page and time until it is drawn.

python benchmarks/interactive_sphere.py [--dataset_name ylecun/mnist]

Uses the test images of the dataset, or synthetic ones of the shape of MNIST if there is none. The points form one
cluster per class. Time is measured from the start of the navigation to the first complete frame, in a headless Chromium
that renders WebGL in software, with a new page each time. Other processes slow it down; the results contain the system
load.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import report, row
from datasets import Image, load_dataset
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor

from hf_sphere.data.decoding import EncodedImages, ImageShape, decode_all
from hf_sphere.visualization import write_interactive_sphere

LOCAL = Path(__file__).parent.parent.parent / "shared" / "data" / "ylecun" / "mnist"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COUNT = 10_000
ROUNDS = 5


def load_images(name: str | None) -> tuple[Tensor, Tensor]:
    """Load test images uint8 (N, C, H, W) and labels (N,) of a dataset, or generate some: bright strokes on black."""
    if not name and not LOCAL.is_dir():
        generator = torch.Generator().manual_seed(0)
        smooth = F.interpolate(torch.randn(COUNT, 1, 7, 7, generator=generator), (28, 28), mode="bicubic")
        return (255 * (smooth * 2).sigmoid().sub(0.6).clamp_min(0) / 0.4).byte(), torch.arange(COUNT) % 10
    rows = load_dataset(name or str(LOCAL), split="test").take(COUNT)
    column = next(key for key, feature in rows.features.items() if isinstance(feature, Image))
    width, height = rows[0][column].size
    shape = ImageShape(1 if rows[0][column].mode == "L" else 3, height, width)
    with tempfile.TemporaryDirectory() as cache:
        images, kept = decode_all(EncodedImages(rows, column, shape), cache_dir=cache, progress=False)
        return images.clone(), torch.tensor(rows["label"])[kept]


def seconds_to_draw(browser: Browser, address: str) -> float:
    """Return the time to open an address in a new page and draw it."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("html[data-drawn]")
    seconds = time.perf_counter() - start
    page.close()
    return seconds


def main() -> None:
    """Write the page, measure its size and open it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset_name")
    images, labels = load_images(parser.parse_args().dataset_name)
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(10, 3, generator=generator), dim=-1)
    points = F.normalize(directions[labels] + 0.15 * torch.randn(len(labels), 3, generator=generator), dim=-1)
    names = [str(index) for index in range(10)]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        start = time.perf_counter()
        path = write_interactive_sphere(
            Path(folder, "sphere.html"), points, labels, names, images=images, directions=directions
        )
        written = time.perf_counter() - start
        load = os.getloadavg()[0]
        executable = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        first, *seconds = [seconds_to_draw(browser, path.as_uri()) for _ in range(1 + ROUNDS)]
        browser.close()
        size = path.stat().st_size / 1e6
    report(
        "interactive_sphere",
        [
            row("page, MB", size, at_most=6),
            row("s from navigation to the complete frame, median", statistics.median(seconds), at_most=3),
            row("s from navigation to the complete frame, best", min(seconds)),
            row("s from navigation to the complete frame, in a new browser", first),
            row("s to write the page", written),
        ],
        points=len(points),
        images=list(images.shape[1:]),
        rounds=seconds,
        load_before=load,
    )


if __name__ == "__main__":
    main()
