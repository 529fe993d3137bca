"""Every kernel the backend launches compiles for a GPU, where there is none: no spills, wide loads, within limits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Bytes of shared memory a program may use (CUDA programming guide, compute capabilities).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
#: Bytes of stack that Triton's own choice of register allocation may take, where the assembler's needs none.
STACK_BYTES = 64
#: Kernels whose loads must be 16 bytes wide: all but the one that moves single vectors.
WIDE = {"attend_kernel", "merge_kernel", "write_kernel", "read_kernel", "copy_kernel"}
#: Those whose turns of 64 vectors of 16 bytes leave each of 128 threads 8.
SMALL = {("decode nvfp4 head of 32", "attend_kernel")}

#: Where `make test` puts the Triton of older GPU machines.
OLDER_TRITON = ROOT / "build" / "triton-3.6.0"
#: The launches for a GPU are shared out to so many tests, each about a minute long.
PARTS = 8


def compiled(*arguments: str, path: tuple[Path, ...] = (ROOT / "src",)) -> list[dict[str, Any]]:
    """Compile in processes of their own, where Triton is not interpreted; what was compiled before is kept in build."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton-cache")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # the others need their cores
    jobs = max(len(os.sched_getaffinity(0)) // workers, 1)
    command = [sys.executable, "-W", "error", str(HERE / "compiling.py"), "--jobs", str(jobs), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]]) -> None:
    """Fail with everything that is wrong."""
    assert rows
    faults = []
    for row in rows:
        name = f"{row['variant']}: {row['kernel']} for sm_{row['capability']}"
        if "error" in row:
            faults.append(f"{name} does not compile: {row['error']}")
            continue
        if row["spills"] or row["stack"] > STACK_BYTES:
            spilled = row["spills"] or row["stack"]
            faults.append(f"{name} spills {spilled} bytes, with {row['registers']} registers")
        if row["shared"] > SHARED_BYTES[row["capability"]]:
            faults.append(f"{name} takes {row['shared']} bytes of shared memory")
        if row["kernel"] in WIDE and (row["variant"], row["kernel"]) not in SMALL and not row["wide_loads"]:
            faults.append(f"{name} has no 16-byte load")
        if row["kernel"] == "attend_kernel" and not row["dots"] and not re.search(r"\bfp32\b", row["variant"]):
            faults.append(f"{name} does not use tensor cores")
        if row["kernel"] in ("write_kernel", "read_kernel", "mix_kernel") and (row["fused"] or row["flushed"]):
            faults.append(f"{name} fuses or flushes: {row['fused']} fma, {row['flushed']} ftz")
        if row["narrow"]:
            faults.append(f"{name} multiplies by strides in 32 bits: {', '.join(row['narrow'])}")
    assert not faults, "\n".join(faults)


@pytest.mark.long
def test_a_kernel_without_enough_registers_is_seen_to_spill() -> None:
    rows = compiled("--only", "decode kv bf16 ", "--max-registers", "64")
    with pytest.raises(AssertionError, match=r"attend_kernel for sm_90 spills \d+ bytes, with 64 registers"):
        check(rows)


@pytest.mark.long
def test_every_kernel_without_its_64_bits_is_seen_to_multiply_strides_in_32(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "kvpool", tmp_path / "kvpool")
    for file in (tmp_path / "kvpool" / "backends" / "triton").glob("*.py"):
        file.write_text(file.read_text().replace("tl.int64", "tl.int32"))
    rows = compiled("--only", "decode kv bf16 |write kv fp8 |copies|score index-fp8|mixing", path=(tmp_path,))
    narrow = {row["kernel"] for row in rows if row["narrow"]}
    assert narrow == {f"{name}_kernel" for name in ("attend", "copy", "merge", "mix", "move", "read", "score", "write")}


def compiled_by_the_older(*arguments: str) -> list[dict[str, Any]]:
    if not OLDER_TRITON.exists():
        pytest.skip(f"triton 3.6.0 is not in {OLDER_TRITON}: `make test` fetches it, where packages can be fetched")
    rows = compiled(*arguments, path=(OLDER_TRITON, ROOT / "src"))
    assert {row["triton"] for row in rows} == {"3.6.0"}
    return rows


def share(capability: int, part: int) -> tuple[str, ...]:
    """Return the arguments for a part of the launches for a GPU: every pair of codecs for one, some for the others."""
    every_pair = ("--every-pair",) if capability == 90 else ()
    return ("--capability", str(capability), "--part", str(part), str(PARTS), *every_pair)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_variant_compiles(capability: int, part: int) -> None:
    check(compiled(*share(capability, part)))


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_variant_compiles_with_the_triton_of_older_gpu_machines(capability: int, part: int) -> None:
    check(compiled_by_the_older(*share(capability, part)))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("compiler", [compiled, compiled_by_the_older])
def test_every_pair_of_codecs_compiles_for_other_gpus(capability: int, compiler: Any) -> None:
    check(compiler("--capability", str(capability), "--every-pair", "--only", r"\+"))
