"""Constructions of spherical codes: each function returns directions, of any norms, as a numpy array (K, d)."""
