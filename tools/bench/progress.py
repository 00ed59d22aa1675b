"""How far a benchmark is, on a terminal; elsewhere it is silent until the result is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import rich.console
import rich.progress


@contextlib.contextmanager
def progress(total: int) -> Generator[Callable[[str], None]]:
    """A bar of `total` turns on standard error; call what it gives before each turn, with its name."""
    screen = rich.console.Console(stderr=True)
    columns = (
        rich.progress.BarColumn(bar_width=30),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def tell(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield tell
