"""No decoder is forgotten: every module that decodes is on the list of those that fuzz targets reach."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from zbmd.tools.fuzzing.registry import DECODERS, EXEMPT, TARGETS

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("transport", "actors", "collectives", "training", "tools")
# What decodes, whatever it is called on: a struct, a socket, numpy, a decoder that is made here.
METHODS = frozenset(
    [
        "unpack",
        "unpack_from",
        "iter_unpack",
        "unpackb",
        "Unpacker",
        "Decoder",
        "convert",
        "frombuffer",
        "memmap",
        "from_bytes",
        "recv",
        "recv_into",
        "recv_fds",
        "recvmsg",
        "sock_recv",
        "sock_recv_into",
        "safe_open",
        "b64decode",
        "b85decode",
        "fromfile",
        "fromhex",
    ]
)
# Names that mean decoding only behind these modules.
OF_MODULES = {
    "decode": ("msgspec.msgpack", "msgspec.json"),
    "load": ("json", "tomllib", "np"),
    "loads": ("json", "tomllib"),
}


def decodes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of every call that turns bytes into something."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, last = name.rpartition(".")
        if last in METHODS or owner in OF_MODULES.get(last, ()):
            yield node.lineno, name


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for layer in LAYERS for path in (ROOT / layer).rglob("*.py")
    )


@pytest.mark.parametrize("path", modules())
def test_every_module_that_decodes_is_listed(path: str) -> None:
    if path in DECODERS or any(fnmatch(path, pattern) for pattern in EXEMPT):
        return
    calls = list(decodes(ast.parse((ROOT / path).read_text())))
    assert not calls, (
        f"{path} decodes at {calls}: give it a target in zbmd.tools.fuzzing and name it in "
        "registry.DECODERS, or say in registry.EXEMPT why it needs none"
    )


def test_the_lists_name_what_is_there() -> None:
    known = modules()
    for path, names in DECODERS.items():
        assert (ROOT / path).is_file(), path
        assert names and set(names) <= set(TARGETS), (path, names)
    named = {name for names in DECODERS.values() for name in names}
    assert named == set(TARGETS), "every target is for some module"
    for pattern, reason in EXEMPT.items():
        fitting = [path for path in known if fnmatch(path, pattern)]
        assert reason and any(True for path in fitting for _ in decodes(ast.parse((ROOT / path).read_text())))
        assert not set(fitting) & set(DECODERS), pattern


@pytest.mark.parametrize(
    "text",
    [
        "x = msgspec.msgpack.decode(data, type=int)",
        "decoder = msgspec.json.Decoder(int)",
        "a, b = LAYOUT.unpack_from(data)",
        "for value in msgpack.Unpacker(file): pass",
        "json.loads(text)",
        "data = sock.recv(10)",
        "n = int.from_bytes(data, 'big')",
    ],
)
def test_a_planted_decoder_is_seen(text: str) -> None:
    assert list(decodes(ast.parse(text)))


def test_text_and_encoders_are_no_decoders() -> None:
    text = "a.decode()\nmsgspec.msgpack.encode(b)\nLAYOUT.pack(1)\nlogs.load()\n"
    assert not list(decodes(ast.parse(text)))
