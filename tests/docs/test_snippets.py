"""Every snippet of the README and the guides runs, as far as this machine can run it.

A page is read from top to bottom, in a directory of its own:

- A Python block with `title="train.py"` becomes that file; a later `sh` block has to run it.
- Any other Python block is a fragment. The fragments of a page run one after the other in one namespace.
- A Python block with `title="not run: REASON"` or `title="not run here: REASON"` is compiled only; with
  `title="needs PyTorch"` or `title="train.py (needs PyTorch)"` it is compiled only where PyTorch is missing.
- An `sh` block runs if the line before it is `<!-- run -->`, or `<!-- run, prints: PATTERN -->`, where the
  pattern is a regular expression that the output must contain.
- `<!-- hidden sh … -->` and `<!-- hidden python … -->` set things up that a reader does not need to see.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = {
    "zbmd",
    *(f"zbmd.{package}" for package in ("actors", "collectives", "training", "transport", "torch")),
    "zbmd.torch.lightning",
    "zbmd.torch.transformers",
}
SESSION = Path(__file__).with_name("page_session.py")
TIMEOUT_S = 180.0
BLOCK = re.compile(
    r"^(?:<!-- run(?:, prints: (?P<prints>.*?))? -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<body>.*?)^```$"
    r"|^<!-- hidden (?P<hidden>sh|python)\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
HAS_TORCH = importlib.util.find_spec("torch") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page, or one hidden set-up."""

    place: str
    language: str
    body: str
    title: str
    hidden: bool
    runs: bool
    prints: str

    @property
    def file(self) -> str | None:
        """The name of the file that a Python block is."""
        name = self.title.partition(" (")[0]
        return name if self.language == "python" and name.endswith(".py") else None


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in order."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("body") if found["language"] else found.start("setup")) + 1
        language, title = found["language"] or found["hidden"], found["title"] or ""
        excluded = title.startswith("not run") or ("needs PyTorch" in title and not HAS_TORCH)
        hidden = found["hidden"] is not None
        runs = not excluded if language == "python" else hidden or found[0].startswith("<!-- run")
        yield Block(
            place=f"{page.relative_to(ROOT)}:{line}",
            language=language,
            body=found["body"] or found["setup"],
            title=title,
            hidden=hidden,
            runs=runs,
            prints=found["prints"] or "",
        )


def run(command: list[str], directory: Path, place: str) -> str:
    """Run a command in a process group of its own and return what it printed. It must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZBMD_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "ZBMD_COOKIE_FILE": str(directory / ".cookie"),
        "ZBMD_TEST_SESSION": os.environ.get("ZBMD_TEST_SESSION", ""),
    }
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{place}: still running after {TIMEOUT_S:g} s:\n{process.communicate()[0]}")
    assert process.returncode == 0, f"{place}: exit code {process.returncode}\n{printed}"
    return printed


def session(fragments: list[Block], directory: Path) -> None:
    """Run the Python fragments of a page."""
    if fragments:
        listed = directory / ".fragments.json"
        listed.write_text(json.dumps([[block.place, block.body] for block in fragments]))
        run([sys.executable, str(SESSION), str(listed)], directory, fragments[0].place)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    fragments: list[Block] = []
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.body, block.place, "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT
        if not block.runs:
            continue
        if block.file:
            (tmp_path / block.file).write_text(block.body)
        elif block.language == "python":
            fragments.append(block)
        else:
            printed = run(["bash", "-euc", block.body], tmp_path, block.place)
            assert re.search(block.prints, printed), f"{block.place}: {block.prints!r} not in\n{printed}"
    session(fragments, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_program_of_a_page_is_run_by_one_of_its_commands(page: Path) -> None:
    blocks = list(blocks_of(page))
    for position, block in enumerate(blocks):
        if block.file and block.runs:
            used = re.compile(
                rf"{re.escape(block.file)}|^from {re.escape(block.file[:-3])} import", re.MULTILINE
            )
            later = [later.body for later in blocks[position + 1 :] if later.runs]
            assert any(used.search(body) for body in later), f"{block.place}: nothing runs {block.file}"


def beyond_the_public_api(source: str, place: str) -> Iterator[str]:
    """Yield what a program uses of zbmd that no `__all__` of `PUBLIC` names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("zbmd") and alias.name not in PUBLIC:
                    yield f"{place}:{node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zbmd"):
            exported = importlib.import_module(node.module).__all__ if node.module in PUBLIC else []
            for alias in node.names:
                if alias.name not in exported:
                    yield f"{place}:{node.lineno}: from {node.module} import {alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zbmd":
            known = node.attr in importlib.import_module("zbmd").__all__ or ast.unparse(node) in PUBLIC
            if not known:
                yield f"{place}:{node.lineno}: {ast.unparse(node)}"


def test_pages_and_examples_use_the_public_api_alone() -> None:
    found = [
        use
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "python"
        for use in beyond_the_public_api(block.body, block.place)
    ]
    for example in sorted((ROOT / "examples").glob("*.py")):
        found += beyond_the_public_api(example.read_text(), example.name)
    assert not found, "\n".join(found)


def test_every_file_that_a_page_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = listed.stdout.split()
    known = {*files, *(path.rpartition("/")[0] for path in files)}
    known |= {folder.rpartition("/")[0] for folder in known}
    found = [
        f"{page.name}: {named}"
        for page in (*PAGES, *(ROOT / "docs/decisions").glob("*.md"))
        for named in re.findall(
            r"`((?:transport|actors|collectives|training|tools|tests)/[\w/.]+)`", page.read_text()
        )
        if named.rstrip("/") not in known
    ]
    assert not found, "\n".join(found)


def test_every_block_is_read() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^```\w+", page.read_text(), re.MULTILINE))
        assert fences == sum(not block.hidden for block in blocks_of(page)), page.name
