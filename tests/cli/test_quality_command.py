"""`kvpool quality`: one object on standard output, a table for people, and refusals that name the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.cli import main

OPTIONS = ["--windows", "2", "--prefix", "20", "--scored", "30", "--threads", "1"]


@pytest.fixture(scope="module")
def model_dir(tiny_model, tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(model_dir: Path, *arguments: str) -> None:
    try:
        main(["quality", "--model", str(model_dir), *OPTIONS, *arguments])
    except SystemExit as ended:
        if ended.code:
            raise


def test_json_is_the_only_thing_on_standard_output(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model_dir, "--codecs", "int8, int8-tensor, nvfp4-token+smoothing", "--json")
    payload = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in payload["rows"]] == ["bf16", "int8", "int8-tensor", "nvfp4-token+smoothing"]
    assert payload["scored_tokens"] == 60
    assert payload["text"] == "pydoc_data.topics"
    assert payload["prefill"] == "stored"
    for row in payload["rows"][1:]:
        assert row["kl"] > 0
        assert row["kl_stderr"] > 0
        assert row["attention_error"] > 0
        assert row["perplexity"] > 1


def test_the_table_and_the_plot_are_for_people(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    run(model_dir, "--codecs", "nvfp4-token", "--text", str(text), "--plot", str(tmp_path / "plot.png"))
    lines = capsys.readouterr().out.splitlines()
    assert "60 scored tokens after 20 or more" in lines[0]
    assert "computed on the same format" in lines[1]
    assert [line.split()[:2] for line in lines[4:6]] == [["bf16", "16.00"], ["nvfp4-token", "6.50"]]
    assert any(line.startswith("worst heads") for line in lines)
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--codecs", "fp9"], "unknown codec 'fp9'"),
        (["--text", "/does/not/exist"], "no text file"),
        (["--prefill", "none"], "unknown prefill 'none'"),
        (["--codecs", "int8+rotation"], "power of two of at least 32"),
    ],
)
def test_a_refusal_is_one_line_with_the_reason(
    model_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quality", "--model", str(model_dir), *OPTIONS, *arguments])
    assert ended.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpool: ")]
    assert len(error) == 1
    assert reason in error[0]
