"""Generate pages of the documentation site, as a script of mkdocs-gen-files.

The main page is the README; the API reference has a page for each layer, generated from its `__all__`; the
CLI reference is generated from the parsers. A public name without a docstring fails the build.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import mkdocs_gen_files

from zbmd.tools.cli.options import LazyParser
from zbmd.tools.dev import prose

ROOT = Path(__file__).resolve().parents[2]
# Package -> the file that has its `__all__`. A name that two packages export is described once, in the first.
API = {
    "zbmd": "src/zbmd/__init__.py",
    "zbmd.transport": "transport/__init__.py",
    "zbmd.actors": "actors/__init__.py",
    "zbmd.collectives": "collectives/__init__.py",
    "zbmd.training": "training/__init__.py",
    "zbmd.torch": "src/zbmd/torch/__init__.py",
}
COMMANDS = {"zbmd-node": "zbmd.tools.node.cli", "zbmd": "zbmd.tools.entry.zbmd"}
HELP_COLUMNS = "100"
# Files of the repository that are pages of the site.
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)]+)\)")


def write(page: str, text: str) -> None:
    """Write a page of the site."""
    with mkdocs_gen_files.open(page, "w") as out:
        out.write(text)


def on_the_site(match: re.Match[str]) -> str:
    """Return a link of a file at the root as it is on the site, where `docs/` is the root."""
    target = match["target"]
    if target.startswith("docs/"):
        return f"]({target.removeprefix('docs/')})"
    if target in COPIED:
        return f"]({COPIED[target]})"
    return f"](repository.md#{target.strip('/').lower()})"


def copy_pages() -> None:
    """Make pages of the files at the root of the repository."""
    for source, page in COPIED.items():
        write(page, LINK.sub(on_the_site, (ROOT / source).read_text()))
    files = "\n".join(f"## {name}\nIn the repository: `{name}`.\n" for name in ("examples", "LICENSE"))
    write("repository.md", f"# In the repository\nFiles that are not pages of this site.\n\n{files}")


def api_pages() -> None:
    """Write a page for each package of the public API."""
    described: dict[tuple[Path, str], str] = {}
    for package, path in API.items():
        tree = ast.parse((ROOT / path).read_text())
        names = sorted(prose.public_names(tree))
        lines = [f"# {package}", "", (ast.get_docstring(tree) or "").split("\n\n")[0], ""]
        for name in names:
            found = prose.definition(ROOT, package, name)
            if found is None:
                lines += [f"## `{name}`", "", f"A constant or type alias of `{package}`.", ""]
                continue
            file, node = found
            if not ast.get_docstring(node):
                raise SystemExit(f"{file}:{node.lineno}: {package}.{name} is public and has no docstring")
            home = described.setdefault((file, node.name), package)
            if home != package:
                lines += [f"- `{name}`: see [{home}.{name}]({home}.md#{home}.{name})"]
            else:
                lines += [f"::: {package}.{name}", ""]
        write(f"api/{package}.md", "\n".join(lines) + "\n")
    write("api/index.md", "# API reference\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in sorted(API)))


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands, at any depth."""
    if isinstance(parser, LazyParser):
        parser.fill_now()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in dict.fromkeys(action.choices.values()):
                yield from parsers(sub)


def cli_page() -> None:
    """Write the help of every command."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    lines = ["# Commands", "", "Generated from the parsers: what `--help` prints.", ""]
    for module in COMMANDS.values():
        for parser in parsers(importlib.import_module(module).parser()):
            lines += [f"## {parser.prog}", "", "```text", parser.format_help().rstrip(), "```", ""]
    write("cli.md", "\n".join(lines))


copy_pages()
api_pages()
cli_page()
