"""Lets the pages of docs/ be read in two places, where the code is hosted and as a site (a hook of mkdocs).

Pages link to files of the project by where these lie, as in ``../drafters/eagle.py``. Where the code is hosted such
links work as they are. A site holds what lies in docs/ alone; so what is linked is added to it under ``project/``: a
picture as it is, a text as a page that shows it, a folder as a page that lists it and leads to its texts. A link to
what is not there is left for mkdocs to complain of.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parent.parent
DOCS = "docs"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")  # where it leads, without an anchor
PICTURES = (".png", ".svg", ".pdf")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".toml": "toml"}


def outside(page: str, link: str) -> Path | None:
    """What a ``link`` of ``page``, a path in docs/, leads to, relative to the project; None if it lies in docs/, or
    nowhere.

    >>> outside("drafters/eagle.md", "../../drafters/eagle.py")
    PosixPath('drafters/eagle.py')
    """
    found = Path(posixpath.normpath(posixpath.join(DOCS, posixpath.dirname(page), link)))
    if found.parts[0] in (DOCS, "..") or not (PROJECT / found).exists():
        return None
    return found


def place(path: Path) -> str:
    """Where the site has a file or folder of the project."""
    return f"project/{path.as_posix()}{'' if path.suffix in (*PICTURES, '.md') else '.md'}"


def texts(path: Path) -> list[Path]:
    """What a folder has that can be shown, not what its folders have; of a file nothing."""
    inside = sorted((PROJECT / path).iterdir()) if (PROJECT / path).is_dir() else []
    return [path / text.name for text in inside if text.suffix in (*LANGUAGES, ".md") and not text.name.startswith("_")]


def shown(path: Path) -> str:
    """The page of a text, or of a folder."""
    head = f"---\ntitle: {path.as_posix()}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
    if (PROJECT / path).is_dir():
        names = sorted(child.name for child in (PROJECT / path).iterdir() if not child.name.startswith(("_", ".")))
        led = {text.name: posixpath.relpath(place(text), posixpath.dirname(place(path))) for text in texts(path)}
        return head + "\n".join(f"- [`{name}`]({led[name]})" if name in led else f"- `{name}`" for name in names)
    text = (PROJECT / path).read_text(encoding="utf-8")
    return head + (text if path.suffix == ".md" else f"``````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n``````\n")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is linked."""
    linked = {path for file in files.documentation_pages() for path in _linked(file)}
    for path in sorted(linked.union(*map(texts, linked))):
        given = {"abs_src_path": str(PROJECT / path)} if path.suffix in PICTURES else {"content": shown(path)}
        files.append(File.generated(config, place(path), **given, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links there."""
    here = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        path = outside(here, link[1])
        return link[1] if path is None else posixpath.relpath(place(path), posixpath.dirname(here) or ".")

    return LINK.sub(led, markdown)


def _linked(file: File) -> Iterator[Path]:
    for link in LINK.findall(file.content_string):
        path = outside(file.src_uri, link)
        if path is not None:
            yield path
