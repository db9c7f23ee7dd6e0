"""From arguments and loaded data to a few-shot model: built anew, or on the encoder of a saved model."""

from typing import Any

from hf_sphere.data import ImageData
from hf_sphere.models import SphereVisionConfig, SphereVisionForFewShotClassification
from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.image_arguments import EncoderArguments, FewShotArguments
from hf_sphere.training.image_models import check_same_architecture


def build_few_shot_model(
    encoder_args: EncoderArguments, few_shot_args: FewShotArguments, args: TrainingArguments, data: ImageData
) -> SphereVisionForFewShotClassification:
    """Build a new model that fits the data, or take the encoder of the one that was named.

    Raises:
        ValueError: If an argument has no meaning here or contradicts the saved model.
    """
    if args.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor is for models with a head, and a few-shot model has none; leave it out."
        )
    if args.loss_reduction == "sum":
        raise ValueError("loss_reduction sum is not for a few-shot model, whose loss is a mean; leave it out.")
    asked = {"metric": few_shot_args.metric, "temperature": few_shot_args.temperature}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    usual = {"metric": "euclidean", "temperature": 1.0}
    saved = encoder_args.model_name_or_path
    if saved is not None:
        config = _adapt_config(SphereVisionConfig.from_pretrained(saved), encoder_args, few_shot_args)
        config.few_shot_kwargs = usual | (config.few_shot_kwargs or {}) | given
        return SphereVisionForFewShotClassification.from_pretrained(saved, config=config)
    config = SphereVisionConfig(
        backbone=encoder_args.backbone or "conv4",
        backbone_kwargs=dict(encoder_args.backbone_kwargs),
        num_channels=data.shape.channels,
        image_size=[data.shape.height, data.shape.width],
        embedding_dim=encoder_args.embedding_dim,
        freeze_batch_norm=bool(encoder_args.freeze_batch_norm),
        head=None,
        spherization=None if few_shot_args.spherization is None else dict(few_shot_args.spherization),
        few_shot_kwargs=usual | given,
    )
    return SphereVisionForFewShotClassification(config, pretrained=encoder_args.pretrained_backbone)


def _adapt_config(
    config: SphereVisionConfig, encoder_args: EncoderArguments, few_shot_args: FewShotArguments
) -> SphereVisionConfig:
    """Put what a run adds to a saved encoder into its configuration, and refuse what would change the encoder."""
    check_same_architecture(encoder_args, config)
    if encoder_args.freeze_batch_norm is not None:
        config.freeze_batch_norm = encoder_args.freeze_batch_norm
    if few_shot_args.spherization is not None:
        added = dict(few_shot_args.spherization)
        if config.spherization not in (None, added):
            raise ValueError(
                f"spherization is {added} but {encoder_args.model_name_or_path} has {config.spherization}; leave "
                "spherization out."
            )
        config.spherization = added
    return config
