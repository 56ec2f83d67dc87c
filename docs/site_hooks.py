"""A hook of MkDocs: docstrings name code with Sphinx' roles, which Markdown does not know."""

import re
from typing import Any

_ROLE = re.compile(r":[a-z]+:<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show code without its role, by its last name."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
