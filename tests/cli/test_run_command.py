"""`kvpool run` as a user runs it: on the embedded model, in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.model

COMMAND = [sys.executable, "-m", "kvpool", "run"]


def run(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_json_is_one_object_with_answers_in_order_and_figures_that_add_up(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"The number {n} is"}) + "\n" for n in ("one", "two", "three")))
    options = ("--max-new-tokens", "5", "--codec", "int8", "--layout", "NHD", "--threads", "1")
    done = run("--json", "--raw", "--prompts", str(file), *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"answers", "report", "plan"}
    assert [a["generated_tokens"] for a in result["answers"]] == [len(a["token_ids"]) for a in result["answers"]]
    report = result["report"]
    assert report["threads"] == {"torch": 1, "kernels": 1}
    blocks = report["blocks"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"]
    assert blocks["used"] == 0
    assert 0 < report["bytes_held"] < 0.6 * report["bytes_bf16"]
    assert result["plan"]["groups"][0]["pools"][0]["codec"] == "int8"


def test_the_shared_system_prompt_of_the_default_run_is_computed_once():
    done = run("--json", "--max-new-tokens", "2")
    answers = json.loads(done.stdout)["answers"]
    assert len(answers) == 8
    assert answers[0]["cached_tokens"] == 0
    assert all(a["cached_tokens"] >= 128 for a in answers[1:])


def test_what_a_run_records_is_what_replay_reads(tmp_path):
    trace = tmp_path / "requests.jsonl"
    done = run("--json", "--max-new-tokens", "2", "--record", str(trace), "--tokens-per-block", "16")
    answers = json.loads(done.stdout)["answers"]
    command = [sys.executable, "-m", "kvpool", "replay", str(trace), "--blocks", "1000", "--live", "8", "--json"]
    replayed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    lines = trace.read_text().splitlines()
    assert [len(json.loads(line)["token_ids"]) for line in lines] == [a["prompt_tokens"] for a in answers]
    found = sum(a["cached_tokens"] for a in answers) / sum(a["prompt_tokens"] for a in answers)
    assert replayed["rows"][0]["hit_rate"] >= found > 0.5


def test_an_interrupt_prints_what_was_done_and_leaves_nothing_behind():
    # Many long answers: a fast machine must not be done before it is interrupted.
    questions = [word for n in range(24) for word in ("--prompt", f"Count from {n} to one thousand in words.")]
    process = subprocess.Popen(
        [*COMMAND, "--max-new-tokens", "400", *questions],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    while not process.stdout.read(1).strip():  # the first character of the answer
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "0 blocks are still in use" in err
    assert "blocks        0 used" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--codec", "fp7"], "fp7"),
        (["--tokens-per-block", "48"], "48"),
        (["--budget", "1KiB"], "1024"),
        (["--temperature", "-1"], "-1"),
        (["--backend", "gpu"], "gpu"),
        (["--device", "tpu"], "'tpu' is not supported; use cpu, cuda"),
        (["--backend", "triton"], "runs on cuda, not on 'cpu'"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda:1"], "'cuda:1' needs a GPU")]),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--codec", "fp8-tensor+rotation", "--scales", "/nowhere"], "fp8-tensor+rotation"),
        (["--record", "/nowhere/t.jsonl"], "/nowhere"),
        (["--prompt", "x " * 9000], "8192"),
    ],
)
def test_a_bad_option_gets_one_clear_line(arguments, words):
    done = run("--max-new-tokens", "2", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvpool: ")
    assert words in last


@pytest.mark.parametrize("codec", ["int8-tensor:unit", "nvfp4-token+smoothing+rotation"])
def test_what_constant_scales_lost_is_counted_and_shown(codec):
    shown = run("--raw", "--prompt", "The capital of France is", "--max-new-tokens", "3", "--codec", codec)
    assert shown.returncode == 0, shown.stderr
    lost = [line for line in shown.stdout.splitlines() if line.startswith("lost ")]
    if codec.endswith(":unit"):
        assert re.search(r"lost +\d+ elements beyond the largest code, [1-9][\d,]* stored as zero", lost[0])
    else:
        assert not lost  # it has scales of its own
    assert ("measuring the constants" in shown.stderr) == (":unit" not in codec)
