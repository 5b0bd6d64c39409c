"""Plain-text tables for reports."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, the first one left-aligned, the others right-aligned.

    Floats get one decimal. Raises ValueError when a row has another number of cells than `headers`.
    """
    cells = [[_format_cell(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {row}")
    lines = [list(headers), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    formatted = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([formatted[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *formatted[1:]])


def _format_cell(cell: object) -> str:
    return f"{cell:.1f}" if isinstance(cell, float) else str(cell)
