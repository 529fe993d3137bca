"""`kvpool bench` on pools too small to print: what it reads, what it reports."""

from __future__ import annotations

import json

import pytest

from kvpool import cli
from kvpool.errors import PlanError
from kvpool.measure import bench
from kvpool.measure.shapes import MODELS, of_model


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


@pytest.mark.parametrize("model", list(MODELS))
def test_the_shapes_of_real_models_are_measured(model: str) -> None:
    case = "mla" if MODELS[model].v_dim else "decode"
    row = bench.measure(of_model(shape(case, context=300), model), 0.0)
    assert row["model"] == model
    assert row["round_bytes"] >= 8 << 20
    assert row["gb_s"] > 0
    with pytest.raises(PlanError, match="does not measure"):
        of_model(shape("decode" if case == "mla" else "mla"), model)


def test_a_window_reads_only_the_blocks_it_sees() -> None:
    seen = shape("decode", context=300, rows=1, window=64)
    assert seen.blocks_seen == 3  # tokens 236..299 lie in blocks 7, 8 and 9 of 32
    assert seen.pairs == 8 * 64
    assert shape("prefill", context=100, rows=4).pairs == 8 * (97 + 98 + 99 + 100)
    assert shape("prefill", context=100, rows=4, window=98).pairs == 8 * (97 + 98 + 98 + 98)


def test_a_row_that_reads_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*_: object) -> dict[str, object]:
        return {"round_bytes": 1}

    monkeypatch.setattr(bench, "_attention_row", small)
    with pytest.raises(PlanError, match="a round reads 1 bytes only"):
        bench.measure(shape("decode"), 0.0)


def test_peers_are_measured_once_a_repetition() -> None:
    calls = []
    row = bench.measure(shape("decode"), 0.0, {"other": lambda: calls.append(1) or 1.0})  # type: ignore[func-returns-value]
    assert len(calls) >= 5
    assert row["vs_peer"]["other"] == pytest.approx(1e6 / row["best_us"])


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
