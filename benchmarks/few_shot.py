"""Few-shot episodes of Omniglot on Conv4: the library's batches and evaluation, compared with a usual loop.

python benchmarks/few_shot.py [--dataset_name <folder>]

The dataset must have columns `image` and `label` and at least 20 images of each class; by default, a copy in
`../shared/data` is used if there is one, and otherwise synthetic images of the shape of Omniglot. An epoch is that of
the paper (100 training and 500 validation episodes), scaled down in proportion. A fifth of the classes are for
validation. On a CPU the library saves time outside of training: the usual loop decodes and embeds an image in each
episode that contains it, while the library decodes it once (before the epochs, reported in a separate row) and embeds
it once per validation. The time of the training episodes is dominated by the convolutions, which are the same.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import ratio, report, row, time_in_turn
from datasets import ClassLabel, Dataset, Features, Image, load_dataset
from PIL import Image as PILImage
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from hf_sphere.data import Episodes, FewShotBatches, ImagesInMemory
from hf_sphere.data.decoding import EncodedImages, ImageShape, decode_all
from hf_sphere.models import SphereVisionConfig, SphereVisionForFewShotClassification
from hf_sphere.training import RecipeArguments, TrainingLoop, evaluate_few_shot
from hf_sphere.training.evaluation import measure_images

WAY, SHOT, QUERY = 5, 5, 15
SIDE, MEAN, STD = 28, [0.92], [0.27]
LOCAL = Path(__file__).parent.parent.parent / "shared" / "data" / "brendenlake" / "omniglot"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def new_model() -> SphereVisionForFewShotClassification:
    """Build Conv4 with cosine prototypes on spherized embeddings."""
    torch.manual_seed(0)
    config = SphereVisionConfig(
        backbone="conv4",
        num_channels=1,
        image_size=SIDE,
        head=None,
        spherization={"scaling": 5.0, "radius": 5.0},
        few_shot_kwargs={"metric": "cosine", "temperature": 128.0},
    )
    return SphereVisionForFewShotClassification(config).to(DEVICE)


class Pictures(torch.utils.data.Dataset):
    """Images opened, converted, resized and normalized one by one."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows
        steps = [v2.Resize((SIDE, SIDE)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose(steps)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(self.rows[index]["image"].convert("L"))


class UsualSampler:
    """Samples the classes of an episode and the images of each class, as tutorials do."""

    def __init__(self, labels: Tensor, count: int) -> None:
        self.members = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.count):
            classes = [self.members[chosen] for chosen in torch.randperm(len(self.members))[:WAY].tolist()]
            drawn = [members[torch.randperm(len(members))[: SHOT + QUERY]] for members in classes]
            yield torch.stack(drawn, dim=1).flatten().tolist()


def usual_loop(parts: Sequence[tuple[Dataset, Tensor]], training: int, validation: int) -> None:
    """Train and evaluate one episode at a time; two workers load images; support and query are embedded separately."""
    model = new_model()
    encoder, truth = model.base_model, torch.arange(WAY, device=DEVICE).repeat(QUERY)

    def classify(images: Tensor) -> tuple[Tensor, Tensor]:
        support, query = images.to(DEVICE).split([WAY * SHOT, WAY * QUERY])
        prototypes = encoder(support).embeddings.reshape(SHOT, WAY, -1).mean(0)
        cosines = F.cosine_similarity(encoder(query).embeddings[:, None], prototypes, dim=-1)
        logits = 1000 * (cosines - 1) / 128
        return F.cross_entropy(logits, truth), (logits.argmax(-1) == truth).float().mean()

    def loader(part: tuple[Dataset, Tensor], count: int) -> DataLoader:
        rows, labels = part
        return DataLoader(Pictures(rows), batch_sampler=UsualSampler(labels, count), num_workers=2)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for images in loader(parts[0], training):
        loss, accuracy = classify(images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item(), accuracy.item()
    if not validation:
        return
    model.eval()
    with torch.no_grad():
        measured = [classify(images)[1].item() for images in loader(parts[1], validation)]
    np.mean(measured), 1.96 * np.std(measured) / len(measured) ** 0.5


def library_loop(parts: Sequence[tuple[Tensor, Tensor]], training: int, validation: int, per_batch: int = 1) -> None:
    """Train and evaluate with the library's loop, including the checkpoint."""

    def batches(part: tuple[Tensor, Tensor], count: int, per_batch: int = 1, **options) -> FewShotBatches:
        episodes = Episodes(WAY, SHOT + QUERY, count, per_batch, distinct=True)
        common = {"mean": MEAN, "std": STD, "device": DEVICE, "episodes": episodes}
        return FewShotBatches(ImagesInMemory(*part, **common, **options), SHOT)

    accelerator = Accelerator(cpu=DEVICE == "cpu")

    def evaluate(model: nn.Module) -> dict[str, float]:
        if not validation:
            return {"accuracy": 0.0}
        return evaluate_few_shot(model, batches(parts[1], validation, seed=1), accelerator)

    with tempfile.TemporaryDirectory() as folder:
        args = RecipeArguments(output_dir=folder, num_train_epochs=1, disable_tqdm=True)
        train = batches(parts[0], training, per_batch, shuffle=True)
        TrainingLoop(new_model(), train, args, accelerator, evaluate=evaluate, measure=measure_images).run()


def load_rows(name: str | None) -> Dataset:
    """Load Omniglot, or generate images of its shape."""
    if name or LOCAL.is_dir():
        return load_dataset(name or str(LOCAL), split="train")
    pixels = np.random.default_rng(0).integers(0, 256, (136 * 20, 105, 105), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(num_classes=136)})
    pictures = [PILImage.fromarray(p) for p in pixels]
    return Dataset.from_dict({"image": pictures, "label": [i % 136 for i in range(len(pixels))]}, features=features)


def main() -> None:
    """Time both loops in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset_name")
    parser.add_argument(
        "--training", type=int, default=20, help="Training episodes; validation has five times as many."
    )
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows, training, validation = load_rows(asked.dataset_name), asked.training, 5 * asked.training
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        shape = ImageShape(1, SIDE, SIDE)
        images, kept = decode_all(EncodedImages(rows, "image", shape), cache_dir=cache, progress=False)
    decoding = time.perf_counter() - started
    labels = torch.tensor(rows["label"])[kept]
    classes = labels.unique()
    held_out = torch.isin(labels, classes[-len(classes) // 5 :])
    pictures = [(rows.select(kept[part].tolist()), labels[part]) for part in (~held_out, held_out)]
    tensors = [(images[part], labels[part]) for part in (~held_out, held_out)]
    seconds = time_in_turn(
        {
            "library, training": lambda: library_loop(tensors, training, 0),
            "library, four per step": lambda: library_loop(tensors, training, 0, per_batch=4),
            "usual, training": lambda: usual_loop(pictures, training, 0),
            "library, epoch": lambda: library_loop(tensors, training, validation),
            "usual, epoch": lambda: usual_loop(pictures, training, validation),
        },
        rounds=asked.rounds,
        warmup=1,
    )
    rates = [row(f"{name}, episodes per second", training / min(seconds[name])) for name in list(seconds)[:3]]
    of_epoch = ratio(seconds["usual, epoch"], seconds["library, epoch"])
    of_training = ratio(seconds["usual, training"], seconds["library, training"])
    report(
        "few_shot",
        [
            row("usual loop / library, time of an epoch", of_epoch, at_least=3),
            row("usual loop / library, time of the training episodes", of_training),
            *rates,
            *(row(f"{name}, s", min(seconds[name])) for name in ("library, epoch", "usual, epoch")),
            row("library, decoding all images once, s", decoding),
        ],
        training_episodes=training,
        validation_episodes=validation,
        validation_images=int(held_out.sum()),
    )


if __name__ == "__main__":
    main()
