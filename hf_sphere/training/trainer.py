"""The Trainer of transformers, training like the recipes; and its parts, for a Trainer of one's own."""

import math
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType, reduce
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import has_length

from hf_sphere.data.batches import ImageBatches
from hf_sphere.geometry.checks import IGNORED
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.nn.labels import find_targets
from hf_sphere.optim import StepDiagnosticsCallback, parameter_groups
from hf_sphere.optim.groups import collect_parameter_options
from hf_sphere.optim.optimizers import optimizer_names
from hf_sphere.training.evaluation import count_examples, global_places, initialize_from_data, loss_is_sum
from hf_sphere.training.pair_batch import backward_together, batches_per_step
from hf_sphere.utils.checks import keyword_options
from hf_sphere.utils.seeds import mix_seed


def create_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Build the optimizer of `args.optim` with the parameter groups of the recipes.

    Parameters in the model's `parameter_options`, such as class vectors and temperatures, have their own learning rates
    and no weight decay; see `parameter_groups`. Optimizers of this library find the scale-invariant weights.

    Args:
        model: The model.
        args: Arguments of the Trainer.

    Raises:
        ValueError: If the optimizer forms its own parameter groups, so that these options would be lost.

    Example:
        >>> trainer = Trainer(model, args, optimizers=(create_optimizer(model, args), None))  # doctest: +SKIP
    """
    kind, options = SphereTrainer.get_optimizer_cls_and_kwargs(args, model)
    if "params" not in options:
        raise ValueError(f"optim {args.optim.value} forms its own parameter groups; let the Trainer create it.")
    return kind(options.pop("params"), **options)


class SphereCallback(TrainerCallback):
    """Calls the methods of the heads in a model that the recipes call during training.

    Head and backbone are initialized from training images before the first step where they require that. Then the
    methods `set_epoch`, `before_forward` and `after_step` of the heads in the model are called as described in `Head`.

    Raises:
        ValueError: When training starts, if the loss is a sum that the Trainer would average, if sharded weights are
            to be initialized from data, or if an epoch of the run to resume had another number of steps.

    Example:
        >>> trainer.add_callback(SphereCallback())  # doctest: +SKIP
    """

    _hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Check the settings, and initialize the model from data."""
        _check_settings(args, state, model, others["train_dataloader"])
        self._epoch, self._together, loader = -1, None, others["train_dataloader"]
        # The loader without Accelerate's wrapper, whose state would change if it is not read to the end.
        images, device = getattr(loader, "base_dataloader", loader), next(model.parameters()).device
        if isinstance(data := getattr(loader, "dataset", None), _ImageEpochs):
            self._together, images = data.batches.dealt_together, data.batches.epoch(augment=False)
        inputs = ({k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor)} for batch in images)
        with torch.random.fork_rng(devices=[]):  # reading the data must not change the order of the first epoch
            initialize_from_data(model, inputs)
        self.on_train_end(args, state, control)  # there may be a hook of an interrupted run
        # Replicas of DataParallel share the head's state, so there the head is trained as in any other loop.
        if heads_of(model) and args.n_gpu <= 1:
            self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Update the head's schedules."""
        self._epoch = max(int(state.epoch or 0), self._epoch + 1)  # `state.epoch` does not count those of streams
        for head in heads_of(model):
            head.set_epoch(self._epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the seed of the step; its batches follow."""
        self._seed, self._done = mix_seed(args.seed, state.global_step), 0
        self._parts = args.gradient_accumulation_steps * args.world_size

    def _before_forward(self, model: Any, positional: tuple[Any, ...], batch: dict[str, Any]) -> None:
        if model.training:
            batch = batch or {"pixel_values": positional[0]}
            count = count_examples(batch)
            # Accelerate deals the batches of other datasets to the processes in turn, ours deal images or episodes.
            positions = global_places(self._together or count, self._done, batch, PartialState())
            for head in heads_of(model):
                head.before_forward(self._seed, positions)
                head.warn_if_divided(1, self._parts)
            self._done += count

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Update the head's running statistics."""
        for head in heads_of(model) if self._hook is not None else ():
            head.after_step(lambda values: reduce(values, "sum"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach from the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _check_settings(args: Any, state: Any, model: nn.Module, loader: Any) -> None:
    """Raise an error for settings of the Trainer with which the model would be trained in another way.

    The Trainer counts steps, so it would resume at another place of the data if an epoch had another number of them.
    """
    devices, problem = args.world_size * max(args.n_gpu, 1), ""
    batches = devices * args.gradient_accumulation_steps
    if getattr(model, "accepts_loss_kwargs", False):  # the Trainer then adds up the losses of batches, and of devices
        batches = 1 if args.average_tokens_across_devices else devices
    is_sharded = PartialState().distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if loss_is_sum(model) and batches > 1:
        problem = f"average the loss, a sum, over {batches} batches per step; use one, or reduction='mean'"
    elif PartialState().num_processes > 1 and class_shards(model):
        problem = "save only the class vectors of the first process; leave out shard_classes"
    elif is_sharded and any(getattr(module, "needs_data_initialization", False) for module in model.modules()):
        problem = "initialize a sharded model from data; call initialize_from_data before creating the Trainer"
    elif state.global_step and has_length(loader):
        epoch, step = divmod(state.global_step, math.ceil(len(loader) / args.gradient_accumulation_steps))
        position = epoch + step * args.gradient_accumulation_steps / len(loader)
        if not math.isclose(position, state.epoch):
            was = f"epoch {state.epoch:.2f} after {state.global_step} steps, which are {position:.2f} epochs now"
            settings = "data, batch size, gradient accumulation and number of processes"
            problem = f"not resume where the run was at {was}; repeat its {settings}"
    if problem:
        raise ValueError(f"the Trainer would {problem}.")


class _ImageEpochs(IterableDataset):
    """`ImageBatches` as a dataset whose items are batches; its length is the number of images."""

    def __init__(self, batches: ImageBatches) -> None:
        self.batches, self.epoch = batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches.examples_per_epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.batches.epoch(self.epoch)


class _ImageLoader(DataLoaderShard):
    def __len__(self) -> int:
        return len(self.dataset.batches)


class SphereTrainer(Trainer):
    """The Trainer of transformers, with `SphereCallback` and the parameter groups of `create_optimizer`.

    With equal settings (`max_grad_norm=0` for no clipping) it trains like the recipes. `label_smoothing_factor` is
    passed to the head, so its own loss is used. Datasets are as for any Trainer, or `ImageBatches` of `hf_sphere.data`,
    which define batch size, order and augmentation.

    Args:
        *args: See `Trainer`.
        diagnostics_steps: Steps between two logs of effective learning rates; see `StepDiagnosticsCallback`.
        pair_batch: Examples per optimizer step, over all processes, whose loss (of the head, or `compute_loss_func`)
            is computed together; batches of the data are encoded twice, as by `hf_sphere.losses.cached_step`.
        **options: See `Trainer`.

    Raises:
        ValueError: If the head, or a regression, has no label smoothing but the arguments request it.

    Example:
        >>> args = TrainingArguments("digits", num_train_epochs=10, learning_rate=2e-3)  # doctest: +SKIP
        >>> images = load_image_data(ImageDataOptions("digits"))  # doctest: +SKIP
        >>> SphereTrainer(model, args, train_dataset=images.train).train()  # doctest: +SKIP
    """

    def __init__(
        self, *args: Any, diagnostics_steps: int | None = None, pair_batch: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if _smooth_by_head(self.model, self.args):
            self.label_smoother = None
        self._pair_batch = pair_batch
        self._waiting: list[Any] = []  # batches of the next step
        if pair_batch is not None:
            size = getattr(self.train_dataset, "batch_size", self.args.per_device_train_batch_size)
            count = batches_per_step(self.model, pair_batch, size, self.args, self.accelerator)
            self.args: TrainingArguments = copy(self.args)  # those of the caller may be for other trainers, too
            self.args.gradient_accumulation_steps = count
        if diagnostics_steps is not None:
            self.add_callback(StepDiagnosticsCallback(self.log, diagnostics_steps))
        if not any(isinstance(callback, SphereCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(SphereCallback())  # twice, it would update running statistics twice

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a batch, or, with `pair_batch`, on those since the last optimizer step, if it is the last one."""
        if self._pair_batch is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        self._waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        # Before them, there may be those of a run that was interrupted within a step.
        batches, self._waiting = self._waiting[-self.current_gradient_accumulation_steps :], []
        together = getattr(self.train_dataset, "dealt_together", count_examples(batches[0]))
        seed, function = mix_seed(self.args.seed, self.state.global_step), self.compute_loss_func
        output, _ = backward_together(model, batches, self.accelerator, seed, together, loss_func=function)
        return output.loss.detach()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count all targets of our models; the Trainer would omit values of -100, and class 156 as uint8."""
        models: list[Any] = [each for each in self.model.modules() if hasattr(type(each).forward, "has_targets")]
        for model in models:
            model.are_targets_counted = True
        batches = []
        for batch in batch_samples:
            labels = batch.get("labels")
            # A loss of the user may ignore values of -100.
            if isinstance(labels, Tensor) and models and not (self.compute_loss_func and labels.is_floating_point()):
                batch = {**batch, "labels": torch.where(find_targets(labels), 0, IGNORED)}
            batches.append(batch)
        return super()._get_num_items_in_batch(batches, device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Create a model by `model_init`, with the label smoothing of the arguments."""
        model = super().call_model_init(trial)
        _smooth_by_head(model, self.args)
        return model

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer class and its arguments; see `create_optimizer`."""
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if model is None or args.optim in optimizer_names():  # `optimizer_for_trainer` has formed the groups
            return kind, options
        is_factory = not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))
        if is_factory or options.keys() & {"params", "model", "optimizer_dict"}:  # it forms its own groups
            if names := collect_parameter_options(model):
                raise ValueError(
                    f"optim {args.optim.value} forms its own parameter groups, so the options of {', '.join(names)} "
                    "would be lost. Use another one, for instance adamw_torch or adam_srt."
                )
            return kind, options
        groups = [{"weight_decay": args.weight_decay, **group} for group in parameter_groups(model)]
        return kind, {**options, "params": groups}

    def _get_dataloader(self, dataset: Any, *args: Any, **options: Any) -> DataLoader:
        if not isinstance(dataset, ImageBatches):
            return super()._get_dataloader(dataset, *args, **options)
        processes = self.args.world_size
        if dataset.num_processes != processes or (processes > 1 and not dataset.shuffle):
            raise ValueError(
                f"the image batches are for {dataset.num_processes} process(es), but {processes} are running. Pass "
                "process_index and num_processes to load_image_data; batches for evaluation need a single process."
            )
        return _ImageLoader(_ImageEpochs(dataset), device=self.args.device, batch_size=None)


def _smooth_by_head(model: Any, args: TrainingArguments) -> bool:
    """Let the heads smooth labels, if there are any; the Trainer would take the labels away from their loss."""
    heads, factor = heads_of(model), args.label_smoothing_factor
    config: Any = getattr(model, "config", None)
    if not factor or not heads or getattr(config, "problem_type", None) == "multi_label_classification":
        return False
    if getattr(config, "problem_type", None) == "regression":
        raise ValueError("a regression has no label smoothing; leave label_smoothing_factor out.")
    for head in heads:
        if "label_smoothing" not in keyword_options(type(head)):
            raise ValueError(f"head {head.name!r} has no label smoothing; leave label_smoothing_factor out.")
        head.label_smoothing = factor
    if hasattr(config, "head_kwargs"):
        config.head_kwargs = {**(config.head_kwargs or {}), "label_smoothing": factor}
    return True
