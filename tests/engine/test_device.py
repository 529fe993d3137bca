"""What the engine does on a GPU, on a device that is not there: interpreted kernels, memory by mmap, recorded steps."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

import kvpool as kv
from host_device import HostDriver, HostRecorder
from kvpool import cli
from kvpool.backends.triton import TritonBackend
from kvpool.cache import KVCache
from kvpool.pools.cuda import VirtualMemory
from kvpool.step import StepBuffers

pytestmark = [pytest.mark.model, pytest.mark.long]  # the tokenizer is the embedded model's


class HostCache(KVCache):
    """A cache of such a device: all but torch takes it for one."""

    def __init__(self, plan: kv.Plan, *, device: str, **options: Any) -> None:
        assert device == "cuda"
        super().__init__(plan, **options)
        self.device = device


class Device:
    """The device, and what was done on it."""

    def __init__(self) -> None:
        self.drivers: list[HostDriver] = []
        self.recorders: list[HostRecorder] = []

    def reserve(self, device: str, size: int) -> VirtualMemory:
        self.drivers.append(HostDriver())
        return VirtualMemory(self.drivers[-1], size)

    def recorder(self) -> HostRecorder:
        self.recorders.append(HostRecorder())
        return self.recorders[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for name in ("kvpool.backends.get_backend", "kvpool.layer_constants.get_backend"):
        monkeypatch.setattr(name, lambda *_: TritonBackend("cpu"))
    monkeypatch.setattr("kvpool.pools.slab.reserve", made.reserve)
    monkeypatch.setattr("kvpool.layer_access.StepBuffers", functools.partial(StepBuffers, staged=True))
    monkeypatch.setattr("kvpool.engine.graphs.CudaRecorder", made.recorder)
    monkeypatch.setattr("kvpool.cache.KVCache", HostCache)
    return made


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[int]]:
    prompts = [argument for text in ("One, two,", "The capital of France is", "a") for argument in ("--prompt", text)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--json", "--raw", "--dtype", "fp32", "--max-new-tokens", "13", *prompts, *arguments])
    assert not ended.value.code
    return [answer["token_ids"] for answer in json.loads(capsys.readouterr().out)["answers"]]


def test_run_gives_the_cpu_s_tokens_on_a_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tiny_model: Any, tokenizer: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvpool.engine.embedded.load_model", lambda *_, **__: (tiny_model, tokenizer))
    monkeypatch.setattr(tiny_model, "to", lambda device: tiny_model)
    options = ("--tokens-per-block", "16", "--threads", "1")
    want = answers(capsys, "--device", "cpu", *options)
    assert len({tuple(row) for row in want}) == 3
    device: Device = request.getfixturevalue("device")
    forwards: list[int] = []
    handle = tiny_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        assert answers(capsys, "--device", "cuda", *options) == want
    finally:
        handle.remove()
    (recorder,) = device.recorders
    assert recorder.num_replays >= 9  # of 12 decode steps
    assert len(forwards) <= 4  # the prompts, and the first step of the size and its recording
    assert sum(driver.left < 1 << 40 for driver in device.drivers) == len(device.drivers) == 1
