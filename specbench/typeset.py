"""A document as Markdown and as LaTeX. What a cell says is decided in ``sheets``; here it is only written down."""

import re
from collections.abc import Iterable

from specbench.sheets import Cell, Document, Sheet
from specbench.tables import TEXT

PACKAGES = r"\usepackage{booktabs,graphicx}"

# what LaTeX takes for a command, and what its usual fonts lack
TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "–": r"\textendash{}",
    "…": r"\ldots{}",
    "†": r"\textsuperscript{\dag}",
    "‡": r"\textsuperscript{\ddag}",
}


def markdown(document: Document) -> str:
    """Its sheets one after the other, each with the ids of its runs below it."""
    return "\n".join(map(_markdown, document.sheets))


def _markdown(sheet: Sheet) -> str:
    lines = [
        f"{md(sheet.caption)}: {md(sheet.setting)}",
        "",
        _line(map(md, sheet.columns)),
        "|" + "|".join("---" if name in TEXT else "---:" for name in sheet.columns) + "|",
        *(_line(map(_md_cell, row)) for row in sheet.rows),
        "",
        *(f"- {md(note)}" for note in sheet.notes),
        f"- Runs {', '.join(sheet.ids)}.",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md_cell(cell: Cell) -> str:
    text = f"**{md(cell.text)}**" if cell.bold else md(cell.text)
    return f"{text} <small>{md(cell.limits)}</small>" if cell.limits else text


def md(text: str) -> str:
    """Words as they are, on one line, whatever Markdown would take them for.

    >>> md("a|b  <c>")
    'a\\\\|b \\\\<c>'
    """
    return re.sub(r"([\\|*<`])", r"\\\1", " ".join(text.split()))


def latex(document: Document) -> str:
    """Its sheets as floats to ``\\input``, as wide as the line at most; the ids of their runs are comments."""
    needs = f"% {PACKAGES} in the preamble. Written by scripts/make_tables.py; changes are lost.\n\n"
    labels = (f"tab:{document.name}-{number}" for number in range(1, len(document.sheets) + 1))
    return needs + "\n".join(map(_latex, document.sheets, labels))


def _latex(sheet: Sheet, label: str) -> str:
    aligned = "".join("l" if name in TEXT else "r" for name in sheet.columns)
    lines = [
        f"% runs {' '.join(sheet.ids)}",
        r"\begin{table}",
        r"\centering\small",
        f"\\caption{{{tex(sheet.caption)}: {tex(sheet.setting)}.}}",
        f"\\label{{{label}}}",
        r"\par\medskip",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        f"\\begin{{tabular}}{{{aligned}}}",
        r"\toprule",
        _row(map(tex, sheet.columns)),
        r"\midrule",
        *(_row(map(_tex_cell, row)) for row in sheet.rows),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\par\medskip\raggedright\footnotesize",
        *(tex(note) for note in sheet.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _tex_cell(cell: Cell) -> str:
    text = f"\\textbf{{{tex(cell.text)}}}" if cell.bold else tex(cell.text)
    return f"{text} {{\\tiny {tex(cell.limits)}}}" if cell.limits else text


def tex(text: str) -> str:
    """Words as they are, on one line, whatever LaTeX would take them for.

    >>> tex("small_lm · 95 %")
    'small\\\\_lm $\\\\cdot$ 95 \\\\%'
    """
    written = "".join(TEX.get(sign, sign) for sign in " ".join(text.split()))
    return re.sub("-(?=-)", "-{}", written)  # two hyphens would become one dash
