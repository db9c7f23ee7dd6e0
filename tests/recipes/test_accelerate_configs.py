"""The configurations of `accelerate launch` and their commands."""

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from training_runs import ROOT

FOLDER = ROOT / "recipes" / "accelerate_configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_accepts_the_configuration(path: Path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    nested = config.deepspeed_config or {}
    assert (ROOT / nested.get("deepspeed_config_file", "")).exists()


def test_the_commands_name_files_that_exist():
    text = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"recipes/[\w/.-]+\.(?:yaml|py)", text))
    assert {str(path.relative_to(ROOT)) for path in FOLDER.glob("*.yaml")} <= named
    assert [name for name in named if not (ROOT / name).is_file()] == []
