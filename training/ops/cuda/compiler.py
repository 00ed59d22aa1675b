"""Compile CUDA C++ to PTX and machine code by NVRTC, which needs neither a driver nor a GPU.

One compilation for a real architecture gives the PTX, the cubin and ptxas's report. Results are cached by a
hash of everything that they depend on. Sources include our own headers only, which are passed in memory, so
that no include path exists at run time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import structlog

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, user_directory, write_atomically

log: Final = structlog.stdlib.get_logger("zbmd.cuda")

INSTALL: Final = 'pip install "nvidia-cuda-nvrtc==13.0.88"'
OPTIONS: Final = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v", "--no-cache")
DIGEST_BYTES: Final = 32
ENTRY_BYTES_MAX: Final = 64 * 2**20


class CompilerMissing(UserError):
    """NVRTC is not installed, or its library cannot be loaded."""


class UnknownArchitecture(UserError):
    """This NVRTC cannot compile for the architecture."""


class CompileFailed(UserError):
    """A source did not compile; `log` has the compiler's messages."""

    def __init__(self, message: str, *, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """ptxas's report of one kernel: registers of a thread, and bytes."""

    registers: int
    shared_bytes: int
    """Static shared memory; dynamic shared memory is an argument of the launch."""
    stack_bytes: int
    spill_bytes: int
    """Stored and loaded, together."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one compilation."""

    ptx: str
    cubin: bytes
    log: str

    @property
    def kernels(self) -> Mapping[str, KernelReport]:
        """Return ptxas's report, by the kernel's entry."""
        return parse_report(self.log)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the log's lines that are not part of ptxas's ordinary report.

        A `wgmma` that ptxas serialises (C7510 to C7520) is one of these.
        """
        return tuple(line for line in self.log.splitlines() if line.strip() and not _ORDINARY.match(line))


_ORDINARY: Final = re.compile(
    r"ptxas info\s+: (\d+ bytes gmem|Compiling entry function|Function properties|Used \d+)"
    r"|(ptxas)?[\s.]*\d+ bytes stack frame"
)
_REPORT: Final = re.compile(
    r"Function properties for (?P<entry>\w+)\s*\n"
    r"(?:ptxas)?[\s.]*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"\s*\nptxas info\s+: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


def parse_report(text: str) -> dict[str, KernelReport]:
    """Return the resources of each kernel that the log of a compilation describes."""
    found = dict[str, KernelReport]()
    for match in _REPORT.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["entry"]] = KernelReport(
            registers=int(match["registers"]),
            shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=int(match["stack"]),
            spill_bytes=int(match["stores"]) + int(match["loads"]),
        )
    return found


def encode_entry(compiled: Compiled) -> bytes:
    """Return the content of a file of the cache: a SHA-256 digest, and what it covers."""
    body = msgspec.msgpack.encode(compiled)
    return hashlib.sha256(body).digest() + body


def decode_entry(data: bytes) -> Compiled | None:
    """Return what `encode_entry` encoded, or None if `data` is anything else."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    try:
        return msgspec.msgpack.decode(body, type=Compiled)
    except (ValueError, RecursionError):  # text that is no UTF-8 is no MsgspecError
        return None


class Compiler:
    """NVRTC with a cache. Safe for several processes that share the cache's directory."""

    def __init__(self, *, library: Path | None = None, cache: Path | None = None) -> None:
        """Load the library: `library`, that of the installed package, or the one that the loader finds.

        cache: a directory, by default `zbmd/kernels` in the user's cache directory; without one, and where
        it cannot be written, results are kept in memory only. Raises `CompilerMissing`.
        """
        self._nvrtc = _load(str(library) if library is not None else _installed())
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version: Final = (major.value, minor.value)
        self.architectures: Final = frozenset(self._architectures())
        if cache is None:
            home = user_directory(UserFiles.CACHE)
            cache = None if home is None else home / "kernels"
        self._directory = cache
        self._memory = dict[str, Compiled]()

    def compile(
        self,
        source: str,
        *,
        architecture: str,
        headers: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        name: str = "kernels.cu",
    ) -> Compiled:
        """Return `source` compiled for `architecture`, such as "sm_90a", from the cache if it is there.

        headers: by the name in `#include`. options: of NVRTC, beyond `OPTIONS`. name: in error messages.
        Raises `UnknownArchitecture` and `CompileFailed`.
        """
        number = re.fullmatch(r"sm_(\d+)[af]?", architecture)
        if number is None or int(number[1]) not in self.architectures:
            known = ", ".join(f"sm_{one}" for one in sorted(self.architectures))
            raise UnknownArchitecture(
                f"NVRTC {self.version[0]}.{self.version[1]} compiles for {known}, not for {architecture!r}."
            )
        headers, every = dict(sorted((headers or {}).items())), (*OPTIONS, *options)
        key = self._key(source, architecture, headers, every)
        found = self._memory.get(key) or self._read(key)
        if found is None:
            found = self._compile(source, architecture, headers, every, name)
            self._write(key, found)
        self._memory[key] = found
        return found

    def _key(self, source: str, architecture: str, headers: Mapping[str, str], options: Sequence[str]) -> str:
        parts = [list(self.version), source, architecture, list(headers.items()), list(options)]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _read(self, key: str) -> Compiled | None:
        if self._directory is None:
            return None
        try:
            with (self._directory / key).open("rb") as file:
                return decode_entry(file.read(ENTRY_BYTES_MAX))
        except OSError:
            return None

    def _write(self, key: str, compiled: Compiled) -> None:
        if self._directory is None:
            return
        try:
            write_atomically(self._directory / key, lambda file: file.write(encode_entry(compiled)))
        except UserError as error:
            log.warning("compiled kernels are kept in memory only", reason=str(error))
            self._directory = None

    def _compile(
        self, source: str, architecture: str, headers: Mapping[str, str], options: Sequence[str], name: str
    ) -> Compiled:
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers))
        self._call(
            "nvrtcCreateProgram",
            *(ctypes.byref(program), source.encode(), f"/{name}".encode(), len(headers), texts, names),
        )
        try:
            given = [f"--gpu-architecture={architecture}", *options]
            array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
            result = int(self._nvrtc.nvrtcCompileProgram(program, len(given), array))
            text = re.sub(r"ptxas info\s+: Compile time.*\n", "", self._text(program, "ProgramLog"))
            if result != 0:
                raise CompileFailed(f"{name} does not compile for {architecture}:\n{text}", log=text)
            return Compiled(ptx=self._text(program, "PTX"), cubin=self._bytes(program, "CUBIN"), log=text)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def _call(self, name: str, *arguments: object) -> None:
        result = int(getattr(self._nvrtc, name)(*arguments))
        if result != 0:
            self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            reason = self._nvrtc.nvrtcGetErrorString(result)
            raise CompilerMissing(f"{name} of NVRTC failed: {reason.decode()}. Reinstall it: {INSTALL}.")


def _installed() -> str:
    """Return the library of NVIDIA's package for CUDA 13 or 12; otherwise a name for the loader."""
    spec = importlib.util.find_spec("nvidia")
    for root in [] if spec is None else list(spec.submodule_search_locations or ()):
        for pattern in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
            if (path := Path(root, pattern)).exists():
                return str(path)
    return "libnvrtc.so.13"


@cache
def _load(name: str) -> ctypes.CDLL:
    try:
        # NVRTC 13.0 does not find this library beside itself unless it is already loaded.
        for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so*")) if "/" in name else []:
            ctypes.CDLL(str(builtins))
        return ctypes.CDLL(name)
    except OSError as error:
        raise CompilerMissing(
            f"cannot load NVRTC, which compiles CUDA kernels ({error}). Install it: {INSTALL}."
        ) from error
