"""Measure how fast batches for training are made from photographs on disk, with random crops and flips.

python benchmarks/image_loading.py

The photographs are crops of the two that scikit-learn contains, of 500 x 375 pixels (about the mean of ImageNet) and of
4000 x 3000, as JPEG. The plain loop is torchvision's: a folder of files, RandomResizedCrop, RandomHorizontalFlip,
Normalize and the default collation in a DataLoader with as many workers; on PIL images, as most recipes have it, or on
tensors. Loops are measured in turn, in images per second of processor time of all processes. Writes
`results/image_loading.json`.
"""

import argparse
import io
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ratio, report, row
from datasets import Dataset, Image, load_dataset
from PIL import Image as PILImage
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from hf_sphere.data import ImageBatches, ImageDataOptions, load_image_data

SIDE, BATCH, WORKERS = 224, 64, 2
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def write_photographs(folder: Path, count: int, size: tuple[int, int]) -> float:
    """Write photographs of two classes as files, parquet and tar; return the mean of their bytes."""
    photographs = [PILImage.fromarray(pixels) for pixels in load_sample_images().images]
    random, sizes, rows = np.random.default_rng(0), [], []
    for index in range(count):
        width = int(random.uniform(340, 560))
        height = width * size[1] // size[0]
        left, top = random.integers(0, 640 - width + 1), random.integers(0, 427 - height + 1)
        box = left, top, left + width, top + height
        file = folder / "files" / "train" / str(index % 2) / f"{index:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        photographs[index % 2].crop(box).resize(size, PILImage.Resampling.BICUBIC).save(file, quality=92)
        sizes.append(file.stat().st_size)
        rows.append({"image": {"bytes": file.read_bytes(), "path": file.name}, "label": index % 2})
    for shard, part in enumerate([rows[start : start + 250] for start in range(0, count, 250)]):
        for kind in ("parquet", "tar"):
            (folder / kind).mkdir(exist_ok=True)
        table = Dataset.from_list(part).cast_column("image", Image())
        table.to_parquet(folder / "parquet" / f"train-{shard:05d}.parquet")
        with tarfile.open(folder / "tar" / f"train-{shard:05d}.tar", "w") as archive:
            for each in part:
                for name, content in (("jpg", each["image"]["bytes"]), ("cls", str(each["label"]).encode())):
                    entry = tarfile.TarInfo(f"{each['image']['path'][:-4]}.{name}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return statistics.mean(sizes)


def plain_loop(folder: Path, of_tensors: bool, extra: list[Any]) -> Callable[[int], Iterator[Any]]:
    """Return epochs of a usual loop."""
    crop = [v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip(), *extra]
    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    steps = [v2.ToImage(), *crop, *floats] if of_tensors else [*crop, v2.ToImage(), *floats]
    images = ImageFolder(str(folder / "files" / "train"), v2.Compose(steps))
    loader: DataLoader = DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    return lambda epoch: iter(loader)


def library(folder: Path, count: int, streaming: bool, **more: Any) -> ImageBatches:
    """Return training batches of the library."""
    options: dict[str, Any] = {"image_size": SIDE, "num_channels": 3, "image_mean": MEAN, "image_std": STD}
    options |= {"random_resized_crop": 0.08, "horizontal_flip": True, "dataloader_num_workers": WORKERS} | more
    if streaming:
        options |= {"streaming": True, "eval_split": "train", "max_train_samples": count, "max_eval_samples": count}
        options |= {"class_names": ["0", "1"]}
    return load_image_data(ImageDataOptions(str(folder), **options), batch_size=BATCH, progress=False).train


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it started, and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def rates(loops: dict[str, Callable[[int], Iterator[Any]]], count: int, rounds: int) -> dict[str, list[float]]:
    """Return images per processor second of each loop, measured in turn after an epoch that is not counted."""
    results: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, epoch in loops.items():
            start, seconds = time.perf_counter(), processor_seconds()
            batches = epoch(number)
            for _ in batches:
                pass
            del batches
            used = processor_seconds() - seconds
            print(f"{name}: {count / used:.0f} ({count / (time.perf_counter() - start):.0f} per second)", flush=True)
            if number:
                results[name].append(count / used)
    return results


def main() -> None:
    """Measure small and large photographs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for size, count in (((500, 375), args.count), ((4000, 3000), args.count // 20)):
        with tempfile.TemporaryDirectory() as name:
            folder, what = Path(name), f"{size[0]} x {size[1]}"
            lines.append(row(f"{what}: mean kB of a file", write_photographs(folder, count, size) / 1000))
            files = library(folder / "files", count, False)
            loops: dict[str, Any] = {
                "plain loop, PIL": plain_loop(folder, False, []),
                "plain loop, tensors": plain_loop(folder, True, []),
                "library, files": files.epoch,
                "library, parquet stream": library(folder / "parquet", count, True).epoch,
                "library, tar stream": library(folder / "tar", count, True).epoch,
            }
            measured = rates(loops, count, args.rounds)
            lines += [
                row(f"{what}: {k}, images per processor second", statistics.median(v)) for k, v in measured.items()
            ]
            for of in ("files", "parquet stream", "tar stream"):
                for plain in ("PIL", "tensors"):
                    value = ratio(measured[f"library, {of}"], measured[f"plain loop, {plain}"])
                    lines.append(row(f"{what}: library, {of} / plain loop, {plain}", value, at_least=1.0))
            if size[0] == 500:
                pair = {
                    "plain loop, tensors": plain_loop(folder, True, [v2.RandAugment(2, 9)]),
                    "library, files": library(folder / "files", count, False, rand_augment=[2, 9]).epoch,
                }
                both = rates(pair, count, args.rounds)
                value = ratio(both["library, files"], both["plain loop, tensors"])
                lines.append(row(f"{what}, RandAugment: library, files / plain loop, tensors", value, at_least=1.0))
                for kind in ("parquet", "tar"):
                    column = "image" if kind == "parquet" else "jpg"
                    rows = load_dataset(str(folder / kind), streaming=True, split="train")
                    rows = rows.cast_column(column, Image(decode=False)).shuffle(seed=0, buffer_size=1000)
                    speed = rates({f"reading {kind}": lambda _, rows=rows: iter(rows)}, count, args.rounds)
                    value = statistics.median(speed[f"reading {kind}"])
                    lines.append(row(f"{what}: reading of {kind} shards, images per processor second", value))
    report("image_loading", lines)


if __name__ == "__main__":
    main()
