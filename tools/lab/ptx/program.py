"""Parse PTX: text to instructions with typed operands. Anything unknown raises `PtxSyntaxError`.

The grammar is that of NVRTC's output and of inline assembly in it, with nested scopes of registers. See
NVIDIA's "PTX ISA", version 9.0.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from zbmd.tools.lab.ptx.errors import PtxSyntaxError

WIDTHS: Final = {
    "pred": 0,
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}
"""Bytes of a value of each type."""
SPECIAL: Final = frozenset(
    (
        *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
        *("%laneid", "%warpid"),
    )
)
_IGNORED: Final = ("pragma", "maxntid", "minnctapersm", "reqntid", "maxnreg")


@dataclass(frozen=True, slots=True)
class Register:
    """A register; `index` counts those of the kernel, `width` is in bytes, 0 for a predicate."""

    index: int
    width: int
    name: str


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """One of `SPECIAL`."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a float."""

    value: int
    is_bits: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable in shared or parameter memory, or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; a tensor's address has coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """`{a, b, …}`, or `a|b`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """`_`: a result that is not wanted."""


Operand: TypeAlias = Register | SpecialRegister | Immediate | Symbol | Address | Group | Discard


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """`@guard opcode.modifiers operands`; `line` is of the source, 0 if it is unknown."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str
    line: int

    @property
    def where(self) -> str:
        """Return the instruction and its source line, for messages."""
        return f"{self.text!r}" + (f", line {self.line}" if self.line else "")


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter or a shared variable: bytes and alignment; `nbytes` is 0 for dynamic shared memory."""

    name: str
    nbytes: int
    alignment: int


@dataclass(slots=True, kw_only=True)
class Kernel:
    """One entry of a module."""

    name: str
    target: str
    parameters: list[Variable]
    shared: list[Variable]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)


_ENTRY: Final = re.compile(r"\.(?:visible|weak)?\s*\.?entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER: Final = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+"
    r"(?P<name>\w+)(?:\[(?P<count>\d+)\])?\s*(?:,|$)"
)
_SHARED: Final = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\S+?)\[(\d*)\]$")
_REGISTERS: Final = re.compile(r"\.reg\s+\.(\w+)\s+(.+)$", re.DOTALL)
_INSTRUCTION: Final = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)(?:\s+(.*))?$", re.DOTALL)
_LABEL: Final = re.compile(r"([$\w]+):(?!:)")


def parse(ptx: str) -> dict[str, Kernel]:
    """Return the kernels of a module, by name. Raises `PtxSyntaxError`."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", "", ptx), flags=re.DOTALL)
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxSyntaxError("expected PTX with a .target, found none")
    module_shared = [
        _shared(match[0].removesuffix(";").removeprefix(".extern").strip())
        for match in re.finditer(r"^(?:\.extern\s+)?\.shared[^;]*;", text, re.MULTILINE)
    ]
    kernels = dict[str, Kernel]()
    for match in _ENTRY.finditer(text):
        parameters = [_parameter(one) for one in _PARAMETER.finditer(match[2].strip())]
        if len(parameters) != match[2].count(".param"):
            raise PtxSyntaxError(f"cannot read the parameters of {match[1]}: {match[2].strip()!r}")
        kernel = Kernel(name=match[1], target=target[1], parameters=parameters, shared=list(module_shared))
        _Body(kernel).read(text, match.end())
        kernels[kernel.name] = kernel
    return kernels


def _parameter(match: re.Match[str]) -> Variable:
    width = WIDTHS.get(match["type"])
    if width is None:
        raise PtxSyntaxError(f"unknown type of a parameter: {match[0]!r}")
    return Variable(match["name"], width * int(match["count"] or 1), int(match["align"] or width))


def _shared(statement: str) -> Variable:
    match = _SHARED.match(statement)
    if match is None:
        raise PtxSyntaxError(f"expected a shared variable of .b8, found {statement!r}")
    return Variable(match[2], int(match[3] or 0), int(match[1]))


class _Body:
    """The reader of one kernel's body."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._scopes: list[dict[str, Register]] = [{}]
        self._line = 0

    def read(self, text: str, at: int) -> None:
        """Read from behind the opening brace to the matching one."""
        for statement in self._statements(text, at):
            if statement.startswith(".reg"):
                self._declare(statement)
            elif statement.startswith(".shared"):
                self._kernel.shared.append(_shared(statement))
            elif statement.startswith("."):
                if statement[1:].split()[0] not in _IGNORED:
                    raise PtxSyntaxError(f"unknown directive {statement!r} in {self._kernel.name}")
            else:
                self._kernel.code.append(self._instruction(statement))

    def _statements(self, text: str, at: int) -> Iterator[str]:
        while True:
            while text[at].isspace() or text[at] == ";":
                at += 1
            if text[at] == "{":
                self._scopes.append({})
                at += 1
            elif text[at] == "}":
                self._scopes.pop()
                at += 1
                if not self._scopes:
                    return
            elif text.startswith(".loc", at):
                end = text.index("\n", at)
                # Code of an inlined function belongs to the line in that function.
                self._line = int(text[at:end].split()[2])
                at = end
            elif match := _LABEL.match(text, at):
                self._kernel.labels[match[1]] = len(self._kernel.code)
                at = match.end()
            else:
                end = text.index(";", at)
                yield " ".join(text[at:end].split())
                at = end + 1

    def _declare(self, statement: str) -> None:
        match = _REGISTERS.match(statement)
        if match is None or match[1] not in WIDTHS:
            raise PtxSyntaxError(f"unknown declaration {statement!r}")
        for item in match[2].split(","):
            several = re.match(r"\s*(\S+?)<(\d+)>$", item)
            names = [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [item.strip()]
            for name in names:
                register = Register(len(self._kernel.registers), WIDTHS[match[1]], name)
                self._kernel.registers.append(register)
                self._scopes[-1][name] = register

    def _instruction(self, statement: str) -> Instruction:
        match = _INSTRUCTION.match(statement)
        if match is None:
            raise PtxSyntaxError(f"expected an instruction, found {statement!r}")
        guard = self._operand(match[2], statement) if match[2] else None
        if guard is not None and not isinstance(guard, Register):
            raise PtxSyntaxError(f"expected a predicate as guard in {statement!r}")
        operands = tuple(self._operand(one, statement) for one in _split(match[5] or ""))
        return Instruction(
            opcode=match[3],
            modifiers=tuple(match[4].split(".")[1:]),
            operands=operands,
            guard=guard,
            negated=match[1] == "!",
            text=statement,
            line=self._line,
        )

    def _operand(self, text: str, statement: str) -> Operand:
        if text == "_":
            return Discard()
        if text.startswith("{"):
            return Group(tuple(self._operand(one, statement) for one in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1], statement)
        if "|" in text:
            return Group(tuple(self._operand(one, statement) for one in text.split("|")))
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        if text in SPECIAL:
            return SpecialRegister(text)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), is_bits=True)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"-?\d+\.\d+", text):
            return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0], is_bits=True)
        if re.fullmatch(r"[$A-Za-z_][$\w]*", text):
            return Symbol(text)
        raise PtxSyntaxError(f"unknown operand {text!r} in {statement!r}")

    def _address(self, text: str, statement: str) -> Address:
        first, *rest = _split(text)
        base_text, _, offset = first.replace(" ", "").partition("+")
        base = self._operand(base_text, statement)
        if not isinstance(base, Register | Symbol | Immediate):
            raise PtxSyntaxError(f"unknown address [{text}] in {statement!r}")
        coordinates = self._operand(rest[0], statement) if rest else Group(())
        if len(rest) > 1 or not isinstance(coordinates, Group):
            raise PtxSyntaxError(f"unknown address [{text}] in {statement!r}")
        return Address(base, int(offset or "0", 0), coordinates.items)


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    found, depth, start = list[str](), 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()] if text.strip() else []
