"""Clusters of real nodes on loopback: they form, die, leave, stop, wake up and restart."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from programs import PROGRAMS
from support.cluster.cluster_nodes import BUDGET, TIMEOUT_S, Nodes

FIVE = ("n1", "n2", "n3", "n4", "n5")


async def test_kills_of_any_node_the_founder_included_and_its_return(nodes: Nodes) -> None:
    await nodes.form(*FIVE)
    await nodes.remembers("n1", 4)
    await nodes.runs["n1"].kill()
    await nodes.agreed("n2", "n3", "n4", "n5")
    await nodes.runs["n4"].kill()
    await nodes.agreed("n2", "n3", "n5")
    again = await nodes.up("n1")  # without --join: it remembers where the others were
    await again.until(r"n1 \(node\d+#2\) at .*view ")
    await nodes.agreed("n1", "n2", "n3", "n5")
    found = await nodes.members("n2")
    assert found["known"] == found["entered"] and found["state"] == "member"
    lives = {member["node"]["name"]: member["node"]["key"]["incarnation"] for member in found["members"]}
    assert lives == {"n1": 2, "n2": 1, "n3": 1, "n5": 1}
    code, text = await nodes.command("n3", "members")
    assert code == 0 and "5" in text and "this node" in text, text


async def test_a_node_leaves_in_order_and_the_last_one_too(nodes: Nodes) -> None:
    _, second, third = await nodes.form("n1", "n2", "n3")
    code, text = await nodes.command("n1", "down")
    assert code == 0 and "has left the cluster" in text, text
    assert await nodes.runs["n1"].ended() == 0
    await nodes.agreed("n2", "n3")
    second.signal(signal.SIGTERM)
    assert await second.ended() == 0
    await nodes.agreed("n3")
    code, text = await nodes.command("n3", "down")
    assert code == 0, text
    assert await third.ended() == 0
    assert "it left" in str(third)
    for name in ("n1", "n2", "n3"):
        assert not (nodes.directory / name / "running.json").exists()


async def test_a_node_that_was_stopped_wakes_up_learns_of_it_and_comes_back(nodes: Nodes) -> None:
    await nodes.form("n1", "n2", "n3")
    stopped, marks = nodes.runs["n2"], nodes.marks()
    stopped.signal(signal.SIGSTOP)
    await nodes.agreed("n1", "n3", after=marks)
    marks = nodes.marks()
    stopped.signal(signal.SIGCONT)
    await stopped.until(r"#1 stops: the others went on without it, in view \d+", after=marks["n2"])
    await stopped.until(r"n2 \(node\d+#2\) at .*view ", after=marks["n2"])
    await nodes.agreed("n1", "n2", "n3", after=marks)


async def test_all_nodes_restart_one_after_the_other_the_first_included(nodes: Nodes) -> None:
    names = FIVE
    await nodes.form(*names)
    for name in names:
        marks = nodes.marks()
        nodes.runs[name].signal(signal.SIGTERM)
        assert await nodes.runs[name].ended() == 0, str(nodes.runs[name])
        others = [other for other in names if other != name]
        await nodes.agreed(*others, after=marks)
        marks = nodes.marks()
        await nodes.up(name, "--join", nodes.address(others[0]))
        await nodes.agreed(*names, after=marks | {name: 0})
    found = await nodes.members("n1")
    assert all(member["node"]["key"]["incarnation"] >= 2 for member in found["members"])


async def test_the_token_is_all_that_another_host_needs(nodes: Nodes, tmp_path: Path) -> None:
    first = await nodes.up("n1")
    await first.until("view 1: ")
    code, line = await nodes.command("n1", "token")
    line = line.splitlines()[0]
    assert code == 0 and line.startswith("zbmd-node up --join "), line
    words = line.split()[2:]
    cookie = tmp_path / "elsewhere" / "cookie"
    second = await nodes.up("n2", *words, ZBMD_COOKIE_FILE=str(cookie))
    await nodes.agreed("n1", "n2")
    check_cookie(cookie, tmp_path / "cookie")
    assert b"zbmd1-" not in command_line(second.pid), "`ps` would show the token"


def check_cookie(cookie: Path, original: Path) -> None:
    assert cookie.stat().st_mode & 0o777 == 0o600
    assert cookie.read_bytes() == original.read_bytes()


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


TRAIN = str(PROGRAMS / "node/train.py")


async def test_a_job_runs_over_two_nodes_and_what_it_prints_reaches_who_follows(nodes: Nodes) -> None:
    await nodes.form("n1", "n2")
    options = ("--nnodes", "2", "-n", "1", "--arena", "1MiB", "--env", "WHERE=here")
    follower = await nodes.start("n2", "submit", "--follow", *options, TRAIN, "--lr", "3")
    for rank in range(2):
        await follower.until(rf"\[rank{rank}\]: rank {rank} of 2 here --lr 3")
    found = await nodes.jobs("n1")
    assert [(each["submitter"], each["phase"]) for each in found] == [("n2", "running")]
    assert {rank["node"] for rank in found[0]["ranks"]} == {"n1", "n2"}
    (nodes.directory / "done").touch()
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)


async def test_members_show_the_failure_domain_of_a_node_and_its_spare_ranks(
    nodes: Nodes,
) -> None:
    first = await nodes.up("n1", "--domain", "rack-7")
    await first.until("view 1: ")
    options = ("--spare-ranks", "2", "-n", "1", "--arena", "1MiB", "--env", "WHERE=here")
    follower = await nodes.start("n1", "submit", "--follow", *options, TRAIN)
    await follower.until("rank 0 of 1 here")
    code, text = await nodes.command("n1", "members")
    (line,) = [line for line in text.splitlines() if "│ this node" in line]
    row = [cell.strip() for cell in line.split("│")]
    assert code == 0 and (row[1], row[2], row[-2]) == ("n1", "rack-7", "2"), text
    (found,) = (await nodes.members("n1"))["members"]
    assert (found["node"]["domain"], found["spares"]) == ("rack-7", 2)
    code, text = await nodes.command("n1", "up", "--new", "--domain", "rack 7")
    assert code == 2 and "--domain: expected 1 to 64 letters, digits" in text, text
    code, text = await nodes.command("n1", "submit", "--on-loss", "stop", *options, TRAIN)
    assert code == 2 and "a spare rank replaces a lost one" in text, text
    (nodes.directory / "done").touch()
    assert await follower.ended() == 0, str(follower)


async def test_a_job_is_stopped_by_any_node_and_what_cannot_be_is_refused(nodes: Nodes) -> None:
    await nodes.form("n1", "n2")
    options = ("--no-follow", "--arena", "1MiB", "-n", "1", "--env", "WHERE=here")
    code, text = await nodes.command("n2", "submit", *options, TRAIN)
    assert code == 0, text
    job = text.splitlines()[0]
    code, text = await nodes.command("n1", "stop", job[:6])
    assert code == 0 and f"zbmd-node: job {job} is being stopped" in text, text
    async with asyncio.timeout(TIMEOUT_S):
        while not (reason := (await nodes.jobs("n2"))[0]["reason"]):  # it hears of what n1 has agreed to
            pass
    assert reason == "zbmd-node stop"
    code, text = await nodes.command("n1", "stop", "nosuchjob")
    assert code == 2 and "no job begins with 'nosuchjob'" in text
    code, text = await nodes.command("n1", "submit", "--nnodes", "9999", TRAIN)
    assert code == 2 and "no cluster would take this job: the" in text, text


async def test_a_host_with_other_code_says_which_files_differ(nodes: Nodes) -> None:
    first = await nodes.up("n1", "--recovery-budget", BUDGET, cwd=package(nodes.directory / "a", "1"))
    await first.until("view 1: ")
    await nodes.up("n2", "--join", nodes.address("n1"), cwd=package(nodes.directory / "b", "2"))
    await nodes.agreed("n1", "n2")
    options = ("--follow", "--nnodes", "2", "-n", "1", "--arena", "1MiB", "--max-restarts", "0")
    follower = await nodes.start("n1", "submit", *options, "-m", "job", cwd=nodes.directory / "a")
    await follower.until(r"ended, failed.*these files differ: job/part\.py")
    assert await follower.ended() == 1


def package(directory: Path, text: str) -> Path:
    (directory / "job").mkdir(parents=True)
    (directory / "job" / "__main__.py").write_text("import time\nfrom zbmd.actors.rank.member import join\n")
    (directory / "job" / "__init__.py").write_text("")
    (directory / "job" / "part.py").write_text(f"PART = {text}\n")
    return directory
