"""`kvpool run`: a model whose attention and cache are kvpool's answers a batch of prompts."""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli import options
from kvpool.cli.options import LayoutName
from kvpool.errors import KVError
from kvpool.measure.replay import save_trace
from kvpool.plan import Plan, make_plan
from kvpool.spec import CacheSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.cache import KVCache
    from kvpool.engine import Answer, Engine, Event
    from kvpool.measure.variants import Variant

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
#: Tokens that constants are measured on.
CALIBRATION_TOKENS = 640
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


class TextStream:
    """Prints answers in order: the first as it comes, each later one when those before it are done.

    Args:
        ids: Requests, in the order their answers are printed.
    """

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._current = 0
        self._waiting = dict.fromkeys(ids, "")
        self._begun = False
        self._done: set[int] = set()

    def take(self, event: Event) -> None:
        """Take one event of the engine."""
        self._waiting[event.request] += event.text
        if event.finish_reason:
            self._done.add(event.request)
        while self._current < len(self._ids):
            request = self._ids[self._current]
            text, self._waiting[request] = self._waiting[request], ""
            if text and not self._begun:
                text, self._begun = f"\n[{self._current + 1}] {text.lstrip()}", True
            sys.stdout.write(text)
            if request not in self._done:
                break
            sys.stdout.write("\n")
            self._current, self._begun = self._current + 1, False
        sys.stdout.flush()


def read_prompts(path: Path) -> list[str]:
    """Read prompts from a file of JSON lines with the key `prompt`.

    Raises:
        KVError: The file cannot be read, or a line is no object with that key.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KVError(f"cannot read prompts from {path}: {error}") from None
    for number, line in enumerate(lines, 1):
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
    codec: Annotated[
        str | None,
        typer.Option(help="CODEC or K/V, with :unit, +smoothing, +rotation, +mixing; default: the model's dtype"),
    ] = None,
    scales: Annotated[
        Path | None, typer.Option(help="Checkpoint with k_scale and v_scale; default: measured on other text")
    ] = None,
    layout: Annotated[LayoutName, typer.Option(help="Order of the axes in memory")] = LayoutName.HND,
    tokens_per_block: Annotated[int, typer.Option()] = 32,
    budget: Annotated[
        str | None, typer.Option(help="Bytes of cache, such as 512MiB; default: what the prompts need")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu, triton or reference")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1")] = "cpu",
    temperature: Annotated[float, typer.Option()] = 0.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str, typer.Option(help="Element type the model is computed in")] = "bf16",
    threads: options.Threads = None,
    host_size: options.HostSize = None,
    host_codec: options.HostCodec = None,
    disk: options.Disk = None,
    disk_size: options.DiskSize = None,
    record: Annotated[Path | None, typer.Option(help="Write the requests' token ids, for kvpool replay")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Answer a batch of prompts with a model whose cache and attention are kvpool's."""
    import os

    from kvpool.measure.variants import parse_variant

    # What can be wrong without the model is found before it is loaded.
    variant = parse_variant(codec or dtype)
    if scales is not None and (variant.smoothing or variant.rotation or variant.mixing):
        raise KVError(f"--scales are those of keys as the model writes them; leave the options of {codec!r} out")
    texts = list(prompt or []) + (read_prompts(prompts) if prompts else [])
    if record and not record.parent.is_dir():
        raise KVError(f"--record {record}: there is no directory {record.parent}")
    from kvpool.backends import get_backend
    from kvpool.engine import Engine, Params, Sampling

    get_backend(backend, device)
    sampling = [Sampling(temperature, top_k, top_p, seed + i) for i in range(len(texts) or len(DEFAULT_PROMPTS))]

    import torch

    from kvpool.cache import KVCache
    from kvpool.engine.embedded import load_model
    from kvpool.tiers.identity import weights_identity

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    torch.set_num_threads(threads or os.cpu_count() or 1)
    say(f"loading {model or 'the embedded model'} as {dtype}")
    network, tokenizer = load_model(model, dtype, notify=say)
    system = None if texts else SYSTEM_PROMPT
    rows = encode(tokenizer, texts or list(DEFAULT_PROMPTS), chat=chat, system=system)
    plan = plan_for(
        network.config,
        [len(row) + max_new_tokens for row in rows],
        budget,
        codec=variant.codec,
        layout=layout.value,
        tokens_per_block=tokens_per_block,
    )
    weights = "" if disk is None else weights_identity(network.named_parameters(), network.config.to_dict())
    network.to(device)  # type: ignore[arg-type]
    cache = KVCache(
        plan,
        device=device,
        backend=backend,
        num_threads=threads,
        host_size=host_size,
        host_codec=host_codec,
        disk=disk,
        disk_size=disk_size,
        model=weights,
    )
    if scales is None:
        set_constants(cache, variant, network, tokenizer, dtype, say)
    else:
        cache.set_scales(scales)
    engine = Engine(network, tokenizer, plan, cache=cache)
    say(f"answering {len(rows)} prompts of {min(map(len, rows))} to {max(map(len, rows))} tokens")
    started = time.perf_counter()
    ids = [engine.add(row, Params(max_new_tokens, chosen)) for row, chosen in zip(rows, sampling, strict=True)]
    complete = answer_all(engine, ids, None if as_json else TextStream(ids))
    answers = [engine.answer(request) for request in ids]
    if record:
        save_trace(record, rows, [len(answer.token_ids) for answer in answers])
    if not cache.flush():
        say("not everything that was computed could be kept on disk; the log says why")
    report = make_report(engine)
    cache.close()
    if as_json:
        print(json.dumps({"answers": [answer_row(a) for a in answers], "report": report, "plan": plan.to_dict()}))
    else:
        print_report(plan, report, time.perf_counter() - started)
    if not complete:
        say(
            f"\ninterrupted: {sum(len(a.token_ids) for a in answers)} tokens of {len(rows)} answers were generated;"
            f" {report['blocks']['used']} blocks are still in use"
        )
        raise typer.Exit(130)


def set_constants(
    cache: KVCache, variant: Variant, network: Any, tokenizer: Any, dtype: str, say: Callable[[str], None]
) -> None:
    """Set what a format needs beside its codes, measured on other text where nobody gave it.

    Args:
        cache: Nothing written yet.
        variant: The format.
        network: Writes the sample.
        tokenizer: Of the network.
        dtype: Plain format of the sample.
        say: Told before something takes long.
    """
    from kvpool.cache import KVCache

    if not variant.needs_calibration:
        variant.prepare(cache, {})
        return
    import torch

    from kvpool.measure.probe import sample
    from kvpool.measure.quality import default_texts
    from kvpool.transformers import register_attention

    say(f"measuring the constants of {variant.name} on {CALIBRATION_TOKENS} tokens of the interpreter's documentation")
    network.set_attn_implementation(register_attention())
    tokens = torch.tensor(tokenizer(default_texts()[1], verbose=False).input_ids[:CALIBRATION_TOKENS])
    plain = make_plan(
        cache.plan.spec, codec=dtype, max_tokens=len(tokens), max_step_tokens=len(tokens), max_sequences=1
    )
    variant.prepare(cache, sample(network, KVCache(plain, device=cache.device), tokens))


def plan_for(config: Any, lengths: list[int], budget: str | None, **settings: Any) -> Plan:
    """Plan a cache for sequences of these lengths: for all of them at once, unless a budget is given.

    Raises:
        KVError: One is longer than the model was made for.
    """
    spec = CacheSpec.from_config(config)
    if max(lengths) > spec.max_seq_len:
        raise KVError(
            f"a prompt and its answer take {max(lengths)} tokens; the model was made for {spec.max_seq_len}:"
            " shorten it, or lower --max-new-tokens"
        )
    size = settings["tokens_per_block"]
    if budget is None and isinstance(size, int) and size > 0:
        settings["num_blocks"] = sum(-(-length // size) for length in lengths) + 1
    else:
        settings["budget"] = budget
    return make_plan(spec, max_sequences=len(lengths), max_seq_len=max(lengths), **settings)


def answer_all(engine: Engine, ids: list[int], stream: TextStream | None) -> bool:
    """Run the engine until all requests are answered; False when the user interrupted it.

    Raises:
        KVError: A request cannot be served.
    """
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        stop.set()  # a step in the middle would leave its blocks in use; the second time it is not waited for
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        while not engine.idle and not stop.is_set():
            for event in engine.step():
                if event.error:
                    raise KVError(f"prompt {ids.index(event.request) + 1}: {event.error}")
                if stream:
                    stream.take(event)
    except KeyboardInterrupt:
        stop.set()
    finally:
        signal.signal(signal.SIGINT, previous)
    for request in ids:
        engine.abort(request)
    return not stop.is_set()


def answer_row(answer: Answer) -> dict[str, Any]:
    """Return an answer as `--json` shows it."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "generated_tokens": len(answer.token_ids),
        "text": answer.text,
        "token_ids": answer.token_ids,
    }


def make_report(engine: Engine) -> dict[str, Any]:
    """Collect the figures of a run, as the `report` object of `--json`."""
    import torch

    stats, timing, plan = engine.cache.stats(), engine.timing, engine.cache.plan
    peak = timing.peak_blocks or tuple(0 for _ in plan.groups)
    held = sum(n * g.bytes_per_block for n, g in zip(peak, plan.groups, strict=True))
    plain = make_plan(plan.spec, num_blocks=1, codec="bf16", tokens_per_block=plan.tokens_per_block)
    bf16 = sum(n * g.bytes_per_block for n, g in zip(peak, plain.groups, strict=True))
    return {
        "blocks": {"used": stats.used, "cached": stats.cached, "free": stats.free, "total": stats.committed},
        "prefix_hit_tokens": stats.hit_tokens,
        "threads": {"torch": torch.get_num_threads(), "kernels": getattr(engine.cache.backend, "num_threads", None)},
        "bytes_held": held,
        "bytes_bf16": bf16,
        "prefill_tokens_per_s": timing.prefill_tokens / timing.prefill_s if timing.prefill_s else 0.0,
        "decode_tokens_per_s": timing.decode_tokens / timing.decode_s if timing.decode_s else 0.0,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "lost": losses(engine.cache),
        "tiers": {name: asdict(tier) for name, tier in engine.cache.tier_stats().items()},
    }


def losses(cache: KVCache) -> dict[str, Any]:
    """Return what constant scales lost, in elements: in all, and where most; nothing for formats without one."""
    lost = cache.lost()
    if not lost:
        return {}
    total = {name: sum(getattr(c, name) for c in lost.values()) for name in ("saturated", "flushed", "nonfinite")}
    (layer, part), _ = max(lost.items(), key=lambda item: item[1].saturated + item[1].flushed + item[1].nonfinite)
    return {**total, "worst": {"layer": layer, "part": part, **asdict(lost[layer, part])}}


def print_report(plan: Any, report: dict[str, Any], seconds: float) -> None:
    """Print the plan and what the cache did."""
    print(f"\n{plan}\n")
    blocks = report["blocks"]
    print(f"blocks        {blocks['used']} used, {blocks['cached']} cached, {blocks['free']} free of {blocks['total']}")
    print(f"prefix        {report['prefix_hit_tokens']} prompt tokens found instead of computed")
    for name, tier in report["tiers"].items():
        print(f"{name:14}{tier['hit']} blocks found, {tier['stored']} kept, {tier['held_bytes']:,} bytes held")
    print(f"bytes held    {report['bytes_held']:,} at the peak; {report['bytes_bf16']:,} in bf16")
    if report["lost"]:
        lost, worst = report["lost"], report["lost"]["worst"]
        print(
            f"lost          {lost['saturated']:,} elements beyond the largest code, {lost['flushed']:,} stored as zero,"
            f" {lost['nonfinite']:,} not finite; most in layer {worst['layer']}, {worst['part']}"
        )
    print(f"prefill       {report['prefill_tokens_per_s']:,.0f} tokens/s")
    print(f"decode        {report['decode_tokens_per_s']:,.0f} tokens/s")
    print(f"peak memory   {report['peak_memory_bytes'] / 2**20:,.0f} MiB, {seconds:.1f} s")
