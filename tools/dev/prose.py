"""Rules of language: banned phrases, docstrings of public names, subjects of commits.

A banned phrase may still occur in old prose. `still_allowed.json` beside this file holds how often each rule
may be broken in the repository; a number may only fall. `tidy.py --phrases [PHRASE …]` lists the
occurrences, and `tidy.py --shrink` lowers the numbers to what is found.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ALLOWED = "tools/dev/still_allowed.json"
# Phrase -> what to write. The names are keys of ALLOWED.
PHRASES: dict[str, tuple[re.Pattern[str], str]] = {
    "who-opening": (
        re.compile(r"(?:^|[.:;*#\"'(|] ?|- )Who(?:ever)? (?!.*\?)"),
        "name the subject: 'a rank that …', 'the caller'",
    ),
    "whose-opening": (
        re.compile(r"(?:^|[.:;*#\"'(|] ?)Whose (?!.*\?)"),
        "begin with a verb or the thing itself",
    ),
    "is-told": (
        re.compile(r"\b(?:is|are|was|were|be|been) told\b"),
        "write 'receives', 'is notified', 'reports'",
    ),
    "last-words": (re.compile(r"\blast words?\b"), "write 'exit reason' or 'final report'"),
    "anew": (re.compile(r"\banew\b"), "write 'again'"),
    "amid": (re.compile(r"\bamid\b"), "write 'during'"),
    "takes-nothing": (re.compile(r"\btakes nothing\b"), "say what is never broken"),
    "not-there": (
        re.compile(r"\b(?:is|are|was|were) not there\b|\bNot there:"),
        "write 'absent', 'missing', 'not supported'",
    ),
    "short-there": (re.compile(r"\bShort there\b"), "write 'Limitations'"),
    "shared-out": (re.compile(r"\bshared out\b"), "write 'sharded'"),
    "put-right": (re.compile(r"\bput right\b"), "write 'corrected'"),
    "other-bits": (re.compile(r"\bhas other bits\b"), "write 'checksum mismatch'"),
    "good-order": (re.compile(r"\bin good order\b"), "write 'orderly'"),
    "all-the-same": (re.compile(r"\ball the same\b"), "write 'nevertheless', or leave it out"),
    "of-which-how": (
        re.compile(r"^(?:\"\"\")?(?:What|Where|How|Which) [a-z].*\.(?:\"\"\")?$"),
        "begin with a verb or the thing itself",
    ),
    "far-side": (re.compile(r"\bfar (?:side|end|rank|process)\b"), "write 'remote'"),
    "tells-of": (re.compile(r"\b(?:tells|told|telling) (?:of|that|who|which|what)\b"), "write 'reports'"),
    "to-mend": (re.compile(r"\bto mend\b|\bis mended\b"), "write 'to fix', 'is fixed'"),
    "harm": (re.compile(r"\b(?:harms?|do(?:es)? no harm to) nobody\b"), "say what keeps working"),
}
COMMENT = re.compile(r"(?:^|(?<= ))# .*")
IN_C = re.compile(r"(?:#|//|/?\*|\"\"\")\s?(?P<said>[A-Z].*)")

NOT_IMPERATIVE = frozenset({
    "a", "all", "an", "and", "another", "any", "as", "at", "both", "each", "every", "for", "from",
    "how", "if", "in", "it", "its", "nobody", "nothing", "of", "on", "one", "only", "our", "some",
    "that", "the", "their", "them", "these", "they", "this", "those", "to", "two", "under", "was",
    "what", "when", "where", "which", "who", "whoever", "whose", "why", "with", "without",
})  # fmt: skip
LIKE_A_PARTICIPLE = frozenset({
    "bring", "embed", "exceed", "feed", "need", "proceed", "ring", "shed", "speed", "string", "succeed",
})  # fmt: skip
SUBJECT = re.compile(r"^[a-z][a-z0-9_./-]*(?:, [a-z][a-z0-9_./-]*)*: (?P<first>[a-z0-9`_.-]+)")
SUBJECT_CHARACTERS_MAX = 72
# The commit before the rule. Not in a shallow clone, where the rule holds for nothing.
SUBJECTS_SINCE = "262de8efab42d743c076e03eb3a62040fdfc1348"

# Packages whose `__all__` is the public API, by the path of their `__init__.py`.
PUBLIC = (
    "src/zbmd/__init__.py",
    "transport/__init__.py",
    "actors/__init__.py",
    "collectives/__init__.py",
    "training/__init__.py",
    "src/zbmd/torch/__init__.py",
    "collectives/torch/__init__.py",
)


def prose(path: str, text: str, tree: ast.Module | None) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of everything in a file that people read: comments, docstrings, messages, pages."""
    suffix = path.rpartition(".")[2]
    if suffix == "md":
        yield from enumerate(text.splitlines(), 1)
    elif tree is not None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for offset, line in enumerate(node.value.splitlines()):
                    yield node.lineno + offset, line.strip()
        for number, line in enumerate(text.splitlines(), 1):
            if match := COMMENT.search(line):
                yield number, match[0]
    elif suffix in {"pyx", "pxd", "h", "c", "sh"}:
        for number, line in enumerate(text.splitlines(), 1):
            if match := IN_C.search(line):
                yield number, match["said"]


def phrases_in(path: str, text: str, tree: ast.Module | None) -> Iterator[tuple[int, str]]:
    """Yield (line, phrase) for each banned phrase of a file."""
    for line, said in prose(path, text, tree):
        for phrase, (pattern, _) in PHRASES.items():
            if pattern.search(said):
                yield line, phrase


def is_imperative(word: str) -> bool:
    """Return whether `word` may be a verb in the imperative. A heuristic: it knows endings, not English."""
    word = word.lower()
    if word in LIKE_A_PARTICIPLE:
        return True
    third_person = word.endswith("s") and not word.endswith(("ss", "us", "ias"))
    return word not in NOT_IMPERATIVE and not third_person and not word.endswith(("ed", "ing"))


def docstring_breach(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return what is wrong with the docstring of a public class or function, or None."""
    said = ast.get_docstring(node)
    if not said:
        return f"{node.name} has no docstring"
    summary = said.split("\n\n")[0]
    if not summary.endswith((".", ":", "`")):
        return f"{node.name}: the first sentence has no period"
    first = summary.split()[0].strip("`*:,")
    attribute = any(isinstance(item, ast.Name | ast.Attribute) for item in node.decorator_list)
    if isinstance(node, ast.ClassDef) or attribute:
        wrong = first in {"What", "Who", "Whose", "Where", "How", "Which"}
    else:
        wrong = not is_imperative(first)
    return f"{node.name}: begin with a verb in the imperative, not with {first!r}" if wrong else None


def module_file(root: Path, module: str) -> Path | None:
    """Return the source file of `zbmd.…`, or None if there is none."""
    parts = "/".join(module.split(".")[1:])
    for base in (parts, f"src/zbmd/{parts}".rstrip("/")):
        for candidate in (f"{base}.pyi", f"{base}.py", f"{base}/__init__.py"):
            if base and (root / candidate).is_file():
                return root / candidate
    return None


def definition(
    root: Path, module: str, name: str
) -> tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """Return the file and the syntax tree of a class or function, through re-exports."""
    file = module_file(root, module)
    if file is None:
        return None
    tree = ast.parse(file.read_text())
    defined = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if defined:  # of overloads, the one that has the docstring
        return file, max(defined, key=lambda node: bool(ast.get_docstring(node)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zbmd"):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module != module:
                    return definition(root, node.module, alias.name)
    return None


def public_names(tree: ast.Module) -> list[str]:
    """Return the strings of a module's `__all__`, or what its `with lazy_imports(…):` has."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                public: ast.AST = value
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                public = value
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="lazy_imports")))]):
                public = node
            case _:
                continue
        walked = list(ast.walk(public))
        names = [item.value for item in walked if isinstance(item, ast.Constant)]
        names += [item.asname or item.name for item in walked if isinstance(item, ast.alias)]
        return [name for name in names if isinstance(name, str) and name[0] != "_"]
    return []


def public_docstrings(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (path, line, advice) for each public name of the API whose docstring breaks the form."""
    seen: set[tuple[Path, int]] = set()
    for path in PUBLIC:
        if not (root / path).is_file():
            continue
        module = path.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")
        module = module if module.startswith("zbmd") else f"zbmd.{module}"
        for name in public_names(ast.parse((root / path).read_text())):
            found = definition(root, module, name)
            if found is None or (found[0], found[1].lineno) in seen:
                continue
            file, node = found
            seen.add((file, node.lineno))
            methods = [
                item
                for item in node.body
                if isinstance(node, ast.ClassDef)
                and isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                and item.name[0] != "_"
                and ast.get_docstring(item)
            ]
            for item in (node, *methods):
                if advice := docstring_breach(item):
                    yield str(file.relative_to(root)), item.lineno, advice


def subject_breaches(subjects: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (commit, advice) for each (commit, subject) that is not `area: imperative` in one line."""
    for commit, subject in subjects:
        match = SUBJECT.match(subject)
        if len(subject) > SUBJECT_CHARACTERS_MAX:
            yield commit, f"{len(subject)} characters, at most {SUBJECT_CHARACTERS_MAX}: {subject!r}"
        elif match is None:
            yield commit, f"write 'area: do something', in lower case: {subject!r}"
        elif not is_imperative(match["first"]):
            yield commit, f"begin with a verb in the imperative, not {match['first']!r}: {subject!r}"


def subjects(root: Path, since: str = SUBJECTS_SINCE) -> list[tuple[str, str]]:
    """Return (commit, subject) of the commits after `since`; empty where the history does not reach back."""
    known = subprocess.run(
        ["git", "merge-base", "--is-ancestor", since, "HEAD"], cwd=root, capture_output=True, check=False
    )
    if known.returncode != 0:
        return []
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{since}..HEAD"]
    log = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in log.splitlines()]


def still_allowed(root: Path) -> dict[str, int]:
    """Return how often each rule may be broken in the repository at `root`."""
    file = root / ALLOWED
    numbers: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    return numbers


def shrink(root: Path, found: Mapping[str, int]) -> None:
    """Lower each number to what was found. A rule that has no number yet gets what was found."""
    before = still_allowed(root)
    after = {name: min(count, before.get(name, count)) for name, count in sorted(found.items()) if count}
    (root / ALLOWED).write_text(json.dumps(after, indent=1) + "\n")
