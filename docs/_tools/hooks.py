"""Hooks of MkDocs: API pages from the public names, recipe pages from their READMEs, and formulas as MathML."""

import html
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import hf_sphere

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
README = re.compile(r"\]\(\.\./((?:\.\./)*)recipes/configs/(\w+)/README\.md")
API = """# API reference

Every public name, by package. The pages are generated from the docstrings.

| package | contents |
|---|---|
"""


def on_config(config: Any) -> Any:
    """Add the generated pages to the navigation, before the results."""
    recipes = [{title: f"recipes/{system}.md"} for system, title in recipe_titles(root(config)).items()]
    api = [{f"hf_sphere.{package}": f"api/{package}.md"} for package in packages()]
    config["nav"][-1:-1] = [{"Recipes": recipes}, {"API": ["api/index.md", *api]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {f"recipes/{system}.md": recipe_page(root(config), system) for system in recipe_titles(root(config))}
    pages |= {f"api/{package}.md": api_page(package) for package in packages()}
    rows = [f"| [hf_sphere.{package}]({package}.md) | {first_line(package)} |" for package in packages()]
    pages["api/index.md"] = API + "\n".join(rows) + "\n"
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of a page by MathML, which browsers show without a script."""
    return FORMULA.sub(lambda found: mathml(found[3], display=found[2] == "["), content)


def mathml(formula: str, *, display: bool) -> str:
    """Convert a formula to MathML."""
    return convert(html.unescape(formula).strip(), display="block" if display else "inline")


def root(config: Any) -> Path:
    """Root of the repository."""
    return Path(config["config_file_path"]).parent


def packages() -> list[str]:
    """Return the packages and modules of the library that have public names."""
    names = [module.name for module in pkgutil.iter_modules(hf_sphere.__path__) if module.name != "registration"]
    return sorted(name for name in names if public_names(name))


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
    return "\n\n".join([*parts, *(f"::: {entry}" for entry in entries if entry), ""])


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


def recipe_titles(root: Path) -> dict[str, str]:
    """Return the titles of the READMEs of the configurations, by folder."""
    readmes = sorted((root / "recipes" / "configs").glob("*/README.md"))
    return {path.parent.name: path.read_text().partition("\n")[0].lstrip("# ") for path in readmes}


def recipe_page(root: Path, system: str) -> str:
    """Return the README of a folder of configurations, with its links as those of a page of the site."""
    folder = root / "recipes" / "configs" / system

    def replace(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(root / "docs"):
            return f"{image}[{text}](../{path.relative_to(root / 'docs')})"
        if path.name == "README.md":
            return f"[{text}]({path.parent.name}.md)"
        return f"{text} (`{path.relative_to(root)}`)"

    return LINK.sub(replace, (folder / "README.md").read_text())


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Link to the recipe pages in place of their READMEs."""
    return README.sub(r"](\1recipes/\2.md", markdown)
