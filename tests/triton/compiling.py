"""Compiles for a GPU, on a machine without one, exactly the kernels that the backend would launch.

Run as a program (`python compiling.py --help`); the tests start it in a process of its own, since Triton is either
interpreted or compiled for the life of a process. The backend's launches are recorded with their arguments; each is
compiled for the target as the launch would have it, and what the compiler used is read off the result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass
class Launch:
    """One recorded launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def source(self) -> tuple[Any, dict[str, Any]]:
        """Return what `triton.compile` takes, specialised as a launch specialises."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name], aligned = "*" + TYPES[value.dtype], value.data_ptr() % 16 == 0
            elif isinstance(value, float):
                signature[parameter.name], aligned = "fp32", False
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = value % 16 == 0
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes), self.options

    def key(self) -> str:
        """Return a text equal for launches that compile to the same code."""
        source, options = self.source()
        return f"{source.hash()}{sorted(options.items())}"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of making them."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        arguments = dict(zip(names, args, strict=False)) | kwargs
        missing = set(names) - set(arguments)
        assert not missing, f"{self.__name__} lacks {missing}"
        assert set(arguments) <= set(names), f"{self.__name__} has no {set(arguments) - set(names)}"
        launches.append(Launch(self, arguments, options))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def resources(ptx: str, capability: int) -> dict[str, int]:
    """Return registers a thread takes, and bytes it spills, as Triton's assembler says."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        for name in ("ptxas-blackwell", "ptxas"):  # newer PTX is refused by the older one
            command = [tool(name), f"-arch=sm_{capability}{suffix}", "-v", str(source), "-o", f"{folder}/kernel.cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode:
                break
    assert not done.returncode, done.stderr
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert spills, done.stderr
    assert registers, done.stderr
    return {"registers": int(registers[1]), "spills": sum(int(n) for n in spills.groups())}


#: 16-byte loads and stores, to registers or straight to shared memory.
WIDE_LOAD = re.compile(
    r"(ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64|cp\.async\.cg\.shared\.global [^;]*0x10)"
)
#: The same of 8 and 4 bytes.
LOAD = re.compile(r"(ld\.global[\w.:]*|cp\.async\.c[ag]\.shared\.global)")


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile one launch and return what it uses."""
    source, options = launch.source()
    started = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": launch.kernel.__name__,
        "shared": compiled.metadata.shared,
        **resources(ptx, capability),
        "wide_loads": len(WIDE_LOAD.findall(ptx)),
        "loads": len(LOAD.findall(ptx)),
        "dots": len(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*", ptx)),
        "wgmma": "wgmma.mma_async" in ptx,
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
        "flushed": len(re.findall(r"\.ftz\.", ptx)),
        "seconds": round(time.perf_counter() - started, 2),
    }


def explain(error: BaseException) -> str:
    """Return the messages of an error and its causes, the innermost last."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(texts)[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", default="", help="regular expression on variant names")
    parser.add_argument("--full", action="store_true", help="every codec x layout x kind, not the quick choice")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from variants import variants

    from kvpool.backends.triton.launch import Target

    target = Target(False, 2 if options.capability >= 89 else 1, 132)
    seen = set()
    for name, run in variants(options.full):
        if not re.search(options.only, name):
            continue
        with recorded() as launches:
            run(target)
        for launch in launches:
            if launch.key() in seen:
                continue
            seen.add(launch.key())
            row = {"variant": name, "capability": options.capability, "triton": triton.__version__}
            try:
                row |= compile_launch(launch, options.capability)
            except Exception as error:
                row |= {
                    "kernel": launch.kernel.__name__,
                    "error": explain(error),
                }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
