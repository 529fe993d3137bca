"""`kvpool bench` on pools too small to print: what it reads, what it reports."""

from __future__ import annotations

import json

import pytest

from kvpool import cli
from kvpool.measure import bench


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SMALLEST_POOL_BYTES", 8 << 20)


def shape(case: str, codec: str = "bf16", **changes: object) -> bench.Shape:
    sizes = {"context": 256, "batch": 1, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "threads": 1, "rows": 1}
    return bench.Shape(case, codec, "HND", 32, **{**sizes, **changes})  # type: ignore[arg-type]


def test_tables_visit_every_block_once_a_round() -> None:
    arena = bench.Arena(shape("decode"))
    seen = [arena.next_table().flatten().tolist() for _ in range(len(arena.tables))]
    blocks = [block for table in seen for block in table]
    assert len(set(blocks)) == len(blocks)
    assert len(blocks) > arena.num_blocks - arena.blocks_each
    assert arena.slab.committed_bytes >= 8 << 20


def test_the_whole_pool_is_filled_with_what_was_written() -> None:
    arena = bench.Arena(shape("decode"))
    data = arena.pools.part(0, "k").planes["data"].tensor
    first = 1024 // 32
    assert data[:first].float().std() > 0.9
    assert (data[first : 2 * first] == data[:first]).all()
    assert (data[-1] == data[(arena.num_blocks - 1) % first]).all()


@pytest.mark.parametrize("case", ["decode", "prefill", "write", "copy"])
@pytest.mark.parametrize("codec", ["bf16", "nvfp4"])
def test_a_row_names_its_path_and_its_shares(case: str, codec: str) -> None:
    row = bench.measure(shape(case, codec, rows=64 if case != "decode" else 1), 0.0)
    assert row["gb_s"] > 0
    assert row["tokens_per_s"] > 0
    assert row["path"]
    assert ("ratio_copy" in row) == (case in ("write", "copy"))
    assert ("ratio_paged_read" in row) == (case in ("decode", "prefill"))


def test_latents_are_read_in_every_format() -> None:
    rows = [bench.measure(shape("mla", codec, kv_heads=1, head_dim=192, v_dim=128), 0.0) for codec in ("bf16", "fp8")]
    bench.compare(rows, "bf16")
    assert rows[0]["vs_bf16"] == 1
    assert rows[1]["vs_bf16"] > 0


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(
            ["bench", "write", "--codec", "bf16,fp8", "--rows", "64", "--heads", "4,2,64", "--seconds", "0", "--json"]
        )
    assert done.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in report["rows"]] == ["bf16", "fp8"]
    assert report["probe"]["read_gb_s"] is None
    assert report["probe"]["copy_gb_s"] > 0
    assert report["machine"]["isa"]
