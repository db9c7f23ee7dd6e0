"""Losses in the trainers of other libraries, and losses of other libraries here."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, reduce
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from transformers import TrainerCallback

from hf_sphere.geometry.checks import IGNORED
from hf_sphere.losses.heads import require_all_classes
from hf_sphere.losses.pairs import CrossBatchSupConLoss, PairLoss
from hf_sphere.losses.uniformity import UniformityLoss
from hf_sphere.nn.heads import HEADS, Head
from hf_sphere.nn.heads.base import heads_of
from hf_sphere.nn.processes import count_processes, process_index
from hf_sphere.utils.files import atomic_file


class MetricLearningLoss(nn.Module):
    """A loss of pytorch-metric-learning, with or without a miner, called with embeddings (B, d) and labels (B,).

    Examples with the label -100 are ignored, and embeddings are upcast to float32.

    Args:
        loss: The loss.
        miner: The miner that selects pairs or triplets for it.

    Example:
        >>> from pytorch_metric_learning import losses, miners  # doctest: +SKIP
        >>> loss = MetricLearningLoss(losses.TripletMarginLoss(), miners.MultiSimilarityMiner())  # doctest: +SKIP
        >>> trainer = SphereTrainer(model, args, compute_loss_func=trainer_loss(loss))  # doctest: +SKIP
    """

    def __init__(self, loss: nn.Module, miner: nn.Module | None = None) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of the pairs or triplets that the miner selects, or of all."""
        used = labels.long() != IGNORED  # as uint8, the class 156 would equal -100
        embeddings, labels = Head.upcast(embeddings)[used], labels[used]
        return self.loss(embeddings, labels, None if self.miner is None else self.miner(embeddings, labels))


def trainer_loss(loss: nn.Module, *, gathers: bool | None = None) -> Callable[..., Tensor]:
    """Return a `compute_loss_func` that trains the embeddings of a model by a loss instead of the loss of its head.

    Args:
        loss: Called with embeddings (B, d), as the head transforms them, and labels (B,). Without trained parameters,
            as the Trainer would not train or save them.
        gathers: Whether the loss compares the examples of all processes, so that its mean over processes is that over
            all examples. By default, if it contains a loss of pairs or of uniformity.

    Raises:
        ValueError: If the loss has trained parameters.

    Example:
        >>> Trainer(model, args, compute_loss_func=trainer_loss(SupConLoss()))  # doctest: +SKIP
    """
    if trained := [name for name, parameter in loss.named_parameters() if parameter.requires_grad]:
        advice = "leave them out, as by learn_temperature=False"
        raise ValueError(f"the Trainer would not train the parameters {', '.join(trained)} of the loss; {advice}.")

    if gathers is None:
        gathers = any(isinstance(module, PairLoss | UniformityLoss) for module in loss.modules())

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        embeddings = outputs["embeddings"]
        loss.to(embeddings.device).train(torch.is_grad_enabled())  # the Trainer knows the model alone
        value = loss(embeddings, labels)
        if num_items_in_batch is None:
            return value
        # The Trainer sums over the batches of an optimizer step; `num_items_in_batch` is their size.
        count, total = (labels.long() != IGNORED).sum(), num_items_in_batch
        if gathers and count_processes() > 1:  # the loss is divided by the number of examples of all processes
            sizes = torch.stack([count, torch.as_tensor(total, device=count.device)])
            distributed.all_reduce(sizes)
            count, total = sizes
        return value * count / total

    return compute


class SentenceTransformerLoss(nn.Module):
    """A loss for `SentenceTransformerTrainer`: a row of the data is a text or image with the label of its class.

    All columns except `label`, `labels`, `score` or `scores` are inputs, which have the label of their row. Without
    labels, each row of one or two inputs is a class of its own, as with pairs of anchor and positive.
    `LossCheckpointCallback` saves the parameters of the loss and averages their gradients over processes. Inside
    `MatryoshkaLoss`, class vectors are cut to the length of the embeddings and normalized again.

    Args:
        model: The `SentenceTransformer`.
        loss: Called with embeddings (B, d) and labels (B,), such as `ArcFaceLoss` or `SupConLoss`.

    Raises:
        ValueError: If there is not one label per row, the callback is missing on several processes, or a head inside
            `MatryoshkaLoss` compares more than directions.

    Example:
        >>> loss = SentenceTransformerLoss(model, ArcFaceLoss(384, num_classes=20))  # doctest: +SKIP
        >>> callbacks = [LossCheckpointCallback(loss.loss)]  # doctest: +SKIP
        >>> trainer = SentenceTransformerTrainer(model, args, loss=loss, callbacks=callbacks)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, sentence_features: Sequence[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of the tokenized texts, or pixels, of each column and the labels of the rows."""
        if count_processes() > 1 and [*self.loss.parameters()] and not hasattr(self.loss, "is_shared"):
            raise ValueError("on several processes, a loss with parameters needs the callback LossCheckpointCallback.")
        heads = heads_of(self.loss)
        has_classes = bool(heads) or isinstance(self.loss, CrossBatchSupConLoss)  # whose memory has earlier labels
        if labels is None and (has_classes or len(sentence_features) > 2):
            what = f"{type(self.loss).__name__} has classes, or one of three columns may be negative"
            raise ValueError(f"labels are missing, but {what}: name their column label, labels, score or scores.")
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        rows = len(embeddings[0])
        if labels is None:
            labels = torch.arange(rows, device=embeddings[0].device) + (process_index() << 32)  # others than elsewhere
        labels = labels.view(-1) if labels.numel() == rows else labels  # or (B, K), of examples with several classes
        if len(labels) != rows:
            raise ValueError(f"there must be one label per row; got {tuple(labels.shape)} labels for {rows} rows.")
        self.loss.train(self.model.training)  # the trainer changes the mode of the model alone
        labels = torch.cat([labels] * len(embeddings))
        if heads and hasattr(self.model.forward, "set_dim"):  # the decorator of `MatryoshkaLoss`
            return self._compute_cut(heads, torch.cat(embeddings), labels)
        return self.loss(torch.cat(embeddings), labels)

    def _compute_cut(self, heads: list[Any], embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of embeddings that were cut, with class vectors that are cut to the same length."""
        plain = {name: kind for name, kind in HEADS.items() if getattr(kind, "normalizes_classes", False)}
        plain = {name: kind for name, kind in plain.items() if kind.compute_concentration is Head.compute_concentration}
        if others := [head.name for head in heads if head.name not in plain]:
            what = f"head {others[0]!r} compares more than directions, which MatryoshkaLoss cuts and normalizes"
            raise ValueError(f"{what}. Use {', '.join(plain)}.")
        lengths, length = [head.embedding_dim for head in heads], embeddings.shape[1]
        vectors = {id(head.get_parameter(name)) for head in heads for name in head.class_parameters}
        cut = {name: value[..., :length] for name, value in self.loss.named_parameters() if id(value) in vectors}
        try:
            for head in heads:
                head.embedding_dim = length
            return torch.func.functional_call(self.loss, cut, (embeddings, labels))
        finally:
            for head, before in zip(heads, lengths, strict=True):
                head.embedding_dim = before


class LossCheckpointCallback(TrainerCallback):
    """Saves a loss in the checkpoints of a Trainer, which contain only the model, and loads it when training resumes.

    With `load_best_model_at_end`, the loss of the best checkpoint is loaded, too. Several losses, one per dataset of a
    `SentenceTransformerTrainer`, need a callback each, in the same order when training resumes.

    Args:
        loss: The loss.

    Raises:
        ValueError: If the class vectors of the loss are spread over processes, or training resumes from a checkpoint of
            another run than that in `output_dir`.
        FileNotFoundError: If training resumes from a checkpoint in `output_dir` that was saved without a loss.

    Example:
        >>> Trainer(model, args, callbacks=[LossCheckpointCallback(loss)])  # doctest: +SKIP
    """

    file = "loss.safetensors"

    def __init__(self, loss: nn.Module) -> None:
        require_all_classes(loss)
        self.loss = loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the loss of the checkpoint from which training resumes, equal on all processes."""
        others = vars(state).setdefault("loss_callbacks", [])  # of this training; not a field, so it is not saved
        self.file = f"loss-{len(others)}.safetensors" if others else type(self).file
        others.append(self)
        runs = state.stateful_callbacks  # a field, which the Trainer saves beside the model
        if state.global_step > 0:
            path = self._path(args, state)
            with safe_open(path, "pt") as file:
                run = (file.metadata() or {}).get("run")
            if run != runs.get(self.file):
                advice = "set output_dir to the folder of the checkpoint from which training resumes"
                raise ValueError(f"{self.file} in {path.parent} is of another run; {advice}.")
            self.loss.load_state_dict(load_file(path))
        self._epoch, self._run = -1, secrets.token_hex(8)
        runs[self.file] = self._run
        for value in self.loss.state_dict().values():
            value.copy_(broadcast(value))
        self.loss.is_shared = True  # type: ignore[assignment]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Update the schedules of the heads, such as `margin_warmup_epochs`."""
        self._epoch = max(int(state.epoch or 0), self._epoch + 1)  # `state.epoch` does not count those of streams
        for head in heads_of(self.loss):
            head.set_epoch(self._epoch)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients over processes, in the same order on each, whichever losses a batch used."""
        for weight in self.loss.parameters() if count_processes() > 1 else ():
            if weight.requires_grad:
                weight.grad = reduce(torch.zeros_like(weight) if weight.grad is None else weight.grad, "mean")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the loss."""
        if state.is_world_process_zero:
            with atomic_file(self._path(args, state)) as unfinished:
                save_file(self.loss.state_dict(), unfinished, metadata={"run": self._run})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the loss of the best model if the Trainer has loaded that."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.loss.load_state_dict(load_file(Path(state.best_model_checkpoint) / self.file))

    def _path(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / self.file
