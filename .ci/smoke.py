"""Use an installed hf_sphere from outside its repository: `smoke.py FOLDER [EXTRAS]`.

Runs each job of `hf-sphere` on the bundled digits and on data made from them, first without extras: a job that needs
one must say so in a sentence. With the requirements of the extras as the second argument, pip then installs these,
those jobs run again, and the blocks of the README run. Each command is printed with its seconds. A command fails by
its status, a traceback, a warning of hf_sphere, or a mention of files that are only in the repository.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path += [str(REPOSITORY / "docs" / "_tools"), str(REPOSITORY / "tests" / "hub")]
from code_blocks import compare, read_page, run_python  # noqa: E402
from hub_server import Hub  # noqa: E402

SECONDS = 360
"""Allowed after the installations, on two cores."""
PORT = 7999
MODEL = "hf-sphere train classification --config digits-lenet5-spherized --num_train_epochs 2 --output_dir model"
MODEL += " --rejection_fraction 0.1"
CHAINS = f"""
hf-sphere
hf-sphere --version
hf-sphere check
hf-sphere configs
hf-sphere configs spherization/digits-lenet5-spherized
hf-sphere place --num_classes 10 --dim 3
hf-sphere prepare class_split --source published --output prepared

hf-sphere extract --model_name_or_path model --dataset_name digits --output_dir embeddings
accelerate launch --cpu --num_processes 2 -m hf_sphere.commands.main extract --model_name_or_path model \
    --dataset_name photos --output_dir photo-embeddings
hf-sphere evaluate --embeddings embeddings
hf-sphere visualize --embeddings embeddings
hf-sphere report embeddings --group_column label --figure report.png

hf-sphere index --model_name_or_path model --images photos --output_dir index
hf-sphere search --index index --query bird.jpg --contact_sheet found.png
hf-sphere page --index index --port {PORT}
hf-sphere duplicates photos --label_column label --table duplicates.csv

hf-sphere train masked-lm --model_name_or_path tiny-bert --from_scratch --spherized --dataset_name texts \
    --max_seq_length 16 --num_train_epochs 1 --output_dir masked-lm
hf-sphere analogies --model_name_or_path masked-lm --dataset_name questions --benchmarks animals \
    --scorings perplexity embedding_similarity --output_dir analogies

accelerate launch --cpu --num_processes 2 -m hf_sphere.commands.train classification --config digits-lenet5-plain \
    --num_train_epochs 1 --output_dir two-processes
hf-sphere train retrieval --dataset_name photos --backbone lenet5 --image_size 28 --head cosine --train_classes 50 \
    --num_train_epochs 1 --output_dir retrieval
hf-sphere train regression --config digits-regression-slant --num_train_epochs 1 --output_dir regression

hf-sphere train joint --config digits-joint-slant --num_train_epochs 1 --output_dir joint
hf-sphere train few-shot --config digits-linear-1shot-plain-cosine --num_train_epochs 1 --output_dir few-shot
hf-sphere predict --model_name_or_path model --images photos --output predictions.csv
hf-sphere reject --model_name_or_path model --images digits --unknown two_clusters --output_dir model-2
hf-sphere publish model --repo_id digits

hf-sphere index --model_name_or_path model --images photos --kind hnsw --output_dir approximate-index
hf-sphere export --model_name_or_path model --output model.onnx
hf-sphere projections --model_name_or_path model --output_dir projections
hf-sphere reinitialize --model_name_or_path model --num_random 1 --output_dir reinitialized
hf-sphere compare digits --train_split train[:300] --settings arms.yaml --image_size 28 --seeds 2 --num_settings 1 \
    --num_train_epochs 1 --output_dir comparison
"""
"""Chains of commands that can run side by side; the commands of a chain follow each other."""
WRONG = re.compile(
    r"Traceback \(most recent|hf_sphere/\S+\.py:\d+: \w*Warning|^(WARNING|ERROR) hf_sphere"
    r"(?!\S*: Fine-tuning made )"  # worse than the frozen backbone, which the tiny one of the README's command may be
    rf"|recipes/|evaluate_modules|analogy/|{re.escape(str(REPOSITORY))}",
    re.MULTILINE,
)
EXTRA = re.compile(r"pip install '?hf_sphere\[")
failures: list[str] = []
refused: list[str] = []
"""Commands that name an extra to install."""


def main() -> None:
    """Run everything in the folder of the first argument."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, the shell has it ignored
    sys.path[:] = [path for path in sys.path if not Path(path).resolve().is_relative_to(REPOSITORY)]
    Path(sys.argv[1]).mkdir()
    os.chdir(sys.argv[1])
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("home").resolve()), "PYTHONWARNINGS": "default"}
    os.environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    start = time.perf_counter()
    check_installed()
    make_data()
    report(start, "check the installed package, and make data")
    helps = [f"hf-sphere {name} --help" for name in names_of_jobs([MODEL, *itertools.chain(*chains())])]
    run_chain([MODEL], has_extras=False)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda chain: run_chain(chain, has_extras=False), [*chains(), helps]))
    seconds = time.perf_counter() - start
    if len(sys.argv) > 2:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", sys.argv[2]], check=True)
        start = time.perf_counter()
        commands = [
            f"{c}{' --overwrite_output_dir' * (c.split()[1] not in ('page', 'export', 'report'))}" for c in refused
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda command: run_chain([command], has_extras=True), commands))
        run_readme()
        seconds += time.perf_counter() - start
    print(f"{seconds:6.1f} s in all")
    if seconds > SECONDS:
        failures.append(f"{seconds:.0f} s are more than {SECONDS}")
    sys.exit("\n".join(["Failed:", *failures]) if failures else 0)


def check_installed() -> None:
    """Check where the package is, its version, and that all its modules can be imported."""
    import importlib
    import importlib.metadata
    import pkgutil

    import hf_sphere

    installed = Path(hf_sphere.__file__).resolve().parent
    if installed.is_relative_to(REPOSITORY) or any(Path(path).resolve() == REPOSITORY for path in sys.path):
        sys.exit(f"{installed} or sys.path {sys.path} is in the repository; use an installed package.")
    version = importlib.metadata.version("hf_sphere")
    if version != hf_sphere.__version__:
        sys.exit(f"the package has version {version}, but hf_sphere.__version__ is {hf_sphere.__version__}.")
    for module in pkgutil.walk_packages(hf_sphere.__path__, "hf_sphere."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if not EXTRA.search(str(error)):
                raise


def chains() -> list[list[str]]:
    """Return the commands of each chain."""
    return [chain.replace("\\\n", "").splitlines() for chain in CHAINS.strip().split("\n\n")]


def names_of_jobs(commands: list[str]) -> list[str]:
    """Return the jobs and tasks; the commands must run each."""
    from hf_sphere.commands import JOBS
    from hf_sphere.commands.train import TASKS

    names = [*JOBS, *(f"train {task}" for task in TASKS)]
    missing = [name for name in names if not any(f"hf-sphere {name}" in command for command in commands)]
    if missing:
        failures.append(f"no command runs {', '.join(missing)}; add one to CHAINS")
    return names


def make_data() -> None:
    """Make folders of images from the digits, texts, questions, and small models under the names in the README."""
    import torch
    import transformers
    from datasets import Dataset

    from hf_sphere.data.sources import load_splits

    digits = load_splits("digits")["train"]
    for row in digits.select(range(600)):  # a class is a digit at one of six angles
        for angle in range(0, 360, 60) if row["label"] < 10 else ():
            folder = Path("photos", f"{row['label']}-{angle}")
            folder.mkdir(parents=True, exist_ok=True)
            if len(count := list(folder.iterdir())) < 6:
                row["image"].convert("RGB").resize((28, 28)).rotate(angle).save(folder / f"{len(count)}.png")
    digits[0]["image"].convert("RGB").resize((28, 28)).save("bird.jpg")
    arm = "{0}: {{head: {0}, backbone: lenet5, grid: {{learning_rate: [0.001]}}}}\n"
    Path("arms.yaml").write_text("".join(map(arm.format, ("softmax", "cosine"))))
    Path("published", "images").mkdir(parents=True)
    for number, split in enumerate(("train", "val", "test")):
        rows = digits.filter(lambda row, of=number: row["label"] // 3 == of).select(range(6))
        names = [f"{split}{index}.jpg" for index in range(6)]
        for name, row in zip(names, rows, strict=True):
            row["image"].save(Path("published", "images", name))
        lines = [f"{name},{row['label']}" for name, row in zip(names, rows, strict=True)]
        Path("published", f"{split}.csv").write_text("\n".join(["filename,label", *lines]))

    foods = {"cat": "milk", "dog": "bones", "bird": "seeds", "cow": "grass"}
    Path("texts").mkdir()
    for split in ("train", "test"):
        sentences = [f"the {animal} wants {food} and {food} is to {animal} ." for animal, food in foods.items()]
        Path("texts", f"{split}.txt").write_text("\n".join(sentences * 40))
    pairs = [list(pair) for pair in foods.items()]
    questions = {"stem": pairs[:3], "choice": [pairs[1:], pairs[2:], pairs[:2]], "answer": [0, 1, 0]}
    for split in ("validation", "test"):
        Dataset.from_dict(questions).to_parquet(f"questions/animals/{split}-00000-of-00001.parquet")
    words = sorted({word for sentence in sentences for word in sentence.split()} | set("?,as what"))
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(vocab_size=len(words) + 5, intermediate_size=32, **sizes)
    transformers.BertForMaskedLM(bert).save_pretrained("tiny-bert")
    transformers.BertTokenizer("vocab.txt", model_max_length=64).save_pretrained("tiny-bert")
    dino = transformers.Dinov2Config(image_size=28, mlp_ratio=2, **sizes)
    transformers.Dinov2Model(dino).save_pretrained("facebook/dinov2-small")
    processor = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    transformers.BitImageProcessor(**processor).save_pretrained("facebook/dinov2-small")


def run_chain(commands: list[str], *, has_extras: bool) -> None:
    """Run commands; a search page is stopped after a request."""
    for command in commands:
        start = time.perf_counter()
        words = shlex.split(command, comments=True)
        environment = os.environ | (stand_in() if words[1:2] == ["publish"] else {})
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        if words[1:2] == ["page"] and "--help" not in words:
            stop_page(process, int(words[words.index("--port") + 1]) if "--port" in words else 7860)
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        report(start, command, usage.ru_utime + usage.ru_stime)
        if EXTRA.search(output):
            refused.append(command)
        is_stopped = words[1:2] == ["page"] and process.returncode == 130
        if is_failure(output, 0 if is_stopped else process.returncode, has_extras=has_extras):
            failures.append(command)
            print(f"failed with status {process.returncode}:\n{output}")


def is_failure(output: str, status: int, *, has_extras: bool) -> bool:
    """Return whether a command failed, other than by a sentence that names an extra that is not installed."""
    needs_extra = EXTRA.search(output) is not None
    if has_extras and needs_extra:
        return True
    refuses = needs_extra and len(output.strip().splitlines()) <= 2
    return WRONG.search(output) is not None or (status != 0 and not refuses)


def stand_in() -> dict[str, str]:
    """Start a Hub on this machine, and return the environment of its clients."""
    hub = Hub("token")
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, **online}


def stop_page(process: subprocess.Popen, port: int) -> None:
    """Wait until a page answers a request, and press Ctrl-C."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/config").close()
            process.send_signal(signal.SIGINT)
            return
        except OSError:
            time.sleep(0.2)


def run_readme() -> None:
    """Run the blocks of the README in order; commands for a clone and installations are left out."""
    page = REPOSITORY / "README.md"
    front, blocks = read_page(page)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks:
        code, place = block.code, f"README.md, line {block.line}"
        for old, new in front.get("replace", {}).items():
            code = code.replace(old, new)
        for command in code.replace("\\\n", " ").splitlines() if block.language in ("bash", "shell") else ():
            if command.startswith(("hf-sphere", "accelerate")):
                run_chain([command], has_extras=True)
            else:
                print(f"         left out: {command}")
        try:
            if block.language == "text":
                compare(code, printed)
            if block.language == "python":
                start = time.perf_counter()
                printed = run_python(code, page, block.line, names)
                report(start, f"{place}, python")
        except (Exception, SystemExit) as error:
            failures.append(f"{place}: {type(error).__name__}: {error}")


def report(start: float, text: str, used: float | None = None) -> None:
    """Print the seconds since the start, and the processor seconds if they are known."""
    processor = "" if used is None else f"{used:.1f} s"
    print(f"{time.perf_counter() - start:6.1f} s {processor:>8}  {' '.join(text.split())}", flush=True)


if __name__ == "__main__":
    main()
