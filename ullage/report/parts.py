"""Parts of a report as data for a page: texts and tables, and the figures that the page's script draws."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ullage.report.charts import Chart, Part, Table
from ullage.report.interactive import figure


def page_data(part: Part, part_id: str = "part0") -> dict[str, Any]:
    """Return a part as data for JSON: texts, tables, and figures for the script of ``ullage.page_assets``.

    ``part_id`` is unique on its page.
    """
    sections = [
        vars(section) | {"parts": [_shown(shown, part_id) for shown in section.parts]} for section in part.sections
    ]
    figures = [
        figure(picture) | {"id": f"{part_id}-chart-{picture.key}", "part": part_id}
        for section in part.sections
        for picture in section.pictures
    ]
    facts = [dataclasses.asdict(fact) for fact in part.facts]
    return vars(part) | {"id": part_id, "facts": facts, "sections": sections, "figures": figures}


def _shown(shown: Chart | Table, part_id: str) -> Mapping[str, Any]:
    if isinstance(shown, Table):
        return {"id": "", **table_data(shown)}
    return {
        "id": f"{part_id}-chart-{shown.key}",
        "wide": not shown.half,
        "title": shown.title,
        "note": shown.note,
        "table": table_data(shown.table),
    }


def table_data(table: Table) -> dict[str, Any]:
    """Return a table as data for JSON, with which of its columns are text."""
    return vars(table) | {"words": table.words}
