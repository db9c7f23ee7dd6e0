"""A training run: setup, training, evaluation, saving and the model card."""

import json
import logging
import os
from collections import ChainMap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, tracking
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, LoggerType, ProjectConfiguration, set_seed
from torch import nn

from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.training import checkpoints, output_dir
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.evaluation import evaluate
from hf_sphere.training.loop import TrainingLoop
from hf_sphere.training.model_card import write_model_card
from hf_sphere.training.optimization import check_optimizer_arguments
from hf_sphere.training.tasks import Prepared, Task
from hf_sphere.utils.files import SNAPSHOT_FOLDER, write_json
from hf_sphere.utils.snapshots import list_snapshots, save_snapshot
from hf_sphere.utils.texts import hide_private, show_metrics

logger = logging.getLogger(__name__)

# Settings that may change when a run is resumed, since they do not affect training.
_FREE_TO_CHANGE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "disable_tqdm", "report_to", "logging_steps"),
    *("save_epochs", "save_steps", "save_total_limit", "per_device_eval_batch_size", "cache_dir", "stop_after_steps"),
    *("dataloader_num_workers", "early_stopping_patience", "load_best_model_at_end", "diagnostics_steps"),
    *("preprocessing_num_workers", "snapshot_epochs", "snapshot_until", "test_time_flips", "calibrate", "reject"),
    *("fit_spherization", "license"),
}


class Run(ExitStack):
    """A training run: arguments, processes and output directory.

    As a context manager, it unlocks the output directory when the block ends.

    Attributes:
        args: Training arguments.
        accelerator: Devices, processes and precision.
        output_dir: The output directory.
        recipe: Name of the recipe.
    """

    def __init__(
        self, args: RecipeArguments, accelerator: Accelerator, *others: Any, recipe: str | None = None
    ) -> None:
        super().__init__()
        self.args, self.accelerator, self.recipe = args, accelerator, recipe
        self.output_dir = Path(args.output_dir)
        self._arguments = (*others, args)

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments by name, with the values that the task has set."""
        precision, processes = self.accelerator.mixed_precision, self.accelerator.num_processes
        used = {"bf16": precision == "bf16", "fp16": precision == "fp16", "num_processes": processes}
        return dict(ChainMap(used, *map(asdict, reversed(self._arguments))))

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments of the functions that load training and evaluation data."""
        return {
            "batch_size": self.args.per_device_train_batch_size,
            "eval_batch_size": self.args.per_device_eval_batch_size,
            "device": self.accelerator.device,
            "seed": self.args.seed,
            "process_index": self.accelerator.process_index,
            "num_processes": self.accelerator.num_processes,
            "progress": self.accelerator.is_main_process and not self.args.disable_tqdm,
        }

    def prepare_output_dir(self, *, is_finished: bool = False) -> None:
        """Create the output directory, replacing its contents if requested, write `run.json`, and start the trackers.

        The directory is locked until the end of the run. Called after data, model and checkpoint have been loaded, so
        that a run that fails to start replaces nothing.

        Raises:
            FileExistsError: If the directory must not be replaced, or another run has locked it.
            ValueError: If settings of training have changed, but the run to resume `is_finished`.
        """
        resume, overwrite = self.args.resume_from_checkpoint is not None, self.args.overwrite_output_dir
        if self.accelerator.is_main_process:
            self.enter_context(output_dir.locked(self.output_dir))
            output_dir.prepare_output_dir(self.output_dir, overwrite=overwrite, resume=resume, recipe=self.recipe)
            now = json.loads(json.dumps(self.settings, default=str))
            before = (output_dir.read_settings(self.output_dir) if resume and not overwrite else None) or {}
            changed = [k for k in now if before.get(k, now[k]) != now[k] and k not in _FREE_TO_CHANGE]
            changes = ", ".join(f"{k} ({before[k]} -> {now[k]})" for k in changed)
            if changes and is_finished:
                raise ValueError(
                    f"the run in {self.output_dir} is finished and is not trained again with other settings: "
                    f"{changes}. Repeat its settings, train more epochs, or choose another --output_dir."
                )
            if changes:
                logger.warning("The resumed run differs from its earlier part: %s.", changes)
            output_dir.write_settings(self.output_dir, {"recipe": self.recipe, **self.settings})
        self.accelerator.wait_for_everyone()
        if self.args.report_to:
            scalars = {k: v for k, v in hide_private(self.settings).items() if isinstance(v, (int, float, str, bool))}
            self.accelerator.init_trackers(self.output_dir.name, config=scalars)


def start_accelerator(**options: Any) -> Accelerator:
    """Create an `Accelerator`; processes of `torchrun` on CPUs, which it would not connect, form a group, too."""
    if {"LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys() and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    return Accelerator(**options)


def start_run(args: RecipeArguments, *others: Any, recipe: str | None = None) -> Run:
    """Set up devices, logging and seed, and check the output directory.

    Args:
        args: Training arguments.
        *others: Further argument dataclasses of the recipe; all are written to `run.json`.
        recipe: Name of the recipe; another one does not resume the run.

    Raises:
        FileExistsError: If the output directory must not be replaced, or a run of another process is using it.
        CheckpointError: If there is no checkpoint to resume from.
    """
    check_optimizer_arguments(args)
    absent = set(LoggerType.list()) - set(map(str, tracking.get_available_trackers())) - {"all"}
    if missing := absent.intersection(args.report_to or []):  # Accelerate would skip them
        names = " ".join(missing)
        raise ImportError(f"the package of tracker {names} is not installed: pip install {names}.")
    # Weights that decay towards zero become denormal, and CPUs are much slower with these. Set before torch starts its
    # threads, which inherit it.
    torch.set_flush_denormal(True)
    options: dict[str, Any] = dict(ChainMap(*map(asdict, others)))
    # In the linear probe, the parameters of the backbone have no gradients.
    unused = bool(options.get("linear_probe_epochs"))
    accelerator = start_accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if unused else None,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to,
        project_config=ProjectConfiguration(args.output_dir, logging_dir=str(Path(args.output_dir, "logs"))),
    )
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("hf_sphere").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # the loop shows another one
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
    # Tied weights are saved once; accelerate would warn at every checkpoint.
    logging.getLogger("accelerate.utils.other").addFilter(lambda record: "Removed shared tensor" not in str(record.msg))
    set_seed(args.seed)
    kind, shards_classes = accelerator.distributed_type, options.get("shard_classes", False)
    unsupported: list[str] = []
    if kind == DistributedType.FSDP or shards_classes:
        kept = ("ema_decay", "load_best_model_at_end", "snapshot_epochs", "snapshot_until")
        unsupported += [name for name in kept if getattr(args, name)]
    if kind == DistributedType.DEEPSPEED:  # its engine takes a step after each backward pass
        unsupported += ["max_grad_norm"] * (args.max_grad_norm is not None)
        unsupported += ["gradient_accumulation_steps"] * (args.gradient_accumulation_steps > 1)
    if shards_classes:  # with fp16, each process would choose another scale of its loss
        unsupported += ["fp16"] * (accelerator.mixed_precision == "fp16")
        unsupported += [kind.value] * (kind in (DistributedType.FSDP, DistributedType.DEEPSPEED))
    if unsupported:
        other = "shard_classes" if shards_classes else kind.value
        raise ValueError(f"{' and '.join(unsupported)} cannot be combined with {other}; leave it out or use DDP.")
    folder, resume = Path(args.output_dir), args.resume_from_checkpoint
    output_dir.check_output_dir(folder, overwrite=args.overwrite_output_dir, resume=resume is not None, recipe=recipe)
    if resume is not None:
        checkpoints.find_checkpoint(resume, folder)
    return Run(args, accelerator, *others, recipe=recipe)


def run_training(task: Task, arguments: Sequence[Any], command: Sequence[str], recipe: str) -> None:
    """Train, evaluate and save the model of a task; `arguments` has an instance of each of its dataclasses."""
    args = next(each for each in arguments if isinstance(each, RecipeArguments))
    settings: dict[str, Any] = dict(ChainMap(*map(asdict, arguments)))
    if args.num_train_epochs == 0 and (not settings.get("model_name_or_path") or settings.get("from_scratch")):
        raise ValueError("num_train_epochs 0 only evaluates a saved model, and this one is new; train it.")
    for unused in task.unused:
        name, _, value = unused.partition("=")
        if settings[name] == value if value else settings[name]:
            raise ValueError(f"{name} {settings[name]} has no effect in this task; leave it out.")
    others = [*arguments]
    others.remove(args)
    with start_run(args, *others, recipe=recipe) as run:
        prepared = task.prepare(run, *arguments)
        accelerator, data, description = run.accelerator, prepared.data, prepared.description
        splits = {"eval": data.evaluation} | ({} if data.validation is None else {"validation": data.validation})
        prefix = [*splits][-1]
        metric = args.metric_for_best_model or f"{prefix}_{task.metric}"
        info = {"model": description.title, "dataset": description.dataset, "seed": str(args.seed)}
        every, until, folder = args.snapshot_epochs, args.snapshot_until, run.output_dir / SNAPSHOT_FOLDER

        def snapshot(model: nn.Module, epoch: int, *, is_last: bool = False) -> None:
            is_due = (every and (is_last or epoch % every == 0)) or (until and (is_last or epoch <= until))
            if is_due and accelerator.is_main_process:
                with checkpoints.explained(f"could not write the snapshot of epoch {epoch}"):
                    save_snapshot(model, folder, epoch, info)
            accelerator.wait_for_everyone()

        loop = TrainingLoop(
            prepared.model,
            data.train,
            args,
            accelerator,
            evaluate=partial(_evaluate, run, prepared, splits[prefix], prefix),
            measure=prepared.measure,
            derive=prepared.derive,
            before_epoch=prepared.before_epoch,
            snapshot=snapshot,
            metric=metric,
            higher_is_better=not metric.endswith(("loss", "error", "perplexity")),
        )
        run.prepare_output_dir(is_finished=loop.is_finished)
        if accelerator.is_main_process:
            if prepared.record is not None:  # before the training, for a resumed run
                prepared.record.save(run.output_dir)
            for later in list_snapshots(folder) if args.resume_from_checkpoint else ():  # of an earlier checkpoint
                if later.epoch > loop.state.epoch:
                    later.path.unlink()
        model: Any = loop.trained_model
        state = loop.run()
        if state.batch == 0:  # training may have ended in the middle of an epoch
            snapshot(model, state.epoch, is_last=True)
        if state.best_step not in (None, state.step):
            best = run.output_dir / f"{output_dir.CHECKPOINT_PREFIX}{state.best_step}"
            checkpoints.load_checkpoint(accelerator, best)
        fitted = {} if prepared.finish is None else prepared.finish(model)
        gathered = accelerator.get_state_dict(model) if accelerator.is_fsdp2 else None
        gathered = checkpoints.gather_classes(model) if class_shards(model) else gathered
        if accelerator.is_main_process:  # before the evaluation, which may need more memory than there is
            with checkpoints.write_model_files(run.output_dir) as unfinished:
                model.save_pretrained(unfinished, state_dict=gathered)
                prepared.processor.save_pretrained(unfinished)
        accelerator.wait_for_everyone()
        results: dict[str, Any] = {}
        for name, batches in splits.items():
            results |= _evaluate(run, prepared, batches, name, model)
        last, seconds = state.history[-1] if state.history else {}, state.seconds
        results |= {name: value for name, value in last.items() if name.startswith("train_")}
        epoch = last.get("epoch", 0)
        results |= {"epoch": epoch, "steps": state.step, "train_runtime": seconds}
        speed = epoch * data.train.examples_per_epoch / max(seconds, 1e-9)
        results |= {"train_samples_per_second": speed, "history": state.history, **fitted}
        results |= {} if prepared.compare is None else prepared.compare(model, results)
        results |= {f"best_{metric.removeprefix(f'{prefix}_')}": state.best_metric, "best_epoch": state.best_epoch}
        if accelerator.is_main_process:
            write_json(run.output_dir / output_dir.RESULTS_FILE, results)
            write_model_card(run, task, prepared, results, command, metric=metric)
        shown = "  ".join(show_metrics(results, [*map("eval_{}".format, task.headline)]))
        accelerator.print(f"{shown}  (model and results in {run.output_dir})")
        accelerator.end_training()


def _evaluate(run: Run, prepared: Prepared, batches: Any, prefix: str, model: nn.Module) -> dict[str, Any]:
    """Evaluate a model on a split, and prefix the names of the metrics."""
    function = prepared.evaluate or partial(evaluate, accelerator=run.accelerator, measure=prepared.measure)
    metrics = function(model, batches)
    return {f"{prefix}_{name}": value for name, value in (metrics | prepared.derive(metrics)).items()}
