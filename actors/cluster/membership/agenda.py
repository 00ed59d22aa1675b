"""What a machine has to do later, by name: one timer for all of it."""

from __future__ import annotations


class Agenda:
    """Times in ns; a name stands for one thing to do, and is due once."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self.next_ns: int | None = None
        """When the next thing is due."""

    def put(self, what: str, at_ns: int) -> None:
        """Have it done at that time, whatever was said before."""
        self._due[what] = at_ns
        self._look()

    def put_by(self, what: str, at_ns: int) -> None:
        """Have it done at that time, or earlier if that was asked for."""
        self.put(what, min(at_ns, self._due.get(what, at_ns)))

    def drop(self, *names: str) -> None:
        """Not to be done any more."""
        for what in names:
            self._due.pop(what, None)
        self._look()

    def clear(self) -> None:
        """Nothing is to be done any more."""
        self._due.clear()
        self._look()

    def take(self, now_ns: int) -> list[str]:
        """What is due, the oldest first; it is no longer on the agenda."""
        due = sorted((at_ns, what) for what, at_ns in self._due.items() if at_ns <= now_ns)
        for _, what in due:
            del self._due[what]
        self._look()
        return [what for _, what in due]

    def _look(self) -> None:
        self.next_ns = min(self._due.values(), default=None)
