"""The job `hf-sphere compare`: the checks before the runs, and the runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sphere.comparison import training_runs
from hf_sphere.comparison.arms import RATES, Arm, Division, apply_setting, make_arm, make_arms
from hf_sphere.comparison.measures import check_measure
from hf_sphere.comparison.plan import Plan
from hf_sphere.comparison.significance import power
from hf_sphere.comparison.study import Results, Study
from hf_sphere.data import ImageSourceOptions, sources
from hf_sphere.data.provenance import DataRecord, fingerprint
from hf_sphere.data.targets import read_class_names, read_labels
from hf_sphere.models.backbones import BACKBONES
from hf_sphere.nn.heads import build_head
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import make_arguments
from hf_sphere.utils.files import digest_file
from hf_sphere.utils.loading import package_file
from hf_sphere.utils.model_sources import file_name
from hf_sphere.utils.shared_rows import ROW_BITS

TUNED = ("learning_rate", "weight_decay")
PLANNED = {"dataset_name", "train_split", "eval_split", "seed", "output_dir"}


class PlannedComparison:
    """A comparison, checked before it starts: arms, measure and parts of the data must fit together."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.folder = plan, Path(plan.output_dir)
        self.splits = sources.load_splits(plan.dataset_name, plan.dataset_config_name)
        rows = sources.find_split(self.splits, plan.train_split, "--train_split")
        self.label = sources.find_column(rows, plan.label_column_name, sources.LABEL_COLUMNS, "label")
        self.class_names = read_class_names(next(iter(self.splits.values())), self.label)
        names = ("dataset_name", "dataset_config_name", "image_column_name", "image_size", "skip_invalid")
        common = {name: getattr(plan, name) for name in names} | {"label_column_name": self.label}
        self.source, self.training = ImageSourceOptions(**common), {**common, **plan.training}
        test, left_out = plan.eval_split, plan.left_out_classes or 0.0
        if plan.train_split in self.splits:  # of a part or a pool, the rest is not known to be unseen
            test = sources.choose_eval_split(self.splits, test, plan.train_split)
        self.division = Division(plan.train_split, test, plan.eval_fraction, plan.group_column, left_out, self.label)
        self.parts = [self.division.of_seed(seed) for seed in range(plan.seeds)]
        drawn = {name for parts in (self.division.tuning(), *self.parts) for name in parts if name}
        # The rows of each part among those of all splits.
        self.positions = {name: sources.find_rows(self.splits, name, self.label) for name in drawn}
        self.arms = make_arms(plan)
        if len(self.arms) < 2:
            raise ValueError("a comparison needs at least two; name more --heads, --backbones or --settings.")
        self.check_parts()
        for arm in self.arms:
            self.check_arm(arm)
        self.check_records()

    def check_parts(self) -> None:
        """Raise an error if test images are tuned or trained on, or left-out classes are not left out."""
        names, rows, column, tuning = self.class_names, self.positions, self.division.group, self.division.tuning()
        labels = torch.cat([read_labels(split, self.label, names, name) for name, split in self.splits.items()])
        units = torch.arange(len(labels))
        if column is not None:
            groups = [group for split in self.splits.values() for group in sources.read_groups(split, column)]
            units = torch.from_numpy(np.unique(groups, return_inverse=True)[1])
        for parts in (tuning, *self.parts):
            trained, known, *unseen = (rows[name] for name in parts if name)
            tested = torch.cat([known, *unseen])
            others = trained if parts is tuning else torch.cat([trained, rows[tuning.test]])
            if shared := int(torch.isin(units[tested], units[others]).sum()):
                which = "test images" if column is None else f"test images, or others of their {column},"
                raise ValueError(f"{shared:,} of the {len(tested):,} {which} are also images to train or tune on.")
            classes = labels[trained].unique()
            if missing := {*labels[known].tolist()} - {*classes.tolist()}:
                which = f"{len(missing)} classes of the test images, such as {names[min(missing)]},"
                raise ValueError(f"{which} have no training images. Pool splits of other classes: --train_split all.")
            if len(classes) < 2 or any(torch.isin(labels[part], classes).any() for part in unseen):
                fraction = f"{self.division.left_out:g} of the classes"
                raise ValueError(f"{fraction} cannot be left out of each part, and two be left: --left_out_classes.")
            check_measure(self.plan.metric, labels[unseen[0] if self.plan.tests_unseen_classes else known])

    def check_arm(self, arm: Arm) -> None:
        """Raise an error for an arm that cannot be trained on the data, or has options that would be ignored."""
        plan, is_trained = self.plan, not self.plan.frozen or bool(self.plan.finetune)
        if both := {*arm.grid} & {*plan.training}:
            raise ValueError(f"{both.pop()} of --training is tuned; state it in {arm.name} to fix it.")
        if planned := PLANNED & {*plan.training, *arm.options}:
            raise ValueError(f"the plan sets {planned.pop()} of each run; leave it out of --training and --settings.")
        others = {*arm.options} - {"backbone", "embedding_dim", "head", "head_kwargs"}
        others |= {name for name in arm.grid if name not in TUNED and not name.startswith("head_kwargs.")}
        if plan.frozen and (others or "learning_rate" not in arm.grid or not arm.backbone):
            needed = f"with --frozen, {arm.name} needs a backbone and the grid of its learning_rate"
            raise ValueError(f"{needed}; got {', '.join(sorted(others)) or 'nothing'} besides.")
        try:
            own = self.trained_arm(arm).options if is_trained else arm.options
            options = apply_setting(own, {name: start for name, (_, start) in arm.grid.items()})
            dim = options.get("embedding_dim") or max(128, len(self.class_names))  # or that of a backbone
            build_head(str(options.get("head")), dim, len(self.class_names), **options["head_kwargs"])
            if is_trained:
                all_options = {**self.training, **options, "output_dir": str(self.folder)}
                make_arguments(find_task("classification").arguments, all_options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{arm.name} does not fit: {error}") from error

    def check_records(self) -> None:
        """Raise an error if a saved model whose weights are used was trained or evaluated on these images."""
        ids = torch.cat([*self.positions.values()]).unique() + (fingerprint(self.splits) << ROW_BITS)
        weights = [{**self.training, **arm.options}.get("initial_weights") for arm in self.arms]
        for name in dict.fromkeys(filter(None, [*weights, *(arm.backbone for arm in self.arms)])):
            record = DataRecord.read(name) if training_runs.saved_config(name) is not None else None
            used = torch.cat([*record.ids.values()]) if record is not None else torch.empty(0)
            if shared := int(torch.isin(ids, used).sum()):
                raise ValueError(f"{name} was trained or evaluated on {shared:,} of these images; compare on others.")

    def contents(self) -> dict[str, Any]:
        """Return the arms and digests of data and weights: results depend on them, and the plan only names them."""
        files = dict.fromkeys(arm.backbone.partition("=")[2] for arm in self.arms)
        weights = {name: digest_file(package_file(name) or Path(name)) for name in files if name}
        return {"data": fingerprint(self.splits), "compared": [asdict(arm) for arm in self.arms], "weights": weights}

    def run(self) -> Iterator[Results]:
        """Run the plan, write the results, and yield them: of the frozen arms, and of those trained in full."""
        self.print_plan()
        if not self.plan.frozen:
            yield self.finish(self.trained_study([self.trained_arm(arm) for arm in self.arms], self.folder))
            return
        study = self.frozen_study()
        runs: Any = study.runs
        scores = {backbone: training_runs.score_backbone(runs, backbone, self.parts) for backbone in runs.files}
        # Heads are trained on CPUs.
        workers = min(len(self.arms) * study.plan.seeds, torch.get_num_threads())
        results = self.finish(study, scores, workers)
        yield results
        if best := results.ranked[: self.plan.finetune]:
            arms = []
            for arm, setting in best:
                own = {name: value for name, value in setting.items() if name.startswith("head_kwargs.")}
                options = apply_setting(self.trained_arm(arm).options, own) | {"grid": {"learning_rate": [*RATES]}}
                arms.append(make_arm(arm.name, options, 1e-3))
            study = self.trained_study(arms, self.folder / "finetuned")
            print(f"\nfinetune  {' and '.join(arm.name for arm in arms)}, in {study.folder}")
            yield self.finish(study)

    def print_plan(self) -> None:
        """Print what is compared, and which differences the seeds can show."""
        plan, division, parts = self.plan, self.division, self.parts[0]
        train, tune, test = (len(self.positions[name]) for name in (parts.train, division.tuning().test, parts.test))
        unseen = "" if parts.unseen is None else f" and {len(self.positions[parts.unseen]):,} of left-out classes"
        drawn = "new parts for each seed" if division.test is None else f"the split {division.test}"
        sizes = f"{train:,} images to train on, {tune:,} to tune on, {test:,}{unseen} to test on ({drawn})"
        f = division.test_fraction
        wider = math.sqrt(1 + plan.seeds * f / (1 - f)) if division.test is None else 1.0
        paired: Any = {"tests": len(self.arms) - 1, "test": "paired" if division.is_redrawn else "welch"}
        chances = ", ".join(f"{power(1.0, wider * points, plan.seeds, **paired):.2f}" for points in (0.3, 0.5, 0.8))
        trainings = len(self.arms) * (2 * plan.num_settings + plan.seeds)
        print(
            f"data      {plan.dataset_name}: {len(self.class_names)} classes, {sizes}\n"
            f"compared  {', '.join(arm.name for arm in self.arms)}; reference {self.arms[0].name}\n"
            f"seeds     {plan.seeds} seeds show a difference of one point of {plan.metric} with a probability of\n"
            f"          {chances} if it varies between seeds by 0.3, 0.5, 0.8 points (standard deviation)\n"
            f"work      up to {trainings:,} trainings of up to {plan.num_train_epochs} epochs"
        )

    def frozen_study(self) -> Study:
        """Compute the features of the backbones, and return the study of heads on them."""
        files, division = dict[str, str](), self.division
        split = division.train if division.test is None else f"{division.train}+{division.test}"
        for index, backbone in enumerate(dict.fromkeys(arm.backbone for arm in self.arms)):
            file = self.folder / "features" / f"{index}-{file_name(backbone)}.safetensors"  # names can be alike
            if not file.is_file():
                training_runs.cache_features(backbone, self.source, self.splits, split, file)
            features, files[backbone] = training_runs.read_features(str(file)), str(file)
            print(f"features  {backbone}: {len(features['ids']):,} images, {features['features'].shape[1]} dimensions")
        rows = features["ids"] & ((1 << ROW_BITS) - 1)  # without those of unreadable images
        positions = {name: torch.isin(rows, part).nonzero()[:, 0] for name, part in self.positions.items()}
        runs = training_runs.FrozenRuns(files, positions, self.source, self.class_names, self.label)
        return Study(runs, self.arms, division, self.plan, self.plan.num_train_epochs, self.folder)

    def trained_study(self, arms: Sequence[Arm], folder: Path) -> Study:
        """Return the study of arms that are trained in full."""
        options = dict(self.training)
        epochs = options.pop("num_train_epochs", self.plan.num_train_epochs)
        runs = training_runs.TrainingRuns(folder / "models", self.source, options)
        return Study(runs, arms, self.division, self.plan, epochs, folder)

    def trained_arm(self, arm: Arm) -> Arm:
        """Return an arm for training in full, with pretrained weights unless its backbone is one of this library."""
        name, _, weights = arm.backbone.partition("=")
        if not name or (self.plan.settings is not None and not self.plan.frozen):
            return arm
        if (saved := training_runs.saved_config(name)) is not None:
            options: dict[str, Any] = {"backbone": saved.backbone, "initial_weights": name}
            options |= {"image_size": [*saved.input_size]} if self.source.image_size is None else {}
        else:
            source: Any = {"backbone_weights": weights} if weights else {"pretrained_backbone": name not in BACKBONES}
            options = {"backbone": name} | source
        return replace(arm, options={**arm.options, **options})

    def finish(self, study: Study, backbones: Mapping[str, Any] = {}, workers: int = 1) -> Results:
        """Run a study, and write its results and the best model; `backbones` are scores of features."""
        study.complete(workers)
        results = Results(study)
        results.write(len(self.class_names), backbones)
        if results.ranked:
            best, setting = results.ranked[0]
            study.runs.save(best, setting, self.parts[0], epochs=study.epochs, folder=study.folder / "model")
            written, model = study.folder / "comparison.md", study.folder / "model"
            print(f"wrote     {written}, and the model of {best.name}, seed 0, in {model}")
        return results
