"""The job `hf-sphere compare`: the checks before the runs, the runs, and the results."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sphere.comparison import frozen, report
from hf_sphere.comparison.arms import Arm, Division, Parts, apply_setting, make_arm, read_arms
from hf_sphere.comparison.measures import SHOT, UNSEEN
from hf_sphere.comparison.runs import RunComparison
from hf_sphere.comparison.significance import power
from hf_sphere.comparison.study import Study
from hf_sphere.comparison.trained import TrainingRuns
from hf_sphere.comparison.tuning import RATES
from hf_sphere.data import ImageSourceOptions, sources
from hf_sphere.data.provenance import DataRecord, fingerprint
from hf_sphere.data.targets import read_class_names, read_labels
from hf_sphere.models.pretrained_backbones import pretrained_preprocessing
from hf_sphere.nn.heads import build_head
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import parse_arguments, to_argv
from hf_sphere.utils.files import digest_file
from hf_sphere.utils.model_sources import file_name
from hf_sphere.utils.shared_rows import ROW_BITS

FROZEN_DIM = 128
RETRIEVAL = ("recall_at_1", "map_at_r")
TUNED = ("learning_rate", "weight_decay")
PLANNED = {"dataset_name", "train_split", "eval_split", "seed", "output_dir"}

Draw = Callable[[RunComparison, str, Path], None]


class Comparing:
    """A comparison, checked before it starts: arms, measure and parts of the data must fit together.

    The arguments are those of the job, a folder of the results, and what draws a comparison, with a title, to a file.
    """

    def __init__(self, data: Any, arms: Any, plan: Any, folder: Path, draw: Draw) -> None:
        self.arguments, self.plan, self.folder, self.draw = arms, plan, folder, draw
        self.splits = sources.load_splits(data.dataset_name, data.dataset_config_name)
        rows = sources.find_split(self.splits, data.train_split, "--train_split")
        self.label = sources.find_column(rows, data.label_column_name, sources.LABEL_COLUMNS, "label")
        names = ("dataset_name", "dataset_config_name", "image_column_name", "image_size", "skip_unreadable_images")
        common = {name: getattr(data, name) for name in names} | {"label_column_name": self.label}
        self.source, self.training = ImageSourceOptions(**common), {**common, **arms.training}
        left_out = plan.left_out_classes
        if left_out is None:
            left_out = 0.25 if plan.metric.startswith(UNSEEN) else 0.0
        test = data.eval_split
        if data.train_split in self.splits:  # of a part or a pool, the rest is not known to be unseen
            test = sources.choose_eval_split(self.splits, test, data.train_split)
        self.division = Division(data.train_split, test, data.eval_fraction, data.group_column, left_out, self.label)
        self.rate = plan.learning_rate or (3e-3 if arms.frozen else 1e-3)
        dim = arms.embedding_dim or (FROZEN_DIM if arms.frozen else None)
        given = {} if dim is None else {"embedding_dim": dim}
        self.arms = [make_arm(name, {**given, **options}, self.rate) for name, options in read_arms(arms).items()]
        if len(self.arms) < 2:
            raise ValueError("a comparison needs at least two arms; name more --heads, --backbones or --settings.")
        self.check_parts()
        self.check_arms()
        self.check_weights()
        self.check_records()

    @cached_property
    def parts(self) -> list[Parts]:
        """The parts of the data for each seed."""
        return [self.division.of_seed(seed) for seed in range(self.plan.seeds)]

    @cached_property
    def positions(self) -> dict[str, torch.Tensor]:
        """The rows of each part of the data among those of all splits."""
        parts = [self.division.tuning(), *self.parts]
        names = {name for each in parts for name in (each.train, each.test, each.unseen) if name is not None}
        return {name: sources.find_rows(self.splits, name, self.label) for name in names}

    def check_parts(self) -> None:
        """Raise an error if test images are tuned or trained on, or left-out classes are not left out."""
        names, splits = self.class_names, self.splits.items()
        labels = torch.cat([read_labels(rows, self.label, names, split) for split, rows in splits])
        tuning, rows, is_unseen = self.division.tuning(), self.positions, self.plan.metric.startswith(UNSEEN)
        column, units = self.division.group, torch.arange(len(labels))
        if column is not None:
            groups = [group for split in self.splits.values() for group in sources.read_groups(split, column)]
            units = torch.from_numpy(np.unique(groups, return_inverse=True)[1])
        for parts in (tuning, *self.parts):
            trained = rows[parts.train]
            for tested in filter(None, (parts.test, parts.unseen)):
                others = trained if parts is tuning else torch.cat([trained, rows[tuning.test]])
                if shared := int(torch.isin(units[rows[tested]], units[others]).sum()):
                    of = "" if column is None else f" of groups with images to train or tune on ({column}), or"
                    raise ValueError(
                        f"{shared:,} of the {len(rows[tested]):,} test images are{of} also images to train or tune on; "
                        "choose other parts by --train_split and --eval_split."
                    )
            if other := {*labels[rows[parts.test]].tolist()} - {*labels[trained].tolist()}:
                raise ValueError(
                    f"{len(other)} classes of the test images, such as {names[min(other)]}, have no "
                    "training images. If the splits have different classes, pool them: --train_split all."
                )
            if len(labels[trained].unique()) < 2:
                raise ValueError("too few classes are left to train on; leave out fewer by --left_out_classes.")
            self.check_metric(labels[rows[(is_unseen and parts.unseen) or parts.test]])
            if parts.unseen is not None and torch.isin(labels[rows[parts.unseen]], labels[trained]).any():
                raise ValueError(
                    "some classes are too small to be left out of each part; leave them out of the data, or test "
                    "another metric than unseen_*."
                )

    def check_metric(self, labels: torch.Tensor) -> None:
        """Raise an error if the planned measure is not defined for test images with these labels."""
        metric, counts = self.plan.metric, labels.unique(return_counts=True)[1]
        if metric.endswith(RETRIEVAL) and len(counts) < 2:
            raise ValueError(
                f"--metric {metric} is 100 % for images of a single class; set a larger --left_out_classes or "
                "--eval_fraction."
            )
        images, classes = (SHOT + 1, 2) if "few_shot" in metric else (2, 1) if metric.endswith(RETRIEVAL) else (1, 1)
        if (found := int((counts >= images).sum())) < classes:
            raise ValueError(
                f"--metric {metric} needs {classes} class(es) with at least {images} images to tune on and to test on; "
                f"some part has {found}. Test another measure, or set a larger --eval_fraction or --left_out_classes."
            )

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes."""
        return read_class_names(next(iter(self.splits.values())), self.label)

    def check_arms(self) -> None:
        """Raise an error for an arm that cannot be trained on the data."""
        for arm in self.arms:
            if both := {*arm.grid} & {*self.arguments.training}:
                raise ValueError(f"{both.pop()} of --training is tuned; state it in the arm {arm.name} to fix it.")
            if planned := PLANNED & {*self.arguments.training, *arm.options}:
                raise ValueError(f"the plan sets {planned.pop()} of each run; leave it out of --training and the arms.")
            options = apply_setting(arm.options, {name: start for name, (_, start) in arm.grid.items()})
            if options.get("head") is None:
                raise ValueError(f"the arm {arm.name} has no head, so no measure in common with others; set `head`.")
            if self.arguments.frozen:
                check_frozen(arm)
            try:
                dim = options.get("embedding_dim") or max(FROZEN_DIM, len(self.class_names))  # or that of a backbone
                build_head(options["head"], dim, len(self.class_names), **options["head_kwargs"])
                if not self.arguments.frozen or self.arguments.finetune:
                    self.parse(options | self.trained_options(arm))
            except (TypeError, ValueError) as error:
                raise ValueError(f"the arm {arm.name} does not fit: {error}") from error

    def check_weights(self) -> None:
        """Raise an error for a frozen backbone that is unknown, or a file of weights that does not fit its backbone."""
        for arm in {arm.backbone: arm for arm in self.arms}.values():
            options = {**self.training, **self.trained_options(arm)}
            name, file = options.get("backbone", ""), options.get("backbone_weights")
            has_file = file and not options.get("backbone_kwargs") and pretrained_preprocessing(name)
            if self.arguments.frozen or has_file:
                images = frozen.prepared_options(arm.backbone, self.source)
            if has_file:
                frozen.build_model(f"{name}={file}", frozen.shape_of(images), head="softmax")

    def check_records(self) -> None:
        """Raise an error if a saved model whose weights are used was trained or evaluated on these images."""
        ids = torch.cat([*self.positions.values()]).unique() + (fingerprint(self.splits) << ROW_BITS)
        weights = [{**self.training, **arm.options}.get("initial_weights") for arm in self.arms]
        for name in dict.fromkeys(filter(None, [*weights, *(arm.backbone for arm in self.arms)])):
            record = DataRecord.read(name) if frozen.saved_config(name) is not None else None
            used = torch.cat([*record.ids.values()]) if record is not None else torch.empty(0)
            if shared := int(torch.isin(ids, used).sum()):
                raise ValueError(f"{name} was trained or evaluated on {shared:,} of these images; compare on others.")

    def contents(self) -> dict[str, Any]:
        """Return the arms and digests of data and weights: results depend on them, and the arguments only name them."""
        files = dict.fromkeys(arm.backbone.partition("=")[2] for arm in self.arms)
        weights = {name: digest_file(Path(name)) for name in files if name}
        return {"data": fingerprint(self.splits), "arms": [asdict(arm) for arm in self.arms], "weights": weights}

    def parse(self, options: Mapping[str, Any]) -> None:
        """Raise an error for options that `hf-sphere train classification` does not have."""
        task, words = find_task("classification"), to_argv({**self.training, **options, "output_dir": "x"})
        try:
            parse_arguments(task.arguments, words)
        except SystemExit as error:
            raise ValueError("see the message above.") from error

    def run(self) -> None:
        """Run the plan, and write the results."""
        self.print_plan()
        if not self.arguments.frozen:
            arms = [replace(arm, options=self.trained_options(arm)) for arm in self.arms]
            self.finish(self.trained_study(self.folder), arms, self.folder)
            return
        ranked = self.finish(self.frozen_study(), self.arms, self.folder)
        if self.arguments.finetune:
            arms = []
            for arm, setting in ranked[: self.arguments.finetune]:
                own = {name: value for name, value in setting.items() if name.startswith("head_kwargs.")}
                options = apply_setting(self.trained_options(arm), own) | {"grid": {"learning_rate": [*RATES]}}
                arms.append(make_arm(arm.name, options, 1e-3))
            folder = self.folder / "finetuned"
            print(f"\nfinetune  {' and '.join(arm.name for arm in arms)}, in {folder}")
            self.finish(self.trained_study(folder), arms, folder)

    def print_plan(self) -> None:
        """Print what is compared, and which differences the seeds can show."""
        plan, division, rows = self.plan, self.division, self.positions
        parts, tuning = self.parts[0], division.tuning()
        train, tune, test = (len(rows[name]) for name in (parts.train, tuning.test, parts.test))
        unseen = "" if parts.unseen is None else f" and {len(rows[parts.unseen]):,} of left-out classes"
        drawn = "new parts for each seed" if division.test is None else f"test split {division.test}"
        sizes = f"{train:,} images to train on, {tune:,} to tune on, {test:,}{unseen} to test on ({drawn})"
        print(f"data      {self.source.dataset_name}: {len(self.class_names)} classes, {sizes}")
        print(f"arms      {', '.join(arm.name for arm in self.arms)}; reference {self.arms[0].name}")
        f = division.test_fraction
        wider = math.sqrt(1 + plan.seeds * f / (1 - f)) if division.test is None else 1.0
        paired: Any = {"tests": len(self.arms) - 1, "test": "paired" if division.is_redrawn else "welch"}
        found = [power(1.0, wider * deviation, plan.seeds, **paired) for deviation in (0.3, 0.5, 0.8)]
        of = "paired differences" if division.is_redrawn else "values"
        print(f"power     {plan.seeds} seeds show a difference of one point of {plan.metric} with a probability of")
        print(f"          {', '.join(f'{each:.2f}' for each in found)} if {of} vary by 0.3, 0.5, 0.8 points over seeds")
        print("          (standard deviation); the variation of test images comes on top")

    def frozen_study(self) -> Study:
        """Compute the features of the backbones, and return the study of heads on them."""
        files, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
        division = self.division
        split = division.train if division.test is None else f"{division.train}+{division.test}"
        for index, backbone in enumerate(dict.fromkeys(arm.backbone for arm in self.arms)):
            file = self.folder / "features" / f"{index}-{file_name(backbone)}.safetensors"  # names can be alike
            frozen.cache_features(backbone, self.source, self.splits, split, file, device=device)
            features = frozen.read_features(str(file))
            rows = features["ids"] & ((1 << ROW_BITS) - 1)
            print(f"features  {backbone}: {len(rows):,} images, {features['features'].shape[1]} dimensions")
            files[backbone] = str(file)
        places = torch.full((int(rows.max()) + 1,), -1).scatter(0, rows, torch.arange(len(rows)))
        positions = {name: places[part[part < len(places)]] for name, part in self.positions.items()}
        positions = {name: part[part >= 0] for name, part in positions.items()}  # without unreadable images
        runs = frozen.FrozenRuns(files, positions, self.source, self.class_names, self.label)
        return self.study(runs, self.folder, self.plan.num_train_epochs)

    def trained_study(self, folder: Path) -> Study:
        """Return the study of arms that are trained in full."""
        options = dict(self.training)
        epochs = options.pop("num_train_epochs", self.plan.num_train_epochs)
        return self.study(TrainingRuns(folder / "models", self.source, options), folder, epochs)

    def study(self, runs: Any, folder: Path, epochs: int) -> Study:
        """Return a study with the plan."""
        metric, seeds, count = self.plan.metric, self.plan.seeds, self.plan.num_settings
        return Study(runs, self.division, metric, seeds, epochs, count, folder / "trials.jsonl")

    def trained_options(self, arm: Arm) -> dict[str, Any]:
        """Return the options of an arm for training in full, with the weights of its pretrained backbone."""
        options, (name, _, weights) = dict(arm.options), arm.backbone.partition("=")
        if not name or (self.arguments.settings is not None and not self.arguments.frozen):
            return options
        if (saved := frozen.saved_config(name)) is not None:
            sides = {"image_size": [*saved.input_size]} if self.source.image_size is None else {}
            return options | {"backbone": saved.backbone, "initial_weights": name} | sides
        pretrained = {"backbone_weights": weights} if weights else {"pretrained_backbone": True}
        return options | {"backbone": name} | pretrained

    def finish(self, study: Study, arms: Sequence[Arm], folder: Path) -> list[tuple[Arm, Mapping[str, float]]]:
        """Run a study and write its results; return the arms that did not diverge with their settings, best first."""
        runs: Any = study.runs
        is_frozen = isinstance(runs, frozen.FrozenRuns)
        workers = min(len(arms) * study.seeds, torch.get_num_threads()) if is_frozen else 1  # heads are trained on CPUs
        results = study.complete(arms, print, workers=workers)
        backbones = dict.fromkeys(arm.backbone for arm in arms) if is_frozen else ()
        scores = {backbone: frozen.score_backbone(runs, backbone, self.parts) for backbone in backbones}
        comparison, ranked = report.write(folder, study, arms, results, scores, len(self.class_names))
        if comparison is not None:
            self.draw(comparison, f"{study.metric}, %", folder / "comparison.png")
        if ranked:
            best, setting = ranked[0]
            runs.save(best, setting, self.parts[0], epochs=study.epochs, folder=folder / "model")
            print(f"wrote     {folder / 'comparison.md'}, and the model of {best.name}, seed 0, in {folder / 'model'}")
        return ranked


def check_frozen(arm: Arm) -> None:
    """Raise an error for an arm that cannot be trained on the features of a frozen backbone."""
    start, allowed = "with --frozen,", {"backbone", "embedding_dim", "head", "head_kwargs"}
    if others := {*arm.options} - allowed:
        raise ValueError(f"{start} an arm has {', '.join(sorted(allowed))}; {arm.name} has {others.pop()}.")
    if others := {name for name in arm.grid if name not in TUNED and not name.startswith("head_kwargs.")}:
        raise ValueError(f"{start} a grid has {', '.join(TUNED)} and head_kwargs; {arm.name} has {others.pop()}.")
    if "learning_rate" not in arm.grid:
        raise ValueError(f"{start} the grid of {arm.name} needs a learning_rate, for instance [0.003].")
    if not arm.backbone:
        raise ValueError("--frozen needs pretrained --backbones; name some.")
