"""Hooks of MkDocs: API pages from the public names, pages of the notebooks, and formulas as MathML."""

import base64
import html
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import hf_sphere

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
ENTRY = re.compile(
    r'(<h2 id="[^"]*" class="doc doc-heading">.*?</h2>)(.*?)(?=<div class="doc doc-object doc-\w+">\s*<h2|\Z)', re.S
)
LINES, WIDEST = 3, 30
"""Lines that the longest cell of a column of a table may have, and the widest column to ask for, in characters."""
WITHOUT_PAGE = {"registration", "commands"}
"""What is not imported by users."""

INHERITED = {"distributions", "losses", "models", "search"}
"""Packages whose classes have methods for users in bases that are not public, which have no entry of their own."""

API = """# API reference

Every public name, by package. The pages are generated from the docstrings.

| package | contents |
|---|---|
"""

NOTEBOOKS = """# Notebooks

Jupyter notebooks with their outputs. They need no download, and are in the folder `notebooks` of the repository;
`make notebooks` runs them.

"""

BOOST = {"api/": 0.2, "results/": 0.4, "results.md": 0.4, "changelog.md": 0.1}
BOOST |= {"notebooks/index": 4, "notebooks/gallery": 1, "notebooks/": 0.4}
"""Factors of the scores in the search of the site, by the start of the path: pages that say what to do come first."""


def on_config(config: Any) -> Any:
    """Add the generated pages to the navigation: notebooks after the first pages, the API after the reference."""
    api = [{f"hf_sphere.{package}": f"api/{package}.md"} for package in packages()]
    reference = next(part["Reference"] for part in config["nav"] if "Reference" in part)
    reference.append({"API": ["api/index.md", *api]})
    start = next(part["Get started"] for part in config["nav"] if "Get started" in part)
    start.append({"Notebooks": ["notebooks/index.md", *(f"notebooks/{path.stem}.md" for path in notebooks())]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {f"api/{package}.md": api_page(package) for package in packages()}
    rows = [f"| [hf_sphere.{package}]({package}.md) | {first_line(package)} |" for package in packages()]
    pages["api/index.md"] = API + "\n".join(rows) + "\n"
    found: dict[str, str | bytes] = dict(pages)
    listed = []
    for path in notebooks():
        text, figures = notebook_page(path)
        listed.append(f"- [{text.partition(chr(10))[0].removeprefix('# ')}]({path.stem}.md)")
        found |= {f"notebooks/{path.stem}.md": text} | {f"notebooks/{name}": png for name, png in figures.items()}
        found[f"notebooks/{path.name}"] = path.read_bytes()
    found["notebooks/index.md"] = NOTEBOOKS + "\n".join(listed) + "\n"
    for name, content in found.items():
        files.append(File.generated(config, name, content=content))
    return files


def notebooks() -> list[Path]:
    """Return the notebooks of the repository."""
    return sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, and the pictures among its outputs by name."""
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\((\w+)\.ipynb\)", r"(\1.md)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(figures) + 1}.png"
                figures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    heading, below = parts[0].split("\n", 1)
    where = f"*The notebook [{path.name}]({path.name}), to download, with its outputs.*"
    shown = ['<div class="notebook" markdown>', below.strip(), where, *parts[1:], "</div>"]
    return "\n\n".join([heading, *shown]) + "\n", figures


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace formulas by MathML, which needs no script, size the columns of tables, and fold entries of the API."""
    content = FORMULA.sub(lambda found: mathml(found[3], display=found[2] == "["), content)
    content = re.sub(r"<table>.*?</table>", lambda found: size_columns(found[0]), content, flags=re.DOTALL)
    return ENTRY.sub(fold, content) if page.file.src_uri.startswith("api/") else content


def size_columns(table: str) -> str:
    """Give the columns of a table a least width, with which no cell has many lines, however narrow the window is."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("</tr>")]
    texts = [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in rows]
    widths = iter(
        [min(max(map(len, column)) // LINES, WIDEST) for column in itertools.zip_longest(*texts, fillvalue="")]
    )
    return re.sub("<th(?= |>)", lambda _: f'<th style="min-width: {next(widths)}ch"', table)


def fold(entry: re.Match[str]) -> str:
    """Fold the entry of a name below its heading and the first paragraph of its docstring."""
    first = re.search(r'(<div class="doc doc-contents first">\s*)<p>(.*?)</p>', entry[2], re.DOTALL)
    summary, rest = (first[2], entry[2].replace(first[0], first[1], 1)) if first else ("Value", entry[2])
    return f"{entry[1]}<details><summary>{summary}</summary>{rest.rstrip().removesuffix('</div>')}</details></div>"


def on_post_build(config: Any) -> None:
    """Add the examples, and let `llms.txt`, whose links are those of the repository, link to the pages of the site."""
    Path(config["site_dir"], "examples").mkdir(exist_ok=True)
    for example in Path(config["docs_dir"]).parent.glob("examples/*.py"):
        shutil.copy(example, Path(config["site_dir"], "examples"))
    path = Path(config["site_dir"], "llms.txt")
    path.write_text(path.read_text("utf-8").replace(".md)", ".html)"), "utf-8")


def mathml(formula: str, *, display: bool) -> str:
    """Convert a formula to MathML."""
    return convert(html.unescape(formula).strip(), display="block" if display else "inline")


def packages() -> list[str]:
    """Return the packages and modules of the library that have public names."""
    names = {module.name for module in pkgutil.iter_modules(hf_sphere.__path__)}
    return sorted(name for name in names - WITHOUT_PAGE if public_names(name))


def public_names(package: str) -> list[str]:
    """Return the public names of a package: its `__all__`, or else what is defined in it."""
    module = importlib.import_module(f"hf_sphere.{package}")
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and str(getattr(value, "__module__", "")).startswith(module.__name__)
    ]
    return sorted((name for name in getattr(module, "__all__", own) if not name.startswith("_")), key=str.lower)


def api_page(package: str) -> str:
    """Write the page of a package: its docstring, and an entry per public name."""
    module = importlib.import_module(f"hf_sphere.{package}")
    entries = [identifier(module, name) for name in public_names(package)]
    made = [f"`{name}`" for name, entry in zip(public_names(package), entries, strict=True) if entry is None]
    parts = [f"# hf_sphere.{package}", inspect.getdoc(module) or ""]
    if made:
        parts.append("Classes with the interface of their counterparts in transformers: " + ", ".join(made) + ".")
    options = (
        "\n    options: {inherited_members: true, filters: ['!^_', '!^post_init$']}" if package in INHERITED else ""
    )
    return "\n\n".join([*parts, *(f"::: {entry}{options}" for entry in entries if entry), ""])


def identifier(module: Any, name: str) -> str | None:
    """Return the path of the source of a public name; None for classes that are made from a table at run time."""
    value = getattr(module, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"{module.__name__}.{name}"
    try:
        inspect.getsource(value)
    except (OSError, TypeError):
        return None
    return f"{value.__module__}.{value.__qualname__}"


def first_line(package: str) -> str:
    """First line of the docstring of a package."""
    return (importlib.import_module(f"hf_sphere.{package}").__doc__ or "").partition("\n")[0]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Set the factor of a page in the search."""
    page.meta["search"] = {"boost": next((BOOST[path] for path in BOOST if page.file.src_uri.startswith(path)), 1)}


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Link the examples that a page names to their files, for readers without the repository."""
    link = rf'<a href="{"../" * page.url.count("/")}examples/\1">examples/\1</a>'
    return re.sub(r"(?<=[>\s])examples/(\w+\.py)(?=[<\s])", link, output)
