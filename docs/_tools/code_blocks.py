"""Check the code blocks of pages: python runs, and commands are parsed by the script that they call.

    python docs/_tools/code_blocks.py [pages]

The pages are checked in one process per core. The python blocks of a page run in one namespace and in a temporary
folder, without network. A `text` block after a python block is its output, where `...` stands for any text. A python
block whose first line is a comment with the name of a file, such as `# my_head.py`, is also a module for `--import`.
One whose first line is `# pip install` with packages is skipped, with its output, if one of them is not installed. A
`bash` block is not run: each command is passed to the argument parser of its job or script, which also reads the YAML
files; make targets and extras of pip must exist.

The front matter of a page may have `requires`, modules without which the page is not checked; `not_run`, why the output
of its commands is not checked, which a `text` block after a `bash` block needs; `files`, a mapping of names to files or
folders of the repository that are copied to the temporary folder; and `replace`, a mapping of texts in the blocks to
what they are replaced by, such as names of large models by those of small ones.
"""

import argparse
import contextlib
import doctest
import fnmatch
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from hf_sphere.commands import JOBS
from hf_sphere.utils.configs import config_names

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ("analogy", "evaluate_modules")
"""Folders that are present in the temporary folder, as in the root of the repository."""
LANGUAGES = ("python", "bash", "shell", "text", "yaml", "bibtex")


class BlockError(Exception):
    """A block failed; the message names the page and the block."""


class MissingModuleError(Exception):
    """A module that a page requires is not installed."""


class _ParsedError(Exception):
    """Raised in place of what a script does after it has parsed its arguments."""


@dataclass(frozen=True)
class Block:
    """A code block of a page: its number from 1, the number of its first line, language and code."""

    number: int
    line: int
    language: str
    code: str


def read_page(page: Path) -> tuple[dict[str, Any], list[Block]]:
    """Return the front matter of a page and its blocks."""
    text = page.read_text(encoding="utf-8")
    front = re.match(r"---\n(.*?)^---\n", text, re.DOTALL | re.MULTILINE)
    blocks = [
        Block(number, text.count("\n", 0, found.start(3)) + 1, found[2], textwrap.dedent(found[3]))
        for number, found in enumerate(FENCE.finditer(text), 1)
    ]
    return yaml.safe_load(front[1]) if front else {}, blocks


def check_page(page: Path) -> int:
    """Check the blocks of a page and return their number.

    Raises:
        BlockError: If a block fails, has another language than `LANGUAGES`, or another output than the page shows.
        MissingModuleError: If a module that the page requires is not installed.
    """
    front, blocks = read_page(page)
    missing = [name for name in front.get("requires", []) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingModuleError(f"{page}: not checked, needs {', '.join(missing)}")
    printed, is_output_of_commands, is_skipped = None, False, False
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _modules_of(folder):
        for name in MODULES:
            os.symlink(ROOT / name, name)
        for name, source in front.get("files", {}).items():
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, Path(folder, name))
        for block in blocks:
            code = block.code
            is_skipped = lacks_packages(code) or (is_skipped and block.language == "text")
            if is_skipped:
                continue
            for old, new in front.get("replace", {}).items():
                code = code.replace(old, new)
            try:
                if block.language not in LANGUAGES:
                    raise ValueError(f"the language is {block.language!r}; allowed are {', '.join(LANGUAGES)}")
                if block.language == "text" and printed is not None:
                    compare(code, printed)
                if block.language == "text" and is_output_of_commands and not front.get("not_run"):
                    raise ValueError("the front matter needs `not_run`: why the output of commands is not checked")
                if block.language == "yaml":
                    yaml.safe_load(code)
                if block.language == "python" and (module := re.match(r"# (\w+\.py)\n", code)):
                    Path(module[1]).write_text(code)
                if block.language in ("bash", "shell"):
                    check_commands(code)
                printed = run_python(code, page, block.line, names) if block.language == "python" else None
                is_output_of_commands = block.language in ("bash", "shell")
            except (Exception, SystemExit) as error:
                text = f"{page}, block {block.number} (line {block.line}): {type(error).__name__}: {error}"
                raise BlockError(text) from error
    return len(blocks)


def lacks_packages(code: str) -> bool:
    """Whether code begins with a comment that names packages to install, and one of them is not."""
    first = re.match(r"# pip install (.+)\n", code)
    names = re.sub(r"\[.*?\]", "", first[1]).split() if first else []
    try:
        return not all(importlib.metadata.version(name) for name in names)
    except importlib.metadata.PackageNotFoundError:
        return True


@contextlib.contextmanager
def _modules_of(folder: str) -> Iterator[None]:
    """Let the modules in a folder be imported, until the end of a page."""
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        yield
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    for name in [name for name, file in files.items() if file.startswith(folder)]:
        del sys.modules[name]


def run_python(code: str, page: Path, line: int, names: dict[str, Any]) -> str:
    """Run code with the line numbers of the page and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\n" * (line - 1) + code, page, "exec"), names)
    return printed.getvalue()


def compare(expected: str, printed: str) -> None:
    """Raise a ValueError if the output differs from that of the page."""
    if not doctest.OutputChecker().check_output(expected, printed, OUTPUT):
        raise ValueError(f"the page shows\n{expected}\nbut the code above prints\n{printed}")


def check_commands(code: str) -> None:
    """Parse the commands of a block, without running them.

    Raises:
        ValueError: If a command is of an unknown kind, or its target or extra does not exist.
        SystemExit: If a parser rejects the arguments.
    """
    for words in (shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()):
        if words[:1] == ["make"]:
            targets = [word for word in words[1:] if "=" not in word]
            makefile = (ROOT / "Makefile").read_text()
            if not all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets):
                raise ValueError(f"the Makefile has no such target: {shlex.join(words)}")
        elif words[:2] == ["pip", "install"]:
            check_extras(words)
        elif words[:1] == ["hf-sphere"]:
            check_job(words[1:])
        elif words and words[0] in ("python", "accelerate", "torchrun"):
            script, argv = script_of(words)
            if script.startswith("hf_sphere.commands."):
                check_job([script.rpartition(".")[2], *argv])
            else:
                check_script(script, argv)
        elif words and words[0] not in ("hf", "cd", "source"):
            raise ValueError(f"unknown kind of command: {shlex.join(words)}")


def check_extras(words: list[str]) -> None:
    """Raise a ValueError if an extra of a pip command does not exist."""
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = {extra for found in re.findall(r"\[(.*?)\]", " ".join(words)) for extra in found.split(",")}
    if extras - set(known):
        raise ValueError(f"unknown extras: {', '.join(sorted(extras - set(known)))}")


def script_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the script of a command and its arguments; those of the launcher are parsed."""
    if words[0] == "python":
        words = [word for word in words if word != "-m"]
        return words[1], words[2:]
    if words[0] == "torchrun":
        from torch.distributed.run import parse_args

        launch = parse_args(words[1:])
    else:
        from accelerate.commands.launch import launch_command_parser

        launch = launch_command_parser().parse_args(words[2:])
    return launch.training_script, launch.training_script_args


def check_job(words: list[str]) -> None:
    """Call the `main` of a job of `hf-sphere` until it has parsed its arguments; without arguments, jobs print."""
    if not words or words == ["--version"]:
        return
    job, *argv = words
    if job not in JOBS:
        raise ValueError(f"there is no job {job}")
    module = importlib.import_module(f"hf_sphere.commands.{job}")
    _call_until_parsed(f"hf-sphere {job}", argv, lambda argv: module.main(argv))


def check_script(script: str, argv: list[str]) -> None:
    """Call the `main` of a script until it has parsed its arguments."""
    path = ROOT / script
    if not path.is_file():
        raise ValueError(f"there is no script {script}")
    if job := re.search(r'run_job\("([\w-]+)"\)', path.read_text()):  # it starts a job of hf-sphere
        return check_job([job[1], *argv])

    def main(argv: list[str]) -> None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
            spec.loader.exec_module(module)
        with mock.patch.object(sys, "argv", [script, *argv]):
            module.main()

    _call_until_parsed(script, argv, main)


def _call_until_parsed(name: str, argv: list[str], main: Callable[[list[str]], None]) -> None:
    argv = [fill_in(word) for word in argv]
    with _stop_after_parsing(), _folder_of_runs(argv), contextlib.redirect_stderr(io.StringIO()) as messages:
        try:
            main(argv)
        except _ParsedError:
            return
        except SystemExit as stop:
            raise ValueError(messages.getvalue().strip()) from stop
    raise ValueError(f"{name} parsed no arguments")


@contextlib.contextmanager
def _folder_of_runs(argv: list[str]) -> Iterator[None]:
    """Work in a folder with the recipes, and with the outputs of earlier runs, empty, that the arguments name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(ROOT / "recipes", "recipes")
        for word in argv:
            if word.startswith("outputs/"):
                Path(word).mkdir(parents=True, exist_ok=True)
        yield


def fill_in(word: str) -> str:
    """Replace `<run>` in the name of a configuration, such as `vmf/<run>`, by the first configuration that matches."""
    pattern = re.sub(r"<\w+>", "*", word)
    matches = fnmatch.filter(config_names(), pattern) if pattern != word and "/" in word else []
    return matches[0] if matches else word


@contextlib.contextmanager
def _stop_after_parsing() -> Iterator[None]:
    """Let both ways to parse arguments, that of the recipes and argparse's, raise `_ParsedError` when they succeed."""
    from hf_sphere.utils import arguments

    known = argparse.ArgumentParser.parse_known_args

    def stopping(parse: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> None:
            with mock.patch.object(argparse.ArgumentParser, "parse_known_args", known):  # which the others call
                raise _ParsedError(parse(*args, **kwargs))

        return wrapper

    stop = stopping(arguments.parse_arguments)
    modules = [importlib.import_module(f"hf_sphere.commands.{name}") for name in (*JOBS, "command_line")]
    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(arguments, "parse_arguments", stop),
        mock.patch.object(arguments, "check_source"),  # files that other commands write
        mock.patch.object(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args)),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stopping(known)),
    ):
        for module in modules:
            if hasattr(module, "parse_arguments"):
                stack.enter_context(mock.patch.object(module, "parse_arguments", stop))
        yield


def pages() -> list[Path]:
    """Return the pages for users in the root, the pages of the site that are files, and the READMEs of the metrics."""
    places = ("README.md", "AGENTS.md", "docs/**/*.md", "docs/llms.txt", "evaluate_modules/*/README.md")
    return sorted(page for place in places for page in ROOT.glob(place))


def main() -> None:
    """Check the given pages, or all."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    given = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    workers = min(len(given), os.cpu_count() or 1)
    if workers == 1:
        failed = sum(not succeeds(page) for page in given)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        largest_first = sorted(given, key=lambda page: page.stat().st_size, reverse=True)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            failed = sum(not success for success in pool.map(succeeds, largest_first))
    sys.exit(f"{failed} of {len(given)} pages have a block that fails." if failed else 0)


def succeeds(page: Path) -> bool:
    """Check a page, print its number of blocks or what failed, and return whether none did."""
    try:
        print(f"{os.path.relpath(page, ROOT)}: {check_page(page)} blocks", flush=True)
    except MissingModuleError as missing:
        print(missing, flush=True)
    except BlockError as error:
        print(error, file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
