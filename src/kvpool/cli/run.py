"""`kvpool run`: a model whose attention and cache are kvpool's answers a batch of prompts."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.errors import KVError

#: Shared by the default prompts, so that the run shows a prefix computed once.
SYSTEM_PROMPT = (
    "You are a patient teacher of computer architecture. You answer questions about memory, caches, bandwidth "
    "and latency in plain words. First you say in one sentence what the thing is. Then you give one everyday "
    "picture of it, such as a kitchen, a library or a post office. Then you say what it costs and what it "
    "saves, with a number where you know one. You never invent numbers: when you do not know one you say so. "
    "You keep every answer short, at most five sentences, and you end with a single sentence that begins with "
    "the words 'In short'. You do not use lists, headings or tables. You speak to a reader who can program but"
    " has never looked inside a processor, so you explain every word of the trade when it first comes up, and "
    "you prefer a concrete example to a definition."
)
DEFAULT_PROMPTS = (
    "What is a cache?",
    "Why is reading memory in order faster than reading it at random?",
    "What is a page table?",
    "What is the difference between bandwidth and latency?",
    "Why do language models keep the keys and values of earlier tokens?",
    "What does it mean that two programs share a block of memory?",
    "What happens when a cache is full?",
    "Why are small numbers such as 8-bit integers useful in a cache?",
)


class LayoutName(StrEnum):
    """Layouts a pool can have."""

    HND = "HND"
    NHD = "NHD"


@dataclass(slots=True)
class TextStream:
    """Prints answers in order: the first as it comes, each later one when those before it are done.

    Attributes:
        tokenizer: Decodes token ids.
        count: Number of answers.
    """

    tokenizer: Any
    count: int
    current: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    printed: int = 0

    def token(self, index: int, token: int) -> None:
        """Take one generated token of answer `index`."""
        self.ids.setdefault(index, []).append(token)
        if index == self.current:
            self._print()

    def finish(self, index: int) -> None:
        """Note that answer `index` is complete, and print what waited for it."""
        self.done.add(index)
        while self.current in self.done:
            self._print(last=True)
            self.current, self.printed = self.current + 1, 0
            if self.current < self.count:
                self._print()

    def _print(self, last: bool = False) -> None:
        text = self.tokenizer.decode(self.ids.get(self.current, []), skip_special_tokens=True)
        if not last and text.endswith("\ufffd"):
            return  # the rest of a character is still to come
        if self.printed == 0:
            sys.stdout.write(f"\n[{self.current + 1}] ")
        sys.stdout.write(text[self.printed :] + ("\n" if last else ""))
        sys.stdout.flush()
        self.printed = max(len(text), 1)


def read_prompts(path: Path) -> list[str]:
    """Read prompts from a file of JSON lines with the key `prompt`.

    Raises:
        KVError: A line is no object with that key.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise KVError(f'{path}:{number} is no JSON object with the key "prompt": {line[:80]!r}') from None
        if not isinstance(prompt, str):
            raise KVError(f"{path}:{number}: prompt must be a string, got {type(prompt).__name__}")
        prompts.append(prompt)
    if not prompts:
        raise KVError(f"{path} holds no prompt")
    return prompts


def encode(tokenizer: Any, prompts: list[str], *, chat: bool, system: str | None) -> list[list[int]]:
    """Turn prompts into token ids, as chat messages or as they are.

    Raises:
        KVError: The model has no chat template, or a prompt gives no token.
    """
    if chat and not tokenizer.chat_template:
        raise KVError("this model's tokenizer has no chat template; use --raw")
    rows: list[list[int]] = []
    for prompt in prompts:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(prompt).input_ids
        if not ids:
            raise KVError(f"prompt {prompt!r} gives no token")
        rows.append([int(i) for i in ids])
    return rows


def run(
    model: Annotated[str | None, typer.Option(help="Directory or GGUF file; default: the embedded model")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for more")] = None,
    prompts: Annotated[Path | None, typer.Option(help='File of JSON lines with the key "prompt"')] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Prompts are chat messages, or plain text")] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    codec: Annotated[str | None, typer.Option(help="Stored format; default: the model's dtype")] = None,
    layout: Annotated[LayoutName, typer.Option(help="Order of the axes in memory")] = LayoutName.HND,
    tokens_per_block: Annotated[int, typer.Option()] = 32,
    budget: Annotated[
        str | None, typer.Option(help="Bytes of cache, such as 512MiB; default: what the prompts need")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu or reference")] = "auto",
    temperature: Annotated[float, typer.Option()] = 0.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str, typer.Option(help="Element type the model is computed in")] = "bf16",
    threads: Annotated[int | None, typer.Option(help="Threads of torch and of the kernels; default: all cores")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Answer a batch of prompts with a model whose cache and attention are kvpool's."""
    import os

    import torch

    import kvpool as kv
    from kvpool.engine.batch import Request, Timing, generate
    from kvpool.engine.embedded import load_model
    from kvpool.engine.sampler import Sampling
    from kvpool.transformers import PackedCache, register_attention

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    workers = threads or os.cpu_count() or 1
    torch.set_num_threads(workers)
    say(f"loading {model or 'the embedded model'} as {dtype}")
    network, tokenizer = load_model(model, dtype, notify=say)
    network.set_attn_implementation(register_attention())
    texts = list(prompt or []) + (read_prompts(prompts) if prompts else [])
    system = None if texts else SYSTEM_PROMPT
    rows = encode(tokenizer, texts or list(DEFAULT_PROMPTS), chat=chat, system=system)

    spec = kv.CacheSpec.from_config(network.config)
    settings: dict[str, Any] = {
        "codec": codec or dtype,
        "layout": layout.value,
        "tokens_per_block": tokens_per_block,
        "max_sequences": max(len(rows), 1),
        "max_step_tokens": max(2048, len(rows)),
        "max_seq_len": max(map(len, rows)) + max_new_tokens,
    }
    if budget is None:
        settings["num_blocks"] = sum(-(-(len(r) + max_new_tokens) // tokens_per_block) for r in rows) + 1
    else:
        settings["budget"] = budget
    plan = kv.make_plan(spec, **settings)
    cache = kv.KVCache(plan, backend=backend)
    packed = PackedCache(cache, network)
    requests = [
        Request(
            row,
            max_new_tokens,
            frozenset(_stop_ids(network, tokenizer)),
            Sampling(temperature, top_k, top_p, seed + index),
        )
        for index, row in enumerate(rows)
    ]
    say(f"answering {len(rows)} prompts of {min(map(len, rows))} to {max(map(len, rows))} tokens")
    stream = None if as_json else TextStream(tokenizer, len(rows))
    timing = Timing()
    generated = [0] * len(rows)
    interrupted = False

    def on_token(index: int, token: int) -> None:
        generated[index] += 1
        if stream:
            stream.token(index, token)
            if token in requests[index].stop_ids or generated[index] == max_new_tokens:
                stream.finish(index)

    started = time.perf_counter()
    try:
        answers = generate(packed, requests, on_token, timing)
    except KeyboardInterrupt:
        interrupted, answers = True, []
    report = make_report(cache, plan, timing)
    if as_json:
        payload = {
            "answers": [
                {
                    "prompt_tokens": a.prompt_tokens,
                    "cached_tokens": a.cached_tokens,
                    "generated_tokens": len(a.token_ids),
                    "text": tokenizer.decode(a.token_ids, skip_special_tokens=True),
                    "token_ids": a.token_ids,
                }
                for a in answers
            ],
            "report": report,
            "plan": plan.to_dict(),
        }
        print(json.dumps(payload))
    else:
        print_report(plan, report, time.perf_counter() - started)
    if interrupted:
        say(f"\ninterrupted: {sum(generated)} tokens of {len(rows)} answers were generated, every block was given back")
        raise typer.Exit(130)


def _stop_ids(network: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer, from the generation configuration and the tokenizer."""
    ids = network.generation_config.eos_token_id
    found = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return {int(i) for i in found if i is not None}


def make_report(cache: Any, plan: Any, timing: Any) -> dict[str, Any]:
    """Collect the figures of a run, as the `report` object of `--json`."""
    stats = cache.stats()
    bytes_held = sum(n * g.bytes_per_block for n, g in zip(timing.peak_blocks, plan.groups, strict=True))
    return {
        "blocks": {
            "used": stats.used,
            "cached": stats.cached,
            "free": stats.free,
            "total": stats.committed,
        },
        "prefix_hit_tokens": stats.hit_tokens,
        "bytes_held": bytes_held,
        "bytes_bf16": bytes_held,
        "prefill_tokens_per_s": timing.prefill_tokens / timing.prefill_s if timing.prefill_s else 0.0,
        "decode_tokens_per_s": timing.decode_tokens / timing.decode_s if timing.decode_s else 0.0,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def print_report(plan: Any, report: dict[str, Any], seconds: float) -> None:
    """Print the plan and what the cache did."""
    print(f"\n{plan}\n")
    blocks = report["blocks"]
    print(f"blocks        {blocks['used']} used, {blocks['cached']} cached, {blocks['free']} free of {blocks['total']}")
    print(f"prefix        {report['prefix_hit_tokens']} prompt tokens found instead of computed")
    print(f"bytes held    {report['bytes_held']:,} at the peak; {report['bytes_bf16']:,} in bf16")
    print(f"prefill       {report['prefill_tokens_per_s']:,.0f} tokens/s")
    print(f"decode        {report['decode_tokens_per_s']:,.0f} tokens/s")
    print(f"peak memory   {report['peak_memory_bytes'] / 2**20:,.0f} MiB, {seconds:.1f} s")
