"""Conversion of image datasets in their published layouts to parquet files."""
