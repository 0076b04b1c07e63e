"""Hook of mkdocs: the site gets llms.txt, by which language models find its pages, and the pages as Markdown."""

import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_sections: dict[str, list[Page]] = {}


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the pages of the navigation by their section."""
    _sections.clear()
    for item in nav.items:
        pages = item.children if isinstance(item, Section) else [item]
        section = str(item.title) if isinstance(item, Section) else "Start"
        _sections.setdefault(section, []).extend(page for page in pages if isinstance(page, Page))
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, with the first sentence of each page, and copy the pages that it links."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, pages in _sections.items():
        lines += ["", f"## {section}", ""]
        for page in pages:
            source = Path(str(page.file.abs_src_path))
            lines.append(f"- [{page.title}]({page.file.src_uri}): {_first_sentence(source.read_text())}")
            shutil.copy(source, site / page.file.src_uri)
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(text: str) -> str:
    """Return a page's first sentence in a paragraph, without links and on one line."""
    blocks = (block.strip() for block in re.split(r"\n\s*\n", text))
    prose = next(block for block in blocks if re.match(r"[A-Z`]", block))
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.!?:])\s", words)[0].rstrip(":")
