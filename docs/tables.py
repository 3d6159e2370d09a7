"""Tables of the pages that are made from results in JSON files."""

from docutils import nodes


def table(head, rows, widths):
    """Returns a table of texts.

    Args:
        head: The titles of the columns.
        rows: The cells of each row.
        widths: The relative widths of the columns.
    """
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", _row(head))
    group += nodes.tbody("", *map(_row, rows))
    return nodes.table("", group)


def _row(cells):
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))
