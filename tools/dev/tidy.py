"""Check the rules that no standard linter knows: budgets, import bans, honest tests, prose.

Missing docstrings, blind excepts and the like are ruff's (pyproject.toml); layers are import-linter's; the
rules of language are in `prose.py`.

`python tools/dev/tidy.py [ROOT]` prints `file:line: rule: what to do` for every breach and exits with 1 if
there is one. `--phrases [PHRASE …]` lists banned phrases that are still allowed; `--shrink` allows no more of
them than there are. Files come from `git ls-files`, tracked or new, never ignored ones. The modules that must
stay sans-I/O are found by their shape (a class with `handle` and `check_invariants`), by the words `Sans-I/O`
at the start of their docstring, or by `PURE_MODULES`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from zbmd.tools.dev import prose

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
FILE_BYTES_MAX = 200 * 1024
FOLDER_ENTRIES_MAX = 20

LAYERS = ("transport", "actors", "collectives", "training", "tools")
FOLDERS_COUNTED = (*LAYERS, "examples", "src", "tests")
SOURCE_SUFFIXES = frozenset({".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".sh"})
# Captured logs kept as regression tests are the one binary format that belongs in the repository.
BINARY_ALLOWED = ("tests/*.zlog", "docs/*.png")

# What tests share, and the programs that they start, are packages; folders of tests are not.
TEST_PACKAGES = ("tests/support/", "tests/programs/")
# Modules that are pure although they hold no machine class.
PURE_MODULES = ("collectives/algorithms/*.py", "transport/machine.py")
# The one helper with which programs that tests start wait for other processes.
POLLING = "tests/support/processes/polling.py"
# Programs longer than this that tests start are files in `tests/programs`, which the type checkers see.
PROGRAM_LINES_MAX = 5
# What these give to the tools that they test is text.
PROGRAM_INPUTS = ("tests/repo/test_tidy*.py", "tests/repo/test_watch.py")
# Tests on the simulator's clock: a sleep there takes no time, and how long a thing takes is exact.
VIRTUAL_TIME = ("tests/*/test_sim_*.py",)
IMPURE_IMPORTS = frozenset(
    {"asyncio", "datetime", "logging", "multiprocessing", "os", "random", "secrets", "select", "selectors"}
    | {"signal", "socket", "structlog", "subprocess", "threading", "time", "uvloop"}
)
# Import name -> the paths that may import it. An empty tuple bans it everywhere.
CONFINED_IMPORTS: dict[str, tuple[str, ...]] = {
    "torch": (
        "collectives/torch/*",
        "training/torch/*",
        "training/checkpoint/formats/dcp.py",
        "examples/torch_*.py",
        "tools/bench/peers/pairs.py",
        "tools/bench/peers/collectives.py",
        "tools/bench/torch_calls.py",
        "tools/lab/gpu/*",
        "tools/lab/bench/training/engine.py",
        "tools/lab/bench/training/loops.py",
        "tools/chaos/soak_stragglers.py",
        "tools/lab/torch_suite/*",
        "tests/*",
    ),
    "mpi4py": ("tools/bench/peers/pairs.py", "tools/bench/peers/collectives.py"),
    "xoscar": ("tools/bench/peers/xoscar_pair.py",),
    "cupy": ("training/autograd/array_module.py", "transport/cuda/runtime.py", "tests/*"),
    "pyverbs": ("transport/rdma/*", "transport/host/topology/devices.py"),
    # The metadata of PyTorch's checkpoints is a pickle: read by an unpickler of that format's classes alone.
    "pickle": ("training/checkpoint/formats/dcp.py", "tests/training/torch/test_dcp.py"),
    "cPickle": (),
    "_pickle": (),
    "marshal": (),
    "shelve": (),
    "dill": (),
    "cloudpickle": (),
}

CLOCKS = frozenset(
    ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time_ns", "now_ns")
)
MACHINE_METHODS = frozenset({"handle", "check_invariants"})

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
MERGE_MARKERS = ("<" * 7 + " ", ">" * 7 + " ")
HOME_PATH = re.compile(r"(?<![\w.}])/(?:home|root|Users)/[A-Za-z0-9_.-]+")
CYTHON_FUNCTION = re.compile(r"^(?P<indent>\s*)(?:(?:async\s+)?def|cdef(?!\s+class\b)|cpdef)\b[^=]*\(")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Breach:
    """One line that breaks one rule, and what to do about it."""

    path: str
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.advice}"


@dataclass(frozen=True, slots=True)
class Source:
    """A text file as the rules see it. `tree` is the syntax tree of a `.py` or `.pyi` file, else None.

    `nodes` are all nodes of the tree: to walk it once and not for each rule takes a third of the time.
    """

    path: str
    text: str
    tree: ast.Module | None
    nodes: tuple[ast.AST, ...] = ()

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")

    @property
    def is_layer(self) -> bool:
        return self.path.split("/", 1)[0] in LAYERS

    def breach(self, line: int, rule: str, advice: str) -> Breach:
        return Breach(path=self.path, line=line, rule=rule, advice=advice)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether `path` (posix, relative to the root) matches one of the shell `patterns`."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def file_budget(source: Source) -> Iterator[Breach]:
    """Files of at most FILE_LINES_MAX lines: one job each."""
    lines = source.text.count("\n") + (not source.text.endswith("\n"))
    if PurePosixPath(source.path).suffix in SOURCE_SUFFIXES and lines > FILE_LINES_MAX:
        yield source.breach(
            FILE_LINES_MAX + 1, "file-lines", f"{lines} lines; split it, at most {FILE_LINES_MAX} a file"
        )


def function_spans(source: Source) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, line count) for each function of a Python, Cython or C file."""
    if source.tree is not None:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    lines = source.text.splitlines()
    suffix = PurePosixPath(source.path).suffix
    if suffix in {".pyx", ".pxd"}:
        yield from _cython_spans(lines)
    elif suffix in {".c", ".h"}:
        yield from _c_spans(lines)


def _cython_spans(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    for start, line in enumerate(lines):
        match = CYTHON_FUNCTION.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        last = start
        inside_signature = ")" not in line
        for number in range(start + 1, len(lines)):
            stripped = lines[number].strip()
            if not stripped:
                continue
            if inside_signature:
                inside_signature = ")" not in stripped
            elif len(lines[number]) - len(lines[number].lstrip()) <= indent:
                break
            last = number
        name = line[: line.index("(")].split()[-1]
        yield name, start + 1, last - start + 1


def _c_spans(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    signature = None
    for number, line in enumerate(lines):
        if line.startswith("}"):
            if signature is not None:
                head = lines[signature]
                yield head[: head.index("(")].split()[-1].lstrip("*"), signature + 1, number - signature + 1
            signature = None
        elif line and not line[0].isspace() and "(" in line and line[0] not in "#/":
            signature = number


def function_budget(source: Source) -> Iterator[Breach]:
    """Functions of at most FUNCTION_LINES_MAX lines."""
    for name, line, count in function_spans(source):
        if count > FUNCTION_LINES_MAX:
            yield source.breach(
                line, "function-lines", f"{name} has {count} lines; split it, at most {FUNCTION_LINES_MAX}"
            )


def imported_names(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted module, line, for types only) for every import, `import_module` and `__import__`."""
    typing_only: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.body:
                typing_only.update(ast.walk(statement))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node in typing_only
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno, node in typing_only
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno, node in typing_only


def called_name(call: ast.Call) -> str:
    """Return the last part of the called name: `sleep` for `asyncio.sleep(1)`, empty for a computed one."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def confined_imports(source: Source) -> Iterator[Breach]:
    """Optional packages only behind their seam; nothing that unpickles, anywhere."""
    if source.tree is None:
        return
    for name, line, _ in imported_names(source.nodes):
        top = name.split(".")[0]
        allowed = CONFINED_IMPORTS.get(top)
        if allowed is None or matches(source.path, allowed):
            continue
        where = f"import it only in {', '.join(allowed)}" if allowed else "nothing here is ever unpickled"
        yield source.breach(line, "import-ban", f"{top}: {where}")
    for node in source.nodes:
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and _is_true(node.value):
            yield source.breach(node.value.lineno, "import-ban", "allow_pickle: nothing is ever unpickled")


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_pure_module(source: Source) -> bool:
    """Tell whether this module is declared, listed or shaped as sans-I/O."""
    if source.tree is None or not source.is_layer:
        return False
    if (ast.get_docstring(source.tree) or "").startswith("Sans-I/O") or matches(source.path, PURE_MODULES):
        return True
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if methods >= MACHINE_METHODS:
                return True
    return False


def pure_machines(source: Source) -> Iterator[Breach]:
    """Machines hold no socket, clock, random source, logger or environment."""
    if source.tree is None or not is_pure_module(source):
        return
    for name, line, for_types_only in imported_names(source.nodes):
        if name.split(".")[0] in IMPURE_IMPORTS and not for_types_only:
            yield source.breach(
                line, "sans-io", f"{name} in a machine's module; pass it in or move it to the driver"
            )


def swallowed_errors(source: Source) -> Iterator[Breach]:
    """No handler that catches everything and says nothing."""
    if source.tree is None:
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type) and _does_nothing(node.body):
            yield source.breach(node.lineno, "swallowed-error", "name the error you expect, and act on it")
        if (
            isinstance(node, ast.Call)
            and called_name(node) == "suppress"
            and any(map(_catches_all, node.args))
        ):
            yield source.breach(node.lineno, "swallowed-error", "suppress only the error you expect")


def _catches_all(*caught: ast.expr | None) -> bool:
    """Tell whether one of the caught types is everything; None is a bare `except:`."""
    for node in caught:
        if isinstance(node, ast.Tuple) and _catches_all(*node.elts):
            return True
        if node is None or (isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"}):
            return True
    return False


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(item, ast.Pass | ast.Continue)
        or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        for item in body
    )


def unfinished_work(source: Source) -> Iterator[Breach]:
    """No notes of work to do: they belong in the tracker."""
    if not UNFINISHED.search(source.text):
        return
    advice = "finish it or file it; the code says what is, not what is missing"
    if source.tree is None:
        if PurePosixPath(source.path).suffix in SOURCE_SUFFIXES:
            for number, line in enumerate(source.text.splitlines(), 1):
                if UNFINISHED.search(line):
                    yield source.breach(number, "unfinished", advice)
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and UNFINISHED.search(token.string):
            yield source.breach(token.start[0], "unfinished", advice)


def home_paths(source: Source) -> Iterator[Breach]:
    """Nothing that works only in one person's home directory."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := HOME_PATH.search(line):
            yield source.breach(number, "home-path", f"{found[0]} is one machine's; make it relative")


def merge_markers(source: Source) -> Iterator[Breach]:
    """Nothing that a merge has left to decide."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if line.startswith(MERGE_MARKERS):
            yield source.breach(number, "merge-marker", "decide which side holds, and remove the other")


def sleeping_tests(source: Source) -> Iterator[Breach]:
    """A test waits for the thing itself, never for a while."""
    if source.tree is None or not source.is_test or matches(source.path, (*VIRTUAL_TIME, POLLING)):
        return
    for node in source.nodes:
        if not isinstance(node, ast.Call) or called_name(node) != "sleep":
            continue
        first = node.args[0] if node.args else None
        if not (isinstance(first, ast.Constant) and first.value == 0):
            yield source.breach(
                node.lineno,
                "test-sleep",
                "wait on the event itself; to hang for ever: signal.pause, a Future",
            )


def programs_in_strings(source: Source) -> Iterator[Breach]:
    """Programs that tests start are files: a string of more than PROGRAM_LINES_MAX lines is none."""
    if source.tree is None or not source.is_test or matches(source.path, PROGRAM_INPUTS):
        return
    parts = {part for node in source.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in source.nodes:
        text = _string(node) if node not in parts else ""
        lines = sum(bool(line.strip()) for line in text.splitlines())
        if lines > PROGRAM_LINES_MAX and _is_program(text):
            advice = f"a program of {lines} lines in a string; make it a file in tests/programs"
            yield source.breach(getattr(node, "lineno", 1), "test-program", advice)


def _string(node: ast.AST) -> str:
    """Return the text of a string, with 0 for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) or "0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_program(text: str) -> bool:
    """Return whether `text` is Python that imports or defines something."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return False
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def timing_assertions(source: Source) -> Iterator[Breach]:
    """No test asserts how long something took. A heuristic: it follows differences of clock readings."""
    if source.tree is None or not source.is_test or matches(source.path, VIRTUAL_TIME):
        return
    for function in source.nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        times, spans = _clock_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and _compares_span(node.test, times, spans):
                yield source.breach(node.lineno, "test-timing", "assert what happened, not how long it took")


def _reads_clock(node: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Call) and called_name(part) in CLOCKS and not part.args)
        or (isinstance(part, ast.Name) and part.id in names)
        for part in ast.walk(node)
    )


def _is_span(node: ast.AST, times: set[str], spans: set[str]) -> bool:
    """Tell whether an expression is a difference of clock readings, or a name that holds one."""
    return any(
        (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and _reads_clock(part, times))
        or (isinstance(part, ast.Name) and part.id in spans)
        for part in ast.walk(node)
    )


def _clock_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[set[str], set[str]]:
    """Return the names that hold a clock reading and those that hold a difference of readings."""
    times: set[str] = set()
    spans: set[str] = set()
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    for node in sorted(assignments, key=lambda assignment: assignment.lineno):
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if _is_span(node.value, times, spans):
            spans |= targets
        elif _reads_clock(node.value, times):
            times |= targets
    return times, spans


def _compares_span(test: ast.expr, times: set[str], spans: set[str]) -> bool:
    return any(
        _is_span(side, times, spans)
        for node in ast.walk(test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    )


RULES: tuple[Callable[[Source], Iterator[Breach]], ...] = (
    file_budget,
    function_budget,
    confined_imports,
    pure_machines,
    swallowed_errors,
    unfinished_work,
    home_paths,
    merge_markers,
    sleeping_tests,
    programs_in_strings,
    timing_assertions,
)


def repeated_test_names(paths: list[str]) -> Iterator[Breach]:
    """Test modules have unique basenames and their folders are not packages: pytest imports them by path."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        name = PurePosixPath(path).name
        if not path.startswith("tests/"):
            continue
        if name == "__init__.py" and not path.startswith(TEST_PACKAGES):
            yield Breach(path=path, line=1, rule="test-name", advice="remove it; tests are no package")
        elif name.startswith("test_") and name.endswith(".py"):
            if name in first:
                advice = f"{first[name]} has the same name; give each test module its own"
                yield Breach(path=path, line=1, rule="test-name", advice=advice)
            first.setdefault(name, path)


def crowded_folders(paths: list[str]) -> Iterator[Breach]:
    """Folders of code with at most FOLDER_ENTRIES_MAX entries, sub-folders included."""
    entries: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) if parts[0] in FOLDERS_COUNTED else 0):
            entries.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    for folder, names in sorted(entries.items()):
        if len(names) > FOLDER_ENTRIES_MAX:
            advice = f"{len(names)} entries, at most {FOLDER_ENTRIES_MAX}; make a package of one concern"
            yield Breach(path=folder, line=1, rule="folder-entries", advice=advice)


def check_file(root: Path, path: str) -> list[Breach]:
    """Hold the file `path` under `root` against every rule. Symlinks are skipped: their target counts."""
    full = root / path
    if full.is_symlink() or not full.is_file():
        return []
    content = full.read_bytes()
    if len(content) > FILE_BYTES_MAX:
        advice = f"{len(content)} bytes, more than {FILE_BYTES_MAX}; generate it or cut it down"
        return [Breach(path=path, line=1, rule="file-bytes", advice=advice)]
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        if matches(path, BINARY_ALLOWED):
            return []
        return [
            Breach(path=path, line=1, rule="binary", advice="keep only sources in git, not what they build")
        ]
    tree = None
    if path.endswith((".py", ".pyi")):
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            return [Breach(path=path, line=error.lineno or 1, rule="syntax", advice=error.msg)]
    source = Source(path, text, tree, tuple(ast.walk(tree)) if tree is not None else ())
    return [breach for rule in RULES for breach in rule(source)]


def check(root: Path, paths: list[str]) -> list[Breach]:
    """Hold `paths` (posix, relative to `root`) against every rule and return the breaches in file order."""
    found = [breach for path in paths for breach in check_file(root, path)]
    return sorted([*found, *repeated_test_names(paths)])


def repository_files(root: Path) -> list[str]:
    """List the files of the repository at `root`, tracked or new, without ignored ones.

    Raises `subprocess.CalledProcessError` when `root` is in no git repository.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in listing.split("\0") if path)


def phrases(root: Path, paths: list[str]) -> list[Breach]:
    """Return every banned phrase in the prose of `paths`."""
    found: list[Breach] = []
    for path in paths:
        full = root / path
        if full.is_symlink() or not full.is_file() or matches(path, BINARY_ALLOWED):
            continue
        text = full.read_text(errors="replace")
        try:
            tree = ast.parse(text) if path.endswith((".py", ".pyi")) else None
        except SyntaxError:
            continue
        for line, phrase in prose.phrases_in(path, text, tree):
            found.append(Breach(path=path, line=line, rule=phrase, advice=prose.PHRASES[phrase][1]))
    return sorted(found)


def counted_breaches(root: Path, paths: list[str]) -> list[Breach]:
    """Return every breach of the rules that old files may still break, by the numbers of `prose.ALLOWED`."""
    docstrings = [
        Breach(path=path, line=line, rule="public-docstring", advice=advice)
        for path, line, advice in prose.public_docstrings(root)
    ]
    return [*phrases(root, paths), *docstrings, *crowded_folders(paths)]


def over_allowance(root: Path, counted: list[Breach]) -> Iterator[Breach]:
    """Yield a breach for each rule that is broken more often than is still allowed."""
    allowed = prose.still_allowed(root)
    for rule, count in sorted(Counter(breach.rule for breach in counted).items()):
        most = allowed.get(rule, 0)
        if count <= most:
            continue
        found = [breach for breach in counted if breach.rule == rule]
        if most == 0 or rule not in prose.PHRASES:
            yield from found
        else:
            advice = f"{count}, at most {most}: {found[0].advice}. List them: tidy.py --phrases {rule}"
            yield Breach(path=prose.ALLOWED, line=1, rule=rule, advice=advice)


def commit_subjects(root: Path) -> Iterator[Breach]:
    """Commits with a subject of the form `area: imperative`, since the commit that began with it."""
    for commit, advice in prose.subject_breaches(prose.subjects(root)):
        yield Breach(path=commit, line=1, rule="commit-subject", advice=advice)


def main(arguments: list[str]) -> int:
    """Check the repository at the given root (default: here) and return the exit code."""
    options = [argument for argument in arguments if argument.startswith("--")]
    names = [argument for argument in arguments if not argument.startswith("--")]
    root = Path(names[0]) if names and "--phrases" not in options else Path()
    paths = repository_files(root)
    counted = counted_breaches(root, paths)
    if "--phrases" in options:
        breaches = [breach for breach in counted if not names or breach.rule in names]
    else:
        if "--shrink" in options:
            prose.shrink(root, Counter(breach.rule for breach in counted))
        breaches = [*check(root, paths), *over_allowance(root, counted), *commit_subjects(root)]
    for breach in breaches:
        print(breach)
    verdict = f"{len(breaches)} to fix" if breaches else "all in order"
    print(f"tidy: {len(paths)} files, {verdict}", file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
