"""The page: one self-contained HTML file.

Texts from files are escaped: by Jinja in the page, by ``tojson`` in its data, and by
:mod:`ullage.report.interactive` for plotly.js. A content security policy lets the browser run only the scripts with the
digests of this page, and load nothing.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from hwprofiles import __version__
from ullage.report.charts import Gantt, Part, Picture, Table
from ullage.report.interactive import figure, theme

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
    ids = [f"part{number}" for number in range(len(parts))]
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(own.joinpath("assets", "page.html").read_text(encoding="utf-8"))
    titles = list(dict.fromkeys(part.title for part in parts))
    return template.render(
        policy=f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        version=__version__,
        title=titles[0] if len(titles) == 1 else f"{len(parts)} side by side",
        css=_trusted(own.joinpath("assets", "page.css").read_text(encoding="utf-8")),
        scripts=[_trusted(script) for script in scripts],
        parts=[_part(part, part_id) for part, part_id in zip(parts, ids, strict=True)],
        overview=overview and _table(overview),
        themes={name: theme(dark=name == "dark") for name in ("light", "dark")},
        figures=[
            figure(picture) | {"id": f"{part_id}-chart-{picture.key}", "part": part_id}
            for part, part_id in zip(parts, ids, strict=True)
            for section in part.sections
            for picture in section.pictures
        ],
    )


def _trusted(text: str) -> Markup:
    """Mark text of Ullage or plotly as safe HTML."""
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return Markup(text)  # noqa: S704 - the text is not from a user's file


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _part(part: Part, part_id: str) -> Mapping[str, Any]:
    sections = [
        vars(section) | {"parts": [_shown(shown, part_id) for shown in section.parts]} for section in part.sections
    ]
    return vars(part) | {"id": part_id, "sections": sections}


def _shown(shown: Picture | Table, part_id: str) -> Mapping[str, Any]:
    if isinstance(shown, Table):
        return {"id": "", **_table(shown)}
    return {
        "id": f"{part_id}-chart-{shown.key}",
        "wide": isinstance(shown, Gantt) or not shown.half,
        "title": shown.title,
        "note": shown.note,
        "table": _table(shown.table),
    }


def _table(table: Table) -> Mapping[str, Any]:
    return vars(table) | {"words": table.words}
