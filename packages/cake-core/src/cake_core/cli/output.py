"""Where a command's results go: aligned plain text, a rich table on a terminal, or one JSON document.

rich is imported for a terminal alone (not with ``--plain`` or ``--json``): it costs more than the rest of a command.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from .. import env

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import Task, TaskID
    from rich.text import Text

__all__ = ["Output", "Progress", "counted"]

# Colours of the words that stand in a status column.
_STYLES = {
    "ok": "green",
    "built": "green",
    "cached": "dim",
    "warning": "yellow",
    "differs": "red",
    "failed": "bold red",
    "problem": "bold red",
}
_GAP = 2
"""Blanks between two columns."""
_FOLDED = 12
"""The least width of a column whose text may continue on the next line."""


class Progress:
    """Progress of one long command: a bar on stderr when that is a terminal, otherwise only the ``log`` lines."""

    def __init__(self, bar: Bar | None, task: TaskID | None, stream: TextIO) -> None:
        self._bar, self._task, self._stream = bar, task, stream

    def log(self, line: str) -> None:
        """One line that stays: above the bar, or on the plain stream."""
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False)

    def update(self, status: str, *, done: int | None = None, total: int | None = None) -> None:
        """Show ``status`` beside the bar; without a terminal nothing is printed."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, status=status, completed=done, total=total)


class Output:
    """One command's output. ``json``: tables and lines are dropped and ``document`` prints; otherwise the reverse."""

    def __init__(self, *, json: bool = False, plain: bool = False) -> None:
        self.json = json
        self._rich_allowed = not json and not plain
        self._console: Console | None = None
        if self._rich_allowed and sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(no_color=env.no_color(), highlight=False)

    @property
    def on_terminal(self) -> bool:
        """Whether tables are drawn by rich."""
        return self._console is not None

    @property
    def width(self) -> int | None:
        """Columns of the terminal, None for plain text, whose lines are as long as they are."""
        return self._console.width if self._console is not None else None

    def line(self, text: str = "") -> None:
        """One line of text for people."""
        if self.json:
            return
        if self._console is None:
            print(text)
        else:
            # The terminal breaks a long line itself: a command or a path in it is copied whole.
            self._console.print(text, markup=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, fold: Collection[str] = ()) -> None:
        """Rows of cells under ``columns``; the words of a column named "status" are coloured on a terminal.

        Nothing is cut: on a narrow terminal the columns named in ``fold`` continue on the next line, and where that is
        not enough every row becomes a block of ``column  cell`` lines under its first cell.
        """
        if self.json:
            return
        if self._console is None:
            for line in _plain_table(columns, rows):
                print(line)
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        styled = [
            [
                Text(cell, _STYLES.get(cell, "") if name == "status" else "")
                for name, cell in zip(columns, row, strict=True)
            ]
            for row in rows
        ]
        least = [
            min(width, _FOLDED) if name in fold else width
            for name, width in zip(columns, _widths(columns, rows), strict=True)
        ]
        if sum(least) + _GAP * (len(least) - 1) > self._console.width:
            self._blocks(columns, styled)
            return
        # One blank of the gap is the cell's, the other the box's.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name, width in zip(columns, least, strict=True):
            table.add_column(name, min_width=width, no_wrap=name not in fold, overflow="fold")
        for row in styled:
            table.add_row(*row)
        self._console.print(table)

    def _blocks(self, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
        from rich.padding import Padding
        from rich.table import Table

        assert self._console is not None
        for head, *cells in rows:
            head.stylize("bold")
            self._console.print(head, soft_wrap=True)
            block = Table.grid(padding=(0, _GAP, 0, 0))
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for name, cell in zip(columns[1:], cells, strict=True):
                block.add_row(name, cell)
            self._console.print(Padding(block, (0, 0, 0, _GAP)))

    def document(self, data: Any) -> None:
        """The result as JSON, with ``--json`` alone."""
        if self.json:
            import json

            print(json.dumps(data, indent=2))

    def failure(self, error: BaseException) -> None:
        """``cake: reason`` on stderr, one line whatever the message holds; with ``--json`` also a document."""
        parts = [str(error) or type(error).__name__, *getattr(error, "__notes__", ())]
        text = "; ".join(" ".join(part.split()) for part in parts).removeprefix("cake: ")
        sys.stdout.flush()
        print(f"cake: {text}", file=sys.stderr)
        if env.log_level() in ("DEBUG", "debug"):
            import traceback

            traceback.print_exception(error)
        self.document({"error": text, "kind": type(error).__name__})

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Progress]:
        """A progress display for the block. Plain lines go to stdout, with ``--json`` to stderr."""
        if not self._rich_allowed or not sys.stderr.isatty():
            yield Progress(None, None, sys.stderr if self.json else sys.stdout)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        class Count(MofNCompleteColumn):
            def render(self, task: Task) -> Text:
                return super().render(task) if task.total is not None else Text()

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            Count(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        with Bar(*columns, console=Console(stderr=True, no_color=env.no_color()), transient=True) as bar:
            yield Progress(bar, bar.add_task(what, total=total, status=""), sys.stderr)


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 library``, ``2 libraries``: the number with its noun."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = _widths(columns, rows)
    for row in (columns, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
