"""The training loop of every recipe: any model whose output has a loss, on any number of processes."""

import logging
import math
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from tqdm.auto import tqdm

from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.heads.mixins import class_shards, exclude_class_shards
from hf_sphere.optim import as_metrics, find_channel_dims, step_diagnostics
from hf_sphere.optim.optimizers import optimizer_names
from hf_sphere.training import checkpoints
from hf_sphere.training.arguments import RecipeArguments
from hf_sphere.training.checkpoints import RunState
from hf_sphere.training.errors import CheckpointError, TrainingDivergedError, TrainingInterruptedError
from hf_sphere.training.evaluation import Batch, Batches, count_examples, global_places, loss_is_sum
from hf_sphere.training.optimization import build_scheduler, optimizer_from_arguments, start_average, total_norm
from hf_sphere.training.output_dir import CHECKPOINT_PREFIX, list_checkpoints
from hf_sphere.training.pair_batch import add_supcon, backward_together, batches_per_step
from hf_sphere.utils.modules import widest_dtype
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.texts import show_metric, show_metrics

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TrainingLoop:
    """Trains a model and writes its checkpoints.

    Args:
        model: Called with the batch as keyword arguments; its output has `loss`. The methods `set_epoch`,
            `before_forward` and `after_step` of the heads in it are called at these times; see `Head`.
        batches: Training batches.
        args: Training arguments.
        accelerator: Devices, processes and precision.
        evaluate: Returns metrics of the model; called after each epoch.
        measure: Returns further training metrics of one batch, each a scalar tensor, from the output and the batch.
        derive: Returns metrics computed from the means over an epoch, for instance the perplexity from the loss.
        before_epoch: Called with the model and the number of the epoch, from 0, before each epoch.
        snapshot: Called with the model and the number of completed epochs, before training and after each full epoch.
        metric: Metric, of training or `evaluate`, for selecting the best epoch, early stopping and the learning rate.
        higher_is_better: Whether larger values of `metric` are better.

    Attributes:
        state: Progress of the run.
        model: The prepared model.
        average: The exponential moving average of the model, if requested.
        trained_model: The model to evaluate and save: the averaged one if there is one.
    """

    model: nn.Module
    batches: Batches
    args: RecipeArguments
    accelerator: Accelerator
    _: KW_ONLY
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    measure: Callable[[Any, Batch], Mapping[str, Tensor]] = lambda output, batch: {}
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda means: {}
    before_epoch: Callable[[nn.Module, int], None] = lambda model, epoch: None
    snapshot: Callable[[nn.Module, int], None] = lambda model, epoch: None
    metric: str = "accuracy"
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        model, batches, args, accelerator = self.model, self.batches, self.args, self.accelerator
        if len(batches) == 0:
            raise ValueError("there is no training batch; the training split is too small.")
        self.output_dir = Path(args.output_dir)
        if args.supcon_weight:
            add_supcon(model, args.supcon_weight)
        self._batches_per_step = args.gradient_accumulation_steps
        if args.pair_batch is not None:
            batch_size = getattr(batches, "batch_size", args.per_device_train_batch_size)
            self._batches_per_step = batches_per_step(model, args.pair_batch, batch_size, args, accelerator)
        self.steps_per_epoch = math.ceil(len(batches) / self._batches_per_step)
        self._loss_is_sum = loss_is_sum(model)
        few = None
        if args.optim in optimizer_names() or args.diagnostics_steps:
            # A few examples for finding the scale-invariant weights, the same on every process.
            few = broadcast({name: value[:16] for name, value in next(iter(batches.epoch())).items()})
        optimizer = optimizer_from_arguments(model, args, few)
        self.average = None if args.ema_decay is None else start_average(model, args.ema_decay, accelerator)
        self._channel_dims = find_channel_dims(model, optimizer, few) if args.diagnostics_steps else {}
        # Not prepared by Accelerate: the schedule counts optimizer steps, whatever the number of processes.
        self.scheduler = build_scheduler(optimizer, args, self.steps_per_epoch, higher_is_better=self.higher_is_better)
        if class_shards(model):
            exclude_class_shards(model)
            checkpoints.register_class_shards(accelerator, model, optimizer)
        if args.torch_compile:
            model.compile()  # in place, so that the names of saved tensors remain
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.trained_model = accelerator.unwrap_model(self.model) if self.average is None else self.average.module
        if accelerator.is_fsdp2 and args.optim == "sgd":  # torch has no fused SGD for sharded parameters
            for parameters in self.optimizer.param_groups:
                parameters["fused"] = False
        if accelerator.num_processes > 1:
            set_seed(args.seed, device_specific=True)  # otherwise every process would draw the same dropout masks
        # What the batches of an epoch depend on, with digests of the images among which they are drawn.
        batching: dict[str, Any] = {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "pair_batch": args.pair_batch,
            "seed": args.seed,
            "gradient_accumulation_steps": self._batches_per_step,
            "batches_per_epoch": len(batches),
            "class_balanced_sampling": getattr(batches, "balanced", False),
        }
        episodes: Any = getattr(batches, "images", None)
        drawn = episodes if hasattr(episodes, "labels") else batches
        for name, values in {"rows": "images", "labels": "labels", "regression_labels": "values"}.items():
            if (tensor := getattr(drawn, name, None)) is not None:
                batching[f"digest_of_{values}"] = zlib.crc32(tensor.cpu().numpy().tobytes())
        batching["num_processes"] = accelerator.num_processes
        self.state = RunState(batching=batching, metric=self.metric)
        self._recent_losses: dict[int, Tensor] = {}  # sums over the batches of a step
        self._totals: dict[str, Tensor] = {}
        self._wide = widest_dtype(accelerator.device)
        self._stop_requested = 0.0  # time of the first signal
        if args.resume_from_checkpoint:
            self._resume(checkpoints.find_checkpoint(args.resume_from_checkpoint, self.output_dir))
        # Not those of all epochs: earlier ones of a resumed run may have had batches of another size.
        done = math.ceil(self.state.batch / self._batches_per_step)
        remaining = (args.num_train_epochs - self.state.epoch) * self.steps_per_epoch - done
        self.total_steps = min(self.state.step + remaining, args.stop_after_steps or sys.maxsize)

    @property
    def is_finished(self) -> bool:
        """Whether no step remains."""
        state, patience, best = self.state, self.args.early_stopping_patience, self.state.best_epoch
        stops_early = patience is not None and best is not None and state.epoch - best >= patience
        return stops_early or state.epoch >= self.args.num_train_epochs or state.step >= self.total_steps

    def run(self) -> RunState:
        """Train until the last step, or until training stops early.

        Raises:
            TrainingDivergedError: If the loss or a weight is not finite; nothing is saved after that.
            TrainingInterruptedError: On Ctrl-C or SIGTERM, after a checkpoint has been written.
            CheckpointError: If a checkpoint cannot be written.
        """
        bar = progress_bar(
            total=self.total_steps,
            initial=self.state.step,
            unit="step",
            disable=self.args.disable_tqdm or not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )

        def request_stop(signum: int, frame: Any) -> None:  # after the current step; the second time immediately
            # A launcher forwards the Ctrl-C that the terminal has already sent; this is not a second request.
            if self._stop_requested and time.monotonic() - self._stop_requested > 1.0:
                raise KeyboardInterrupt
            self._stop_requested = self._stop_requested or time.monotonic()

        # Only the main thread may set handlers; elsewhere signals keep their default behavior.
        signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        with bar, ExitStack() as handlers:
            for signum in signals:
                handlers.callback(signal.signal, signum, signal.signal(signum, request_stop))
            if self.state.step == 0:
                self.snapshot(self.trained_model, 0)
            while not self.is_finished:
                self._train_epoch(bar)
        if self.state.epoch < self.args.num_train_epochs and self.state.step < self.total_steps:
            logger.info("No improvement for %d epochs; stopping.", self.args.early_stopping_patience)
        return self.state

    def _train_epoch(self, bar: tqdm) -> None:
        state, args, inner = self.state, self.args, self.accelerator.unwrap_model(self.model)
        started = time.perf_counter()
        self.before_epoch(inner, state.epoch)
        self.model.train()
        for module in {inner, self.trained_model}:
            for head in heads_of(module):
                head.set_epoch(state.epoch)
        bar.set_description(f"Epoch {state.epoch + 1}/{args.num_train_epochs}")
        group: list[Batch] = []
        for count, batch in enumerate(self.batches.epoch(state.epoch, start=state.batch), state.batch + 1):
            group.append(batch)
            is_last = count == len(self.batches)
            if len(group) < self._batches_per_step and not is_last:
                continue
            self._train_step(group)
            group, state.batch = [], count
            bar.update()
            at_log, ends = state.step % args.logging_steps == 0, state.step == self.total_steps
            if at_log or ends:
                self._check_finite(of_weights=False)
                means = self._train_metrics()
                bar.set_postfix({name.removeprefix("train_"): show_metric(name, mean) for name, mean in means.items()})
                self.accelerator.log({**means, "learning_rate": self.optimizer.param_groups[0]["lr"]}, step=state.step)
            if ends:
                break
            stops = self._stop_requested > 0
            if self.accelerator.num_processes > 1:  # they agree at logging steps
                received = torch.tensor(self._stop_requested, device=self.accelerator.device)
                stops = at_log and bool(self.accelerator.reduce(received, "sum") > 0)
            if stops or (args.save_steps and state.step % args.save_steps == 0 and not is_last):
                self._check_finite()
                state.seconds += time.perf_counter() - started
                started = time.perf_counter()
                checkpoint = self._save()
            if stops:
                where = f"step {state.step} of {self.total_steps}; the state is in {checkpoint}"
                raise TrainingInterruptedError(f"stopped at {where}. Resume with --resume_from_checkpoint latest.")
        self._finish_epoch(started, bar)

    def _train_step(self, group: list[Batch]) -> None:
        args, accelerator, inner = self.args, self.accelerator, self.accelerator.unwrap_model(self.model)
        sizes = [*map(getattr(self.batches, "num_targets", count_examples), group)]
        total: Any = sum(sizes)
        if hasattr(self.batches, "num_targets"):
            # Gradients are averaged over processes, whose numbers of targets differ, so losses are weighted by them.
            total = accelerator.reduce(total.float(), "mean")
        heads, together, done = heads_of(inner), getattr(self.batches, "dealt_together", 1), 0
        seed = mix_seed(args.seed, self.state.step)
        if args.pair_batch is not None:
            weight = accelerator.num_processes if self._loss_is_sum else 1
            self._record(*backward_together(self.model, group, accelerator, seed, together, weight), total)
            group = []
        for position, (batch, size) in enumerate(zip(group, sizes, strict=False), 1):
            for head in heads:
                head.before_forward(seed, global_places(together, done, batch, accelerator))
                head.warn_if_divided(1, len(group) * accelerator.num_processes)
            done += count_examples(batch)
            with accelerator.no_sync(self.model) if position < len(group) else nullcontext():
                output = self.model(**batch)
                # Gradients are averaged over processes, so summed losses are multiplied by the number of processes.
                accelerator.backward(output.loss * (accelerator.num_processes if self._loss_is_sum else size / total))
            self._record(output, batch, size)
        if args.max_grad_norm is not None and class_shards(inner):
            norm = total_norm(inner, of_gradients=True)
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), args.max_grad_norm, norm)
        elif args.max_grad_norm is not None:
            accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
        self.optimizer.step()
        for head in heads:
            head.after_step(lambda values: accelerator.reduce(values, "sum"))
        if self.average is not None:
            self.average.update_parameters(inner)
        self.state.step += 1
        if self._channel_dims and self.state.step % (args.diagnostics_steps or 1) == 0:
            accelerator.log(as_metrics(step_diagnostics(self.optimizer.optimizer, self._channel_dims)), self.state.step)
        self.optimizer.zero_grad()
        if not isinstance(self.scheduler, ReduceLROnPlateau) and not accelerator.optimizer_step_was_skipped:
            self.scheduler.step()

    @torch.no_grad()
    def _record(self, output: Any, batch: Batch, size: Any) -> None:
        """Add loss and metrics of a batch with `size` targets to those of the epoch."""
        loss, step = output.loss.detach(), self.state.step + 1
        self._recent_losses[step] = self._recent_losses.get(step, 0) + loss
        loss = loss / size if self._loss_is_sum else loss
        metrics = {"examples": torch.ones_like(loss), "loss": loss, **self.measure(output, batch)}
        for name, value in metrics.items():
            self._totals[name] = self._totals.get(name, 0) + value.to(self._wide) * size

    def _finish_epoch(self, started: float, bar: tqdm) -> None:
        state, reached_end = self.state, self.state.batch >= len(self.batches)
        self._check_finite()
        train, seconds = self._train_metrics(), time.perf_counter() - started
        state.seconds += seconds
        self.model.eval()
        epoch = state.epoch + state.batch / len(self.batches)
        metrics = {**train, "learning_rate": self.optimizer.param_groups[0]["lr"]}
        if self.accelerator.num_processes > 1:  # the batch-norm statistics of the first process are saved
            for buffer in self.trained_model.buffers():
                buffer.copy_(broadcast(buffer))
        metrics |= self.evaluate(self.trained_model)
        entry = {"epoch": epoch, "step": state.step, **metrics}
        state.history.append(entry)
        self.accelerator.log({"epoch": epoch, **metrics}, step=state.step)
        if self.accelerator.is_main_process:
            shown = "  ".join(show_metrics(metrics))
            bar.write(f"epoch {round(epoch, 2):g}/{self.args.num_train_epochs}  {shown}  {seconds:.1f} s")
            sys.stdout.flush()  # for those who follow a log file
        if self.metric not in entry:
            raise ValueError(f"metric_for_best_model must be one of {', '.join(entry)}; got {self.metric!r}.")
        value, best = entry[self.metric], state.best_metric
        if best is None or math.isnan(best) or (value > best if self.higher_is_better else value < best):
            state.best_metric, state.best_epoch = value, state.epoch + 1
            state.best_step = state.step if self.args.load_best_model_at_end else None
        if reached_end:
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(value)
            state.epoch, state.batch = state.epoch + 1, 0
            self._totals = {}
            self.snapshot(self.trained_model, state.epoch)
        if self.is_finished or state.epoch % self.args.save_epochs == 0 or state.step == state.best_step:
            self._save()

    def _train_metrics(self) -> dict[str, float]:
        """Means over the epoch so far and over all processes."""
        sums = self.accelerator.reduce(torch.stack([*self._totals.values()]), "sum").tolist()
        totals = dict(zip(self._totals, sums, strict=True))
        count = totals.pop("examples")
        means = {name: value / count for name, value in totals.items()}
        return {f"train_{name}": value for name, value in (means | dict(self.derive(means))).items()}

    def _check_finite(self, *, of_weights: bool = True) -> None:
        """Raise an error if a loss since the last check, or a weight, is not finite.

        Checking each loss in its step would synchronize with the device.
        """
        losses, self._recent_losses = self._recent_losses, {}
        values = torch.stack([*losses.values()]) if losses else torch.zeros(1, device=self.accelerator.device)
        bad = self.accelerator.reduce((~values.isfinite()).float(), "sum").nonzero()
        if len(bad):
            what = f"the loss is not finite at step {[*losses][int(bad[0])]}"
        elif of_weights and not total_norm(self.accelerator.unwrap_model(self.model)).isfinite():
            what = f"the weights are not finite after step {self.state.step}"
        else:
            return
        saved = list_checkpoints(self.output_dir)
        last = f"The last good checkpoint is {saved[-1]}" if saved else "There is no checkpoint yet"
        raise TrainingDivergedError(f"{what}. {last}. Try a lower --learning_rate, --max_grad_norm or --warmup_epochs.")

    def _save(self) -> Path:
        self.state.scheduler = self.scheduler.state_dict()
        # Divided by the number of processes, so that the sum over processes is correct after loading.
        fraction = 1 / self.accelerator.num_processes
        self.state.totals = {n: self.accelerator.reduce(v, "sum").item() * fraction for n, v in self._totals.items()}
        return checkpoints.save_checkpoint(self.accelerator, self.output_dir, self.state, self.args.save_total_limit)

    def _resume(self, checkpoint: Path) -> None:
        requested = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        now, scheduler = self.state.batching, self.scheduler
        state = self.state = checkpoints.load_checkpoint(self.accelerator, checkpoint)
        changed = [f"{k} {v} (now {now[k]})" for k, v in state.batching.items() if now.get(k, v) != v]
        if state.batch and changed:
            raise CheckpointError(
                f"{checkpoint} was written in the middle of an epoch with {', '.join(changed)}; resume with its "
                "settings, or from a checkpoint of the end of an epoch."
            )
        follows_metric = isinstance(scheduler, ReduceLROnPlateau)
        if follows_metric != ("best" in state.scheduler):
            raise CheckpointError(f"{checkpoint} has another lr_scheduler_type; keep it, reduce_lr_on_plateau or not.")
        loads_best = self.args.load_best_model_at_end
        best = self.output_dir / f"{CHECKPOINT_PREFIX}{state.best_step}"
        state.best_step = state.best_step if loads_best else None
        # The best value of one metric cannot be compared with another.
        if state.metric != self.metric or (loads_best and best not in list_checkpoints(self.output_dir)):
            logger.warning("The best epoch is chosen among the coming ones.")
            state.best_metric = state.best_epoch = state.best_step = None
        if state.metric == self.metric or not follows_metric:
            scheduler.load_state_dict(state.scheduler)
        if changed and not follows_metric:  # the schedule counts steps, whose number per epoch may be another
            scheduler.last_epoch = state.epoch * self.steps_per_epoch
        state.batching, state.metric = now, self.metric
        # The current arguments apply where they differ from those of the checkpoint.
        for group, settings in zip(self.optimizer.param_groups, requested, strict=True):
            before = group["initial_lr"]
            group.update(settings | {"lr": group["lr"] * (settings["initial_lr"] / before if before else 1)})
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        elif isinstance(scheduler, ReduceLROnPlateau):
            scheduler.factor, scheduler.patience = self.args.lr_gamma, self.args.lr_patience
        device = self.accelerator.device
        self._totals = {n: torch.tensor(v, dtype=self._wide, device=device) for n, v in state.totals.items()}
        logger.info("Resumed from %s at step %d.", checkpoint, state.step)
