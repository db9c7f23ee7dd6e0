"""Image models: a timm backbone and a head on the hypersphere."""
