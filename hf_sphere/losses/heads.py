"""Heads as losses, losses in the trainers of other libraries, and losses of other libraries here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_sphere.nn.checks import IGNORED
from hf_sphere.nn.heads import HEADS, build_head
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.utils.files import atomic_file


class HeadLoss(nn.Module, PyTorchModelHubMixin, library_name="hf_sphere"):  # type: ignore[call-arg]
    """Makes any head a loss: called with embeddings (B, d) and labels (B,), it returns a scalar.

    The parameters of the loss are those of the head, such as class vectors: they need an optimizer, and, on several
    processes, the gradients averaged, for instance by `DistributedDataParallel`. `save_pretrained` and
    `from_pretrained` save and load them with the arguments; `loss.head(embeddings)` predicts. A data-dependent
    initialization is done from the first batch in training.

    Args:
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        head: Name of the head, one of `hf_sphere.nn.HEADS`; the subclasses have one.
        **options: Options of the head.

    Raises:
        ValueError: If the head or an option is unknown or invalid, or the embeddings have another length.

    Example:
        >>> loss = ArcFaceLoss(128, 1000, scale=64.0, margin=0.5)
        >>> optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
        >>> loss(model(images), labels).backward()
    """

    head_name: ClassVar[str | None] = None

    def __init_subclass__(cls, *, head: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.head_name = head or cls.head_name

    def __init__(self, embedding_dim: int, num_classes: int, *, head: str | None = None, **options: Any) -> None:
        super().__init__()
        name = self.head_name or head
        if name is None or (head is not None and head != name):
            raise ValueError(f"head must be {name or 'one of ' + ', '.join(HEADS)}; got {head!r}.")
        self.head = build_head(name, embedding_dim, num_classes, **options)
        self._is_initialized = False

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        """Compute the loss of embeddings (B, d) with labels (B,), where examples with -100 are ignored.

        `indices_tuple` is for the trainers of pytorch-metric-learning, without a miner.
        """
        if indices_tuple is not None:
            raise ValueError(f"{type(self).__name__} uses all examples of a batch; leave out the miner.")
        if embeddings.shape[1:] != (self.head.embedding_dim,):
            shape = tuple(embeddings.shape)
            raise ValueError(f"embeddings must have the shape (B, {self.head.embedding_dim}); got {shape}.")
        if self.training and not self._is_initialized:
            self._is_initialized = True  # reading the head's state synchronizes the device: once per loss
            if self.head.needs_data_initialization:
                self.head.initialize_from_data(embeddings.detach())
        loss = self.head(embeddings, labels).loss
        assert loss is not None
        return loss

    def _save_pretrained(self, save_directory: Path) -> None:
        """Save weights; called by `save_pretrained`."""
        require_all_classes(self)
        super()._save_pretrained(save_directory)


def require_all_classes(loss: nn.Module) -> None:
    """Raise a `ValueError` if this process has only some of the class vectors of a loss."""
    if any(head.is_sharded for head in class_shards(loss).values()):
        raise ValueError(
            "the loss cannot be saved: with shard_classes, each process has only a part of its class vectors. Save the "
            "`state_dict()` of each process yourself, or train a model with this head by the recipes."
        )


class CosineSoftmaxLoss(HeadLoss, head="cosine"):
    """`CosineHead` as a loss."""


class ArcFaceLoss(HeadLoss, head="arcface"):
    """`ArcFaceHead` as a loss."""


class CosFaceLoss(HeadLoss, head="cosface"):
    """`CosFaceHead` as a loss."""


class SubCenterArcFaceLoss(HeadLoss, head="subcenter_arcface"):
    """`SubCenterArcFaceHead` as a loss."""


class AdaFaceLoss(HeadLoss, head="adaface"):
    """`AdaFaceHead` as a loss."""


class ProxyAnchorLoss(HeadLoss, head="proxy_anchor"):
    """`ProxyAnchorHead` as a loss."""


class VMFSoftmaxLoss(HeadLoss, head="vmf"):
    """`VMFHead` as a loss."""


class PrototypeLoss(HeadLoss, head="prototype"):
    """`PrototypeHead` as a loss."""


class ETFLoss(HeadLoss, head="etf"):
    """`ETFHead` as a loss."""


class MetricLearningLoss(nn.Module):
    """A loss of pytorch-metric-learning, with or without a miner, called with embeddings (B, d) and labels (B,).

    Examples with the label -100 are ignored, and embeddings are upcast to float32.

    Args:
        loss: The loss.
        miner: The miner that selects pairs or triplets for it.

    Example:
        >>> from pytorch_metric_learning import losses, miners
        >>> loss = MetricLearningLoss(losses.TripletMarginLoss(), miners.MultiSimilarityMiner())
        >>> trainer = SphereTrainer(model, args, train_dataset=images, compute_loss_func=trainer_loss(loss))
    """

    def __init__(self, loss: nn.Module, miner: nn.Module | None = None) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of the pairs or triplets that the miner selects, or of all."""
        used = labels != IGNORED
        embeddings, labels = Head.upcast(embeddings)[used], labels[used]
        return self.loss(embeddings, labels, None if self.miner is None else self.miner(embeddings, labels))


def trainer_loss(loss: nn.Module) -> Callable[..., Tensor]:
    """Return a `compute_loss_func` that trains the embeddings of a model by a loss instead of that of its head.

    Args:
        loss: Called with embeddings (B, d), as the head transforms them, and labels (B,). Without trained parameters,
            as the Trainer would not train or save them.

    Raises:
        ValueError: If the loss has trained parameters.
    """
    trained = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"the Trainer would not train the parameters {', '.join(trained)} of the loss: use a model with this head, "
            "or a loss without parameters (learn_temperature=False)."
        )

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        value = loss(outputs.embeddings, labels)
        # The Trainer sums over the batches of an optimizer step, of which `num_items_in_batch` is the size.
        return value if num_items_in_batch is None else value * (labels != IGNORED).sum() / num_items_in_batch

    return compute


class SentenceTransformerLoss(nn.Module):
    """A loss for `SentenceTransformerTrainer`: a row of the data is a text with the label of its class.

    Several texts in a row have the same label; without labels, each row is a class of its own, as with pairs of anchor
    and positive. Parameters of the loss are trained, and `LossCheckpointCallback` saves them with the checkpoints.

    Args:
        model: The `SentenceTransformer`.
        loss: Called with embeddings (B, d) and labels (B,), such as `ArcFaceLoss` or `SupConLoss`.

    Raises:
        ValueError: If there is not one label per row.

    Example:
        >>> loss = SentenceTransformerLoss(model, ArcFaceLoss(model.get_embedding_dimension(), num_classes=20))
        >>> callbacks = [LossCheckpointCallback(loss.loss)]
        >>> trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, callbacks=callbacks)
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, sentence_features: Sequence[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of the tokenized texts of each column and the labels of the rows."""
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        rows = len(embeddings[0])
        if labels is None:
            labels = torch.arange(rows, device=embeddings[0].device)
        if labels.numel() != rows:
            raise ValueError(f"there must be one label per row; got {tuple(labels.shape)} labels for {rows} rows.")
        return self.loss(torch.cat(embeddings), labels.view(-1).repeat(len(embeddings)))


class LossCheckpointCallback(TrainerCallback):
    """Saves a loss in the checkpoints of a Trainer, which contain only the model, and loads it when training resumes.

    Args:
        loss: The loss.

    Raises:
        ValueError: If the class vectors of the loss are spread over processes.
        FileNotFoundError: If training resumes from a checkpoint in `output_dir` that was saved without a loss.
    """

    def __init__(self, loss: nn.Module) -> None:
        require_all_classes(loss)
        self.loss = loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the loss of the checkpoint from which training resumes."""
        if state.global_step > 0:
            self.loss.load_state_dict(load_file(self._path(args, state)))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the loss."""
        if state.is_world_process_zero:
            with atomic_file(self._path(args, state)) as unfinished:
                save_file(self.loss.state_dict(), unfinished)

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loss.safetensors"
