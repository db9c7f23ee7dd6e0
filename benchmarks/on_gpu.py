"""What only a GPU can measure, in order of priority and within a time limit, each row beside its peer in one run.

python benchmarks/on_gpu.py --minutes 14
python benchmarks/on_gpu.py --minutes 5 --device pretend --results dry_run.json

Each part runs in a process of its own, and its rows are written to `results/on_gpu.json` when it ends. Finished parts
are not repeated. A part that fails, or for which no time is left, is "not measured", with the reason, and the next call
tries it again. `losses` needs pytorch-metric-learning; `fast_cifar10` and `queue` need `datasets` and data. The queue
writes to `results/runs`, and every call continues it. `pretend` is the test device of `tests/devices`: a dry run.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import torch
from common import RESULTS, ratio, row, synchronize, time_in_turn

from hf_sphere.utils.files import write_text

ROOT = Path(__file__).parent.parent
PRETEND = "pretend"
SECONDS_TO_END = 10
"""The queue ends this long before the time is over, beyond the minute that it takes to write checkpoints."""
DRY_RUN = {
    "spherization": {"ROWS": 4, "FEATURES": 8},
    "losses": {"DIM": 8, "CLASSES": 5, "BATCH": 6, "MANY": 100},
    "optimizers": {"BACKBONE": "lenet5_bn"},
    "image_training": {"BATCH": 2},
}
"""Sizes of a dry run, by module."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """Rows that are measured together.

    Attributes:
        measure: Returns the rows, from the device and the minutes that are left.
        seconds: A part is not started if less time is left.
        repeats: Whether every call runs the part, since it continues by itself.
    """

    measure: Callable[[str, float], Rows]
    seconds: float
    repeats: bool = False


def load(name: str, device: str) -> ModuleType:
    """Import another benchmark for a device."""
    module = importlib.import_module(name)
    settings = {"DEVICE": device} | (DRY_RUN.get(name, {}) if device == PRETEND else {})
    if device == PRETEND:
        torch.compiler.set_stance("force_eager")  # inductor does not know the device
        settings["time_in_turn"] = lambda functions, **_: time_in_turn(functions, rounds=1, warmup=0)
    for setting, value in settings.items():
        setattr(module, setting, value)
    return module


def rows_of_main(name: str, device: str) -> Rows:
    """Return the rows that another benchmark reports."""
    found: Rows = []
    module = load(name, device)
    module.report = lambda _, rows, **more: found.extend(rows)
    sys.argv = [f"{name}.py"]
    module.main()
    return found


def device_tests(device: str, minutes: float) -> Rows:
    """Run the tests of accelerators."""
    tests = "tests/devices/test_pretend.py" if device == PRETEND else "tests/devices"
    parallel = ["-n", "auto"] if find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", tests, "-q", *parallel, "--junitxml", str(file)]
        code = subprocess.run(command, cwd=ROOT).returncode
        if code not in (0, 1):
            sys.exit(f"pytest ended with exit code {code}")
        suite = ElementTree.parse(file).getroot()[0].attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    passed = int(suite["tests"]) - failed - int(suite["skipped"])
    return [row("tests that fail", failed, at_most=0), row("tests that pass", passed, at_least=1)]


def spherize(device: str, minutes: float) -> Rows:
    """Compare `spherize`, eager and compiled, with copies."""
    module = load("spherization", device)
    return [*module.measure_speed(), *module.measure_bandwidth(), *module.measure_accuracy()]


def vmf_kernels(device: str, minutes: float) -> Rows:
    """Count the kernels of a step of the vMF head, beside softmax."""
    module = load("kernel_counts", device)
    x, labels = module.batch(device)
    rows = []
    for name, at_most in {"softmax": None, "vmf": module.BOUNDS["vmf"]}.items():
        head = module.head_for(name).to(device)

        def step(head: torch.nn.Module = head) -> None:
            module.train(lambda x, y: head(x, y).loss, x, labels, head)

        count = module.count if device == PRETEND else count_launches
        rows.append(row(f"{name} head, kernels per step", count(step), at_most=at_most))
    return rows


def count_launches(step: Callable[[], Any]) -> int:
    """Return the kernels that a step launches on a GPU, without copies, after one that fills caches of constants."""
    step()
    synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step()
        synchronize()
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)


def throughput(device: str, minutes: float) -> Rows:
    """Time training steps of two networks, softmax and spherized, in bfloat16 and channels last."""
    module, steps, rows = load("image_training", device), 1 if device == PRETEND else 8, []
    for backbone in ("lenet5_bn",) if device == PRETEND else ("vgg11_cifar", "resnet18_cifar"):
        functions = {
            head: module.training_steps(torch.channels_last, torch.bfloat16, steps, backbone, head)
            for head in ("softmax", "spherized")
        }
        seconds = module.time_in_turn(functions)
        images = steps * module.BATCH
        rows += [row(f"{backbone}, {head}: images per second", images / min(seconds[head])) for head in functions]
        rows.append(row(f"{backbone}: spherized / softmax, time", ratio(seconds["spherized"], seconds["softmax"])))
    return rows


def fast_cifar10(device: str, minutes: float) -> Rows:
    """Train the fast network."""
    if device == PRETEND:
        sys.exit("a dry run trains no network")
    return rows_of_main("fast_cifar10", device)


def queue(device: str, minutes: float) -> Rows:
    """Continue the runs of the queue that need a GPU."""
    if device == PRETEND:
        sys.exit("a dry run trains no network")
    runs = ROOT / "results" / "runs"
    before = set(runs.glob("*.json"))
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), "--device", "gpu"]
    code = subprocess.run([*command, "--minutes", str(minutes - SECONDS_TO_END / 60)]).returncode
    if code:
        sys.exit(code)
    return [row("runs finished by the last call", len(set(runs.glob("*.json")) - before))]


PARTS = {
    "device_tests": Part(device_tests, 60),
    "spherize": Part(spherize, 30),
    "optimizers": Part(lambda device, minutes: rows_of_main("optimizers", device), 60),
    "losses": Part(lambda device, minutes: load("losses", device).compare(rounds=21), 30),
    "arcface_300k": Part(lambda device, minutes: load("losses", device).compare_blocks(256), 30),
    "vmf_kernels": Part(vmf_kernels, 20),
    "fast_cifar10": Part(fast_cifar10, 60),
    "throughput": Part(throughput, 30),
    "queue": Part(queue, 180, repeats=True),
}
"""The parts, in order of priority."""


def run_part(name: str, device: str, seconds: float) -> Rows | str:
    """Run a part in a process of its own; return its rows, or the reason why it is not measured."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "rows.json"), Path(folder, "log.txt")
        command = [sys.executable, __file__, "--part", name, "--device", device, "--minutes", str(seconds / 60)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--results", str(file)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return f"stopped after {seconds:.0f} s"
            finally:  # processes that it started, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode == 0:
            return json.loads(file.read_text("utf-8"))
        lines = log.read_text("utf-8", "replace").split("\n")
        return [f"exit code {process.returncode}", *filter(None, map(str.strip, lines))][-1]


def measure_parts(names: Sequence[str], device: str, minutes: float, path: Path) -> None:
    """Measure the parts that the file does not have, and write it after each."""
    end = time.monotonic() + 60 * minutes
    content: dict[str, Any] = {"benchmark": "on_gpu", "rows": [], "not measured": {}}
    content |= json.loads(path.read_text("utf-8")) if path.is_file() else {}
    reasons = content["not measured"]
    about = {"device": torch.cuda.get_device_name() if device == "cuda" else device, "torch": torch.__version__}
    for name in names:
        part, left = PARTS[name], end - time.monotonic()
        if not part.repeats and any(line["part"] == name for line in content["rows"]):
            continue
        found: Rows | str = f"{max(left, 0):.0f} s were left, {part.seconds:.0f} s are needed"
        if left >= part.seconds:
            found = run_part(name, device, left)
        elif name in reasons:
            found = reasons[name]  # of an earlier call, which tried it
        print(f"{name}: {'measured' if isinstance(found, list) else found}", flush=True)
        if isinstance(found, str):
            reasons[name] = found
        else:
            reasons.pop(name, None)
            rows = [{"part": name, **line, "what": f"{name}: {line['what']}", **about} for line in found]
            content["rows"] = [line for line in content["rows"] if line["part"] != name] + rows
            for line in rows:
                print(f"  {line['what']}  {line['value']:.4g}  {line.get('bound', '')}", flush=True)
        write_text(path, json.dumps(content | about, indent=2) + "\n")


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14, help="time limit (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--device", choices=["cuda", PRETEND], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS / "on_gpu.json", help="file of the rows")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device pretend is a dry run.")
    if args.device == PRETEND:
        if args.results == RESULTS / "on_gpu.json":
            parser.error("a dry run needs --results, so that its rows are not taken for those of a GPU.")
        sys.path.insert(0, str(ROOT / "tests" / "devices"))
        importlib.import_module(PRETEND)  # registers the device
    if args.part:
        rows = PARTS[args.part].measure(args.device, args.minutes)
        args.results.write_text(json.dumps(rows), "utf-8")
    else:
        measure_parts(args.only, args.device, args.minutes, args.results)


if __name__ == "__main__":
    main()
