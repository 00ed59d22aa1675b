"""A process of an actor system's pool: reads a request, calls the handler it names, writes its answer.

    python -m zbmd.actors.core.pool_worker PARENT

Requests come on standard input, answers go to what was standard output: a length of 4 bytes, big endian, and
MessagePack. It ends when its input does, or with its parent.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, BinaryIO, NoReturn

import msgspec

from zbmd.actors.contracts import ContractDecoder
from zbmd.actors.core.pools import LENGTH_BYTES
from zbmd.actors.core.wire import encode_body
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.host.process import end_with_parent, set_process_name


def _no_refs(wanted: type, _: Any) -> NoReturn:
    raise LocalProtocolError(f"a {wanted.__name__} cannot be used in a process of a pool")


_decoder = ContractDecoder(_no_refs)


def _find(function_id: str) -> Any:
    module_name, _, qualified = function_id.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        found = getattr(found, part)
    if getattr(found, "__zbmd_pool__", None) != "process":
        raise LocalProtocolError(f"{function_id} is not declared with pool='process'")
    return found


def _answer(request: bytes) -> tuple[bool, bytes]:
    try:
        function_id, body = msgspec.msgpack.decode(request, type=tuple[str, bytes])
        function = _find(function_id)
        return True, bytes(encode_body(function(_decoder.decode(body))))
    except Exception as error:  # noqa: BLE001 (the handler's own errors, told to its actor)
        return False, f"{type(error).__name__}: {error}".encode()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        size = int.from_bytes(head)
        if size > 2 * MAX_PAYLOAD_BYTES:
            return
        answer = msgspec.msgpack.encode(_answer(requests.read(size)))
        answers.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
        answers.flush()


def main() -> int:
    """Serve standard input."""
    end_with_parent(int(sys.argv[1]))
    set_process_name("zbmd pool")
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a handler prints is not to be taken for an answer
        serve(sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
