"""Heads as losses."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from hf_sphere.nn.heads import HEADS, Head, build_head
from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.nn.processes import Exchange


class HeadLoss(nn.Module, PyTorchModelHubMixin, library_name="hf_sphere"):  # type: ignore[call-arg]
    """Makes any head a loss: called with embeddings (B, d) and labels (B,), it returns a scalar.

    The parameters of the head, such as class vectors, are parameters of the loss: they need an optimizer, and on
    several processes averaged gradients, for instance by `DistributedDataParallel`. `save_pretrained` and
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
        >>> loss = HeadLoss(4, 3, head="arcface", scale=64.0, margin=0.5)
        >>> optimizer = torch.optim.AdamW([*network.parameters(), *loss.parameters()])
        >>> loss(embeddings, labels).backward()
    """

    head_name: ClassVar[str | None] = None

    def __init_subclass__(cls, *, head: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.head_name = head or cls.head_name

    def __init__(self, embedding_dim: int, num_classes: int, *, head: str | None = None, **options: Any) -> None:
        super().__init__()
        name = self.head_name or head
        if name is None or head not in (None, name):
            raise ValueError(f"head must be {name or 'one of ' + ', '.join(HEADS)}; got {head!r}.")
        self.head = build_head(name, embedding_dim, num_classes, **options)
        saved = vars(self)["_hub_mixin_config"]  # the arguments
        sizes = {"embedding_dim": int(embedding_dim), "num_classes": int(num_classes)}  # those of numpy are not JSON
        self._hub_mixin_config = {**saved, **sizes, "head": name}  # checked when loaded
        if self.head.class_weights is not None:  # an array or a tensor cannot be saved in the configuration
            self._hub_mixin_config["class_weights"] = self.head.class_weights
        self._is_initialized = False

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: None = None) -> Tensor:
        """Compute the loss of embeddings (B, d) with labels (B,), where examples with -100 are ignored.

        `indices_tuple` is for the trainers of pytorch-metric-learning, without a miner.

        Raises:
            ValueError: If embeddings or labels do not fit the head, or there is a miner.
        """
        if indices_tuple is not None:
            raise ValueError(f"{type(self).__name__} uses all examples of a batch; leave out indices_tuple, the miner.")
        fits = embeddings.shape[1:] == (self.head.embedding_dim,)  # otherwise the head raises an error
        if fits and self.training and not self._is_initialized:
            self._is_initialized = True  # reading the head's state synchronizes the device: once per loss
            if getattr(type(self.head), "initialize_from_data", None) is not Head.initialize_from_data:  # or a wrapper
                self._initialize(embeddings.detach())
        options = {"needs_logits": False} if type(self.head).forward is Head.forward else {}
        return self.head(embeddings, labels, **options).loss

    @torch.compiler.disable(reason="a first batch without compilation must initialize the loss")
    def _initialize(self, embeddings: Tensor) -> None:
        """Do the data-dependent initialization of the head, unless it is done."""
        if self.head.needs_data_initialization:
            self.head.initialize_from_data(Exchange(embeddings, shared=True).gather(embeddings))

    def _save_pretrained(self, save_directory: Path) -> None:
        """Save weights; called by `save_pretrained`."""
        require_all_classes(self)
        super()._save_pretrained(save_directory)


def require_all_classes(loss: nn.Module) -> None:
    """Raise a `ValueError` if this process has only some of the class vectors of a loss."""
    if any(head.is_sharded for head in class_shards(loss).values()):
        advice = "save the `state_dict()` of each"
        raise ValueError(f"with shard_classes, each process has only a part of the class vectors; {advice}.")


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
