"""The report as one HTML page that opens offline: everything is inside it, everything foreign is escaped."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from pathlib import Path

_WORDS = ("mode", "gives up", "seeds", "why", "command line", "folder")

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f23; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; white-space: nowrap; border-bottom: 1px solid #d0d7de; text-align: left; }
th { border-bottom: 2px solid #57606a; }
.number { text-align: right; white-space: normal; }
tr.failed td:first-child { border-left: 4px solid #b3261e; }
tr.failed td { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption, .note { color: #57606a; font-size: 14px; }
@media print { body { max-width: none; } figure, table { break-inside: avoid; } }
"""


def text(value: str) -> str:
    """Text as HTML."""
    return html.escape(value)


def table(head: list[str], rows: list[list[str]], row_class: str = "") -> str:
    """A table; columns of figures are set to the right."""
    kinds = ["" if name in _WORDS else "number" for name in head]
    heads = (f'<th class="{kind}">{text(cell)}</th>' for kind, cell in zip(kinds, head, strict=True))
    lines = ["<div class=table><table><thead><tr>", *heads, "</tr></thead><tbody>"]
    for row in rows:
        whole = [_whole(cell) if kind else cell for kind, cell in zip(kinds, row, strict=True)]
        cells = (f'<td class="{kind}">{text(cell)}</td>' for kind, cell in zip(kinds, whole, strict=True))
        lines += [f'<tr class="{row_class}">', *cells, "</tr>"]
    return "".join([*lines, "</tbody></table></div>"])


def _whole(cell: str) -> str:
    """A figure whose brackets a narrow window does not break: "6.51 (6.49 to 6.53)", "250 (240-300)"."""
    return re.sub(r"(?<=\d)-(?=\d)", "\u2011", cell.replace(" to ", "\u00a0to\u00a0"))


def picture(path: Path, alt: str, caption: str) -> str:
    """A PNG inside the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt, quote=True)}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def notes(lines: Iterable[str]) -> str:
    """Remarks, a paragraph each."""
    return "".join(f"<p class=note>{text(line)}</p>" for line in lines)


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body><h1>{text(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
