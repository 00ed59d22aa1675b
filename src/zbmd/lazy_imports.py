"""Lazy imports: a package re-exports names of modules that are imported when a name is first used.

    with lazy_imports(globals()):
        from zbmd.actors.session import Session as Session

Type checkers and editors see ordinary imports. At run time nothing is imported in the block: it fills the
package's `__all__`, `__getattr__` and `__dir__` (PEP 562), so a tool that needs one layer does not load the
others. It does for a package what `lazy from … import` of Python 3.15 (PEP 810) will do.
"""

from __future__ import annotations

import builtins
from typing import Any, cast


class _Name:
    """A name that is to be imported from `module`."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Module:
    """Stands for a module while names are imported from it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> _Name:
        return _Name(self._module, name)


class lazy_imports:
    """Delay the imports of a `with` block in a package's `__init__`. more: other public names of the package.

    `builtins.__import__` is replaced during the block. Imports of other modules, on other threads, pass.
    """

    def __init__(self, namespace: dict[str, Any], *more: str) -> None:
        self._namespace, self._more = namespace, more
        self._active = False

    def __enter__(self) -> None:
        self._active, self._import = True, builtins.__import__
        builtins.__import__ = cast(Any, self._delayed)

    def _delayed(self, name: str, namespace: Any = None, *rest: Any) -> Any:
        delayed = self._active and namespace is self._namespace
        return _Module(name) if delayed else self._import(name, namespace, *rest)

    def __exit__(self, *error: object) -> None:
        self._active = False
        if builtins.__import__ == self._delayed:  # else another thread has wrapped it, and restores it
            builtins.__import__ = self._import
        space = self._namespace
        homes = {name: value for name, value in space.items() if isinstance(value, _Name)}
        for name in homes:
            del space[name]

        def load(name: str) -> Any:
            if name not in homes:
                raise AttributeError(f"module {space['__name__']!r} has no attribute {name!r}")
            home = homes[name]
            value = space[name] = getattr(__import__(home.module, fromlist=(home.name,)), home.name)
            return value

        names = sorted((*homes, *self._more))
        space.update(__all__=names, __getattr__=load, __dir__=lambda: names)
