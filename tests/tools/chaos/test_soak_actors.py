"""A short soak: processes are killed while others ask them, and every message is accounted for.

Five minutes with twenty processes are for the script.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from zbmd.tools.chaos.soak_ledger import Bookkeeper, Books, Written

TIMEOUT_S = 200.0


def test_every_message_is_accounted_for() -> None:
    command = [sys.executable, "-m", "zbmd.tools.chaos.soak_actors", "--processes", "4", "--minutes", "0.08"]
    done = subprocess.run(
        [*command, "--kill-every", "0.3"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["accounted_for"] and not result["violations"]
    assert result["acknowledged"] > 0 and result["audits"] > 0


def written(number: int, *, life: int = 1, entries: int = 1) -> Written:
    return Written("p", life, number, entries)


@pytest.mark.parametrize(
    ("answer", "over", "books", "words"),
    [
        (written(1, life=2), False, [1], "was answered by"),
        (written(2), False, [1], "was answered by"),
        (written(1, entries=3), False, [1], "3 are written, 2 were sent"),
        (written(1), True, [1], "by a life that was over"),
        (written(1), False, [1, 1], "not each once and in order"),
        (written(1), False, [2, 1], "not each once and in order"),
        (written(1), False, [1, 3], "never sent there"),
        (written(1), False, [2], "acknowledged and not written"),
    ],
)
def test_the_books_show_what_is_wrong(answer: Written, over: bool, books: list[int], words: str) -> None:
    keeper = Bookkeeper()
    for number in (1, 2):
        keeper.send("p", 1, "c", number)
    keeper.acknowledge(1, "c", 1, answer, sent_after_end=over)
    keeper.audit(Books("p", 1, {"c": books}))
    assert any(words in violation for violation in keeper.violations), keeper.violations


def test_the_books_let_pass_what_is_right() -> None:
    keeper = Bookkeeper()
    for number in (1, 2, 3):
        keeper.send("p", 1, "c", number)
    keeper.acknowledge(1, "c", 1, written(1), sent_after_end=False)
    keeper.lose()
    keeper.acknowledge(1, "c", 3, written(3, entries=2), sent_after_end=False)
    keeper.audit(Books("p", 1, {"c": [1, 3]}))
    keeper.audit(Books("p", 1, {"c": [1, 2, 3]}))
    assert (keeper.violations, keeper.sent, keeper.acknowledged + keeper.unknown) == ([], 3, 3)
