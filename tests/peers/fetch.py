"""Fetch the tests of installed packages: `fetch.py PACKAGE...` prints the folders to add to the Python path.

Some packages have tests in their source distribution but not in what is installed. Those of the installed version are
unpacked into a cache that git ignores, as the package `<package>_tests`. Modules that the tests import and that are
not distributed are replaced by stubs.
"""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "peer_tests"

PEERS: dict[str, dict[str, str]] = {
    "timm": {},
    "transformers": {
        # Needed only for images on the Hub.
        "fetch_hub_objects_for_ci.py": "def url_to_local_path(url):\n    return url\n",
        "transformers_tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
        "transformers_tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
        # Options of every configuration, with non-default values.
        "transformers_tests/utils/test_configuration_utils.py": """config_common_kwargs = {
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
    },
}
"""Packages with tests in their source distribution: the source of each module that is missing from it, by path."""


def fetch(name: str) -> Path:
    """Return the folder with the tests of a package; download them unless they are cached."""
    version = importlib.metadata.version(name)
    folder = CACHE / f"{name}-{version}"
    if not folder.is_dir():
        # Moved into place when complete, so that an interrupted download does not look complete.
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpack(name, download(name, version, Path(scratch)), Path(scratch) / "whole")
            (Path(scratch) / "whole").rename(folder)
    return folder


def download(name: str, version: str, folder: Path) -> Path:
    """Return the source distribution from the package index configured in pip."""
    command = [sys.executable, "-m", "pip", "download", f"{name}=={version}", "--dest", str(folder)]
    command += ["--no-deps", "--no-binary", name, "--quiet", "--disable-pip-version-check"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"could not download the source of {name} {version}; see above. The first run needs the network.")
    return next(folder.glob(f"{name}-*.tar.gz"))


def unpack(name: str, archive: Path, folder: Path) -> None:
    """Unpack the tests as a package, and add the stubs."""
    with tarfile.open(archive) as file:
        for member in file.getmembers():
            parts = Path(member.name).parts
            if parts[1:2] == ("tests",):
                member.name = str(Path(f"{name}_tests", *parts[2:]))
                file.extract(member, folder, filter="data")
    for path, text in PEERS[name].items():
        stub = folder / path
        if stub.exists():
            sys.exit(f"{path} is now part of the distribution of {name}; remove its stub from {__file__}.")
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(text)
        if stub.parent != folder:
            (stub.parent / "__init__.py").touch()
    (folder / f"{name}_tests" / "__init__.py").touch()


if __name__ == "__main__":
    print(os.pathsep.join(str(fetch(name)) for name in sys.argv[1:]))
