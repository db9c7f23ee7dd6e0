"""Fetch the tests of the installed transformers version and print the folder to add to the Python path.

The common tests are in the source distribution but not in the installed package. They are unpacked into a cache that
git ignores, as the package `transformers_tests`. Three of its modules are not distributed and are replaced by stubs.
"""

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "transformers_tests"

STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    # Options of every configuration, with non-default values.
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "is_encoder_decoder": True,
    "id2label": {0: "north", 1: "south", 2: "pole"},
    "label2id": {"north": 0, "south": 1, "pole": 2},
    "problem_type": "regression",
}
""",
}
"""Source of each module that is missing from the source distribution."""


def main() -> None:
    """Fetch the tests unless they are cached."""
    version = importlib.metadata.version("transformers")
    folder = CACHE / version
    if not folder.is_dir():
        # Moved into place when complete, so that an interrupted download does not look complete.
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpack(download(version, Path(scratch)), Path(scratch) / "whole")
            (Path(scratch) / "whole").rename(folder)
    print(folder)


def download(version: str, folder: Path) -> Path:
    """Return the source distribution from the package index configured in pip."""
    command = [sys.executable, "-m", "pip", "download", f"transformers=={version}", "--dest", str(folder)]
    command += ["--no-deps", "--no-binary", "transformers", "--quiet", "--disable-pip-version-check"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(
            f"could not download the source of transformers {version}; see above. The first run needs the network."
        )
    return next(folder.glob("transformers-*.tar.gz"))


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the tests as the package `transformers_tests`, and add the stubs."""
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            parts = Path(member.name).parts
            if parts[1:2] == ("tests",):
                member.name = str(Path("transformers_tests", *parts[2:]))
                file.extract(member, folder, filter="data")
    package = folder / "transformers_tests"
    for name, text in STUBS.items():
        stub = package / name
        if stub.exists():
            sys.exit(f"{name} is now part of the distribution of transformers; remove its stub from {__file__}.")
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(text)
    for place in (package, *(package / name for name in {Path(stub).parent for stub in STUBS})):
        (place / "__init__.py").touch()


if __name__ == "__main__":
    main()
