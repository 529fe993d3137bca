"""Does `kvpool serve` hold under ten minutes of mixed and hostile traffic?

    python benchmarks/soak.py [--seconds 600] [--requests 2000] [--seed 0] [--json FILE]

A random llama with the embedded model's tokenizer is served in fp32 by a process of its own, from a budget too small
for the load. Clients share prefixes by a Zipf law, stream, abort, vanish, read slowly, time out and send nonsense.
Checked: sampled greedy answers against transformers, the arithmetic of every request's tokens, a clear 4xx for every
mistake, blocks, memory, threads and file handles back to where they were, and the scheduler's time on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_clients import NAME, TIMEOUT_S, Clients, Record, Traffic

LONGEST = 4096
#: Bytes of cache: 2,048 tokens, a fraction of what the clients ask for at once.
BUDGET = "2MiB"
#: Clients at once, those that may wait beside them, and how many come together.
CLIENTS, WAITING, CLUMP = 24, 64, 16


def make_model(directory: Path) -> None:
    """Save a random llama and the embedded model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from kvpool.engine.embedded import embedded_model_dir

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir("bf16"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=LONGEST, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a process holds."""

    memory_bytes: int
    threads: int
    files: int


class Served:
    """`kvpool serve` in a process of its own; its log is read as it comes."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        command = [
            sys.executable, "-m", "kvpool", "serve", "--model", str(model), "--served-model-name", NAME, "--port", "0",
            "--dtype", "fp32", "--budget", BUDGET, "--tokens-per-block", "16", "--max-sequences", str(CLIENTS),
            "--max-waiting", str(WAITING), "--max-step-tokens", "256", "--threads", "1", "--drain", "20",
        ]  # fmt: skip
        environment = {**os.environ, "KVPOOL_LOG": "info,json", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
        self.port = self._wait()
        self.url = f"http://127.0.0.1:{self.port}"

    def _wait(self) -> int:
        """Wait until it listens; return the port it chose."""
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            for line in self.events("listening"):
                return int(line["port"])
            time.sleep(0.2)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-2000:]}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of its log that tell of an event."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def metrics(self) -> dict[str, float]:
        """Return what `/metrics` says."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=TIMEOUT_S) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    def idle(self) -> bool:
        """Wait until nothing runs and no block is used."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            now = self.metrics()
            running = now["kvpool:num_requests_running"] + now["kvpool:num_requests_waiting"]
            if not running and not now['kvpool:blocks{group="full",state="used"}']:
                return True
            time.sleep(0.2)
        return False

    def vitals(self) -> Vitals:
        """Return what the process holds once its connections are gone."""
        root = Path(f"/proc/{self.process.pid}")
        time.sleep(1.0)
        status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        memory = int(status["RssAnon"].split()[0]) * 1024
        return Vitals(memory, len(list((root / "task").iterdir())), len(list((root / "fd").iterdir())))

    def stop(self) -> None:
        """End it as a supervisor would."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def load(served: Served, traffic: Traffic, record: Record, requests: int, seconds: float, idle: int) -> None:
    """Let clients come at random times; meanwhile idle connections stay open."""
    clients = Clients(served.url, served.port, traffic, record)
    connections = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(idle)]
    room, running = asyncio.Semaphore(CLIENTS), set[asyncio.Task[None]]()
    started, told = time.monotonic(), 0.0
    for number in range(requests):
        due = started + seconds * (number - number % CLUMP) / requests
        await asyncio.sleep(max(due - time.monotonic(), 0))
        await room.acquire()
        task = asyncio.ensure_future(clients.come(traffic.kind()))
        running.add(task)
        task.add_done_callback(lambda task: (running.discard(task), room.release()))
        if number == requests // 2:
            await clients.burst(2 * (CLIENTS + WAITING))
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(
                f"{number} of {requests} clients, {told - started:.0f} s, {len(record.failures)} failures", flush=True
            )
    await asyncio.gather(*running)
    await asyncio.gather(*(asyncio.to_thread(served.metrics) for _ in range(8)))
    await clients.openai.close()
    for _, writer in connections:
        writer.close()


def replay(model: Path, greedy: list[tuple[list[int], int, str]]) -> tuple[int, list[str]]:
    """Answer again with transformers; return near ties and what differs without being one."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(1)
    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    ties, wrong = 0, []
    for ids, count, text in greedy:
        given = torch.tensor([ids])
        out = plain.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        if tokenizer.decode(out.sequences[0, len(ids) :], skip_special_tokens=True) == text:
            continue
        best = torch.cat(out.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < 1e-4:
            ties += 1
        else:
            wrong.append(f"{len(ids)} tokens of prompt, {count} new: {text!r}")
    return ties, wrong


def check_counts(served: Served, metrics: dict[str, float]) -> list[str]:
    """Check the arithmetic of every request's tokens, and their sum against the rows the engine computed."""
    wrong = []
    requests = served.events("request")
    for r in requests:
        expected = r["prompt"] - r["cached"] + r["recomputed"] + r["generated"] - 1
        whole = r["reason"] in ("length", "stop")
        if r["computed"] != expected if whole else r["computed"] > max(expected, r["prompt"] - r["cached"]):
            wrong.append(f"computed is not prompt - cached: {r}")
    rows = metrics["kvpool:prefill_tokens_computed_total"] + metrics["kvpool:decode_tokens_computed_total"]
    if rows != sum(r["computed"] for r in requests):
        wrong.append(f"the engine computed {rows} rows, its requests {sum(r['computed'] for r in requests)}")
    return wrong


def scheduler(metrics: dict[str, float]) -> tuple[float, float]:
    """Return the p99 bucket of the scheduler's CPU time a step in ms, and the mean."""
    name = "kvpool:scheduler_cpu_seconds"
    count = metrics[f"{name}_count"]
    buckets = {k.split('"')[1]: v for k, v in metrics.items() if k.startswith(f"{name}_bucket")}
    p99 = next(float(le) for le, below in buckets.items() if below >= 0.99 * count)
    return 1e3 * p99, 1e3 * metrics[f"{name}_sum"] / count


def run(requests: int, seconds: float, seed: int, samples: int) -> dict[str, Any]:
    """Run the soak; the report's `failures` is empty when all held."""
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", Path(folder) / "log"
        make_model(model)
        served, traffic, record = Served(model, log), Traffic(seed), Record()
        try:
            warm, idle = max(requests // 10, 30), min(requests // 2, 1000)
            asyncio.run(load(served, traffic, record, warm, seconds * warm / requests, idle))
            settled = [served.idle()]
            before = served.vitals()
            asyncio.run(load(served, traffic, record, requests, seconds, idle))
            settled.append(served.idle())
            after, metrics = served.vitals(), served.metrics()
        finally:
            served.stop()
            stopped = served.events("stopped")
        chosen = traffic.random.sample(record.greedy, min(samples, len(record.greedy)))
        ties, wrong = replay(model, chosen)
        failures = record.failures + wrong + check_counts(served, metrics)
    p99, mean = scheduler(metrics)
    checks = {
        "blocks are back": all(settled),
        "threads are back": after.threads <= before.threads,
        "file handles are back": after.files <= before.files,
        "memory is back": after.memory_bytes - before.memory_bytes < 24 << 20,
        "p99 of the scheduler is under 5 ms": p99 <= 5,
        "a burst was refused in part": 0 < record.busy < 4 * (CLIENTS + WAITING),
        "every mistake has a message of its own": len(set(record.refusals.values())) == len(record.refusals),
        "the server was preempting": metrics["kvpool:num_preemptions_total"] > 0 or requests < 500,
        "the server stopped cleanly": bool(stopped),
    }
    failures += [f"not so: {text}" for text, held in checks.items() if not held]
    return {
        "question": "does the server hold",
        "machine": platform.processor() or platform.machine(),
        "requests": requests,
        "seconds": seconds,
        "seed": seed,
        "failures": failures,
        "kinds": dict(record.kinds),
        "refusals": dict(sorted(record.refusals.items())),
        "refused_by_429": record.busy,
        "replayed": len(chosen),
        "near_ties": ties,
        "scheduler_cpu_ms": {"p99_at_most": p99, "mean": mean},
        "vitals": {"before": [before.memory_bytes, before.threads, before.files],
                   "after": [after.memory_bytes, after.threads, after.files]},
        "metrics": {
            name: metrics[f"kvpool:{name}"]
            for name in ("engine_steps_total", "prefill_tokens_computed_total", "decode_tokens_computed_total",
                         "prefix_cache_hits_total", "prefix_cache_queries_total", "evicted_blocks_total",
                         "num_preemptions_total", "recomputed_tokens_total")
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = run(args.requests, args.seconds, args.seed, args.samples)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    raise SystemExit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
