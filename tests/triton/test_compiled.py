"""Every kernel the backend launches compiles for a GPU, where there is none: no spills, wide loads, within limits."""

from __future__ import annotations

import json
import os
import re
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


def compiled(*arguments: str, triton: Path | None = None) -> list[dict[str, Any]]:
    """Compile in processes of their own, where Triton is not interpreted; what was compiled before is kept in build."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton-cache")
    environment["PYTHONPATH"] = os.pathsep.join([*([str(triton)] if triton else []), str(ROOT / "src")])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # the others need their cores
    jobs = max(len(os.sched_getaffinity(0)) // workers, 1)
    command = [sys.executable, "-W", "error", str(HERE / "compiling.py"), "--jobs", str(jobs), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]], *, spill_bytes: int = 0) -> None:
    """Fail with everything that is wrong; a stack frame of 8 bytes and a store and a load of a word are 16 spilled."""
    assert rows
    faults = []
    for row in rows:
        name = f"{row['variant']}: {row['kernel']} for sm_{row['capability']}"
        if "error" in row:
            faults.append(f"{name} does not compile: {row['error']}")
            continue
        if row["spills"] > spill_bytes or row["stack"] > STACK_BYTES:
            spilled = row["spills"] or row["stack"]
            faults.append(f"{name} spills {spilled} bytes, with {row['registers']} registers")
        if row["shared"] > SHARED_BYTES[row["capability"]]:
            faults.append(f"{name} takes {row['shared']} bytes of shared memory")
        if row["kernel"] in WIDE and not row["wide_loads"]:
            faults.append(f"{name} has no 16-byte load")
        if row["kernel"] == "attend_kernel" and not row["dots"] and not re.search(r"\bfp32\b", row["variant"]):
            faults.append(f"{name} does not use tensor cores")
        if row["kernel"] in ("write_kernel", "read_kernel", "mix_kernel") and (row["fused"] or row["flushed"]):
            faults.append(f"{name} fuses or flushes: {row['fused']} fma, {row['flushed']} ftz")
    assert not faults, "\n".join(faults)


@pytest.mark.long
def test_what_the_models_use_most_compiles_for_sm_90() -> None:
    check(compiled("--only", "(decode kv|write kv) (bf16|fp8|nvfp4) "))


@pytest.mark.long
def test_a_kernel_without_enough_registers_is_seen_to_spill() -> None:
    rows = compiled("--only", "decode kv bf16 ", "--max-registers", "64")
    with pytest.raises(AssertionError, match=r"attend_kernel for sm_90 spills \d+ bytes, with 64 registers"):
        check(rows)


@pytest.mark.long
def test_every_codec_kind_and_option_compiles_for_sm_90() -> None:
    check(compiled())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 100])
def test_every_variant_compiles(capability: int) -> None:
    rows = compiled("--full", "--capability", str(capability))
    check(rows, spill_bytes=0 if capability == 90 else 24)


@pytest.mark.slow
def test_every_variant_compiles_with_the_triton_of_older_gpu_machines() -> None:
    """Triton 3.6, in a folder of its own."""
    folder = ROOT / "build" / "triton-3.6"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "triton==3.6.0"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"triton 3.6.0 cannot be installed here: {done.stderr[-200:]}")
    rows = compiled("--full", triton=folder)
    assert {row["triton"] for row in rows} == {"3.6.0"}
    check(rows, spill_bytes=24)  # latents in 8 bits are at the limit: a word or two
