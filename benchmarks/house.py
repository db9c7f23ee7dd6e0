"""Count the lines of the library, its errors, and the functions that common calls pass.

python benchmarks/house.py

A function is a code object of `hf_sphere` that runs during a call, found by `sys.setprofile`; what imports run is left
out. An error is a `raise`, or a call of a function that only raises.
"""

import ast
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "hf_sphere")
LIMITS = {
    "lines": 36_000,
    "raises per 1,000 lines": 15,
    "files of a training": 50,
    "functions of a training": 380,
    "functions of EmbeddingSpace.search": 30,
    "functions of ArcFaceLoss": 40,
    "functions of a forward pass with loss": 40,
    "functions of loading a folder": 40,
    "files over 420 lines": 0,
    "lines of tests": 48_000,
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def count_lines(*folders: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*folders))


def only_raises(function: ast.AST) -> bool:
    """Whether a function does nothing but raise, apart from its docstring and the making of the message."""
    if not isinstance(function, ast.FunctionDef):
        return False
    kinds = (ast.Assign, ast.AugAssign, ast.Expr)
    return isinstance(function.body[-1], ast.Raise) and all(isinstance(line, kinds) for line in function.body[:-1])


def count_raises() -> int:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in python_files("hf_sphere", "recipes")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if only_raises(node)}
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    called = [getattr(name, "id", getattr(name, "attr", "")) for name in calls]
    return sum(isinstance(node, ast.Raise) and node.exc is not None for node in nodes) + sum(n in names for n in called)


@contextlib.contextmanager
def walk() -> Iterator[set[types.CodeType]]:
    """Collect the code objects of the library that run, without those that an import runs."""
    found: set[types.CodeType] = set()
    imports = 0

    def record(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal imports
        is_import = frame.f_code.co_name == "<module>"
        if event == "call":
            imports += is_import
            if not imports and frame.f_code.co_filename.startswith(PACKAGE):
                found.add(frame.f_code)
        elif event == "return":
            imports -= is_import

    sys.setprofile(record)
    try:
        yield found
    finally:
        sys.setprofile(None)


def walks() -> dict[str, int]:
    """Count the functions of common calls, each after a first one, which initializes."""
    import torch

    from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
    from hf_sphere.losses import ArcFaceLoss
    from hf_sphere.search import EmbeddingSpace

    torch.manual_seed(0)
    vectors, labels = torch.nn.functional.normalize(torch.randn(200, 16), dim=1), torch.arange(200) % 20
    space, loss = EmbeddingSpace.fit(vectors, labels), ArcFaceLoss(16, 20)
    config = SphereVisionConfig(backbone="lenet5", num_channels=1, image_size=28, num_labels=20, head="arcface")
    model, pixels = SphereVisionForImageClassification(config), torch.rand(4, 1, 28, 28)
    calls: dict[str, Callable[[], object]] = {
        "functions of EmbeddingSpace.search": lambda: space.search(vectors[:2], k=3, false_accept=0.2),
        "functions of ArcFaceLoss": lambda: loss(vectors, labels),
        "functions of a forward pass with loss": lambda: model(pixels, labels=labels[:4]),
    }
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        space.save(Path(folder, "space"))
        calls["functions of loading a folder"] = lambda: EmbeddingSpace.load(Path(folder, "space"))
        for name, call in calls.items():
            call()
            with walk() as found:
                call()
            counts[name] = len(found)
    return counts


def walk_of_training() -> dict[str, int]:
    """Count the files and functions of `hf-sphere train classification`, from the command to the card.

    The first run of a machine passes 18 more functions, which decode the images and write them to the cache.
    """
    from hf_sphere.commands.main import main

    argv = [
        "hf-sphere",
        "train",
        "classification",
        "--dataset_name",
        "digits",
        "--backbone",
        "lenet5",
        "--image_size",
        "28",
    ]
    argv += ["--num_train_epochs", "1", "--max_train_samples", "200", "--disable_tqdm"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), walk() as found:
        sys.argv = [*argv, "--output_dir", folder]
        with contextlib.suppress(SystemExit):
            main()
        assert Path(folder, "README.md").is_file(), "the training failed"
    return {"files of a training": len({code.co_filename for code in found}), "functions of a training": len(found)}


def measure() -> dict[str, float]:
    lines = count_lines("hf_sphere", "recipes")
    code = "from benchmarks import house; import json; print(json.dumps(house.walk_of_training()))"
    command = [sys.executable, "-c", code]
    for _ in range(2):  # the second one finds the decoded images in the cache, also on a new machine
        trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in python_files("hf_sphere", "recipes")]
    return {
        "lines": lines,
        "raises per 1,000 lines": round(1000 * count_raises() / lines, 1),
        **json.loads(trained.stdout.splitlines()[-1]),
        **walks(),
        "files over 420 lines": sum(size > 420 for size in sizes),
        "lines of tests": count_lines("tests"),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:<40}{value:>10,}   at most {LIMITS[name]:,}")
