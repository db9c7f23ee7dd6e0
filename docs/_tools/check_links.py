"""Check the links of the built site: every file and anchor exists, and nothing is loaded from the network.

python docs/_tools/check_links.py build/site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str, str]] = []
        self.anchors = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the links and anchors of a tag."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append((tag, name, value))


def broken_links(site: Path) -> tuple[int, list[str]]:
    """Return the number of links of a site, and a line per link that leads nowhere or loads something from outside."""
    found = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken, count = [], 0
    for path, page in found.items():
        for tag, name, link in page.links:
            count += 1
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                if (tag, name) in LOADED and parts.scheme != "data":
                    broken.append(f"{path.relative_to(site.resolve())}: loads {link}")
                continue
            folder = site if parts.path.startswith("/") else path.parent  # 404.html has absolute links
            target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(site.resolve())}: no file {link}")
            elif target in found and unquote(parts.fragment) not in found[target].anchors:
                broken.append(f"{path.relative_to(site.resolve())}: no anchor {link}")
    return count, broken


def main() -> None:
    """Print the broken links and exit with 1 if there are any."""
    count, broken = broken_links(Path(sys.argv[1]))
    print("\n".join([*broken, f"{count} links checked, {len(broken)} broken."]))
    sys.exit(bool(broken) or not count)


if __name__ == "__main__":
    main()
