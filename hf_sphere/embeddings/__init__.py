"""Predictions and embeddings of a split on disk: store, extract, provenance."""
