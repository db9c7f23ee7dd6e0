"""Constructions of spherical codes: functions that return points of any norms as numpy arrays (K, d)."""
