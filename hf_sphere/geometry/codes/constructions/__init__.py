"""Constructions of spherical codes: functions that return points of any norm as numpy arrays (K, d)."""
