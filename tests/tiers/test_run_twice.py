from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import main


@pytest.mark.model
@pytest.mark.slow
def test_the_second_run_computes_no_shared_prompt_and_gives_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        assert ended.value.code == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    answer = ("run", "--max-new-tokens", "3", "--disk", str(tmp_path), "--disk-size", "1GiB")
    first, second = run(*answer), run(*answer)
    assert first["answers"][0]["cached_tokens"] == 0
    assert first["report"]["tiers"]["disk"]["stored"] > 0
    assert all(a["cached_tokens"] >= (a["prompt_tokens"] - 1) // 32 * 32 for a in second["answers"])
    assert [a["token_ids"] for a in first["answers"]] == [a["token_ids"] for a in second["answers"]]
    assert run("cache", "verify", str(tmp_path))["damage"] == []
