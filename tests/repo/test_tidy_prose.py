"""The rules of language, folders and commit subjects, against planted breaches and their neighbours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.tools.dev import prose, tidy

ROOT = Path(__file__).resolve().parents[2]
# Joined here, so that this file does not break the rules that it tests.
WHO, TOLD, ANEW, THERE, WORDS = "Wh" + "o", "to" + "ld", "an" + "ew", "not" + " there", "last" + " words"

# (path, text, line, phrase)
PLANTED = [
    ("docs/a.md", f"Text.\n{WHO} leaves takes everything along.\n", 2, "who-opening"),
    ("docs/a.md", f"- {WHO} waits is woken.\n", 1, "who-opening"),
    ("actors/a.py", f"def f():\n    '''{WHO}ever asks waits a while.'''\n", 2, "who-opening"),
    ("actors/a.py", f"x = 1  # {WHO}se op is at work\n", 1, "whose-opening"),
    ("actors/a.py", f"raise ValueError('the caller is {TOLD} at once')\n", 1, "is-told"),
    ("actors/a.py", f"x = f'a peer {TOLD} that {{y}} ends'\n", 1, "tells-of"),
    ("docs/a.md", f"Its {WORDS} are shown.\n", 1, "last-words"),
    ("transport/a.h", f"/* Begin {ANEW} at the front. */\n", 1, "anew"),
    ("transport/a.pyx", f"# Rows that are {THERE} are zero.\n", 1, "not-there"),
    ("docs/a.md", "The sum is sent a" + "mid the pass.\n", 1, "amid"),
    ("docs/a.md", "Leaving takes" + " nothing with it.\n", 1, "takes-nothing"),
    ("docs/a.md", "Short" + " there: a GPU.\n", 1, "short-there"),
    ("docs/a.md", "Its state is shared" + " out.\n", 1, "shared-out"),
    ("docs/a.md", "A figure put" + " right.\n", 1, "put-right"),
    ("docs/a.md", "The file has" + " other bits.\n", 1, "other-bits"),
    ("docs/a.md", "It leaves in good" + " order.\n", 1, "good-order"),
    ("docs/a.md", "It runs all the" + " same.\n", 1, "all-the-same"),
    ("actors/a.py", '"""What' + ' a rank holds."""\n', 1, "of-which-how"),
    ("docs/a.md", "The far" + " side answers.\n", 1, "far-side"),
    ("docs/a.md", "Three are to" + " mend.\n", 1, "to-mend"),
    ("docs/a.md", "A death harms" + " nobody.\n", 1, "harm"),
]
ALLOWED = [
    ("docs/a.md", f"{WHO} waits for whom?\n"),
    ("docs/a.md", "It shows who is in the cluster.\n"),
    ("actors/a.py", f"{TOLD} = whose({ANEW})\n"),
    ("actors/a.py", '"""Return what a rank holds."""\n'),
    ("docs/a.md", "The caller is notified.\n"),
]


def found_in(root: Path, path: str, text: str) -> list[tuple[int, str]]:
    """Write one file under `root` and return the (line, phrase) of each banned phrase."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return [(breach.line, breach.rule) for breach in tidy.phrases(root, [path])]


@pytest.mark.parametrize(("path", "text", "line", "phrase"), PLANTED)
def test_a_planted_phrase_is_found(tmp_path: Path, path: str, text: str, line: int, phrase: str) -> None:
    assert found_in(tmp_path, path, text) == [(line, phrase)]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_its_neighbour_is_no_banned_phrase(tmp_path: Path, path: str, text: str) -> None:
    assert found_in(tmp_path, path, text) == []


def test_every_phrase_has_a_planted_breach() -> None:
    assert {phrase for _, _, _, phrase in PLANTED} == set(prose.PHRASES)


def test_a_number_may_only_fall(tmp_path: Path) -> None:
    def rules(text: str) -> list[str]:
        (tmp_path / "a.md").write_text(text)
        counted = tidy.counted_breaches(tmp_path, ["a.md"])
        return [breach.rule for breach in tidy.over_allowance(tmp_path, counted)]

    line = f"Begin {ANEW}.\n"
    (tmp_path / "tools/dev").mkdir(parents=True)
    assert rules(line * 2) == ["anew", "anew"]  # nothing is allowed yet
    prose.shrink(tmp_path, {"anew": 2})
    assert rules(line * 2) == []
    assert rules(line * 3) == ["anew"]
    prose.shrink(tmp_path, {"anew": 3})
    assert prose.still_allowed(tmp_path) == {"anew": 2}
    prose.shrink(tmp_path, {"anew": 1})
    assert rules(line * 2) == ["anew"]


def test_a_crowded_folder_is_found() -> None:
    files = [f"actors/core/part{number}.py" for number in range(19)]
    assert not list(tidy.crowded_folders([*files, "actors/core/native/a.pyx", "docs/a.md"]))
    crowded = [*files, "actors/core/native/a.pyx", "actors/core/native/b.pyx", "actors/core/wire.py"]
    found = list(tidy.crowded_folders(crowded))
    assert [(breach.path, breach.rule) for breach in found] == [("actors/core", "folder-entries")]
    assert found[0].advice.startswith("21 entries")


@pytest.mark.parametrize(
    ("source", "breaks"),
    [
        ("def f():\n    '''Return the rank.'''\n", False),
        ("def f():\n    '''Send rows to `root`.\n\n    More.\n    '''\n", False),
        ("def f():\n    '''Process a frame.'''\n", False),
        ("@property\ndef f(self):\n    '''The rank.'''\n", False),
        ("class C:\n    '''An actor.'''\n", False),
        ("def f():\n    pass\n", True),
        ("def f():\n    '''Return the rank'''\n", True),
        ("def f():\n    '''Returns the rank.'''\n", True),
        ("def f():\n    '''The rank.'''\n", True),
        ("def f():\n    '''What it holds.'''\n", True),
        (f"class C:\n    '''{WHO} asks.'''\n", True),
        ("class C:\n    '''Asked by a rank.'''\n    def f(self):\n        '''Waiting for it.'''\n", True),
    ],
)
def test_docstrings_of_public_names(tmp_path: Path, source: str, breaks: bool) -> None:
    (tmp_path / "actors/core").mkdir(parents=True)
    name = "C" if "class" in source else "f"
    home = f"__all__ = ['{name}']\nfrom zbmd.actors.core.place import {name}\n"
    (tmp_path / "actors/__init__.py").write_text(home)
    (tmp_path / "actors/core/__init__.py").write_text(f"from zbmd.actors.core.real import {name}\n")
    (tmp_path / "actors/core/place.py").write_text(f"from zbmd.actors.core import {name}\n")
    (tmp_path / "actors/core/real.py").write_text(source)
    found = [path for path, _, _ in prose.public_docstrings(tmp_path)]
    assert found == (["actors/core/real.py"] if breaks else [])


@pytest.mark.parametrize(
    ("subject", "breaks"),
    [
        ("collectives: cache plans by shape", False),
        ("tools/bench: add a table", False),
        ("actors, docs: rename Node to Worker", False),
        ("docs: a figure", True),
        ("docs: corrected a figure", True),
        ("docs: corrects a figure", True),
        ("docs: correcting a figure", True),
        ("Docs: correct a figure", True),
        ("A figure is corrected", True),
        ("docs: correct " + "x" * 59, True),
    ],
)
def test_subjects_of_commits(subject: str, breaks: bool) -> None:
    found = list(prose.subject_breaches([("abc", subject)]))
    assert [commit for commit, _ in found] == (["abc"] if breaks else [])


def test_the_command_finds_a_planted_subject_and_skips_a_shallow_history(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "Before the rule")
    since = git("rev-parse", "HEAD")
    git("commit", "--quiet", "--allow-empty", "--message", "docs: add a page")
    git("commit", "--quiet", "--allow-empty", "--message", "One more page")
    assert [subject for _, subject in prose.subjects(tmp_path, since)] == [
        "One more page",
        "docs: add a page",
    ]
    assert len(list(prose.subject_breaches(prose.subjects(tmp_path, since)))) == 1
    assert prose.subjects(tmp_path, "0" * 40) == []


def test_the_command_fails_on_a_planted_phrase(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "page.md").write_text(f"Begin {ANEW}.\n")
    command = [sys.executable, "tools/dev/tidy.py", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout.startswith(f"page.md:1: {ANEW}: write ")
