"""The page: one self-contained HTML file.

Texts from files are escaped: by Jinja in the page, by ``tojson`` in its data, and by
:mod:`ullage.report.interactive` for plotly.js. A content security policy lets the browser run only the scripts with the
digests of this page, and load nothing.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from hwprofiles import __version__
from ullage.report.charts import Part, Table
from ullage.report.interactive import THEMES
from ullage.report.parts import page_data, table_data

try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "a report needs plotly and jinja2; pip install 'ullage[report]'", name="plotly"
    ) from error


def render(parts: Sequence[Part], overview: Table | None = None) -> str:
    """Return the HTML of a report.

    Args:
        parts: the part about each file.
        overview: a table of all files side by side.
    """
    own = files("ullage.report")
    scripts = [get_plotlyjs(), own.joinpath("assets", "page.js").read_text(encoding="utf-8")]
    shown = [page_data(part, f"part{number}") for number, part in enumerate(parts)]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(own.joinpath("assets", "page.html").read_text(encoding="utf-8"))
    titles = list(dict.fromkeys(part.title for part in parts))
    return template.render(
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        version=__version__,
        title=titles[0] if len(titles) == 1 else f"{len(parts)} side by side",
        css=_trusted(own.joinpath("assets", "page.css").read_text(encoding="utf-8")),
        scripts=[_trusted(script) for script in scripts],
        parts=shown,
        overview=overview and table_data(overview),
        themes=THEMES,
        figures=[figure for part in shown for figure in part["figures"]],
    )


def _trusted(text: str) -> Markup:
    """Mark text of Ullage or plotly as safe HTML."""
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return Markup(text)  # noqa: S704 - the text is not from a user's file
