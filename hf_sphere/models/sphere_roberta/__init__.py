"""RoBERTa with spherized feed-forward layers."""
