"""BERT with spherized feed-forward layers."""
