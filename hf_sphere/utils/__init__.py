"""Helpers for files, arguments, seeds, digests and pixels, independent of the rest of the library."""
