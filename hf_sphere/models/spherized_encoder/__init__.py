"""What the spherized text encoders share: settings, feed-forward layers, loading, calibration."""
