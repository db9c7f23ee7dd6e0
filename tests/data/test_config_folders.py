"""Configurations of a dataset that are also folders in it."""

from datasets import Dataset

from hf_sphere.data.sources import load_splits


def test_the_splits_of_a_configuration_are_those_that_the_card_states(tmp_path):
    (tmp_path / "en").mkdir()
    for name, count in (("a", 3), ("b", 5)):
        Dataset.from_dict({"text": ["cat"] * count}).to_csv(tmp_path / "en" / f"{name}.csv")
    files = ["  - {split: train, path: en/a.csv}", "  - {split: test, path: en/b.csv}"]
    card = ["---", "configs:", "- config_name: en", "  data_files:", *files, "---", ""]
    (tmp_path / "README.md").write_text("\n".join(card))
    splits = load_splits(str(tmp_path), "en", cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 3, "test": 5}
