"""Kernels compiled ahead of time for GPUs that need not be there, and what their code says.

Triton carries the compilers for NVIDIA and AMD and the disassembler. Registers, spills and the width of every load and
store are read from the machine code; where float32 arithmetic and 64-bit offsets are promised, from Triton's own IR.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""A100, H100 and H200, B200, MI300."""

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Most bytes that a block may have (CUDA C++ Programming Guide, compute capabilities; CDNA3 ISA: 64 KiB of LDS)."""


ADVANCES_32_BITS = re.compile(r"\s*%\S+ = tt\.addptr %\S+, (%\S+) : .*i32>?(?: loc.*)?$")
"""Triton's IR for a pointer, or a block of them, moved by 32-bit offsets."""


@dataclass(frozen=True)
class Compiled:
    """A kernel as it is launched for one shape: ``pointers`` and ``scalars`` by their types, ``constants`` by value."""

    name: str
    kernel: JITFunction
    pointers: dict[str, str]
    scalars: dict[str, str]
    constants: dict[str, Any]
    warps: int
    odd: frozenset[str] = field(default_factory=frozenset)
    """Integer scalars that 16 does not divide; pointers lie on 16 bytes, as PyTorch's allocator gives them."""
    statistics: tuple[int, int] = (0, 0)
    """Loads and stores of less than 16 bytes a thread that the kernel needs: of one number a token, of few columns."""

    lacking: frozenset[str] = field(default_factory=frozenset)
    """Those of TARGETS that have no instructions for it, where the reference runs."""

    def source(self) -> ASTSource:
        """What Triton compiles."""
        names = self.kernel.arg_names
        types = {name: (self.pointers | self.scalars).get(name, "constexpr") for name in names}
        integers = {name for name, kind in self.scalars.items() if kind.startswith("i")}
        aligned = (set(self.pointers) | integers) - self.odd
        return ASTSource(
            fn=self.kernel,
            signature=types,
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )


@dataclass(frozen=True)
class Facts:
    """Of one kernel on one target. Registers are a thread's, shared memory a block's, in bytes."""

    registers: int
    spills: int
    """Loads from and stores to local memory (NVIDIA), spilled vector registers (AMD)."""
    shared_memory: int
    vector_loads: int
    """That take 16 bytes a thread."""
    vector_stores: int
    other_loads: int
    other_stores: int
    narrow_arithmetic: tuple[str, ...]
    """Operations on bfloat16 or float16 values in Triton's IR."""
    short_offsets: tuple[str, ...]
    """32-bit offsets in Triton's IR that are more than a place within a block."""


def facts(compiled: Compiled, target: str) -> Facts:
    """Compile for one of TARGETS; Triton keeps what it compiled in its cache."""
    kernel = triton.compile(compiled.source(), target=TARGETS[target], options={"num_warps": compiled.warps})
    ir = kernel.asm["ttir"]
    read = _amd if TARGETS[target].backend == "hip" else _nvidia
    return Facts(
        **read(kernel.asm),
        shared_memory=kernel.metadata.shared,
        narrow_arithmetic=tuple(narrow_arithmetic(ir)),
        short_offsets=tuple(short_offsets(ir)),
    )


def broken(compiled: Compiled, found: Facts, target: str) -> list[str]:
    """What is promised of every kernel and does not hold for this one."""
    loads, stores = compiled.statistics
    promises = {
        f"{found.spills} spills": found.spills == 0,
        f"{found.other_loads} loads under 16 bytes": found.other_loads <= loads and found.vector_loads > 0,
        f"{found.other_stores} stores under 16 bytes": found.other_stores <= stores,
        f"{found.shared_memory} bytes of shared memory": found.shared_memory <= SHARED_MEMORY[target],
        f"arithmetic on narrow numbers: {found.narrow_arithmetic}": not found.narrow_arithmetic,
        f"32-bit offsets: {found.short_offsets}": not found.short_offsets,
    }
    return [f"{compiled.name}, {target}: {fault}" for fault, holds in promises.items() if not holds]


def _nvidia(assembly: dict[str, Any]) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    loads, stores = re.findall(r"\bLDG\.\S+", code), re.findall(r"\bSTG\.\S+", code)
    vector_loads, vector_stores = (sum(".128" in each for each in found) for found in (loads, stores))
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "vector_loads": vector_loads,
        "vector_stores": vector_stores,
        "other_loads": len(loads) - vector_loads,
        "other_stores": len(stores) - vector_stores,
    }


def _cuobjdump(*arguments: str) -> str:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _amd(assembly: dict[str, Any]) -> dict[str, int]:
    code = assembly["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        assert found is not None, name
        return int(found[1])

    loads = re.findall(r"(?:global|buffer)_load_\S+", code)
    stores = re.findall(r"(?:global|buffer)_store_\S+", code)
    vector_loads, vector_stores = (sum("dwordx4" in each for each in found) for found in (loads, stores))
    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "vector_loads": vector_loads,
        "vector_stores": vector_stores,
        "other_loads": len(loads) - vector_loads,
        "other_stores": len(stores) - vector_stores,
    }


def narrow_arithmetic(ir: str) -> list[str]:
    """Lines of Triton's IR that compute on bfloat16 or float16 values: all but conversions, constants, selection."""
    computes = re.compile(r"\b(?:arith|math)\.(?!ext|trunc|constant|select|bitcast)\w+[^\n]*:[^\n]*f16\b")
    return [line.strip() for line in ir.splitlines() if computes.search(line)]


def short_offsets(ir: str) -> list[str]:
    """Lines of Triton's IR that move a pointer by 32 bits, unless it is by a place within the block (make_range)."""
    within_block: set[str] = set()
    lines = []
    for line in ir.splitlines():
        if made := re.match(r"\s*(%\S+) = tt\.(make_range|expand_dims|broadcast)\b(?: (%\S+))?", line):
            if made[2] == "make_range" or made[3] in within_block:
                within_block.add(made[1])
        elif (moved := ADVANCES_32_BITS.match(line)) and moved[1] not in within_block:
            lines.append(line.strip())
    return lines
