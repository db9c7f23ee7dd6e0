"""Training of arms: of heads on features of frozen backbones, which are computed once, or in full by the recipe."""

import functools
import hashlib
import itertools
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig
from transformers.image_utils import PILImageResampling

from hf_sphere.comparison.arms import Arm, Parts, Setting, apply_setting
from hf_sphere.comparison.measures import Evaluated, mean_or_none
from hf_sphere.comparison.plan import UNSEEN
from hf_sphere.data import ImageSourceOptions, load_image_split
from hf_sphere.data.provenance import DataRecord
from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification, SphereVisionImageProcessor
from hf_sphere.models.pretrained_backbones import is_transformers_name, pretrained_preprocessing
from hf_sphere.nn.heads import HeadOutput, build_head
from hf_sphere.ood import Outputs
from hf_sphere.optim.groups import parameter_groups
from hf_sphere.search.extract import embed, embedding_metric, load_embedding_model
from hf_sphere.search.neighbor_search import NeighborSearch
from hf_sphere.training.errors import TrainingDivergedError
from hf_sphere.training.evaluation import initialize_from_data
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import make_arguments, to_argv
from hf_sphere.utils.files import atomic_file
from hf_sphere.utils.loading import load_pretrained
from hf_sphere.utils.model_sources import file_name
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.seeds import mix_seed

BATCH_SIZE = 256
NEIGHBORS = 5


class FeatureClassifier(nn.Module):
    """A linear map and a head, trained on the features of one backbone after `standardize`."""

    def __init__(self, features: Tensor, num_classes: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        embedding_dim = options["embedding_dim"]
        deviation, self.mean = torch.std_mean(features, dim=0, correction=0)
        self.deviation = torch.where(deviation > 1e-6 * self.mean.abs().clamp_min(1e-6), deviation, 1.0)
        self.projection = nn.Linear(features.shape[1], embedding_dim)
        self.head = build_head(options["head"], embedding_dim, num_classes, **options["head_kwargs"])

    def standardize(self, features: Tensor) -> Tensor:
        """Shift and scale features (N, d) to mean 0 and deviation 1 in training."""
        return (features - self.mean) / self.deviation

    def forward(self, features: Tensor, labels: Tensor | None = None) -> HeadOutput:
        """Classify standardized features (B, d)."""
        return self.head(self.projection(features), labels)


@dataclass(frozen=True)
class FrozenRuns:
    """Trains arms on cached features; can be sent to other processes."""

    training: ClassVar[str] = (
        f" of AdamW with a cosine schedule and batches of {BATCH_SIZE}, on a linear map of the standardized features "
        "of the frozen backbone"
    )

    files: Mapping[str, str]  # of `cache_features`, by backbone
    positions: Mapping[str, Tensor]  # indices of the images of each part of the data among the features
    source: ImageSourceOptions  # the dataset, whose images are prepared as each backbone needs them
    class_names: list[str]
    label: str  # column of the labels

    def train(self, arm: Arm, setting: Setting, parts: Parts, *, seed: int, epochs: int) -> FeatureClassifier | None:
        """Train an arm on a part of the data, by AdamW with a cosine schedule; None if it diverges."""
        features, labels = self.select(arm, parts.train)
        classes, targets = labels.unique(return_inverse=True)
        options, generator = apply_setting(arm.options, setting), torch.Generator().manual_seed(seed)
        rates = {"lr": options["learning_rate"], "weight_decay": options.get("weight_decay", 0.0)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = FeatureClassifier(features, len(classes), options)
            features = model.standardize(features)
            initialize_from_data(model, [{"features": features, "labels": targets}])
            optimizer = torch.optim.AdamW(parameter_groups(model), fused=True, **rates)
            step, steps = 0, epochs * math.ceil(len(labels) / BATCH_SIZE)
            schedule = LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
            for epoch in range(epochs):
                model.head.set_epoch(epoch)
                for rows in torch.randperm(len(labels), generator=generator).split(BATCH_SIZE):
                    model.head.before_forward(mix_seed(seed, step), torch.arange(len(rows)))
                    loss: Any = model(features[rows], targets[rows]).loss
                    if not loss.isfinite():
                        return None
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    model.head.after_step(lambda values: values)
                    step += 1
        return model

    def run(self, arm: Arm, setting: Setting, parts: Parts, *, seed: int, epochs: int) -> Evaluated | None:
        """Train an arm, and evaluate it on its test images; None if it diverges."""
        model = self.train(arm, setting, parts, seed=seed, epochs=epochs)
        if model is None:
            return None
        classes = self.select(arm, parts.train)[1].unique()
        outputs: Any = [self.outputs(model.eval(), arm, name, classes) for name in parts[1:] if name]
        known, unseen = [*outputs, None][:2]
        return Evaluated(known, unseen, model.head.metric()) if known.logits.isfinite().all() else None

    def save(self, arm: Arm, setting: Setting, parts: Parts, *, epochs: int, folder: Path) -> None:
        """Save the model of an arm and the first seed, with backbone, image processor and record of its images."""
        trained: Any = self.train(arm, setting, parts, seed=0, epochs=epochs)
        classes = [self.class_names[label] for label in self.select(arm, parts.train)[1].unique().tolist()]
        source = prepared_options(arm.backbone, self.source)
        options = apply_setting(arm.options, setting)
        settings: dict[str, Any] = {key: options[key] for key in ("head", "head_kwargs", "embedding_dim")}
        settings["label2id"] = {name: index for index, name in enumerate(classes)}
        model = build_model(arm.backbone, source, id2label=dict(enumerate(classes)), **settings)
        weight = trained.projection.weight / trained.deviation  # it also standardizes
        bias = trained.projection.bias - weight @ trained.mean
        model.sphere_vision.projection.load_state_dict({"weight": weight, "bias": bias})
        model.head.load_state_dict(trained.head.state_dict())
        model.save_pretrained(folder)
        names = ("num_channels", "image_mean", "image_std", "crop_pct", "background_color")
        SphereVisionImageProcessor(
            **{name: value for name in names if (value := getattr(source, name)) is not None},
            size=dict(zip(("height", "width"), model.config.input_size, strict=True)),
            resample=PILImageResampling[(source.interpolation or "bilinear").upper()],
        ).save_pretrained(folder)
        used, ids = {"train": parts.train, "eval": parts.test}, read_features(self.files[arm.backbone])["ids"]
        rows = {key: ids[self.positions[name]] for key, name in used.items()}
        DataRecord(used, rows, self.label).save(folder)

    @torch.no_grad()
    def outputs(self, model: FeatureClassifier, arm: Arm, part: str, classes: Tensor) -> Outputs:
        """Return the outputs of a part; labels that are no `classes` of the model follow these."""
        features, labels = self.select(arm, part)
        output = model(model.standardize(features))
        targets = torch.where(torch.isin(labels, classes), torch.searchsorted(classes, labels), len(classes) + labels)
        return Outputs(output.embeddings, output.logits, targets, ids=self.positions[part])

    def select(self, arm: Arm, part: str) -> tuple[Tensor, Tensor]:
        """Return the features and labels of a part."""
        cached = read_features(self.files[arm.backbone])
        rows = self.positions[part]
        return cached["features"][rows], cached["labels"][rows]


read_features = functools.lru_cache(maxsize=2)(load_file)
"""Reads what `cache_features` wrote."""


def cache_features(backbone: str, source: ImageSourceOptions, splits: Any, split: str, file: Path) -> None:
    """Write `features` (N, d), `labels` (N,) and `ids` (N,), see `hf_sphere.data.ImageSplit`, of a split to a file."""
    options, device = prepared_options(backbone, source), "cuda" if torch.cuda.is_available() else "cpu"
    encoder = build_model(backbone, options, head="softmax").sphere_vision.backbone.to(device).eval()
    images = load_image_split(options, split, dataset=splits, device=device)
    batches = progress_bar(images.batches.epoch(), total=len(images.batches), desc=backbone, leave=False)
    with torch.inference_mode():
        features = torch.cat([encoder(batch["pixel_values"]).float().cpu() for batch in batches])
    ids = images.ids[images.batches.rows]
    with atomic_file(file) as unfinished:
        save_file({"features": features, "labels": images.batches.labels.cpu(), "ids": ids}, unfinished)


def prepared_options(backbone: str, options: ImageSourceOptions) -> ImageSourceOptions:
    """Return options with which images are prepared as a backbone needs them; an error if that is unknown."""
    options = replace(options)
    options.fill(pretrained_preprocessing(backbone.partition("=")[0]))
    if None in (options.image_mean, options.image_std, options.image_size):
        raise ValueError(f"how images are prepared for the backbone {backbone} is unknown; it cannot be frozen.")
    return options


def saved_config(backbone: str) -> SphereVisionConfig | None:
    """Return the configuration of a backbone that is a saved model of this library, or None."""
    config = load_pretrained(AutoConfig, backbone) if is_transformers_name(backbone) else None
    return config if isinstance(config, SphereVisionConfig) else None


def build_model(backbone: str, source: ImageSourceOptions, **settings: Any) -> SphereVisionForImageClassification:
    """Build a classifier of prepared images with a pretrained backbone, and a new head by settings of a configuration.

    For names of backbones, see `Plan`; of a saved model of this library, the backbone is used.
    """
    name, _, weights = backbone.partition("=")
    sides = source.image_size or []
    settings |= {"num_channels": source.num_channels, "image_size": [sides[0], sides[-1]]}
    if (saved := saved_config(name)) is not None:
        kept = {key: getattr(saved, key) for key in ("backbone", "backbone_kwargs", "backbone_config")}
        config = SphereVisionConfig(**kept, final_activation=saved.keeps_activation, **settings)
        model = SphereVisionForImageClassification(config)
        model.sphere_vision.backbone.load_state_dict(load_embedding_model(name).base_model.backbone.state_dict())
        return model
    config = SphereVisionConfig(backbone=name, final_activation=True, **settings)
    return SphereVisionForImageClassification(config, pretrained=weights or True)


@torch.no_grad()
def score_backbone(runs: FrozenRuns, backbone: str, parts: Sequence[Parts]) -> dict[str, float | None]:
    """Return scores of the features in percent, means over the seeds' parts of the data; None if one is undefined."""
    arm, columns = Arm("", {"backbone": backbone}), defaultdict[str, list[Any]](list)
    for each in parts:
        train, labels = runs.select(arm, each.train)
        tested = [(part, *runs.select(arm, part)) for part in each[1:] if part]
        outputs = [Outputs(features, labels=classes, ids=runs.positions[part]) for part, features, classes in tested]
        _, rows = NeighborSearch(train, kind="torch").search(tested[0][1], min(NEIGHBORS, len(train)))
        correct = labels[rows].mode(1).values == tested[0][2]
        columns[f"{NEIGHBORS}-NN accuracy"].append(100 * float(correct.double().mean()))
        evaluated = Evaluated(outputs[0], outputs[-1])
        for prefix, name in itertools.product(("", UNSEEN)[: len(outputs)], ("recall_at_1", "map_at_r")):
            columns[prefix + name].append(mean_or_none(prefix + name, evaluated))
    return {name: None if None in column else statistics.fmean(column) for name, column in columns.items()}


@dataclass(frozen=True)
class TrainingRuns:
    """Trains arms by `hf-sphere train classification`."""

    training: ClassVar[str] = ""

    folder: Path  # of the models; `train.log` in it has what the runs print
    source: ImageSourceOptions  # the dataset and its columns
    options: Mapping[str, Any]  # of all runs

    def run(self, arm: Arm, setting: Setting, parts: Parts, *, seed: int, epochs: int) -> Evaluated | None:
        """Train an arm, and evaluate it on its test images; None if it diverges."""
        from hf_sphere.training.run import run_training

        output, task = self.model_folder(arm, seed), find_task("classification")
        options = apply_setting({**self.options, **arm.options}, setting)
        options |= {"seed": seed, "num_train_epochs": epochs, "save_epochs": epochs, "disable_tqdm": True}
        options |= {"train_split": parts.train, "eval_split": parts.test}
        options |= {"output_dir": str(output), "overwrite_output_dir": True}
        # That of the model card.
        command = ["hf-sphere", "train", "classification", *to_argv(options)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "train.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                run_training(task, make_arguments(task.arguments, options), command, "train_image_classification")
            except TrainingDivergedError:
                return None
            known, metric = self.evaluate(output, parts.test)
            unseen = None if parts.unseen is None else self.evaluate(output, parts.unseen)[0]
        for leftover in [output] if seed else output.glob("checkpoint-*"):
            shutil.rmtree(leftover)
        return Evaluated(known, unseen, metric)

    def save(self, arm: Arm, setting: Setting, parts: Parts, *, epochs: int, folder: Path) -> None:
        """Copy the model of an arm and the first seed to a folder."""
        shutil.copytree(self.model_folder(arm, 0), folder, dirs_exist_ok=True)

    def model_folder(self, arm: Arm, seed: int) -> Path:
        """Return the folder of the model of a run; that of the first seed is kept."""
        digest = hashlib.sha256(arm.name.encode()).hexdigest()[:8]  # names such as a/b and a-b are alike
        return self.folder / f"{file_name(arm.name)}-{digest}-seed{seed}"

    def evaluate(self, model_folder: Path, part: str) -> tuple[Outputs, dict[str, Any]]:
        """Return the outputs of a model for a part, and the distance of its embeddings."""
        model = load_embedding_model(str(model_folder)).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        source = replace(self.source, image_size=None)  # the model has it
        images = load_image_split(source, part, like=str(model_folder), device=model.device, progress=False)
        index = {name: number for number, name in model.config.id2label.items()}
        batches = ((batch["pixel_values"], len(batch["labels"])) for batch in images.batches.epoch())
        columns = [embed(model, [part] * count, pixel_values=pixels) for pixels, count in batches]
        embeddings, logits = (torch.cat([column[name] for column in columns]) for name in ("embedding", "logits"))
        names = images.class_names  # left-out classes that the model does not have follow its own
        labels = torch.tensor([index.get(names[i], len(index) + i) for i in images.batches.labels.tolist()])
        return Outputs(embeddings, logits, labels, ids=images.ids[images.batches.rows]), embedding_metric(model)
