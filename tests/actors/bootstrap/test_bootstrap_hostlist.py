"""Slurm's lists of hosts: what they mean, and that formatting, parsing and scontrol agree."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.bootstrap.hostlist import HOSTS_MAX, format_hostlist, parse_hostlist
from zbmd.transport.errors import UserError

NAMES = st.from_regex(
    r"[a-z]{0,3}(0{0,3}[0-9]{1,4})?(-[a-z]{1,2}[0-9]?)?(\.[a-z]{2})?", fullmatch=True
).filter(bool)
RUNS = st.builds(
    lambda stem, first, count, width, end: [f"{stem}{first + n:0{width}d}{end}" for n in range(count)],
    st.sampled_from(["n", "gpu-", "rack1n"]),
    st.integers(0, 1200),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(["", "-ib", ".x"]),
)
FAMILIES = st.lists(st.one_of(st.lists(NAMES, min_size=1, max_size=3), RUNS), max_size=5)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ""),
        ("a", "a"),
        ("a,b,a", "a b a"),
        ("a[001-003,7]-ib,b12,c[1-2][3-4]", "a001-ib a002-ib a003-ib a7-ib b12 c13 c14 c23 c24"),
        ("n[9-11],n[09-11]", "n9 n10 n11 n09 n10 n11"),
        ("a[098-101]", "a098 a099 a100 a101"),
        ("a[1-03]", "a1 a2 a3"),
        ("rack[0-1]node[1-2].x", "rack0node1.x rack0node2.x rack1node1.x rack1node2.x"),
        ("a,,b,", "a b"),
        ("[1-3]", "1 2 3"),
    ],
)
def test_lists_of_hosts(text: str, hosts: str) -> None:
    assert parse_hostlist(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x[3-1]", "ends before it begins"),
        ("a[1-2", r"a \[ without a \]"),
        ("a]b", r"a \] without a \["),
        ("a[[1]]", r"a \[ inside of brackets"),
        ("a[]", "neither a number nor a range"),
        ("a[1 -2]", "neither a number nor a range"),
        ("a[1-2-3]", "neither a number nor a range"),
        ("a[٣]", "neither a number nor a range"),
        ("a b", "no part of a host's name"),
        ("$(reboot)", "no part of a host's name"),
        ("a" * 254, "more than 253 characters"),
        ("a[1]" * 9, "more than 8 brackets"),
        ("a[0-999999999999999999]", f"more than {HOSTS_MAX} hosts"),
        ("a[0-99][0-99][0-99]", f"more than {HOSTS_MAX} hosts"),
        (",".join(["a[0-9999]"] * 7), f"more than {HOSTS_MAX} hosts"),
        ("a," * (1 << 18), "characters: at most"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_hostlist(text)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("a001 a002 a003 a7", "a[001-003,7]"),
        ("n9 n10 n11", "n[9-11]"),
        ("n09 n10", "n[09-10]"),
        ("n9 n010", "n[9,010]"),
        ("a a1 a b", "a,a1,a,b"),
        ("x1-ib x2-ib", "x[1-2]-ib"),
    ],
)
def test_formatting_folds_neighbours(hosts: str, text: str) -> None:
    assert format_hostlist(hosts.split()) == text


@given(FAMILIES)
def test_what_is_formatted_reads_back(families: list[list[str]]) -> None:
    hosts = tuple(host for family in families for host in family)
    text = format_hostlist(hosts)
    assert parse_hostlist(text) == hosts
    assert len(text) <= len(",".join(hosts)) + 2 * len(families) + 2


@given(st.text(alphabet="ab[]0123456789,-. é", max_size=40))
def test_any_text_is_a_list_or_a_typed_error(text: str) -> None:
    with contextlib.suppress(UserError):
        hosts = parse_hostlist(text, hosts_max=1000)
        assert len(hosts) <= 1000
        assert parse_hostlist(format_hostlist(hosts), hosts_max=1000) == hosts


def test_a_name_that_is_none_is_not_formatted() -> None:
    with pytest.raises(UserError, match="no host's name"):
        format_hostlist(["a", "b[1]"])


@pytest.mark.optional
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol (apt: slurm-client) is not installed")
def test_scontrol_reads_the_same_hosts(tmp_path: Path) -> None:
    """Slurm's own reader takes neither a suffix nor two brackets of many numbers, so none are given."""
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    lists = [
        "a[001-003,7],b12",
        "n[9-11],n[09-11],n[098-101]",
        "a,b,a",
        "gpu-[1,1,3-4]",
        "a1b2c[3-4]",
        format_hostlist([f"node{n:04d}" for n in range(95, 300, 3)]),
        format_hostlist(["c1", "c2", "d01", "d02", "d3", "login", "d4"]),
    ]
    for text in lists:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(config)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert tuple(said.stdout.split()) == parse_hostlist(text), text
        folded = subprocess.run(
            ["scontrol", "show", "hostlist", ",".join(parse_hostlist(text))],
            env={**os.environ, "SLURM_CONF": str(config)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert sorted(parse_hostlist(folded.stdout.strip())) == sorted(parse_hostlist(text))
