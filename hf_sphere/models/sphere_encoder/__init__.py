"""Encoders of transformers with spherized feed-forward layers: one file per encoder, named by its `model_type`."""

ENCODERS = {
    "bert": "Bert",
    "roberta": "Roberta",
    "electra": "Electra",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
    "vit": "ViT",
}
"""Prefix of transformers' classes by `model_type`; those of `bert` become `SphereBertModel` and so on."""
