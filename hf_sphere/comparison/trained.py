"""Arms that are trained in full, by the recipe for image classification."""

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_sphere.comparison.arms import Arm, Parts, Setting, apply_setting
from hf_sphere.comparison.measures import Evaluated
from hf_sphere.data import ImageSourceOptions, load_image_split
from hf_sphere.ood import Outputs
from hf_sphere.search.extract import embed, embedding_metric, load_embedding_model
from hf_sphere.training.errors import TrainingDivergedError
from hf_sphere.training.model_card import Command
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import make_arguments, to_argv
from hf_sphere.utils.model_sources import file_name


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

        output = self.model_folder(arm, seed)
        options = apply_setting({**self.options, **arm.options}, setting)
        options |= {"seed": seed, "num_train_epochs": epochs, "save_epochs": epochs, "disable_tqdm": True}
        options |= {"train_split": parts.train, "eval_split": parts.test}
        options |= {"output_dir": str(output), "overwrite_output_dir": True}
        task, words = find_task("classification"), ["hf-sphere", "train", "classification"]
        command = Command(words, to_argv(options), "train_image_classification")  # that of the model card
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "train.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                run_training(task, make_arguments(task.arguments, options), command)
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
