"""Text encoders of transformers with spherized feed-forward layers."""
