"""`kvpool serve` as a process that a supervisor starts and ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from test_soak import soak

from kvpool.tiers.base import Entry, Identity, pack_tokens
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.disk.directory_writer import WritableDirectory

pytestmark = pytest.mark.model

BODY = {"model": "tiny", "prompt": list(range(100, 300)), "max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    soak.make_model(path)
    return path


def start(model: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "kvpool", "serve", "--model", str(model), "--served-model-name", "tiny", "--port", "0",
        "--dtype", "fp32", "--budget", "8MiB", "--tokens-per-block", "16", "--threads", "1", *options,
    ]  # fmt: skip
    environment = {**os.environ, "KVPOOL_LOG": "info,json", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yields its process and its address."""
    process = start(model, *options)
    assert process.stderr is not None
    try:
        told = next(json.loads(line) for line in process.stderr if '"listening"' in line)
        yield process, f"http://127.0.0.1:{told['port']}"
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


@pytest.mark.parametrize("ending", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_ends_a_server_only_when_what_is_cached_is_on_disk(
    model_dir: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    with serving(model_dir, "--disk", str(tmp_path), "--disk-size", "64MiB") as (process, url):
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=60).status_code == 200
        process.send_signal(ending)  # long before an idle server writes
        assert process.wait(120) == 0
    directory = Directory(tmp_path)
    assert len(directory) == 200 // 16
    assert not directory.damage
    directory.close()


@pytest.mark.long
def test_a_second_interrupt_ends_it_at_once(model_dir: Path) -> None:
    endless = {**BODY, "max_tokens": 3500, "stream": True}
    with (
        serving(model_dir, "--drain", "600", "--max-step-tokens", "64") as (process, url),
        httpx.stream("POST", url + "/v1/completions", json=endless, timeout=60) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "the first one waits for open requests"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0  # five times sooner than the first one alone


@pytest.mark.long
def test_a_directory_that_cannot_be_used_is_refused_before_anybody_asks(model_dir: Path, tmp_path: Path) -> None:
    identity = Identity({"block_format": "another", "constants": "another", "model": "another"})
    foreign = WritableDirectory(tmp_path / "foreign", identity)
    page = ctypes.create_string_buffer(4096)
    assert foreign.append([(Entry(0, bytes(16), pack_tokens([1])), ((ctypes.addressof(page), 4096),))])[0].ok
    foreign.close()
    held = WritableDirectory(tmp_path / "held")  # somebody writes into it
    for name, words in (("foreign", ("block_format", "constants", "model")), ("held", (str(os.getpid()),))):
        process = start(model_dir, "--disk", str(tmp_path / name))
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
        last = said.strip().splitlines()[-1]
        assert process.returncode == 2, said
        assert last.startswith("kvpool: ")
        assert all(word in last for word in words), last
    held.close()
