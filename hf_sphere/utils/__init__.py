"""Files, seeds, digests and pixels: small helpers that know no data set and no model."""
