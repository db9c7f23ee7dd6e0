"""A module of sentence-transformers that spherizes sentence embeddings."""

from typing import Any

from sentence_transformers.base.modules import Module
from torch import Tensor

from hf_sphere.nn.layers import Spherization


class Spherize(Module):
    """Spherize the sentence embeddings of a `SentenceTransformer`; put it after the pooling.

    It is saved and loaded with the model. sentence-transformers loads modules of other libraries only with
    `trust_remote_code=True`; import hf_sphere before.

    No coordinate is negative, so binary codes, which keep the signs, are equal for all sentences unless a module after
    this one subtracts the mean; docs/tasks/text-embeddings.md has one.

    Args:
        in_features: Length n of the embeddings.
        **spherization: Options of `Spherization`: `scaling`, `radius`, `delta`, `learn_scaling`, `learn_radius`.

    Shape:
        - `sentence_embedding` before: (B, n).
        - `sentence_embedding` after: (B, n + 1), of norm `radius`.

    Example:
        >>> Spherize(8)({"sentence_embedding": torch.randn(2, 8)})["sentence_embedding"].shape
        torch.Size([2, 9])
        >>> model = SentenceTransformer(modules=[transformer, pooling, Spherize(384)])  # doctest: +SKIP
    """

    def __init__(self, in_features: int, **spherization: Any) -> None:
        super().__init__()
        self.options = {"in_features": in_features, **spherization}
        self.spherization = Spherization(**self.options)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Spherize the entry `sentence_embedding`."""
        embeddings: Tensor = features["sentence_embedding"]
        return {**features, "sentence_embedding": self.spherization(embeddings)}

    def get_embedding_dimension(self) -> int:
        """Return the length of the spherized embeddings."""
        return self.spherization.in_features + 1

    def get_config_dict(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return self.options

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save the arguments of the constructor, the scaling and the radius to a folder."""
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, **kwargs: Any) -> "Spherize":
        """Load the module from a folder or the Hub; the options are those of sentence-transformers' `Module.load`."""
        names = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        hub = {name: kwargs[name] for name in names if name in kwargs}
        module = cls(**cls.load_config(model_name_or_path, **hub))
        return cls.load_torch_weights(model_name_or_path, model=module, **hub)
