"""The GPU check: all of it where there is a GPU, a rehearsal of its shortest parts elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import peer
import pytest
from needs import other_python, present, unpack
from targets import verdicts

CHECK = Path(__file__).parent / "check"


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")} | (environment or {})
    return subprocess.run([sys.executable, str(CHECK), *arguments], capture_output=True, text=True, env=given)


def figures(decode_us: dict[str, float], peer: float = 1.0, share: float = 0.9) -> tuple[list[dict], list[dict]]:
    """Rows of a run: bytes at so large a share of the copy rate, decode in so many microseconds, and FlashInfer's."""
    memory = [{"case": f"{case} kv 8x128", "codec": "bf16", "of_copy": share} for case in ("write", "read")]
    attention = []
    for case, codecs in (("decode", decode_us), ("mla", {"bf16": 50.0})):
        for codec, us in codecs.items():
            shape = {"case": case, "codec": codec, "batch": 64, "context": 8192, "rows": 1, "heads": 64}
            row = {**shape, "us": us, "gb_s": 2**31 / us / 1e3, "vs_bf16": decode_us["bf16"] / us}
            attention += [{**row, "backend": "triton"}, {**row, "backend": "flashinfer", "us": us * peer}]
    return memory, attention


def results(*rows: Any, device: str = "NVIDIA H200") -> list[str]:
    return [verdict.result for verdict in verdicts(device, *rows)]


FAST = {"bf16": 540.0, "fp8": 320.0, "int8": 330.0, "nvfp4": 220.0}


def test_speeds_that_were_asked_for_are_seen_or_missed_each_by_itself() -> None:
    assert results(*figures(FAST)) == ["ok"] * 8
    assert results(*figures(FAST, share=0.84)) == ["MISSED"] * 2 + ["ok"] * 6
    slow = {"bf16": 600.0, "fp8": 380.0, "int8": 370.0, "nvfp4": 260.0}
    assert results(*figures(slow)) == ["ok", "ok", "MISSED", "MISSED", "ok", "MISSED", "ok", "ok"]
    assert results(*figures(FAST, peer=0.95)) == ["ok"] * 6 + ["MISSED", "ok"]
    assert results(*figures(FAST, peer=0.9)) == ["ok"] * 6 + ["MISSED", "MISSED"]


def test_a_speed_without_a_figure_is_not_run() -> None:
    assert results([], []) == ["not run"] * 8
    assert results(*figures(FAST), device="NVIDIA A100") == ["ok", "ok", "not run"] + ["ok"] * 5
    memory, attention = figures(FAST)
    alone = [row for row in attention if row["backend"] == "triton"]
    assert results(memory, alone) == ["ok"] * 6 + ["not run"] * 2


def without(row: dict, why: str) -> dict:
    """A row of a case that gave no figure."""
    return {key: value for key, value in row.items() if key not in ("us", "gb_s", "vs_bf16")} | {why: "out of memory"}


def test_a_target_is_not_seen_to_hold_where_one_of_its_cases_failed() -> None:
    memory, attention = figures(FAST)
    broken = [without(row, "error") if row["codec"] == "fp8" else row for row in attention]
    assert results(memory, broken) == ["ok"] * 3 + ["not run"] + ["ok"] * 3 + ["not run"]
    other = [
        without(row, "error") if row["backend"] == "flashinfer" and row["case"] == "mla" else row for row in attention
    ]
    assert results(memory, other) == ["ok"] * 6 + ["not run"] * 2
    assert "1 failed" in verdicts("NVIDIA H200", memory, other)[-1].seen
    refused = [
        without(row, "refused") if row["backend"] == "flashinfer" and row["codec"] == "int8" else row
        for row in attention
    ]
    assert results(memory, refused) == ["ok"] * 8


@pytest.mark.long
def test_a_library_that_fails_refuses_or_computes_something_else_is_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(CHECK.parents[2] / "benchmarks"))
    import gpu_attention

    from kvpool.backends.triton import TritonBackend
    from kvpool.errors import UnsupportedError

    class Wrong(TritonBackend):
        def attend(self, *arguments: Any) -> None:
            super().attend(*arguments)
            arguments[6].mul_(1.05)

    class Refusing(TritonBackend):
        def attend(self, *arguments: Any) -> None:
            raise UnsupportedError("no kernel")

    class Broken(TritonBackend):
        def __init__(self, device: str) -> None:
            raise RuntimeError("no module")

    others = {"wrong": Wrong, "refusing": Refusing, "broken": Broken, "same": TritonBackend}
    monkeypatch.setattr(gpu_attention, "backends", lambda device: {"triton": TritonBackend, **others})
    case = {**next(gpu_attention.cases("cpu", "decode")), "batch": 1, "context": 20, "heads": 8}
    rows = {row["backend"]: row for row in gpu_attention.run_case(case, "cpu", 1.0)}
    assert rows["triton"]["us"] > 0
    assert rows["same"]["us"] > 0
    assert "differs from triton's by 5.0e-02" in rows["wrong"]["error"]
    assert rows["refusing"]["refused"] == "no kernel"
    assert rows["broken"]["error"] == "RuntimeError: no module"
    assert "us" in rows["torch sdpa"]


@pytest.mark.long
def test_blocks_beyond_two_billion_elements_are_where_they_should_be(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--only", "high_ids")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert [(c["check"], c["result"]) for c in checks] == [("high_ids", "ok")]


@pytest.mark.long
def test_what_is_missing_is_said_in_a_line_each_and_stops_no_other_check(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(\"No module named 'transformers'\")\n")
    without = {"PYTHONPATH": str(tmp_path)}
    done = run("--dry-run", "--out", str(tmp_path), "--only", "tiers", "memory", "steps_in_flight", environment=without)
    lines = [line for line in done.stdout.splitlines() if line.startswith("not here: ")]
    assert len(lines) == len({line.split()[2] for line in lines})
    assert any(line.startswith("not here: flashinfer-python (figures") for line in lines) or present("flashinfer")
    assert any("carry it: tests/gpu/carry DIR" in line for line in lines) or present("cuda.bindings")
    results = {c["check"]: c for c in json.loads((tmp_path / "gpu-check.json").read_text())["checks"]}
    assert results["tiers"]["result"] == results["memory"]["result"] == "ok"
    assert results["steps_in_flight"]["result"] == "not run"
    assert "No module named 'transformers'" in results["steps_in_flight"]["detail"]


@pytest.mark.long
def test_what_is_carried_is_unpacked_beside_the_package(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    (tmp_path / "__init__.py").write_text("")
    with tarfile.open(carried / "flashinfer.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "__init__.py", "flashinfer/__init__.py")
    with zipfile.ZipFile(carried / "typer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("typer/__init__.py", "")
    done = run("--dry-run", "--out", str(tmp_path), "--carried", str(carried), "--only", "memory")
    assert not done.returncode, done.stdout + done.stderr
    absent = ("not here: flashinfer", "not here: typer")
    assert not [line for line in done.stdout.splitlines() if line.startswith(absent)]


@pytest.mark.long
def test_a_folder_that_is_too_large_or_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(60_000_001)
    for folder in (tmp_path, tmp_path / "nothing"):
        done = run("--dry-run", "--carried", str(folder))
        assert done.returncode == 1
        assert done.stderr.startswith(f"--carried {folder} must be a folder of at most 60000000 bytes")
        assert len(done.stderr.splitlines()) == 1


def test_what_was_carried_for_another_python_is_named(tmp_path: Path) -> None:
    this = f"{sys.version_info.major}{sys.version_info.minor}"
    for name in (
        f"a-1-cp{this}-cp{this}-linux.whl",
        "b-1-cp38-abi3-linux.whl",
        f"_native.cpython-{this}-linux.so",
        "c.tar.xz",
    ):
        (tmp_path / name).touch()
    assert other_python(tmp_path) == ""
    (tmp_path / "d-1-cp39-cp39-linux.whl").touch()
    assert other_python(tmp_path) == "d-1-cp39-cp39-linux.whl"


@pytest.mark.slow
def test_flashinfer_finds_every_kernel_our_cases_ask_for_where_it_is_unpacked(tmp_path: Path) -> None:
    """Names of kernels hold types and sizes: one that was built under another name would be no figure on a GPU."""
    try:
        library = peer.install()
    except OSError as error:
        pytest.skip(str(error))
    asked = [row["module"] for row in peer.run(places=(library,)) if "module" in row]
    assert len(asked) == len(set(asked)) == 6
    (tmp_path / "kernels").mkdir()
    for name in asked:
        (tmp_path / "kernels" / f"{name}.so").touch()
    assert peer.pack(tmp_path, library, tmp_path / "kernels") == asked
    site = unpack([tmp_path / "flashinfer.tar.xz"], tmp_path / "site")
    (site / "flashinfer" / "data" / "aot" / asked[1] / f"{asked[1]}.so").unlink()
    variables = {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "empty")}
    rows = [row for row in peer.run(places=(site, library), **variables) if "module" in row]
    assert [row["module"] for row in rows] == asked
    assert [row["found"] for row in rows] == [True, False, True, True, True, True]


@pytest.mark.slow
def test_everything_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path), "--seconds", "3000")
    assert not done.returncode, done.stdout + done.stderr
    checks = json.loads((tmp_path / "gpu-check.json").read_text())["checks"]
    assert all(c["result"] == "ok" for c in checks)
    assert len(checks) == 18
    figures = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    assert {row["case"] for row in figures["attention"]} == {"decode", "mla", "prefill"}
    assert not [row for row in figures["attention"] + figures["memory"] if "error" in row]


@pytest.mark.gpu
def test_a_gpu_shows_that_the_backend_is_right(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    print(done.stdout)
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
