"""Hooks of MkDocs: links of pages to source files, and roles of docstrings."""

import re
from pathlib import Path
from typing import Any

_ROLE = re.compile(r":[a-z]+:<code>~?([^<]*)</code>")
_SOURCE = re.compile(r"\]\((?:\.\./)+((?:hwprofiles|planner|executor|ullage)/[\w/]+\.py)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the source files that pages link to, as plain text. They are outside the folder of the pages."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests read this file without MkDocs

    root = Path(config.config_file_path).parent
    linked = {path for page in files.documentation_pages() for path in _SOURCE.findall(page.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.txt", content=(root / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to source files lead to the copies of :func:`on_files`."""
    up = "../" * page.file.src_uri.count("/")
    return _SOURCE.sub(rf"]({up}source/\1.txt)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show code without its Sphinx role, which Markdown does not know, and by its last name."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
