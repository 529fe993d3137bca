"""`kvpool quality`: what each stored format costs on a model and a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.progress import bar
from kvpool.errors import KVError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.measure.quality import Row

#: Constant scales against scales of every token and head, for FP8, INT8 and NVFP4; and what the options add.
DEFAULT_CODECS = (
    "fp8,fp8-tensor,fp8-tensor:unit,int8,int8-tensor,nvfp4,nvfp4-token,nvfp4-token+smoothing,nvfp4-token+rotation,"
    "nvfp4-token+mixing+rotation"
)

PROCEDURES = {
    "stored": "the tokens before were computed on the same format, as kvpool's attention computes a prompt",
    "exact": "the tokens before were computed on the baseline, then stored in the format",
}


def quality(
    model: Annotated[str | None, typer.Option(help="Directory or GGUF file; default: the embedded model")] = None,
    text: Annotated[Path | None, typer.Option(help="Text file; default: the interpreter's pydoc topics")] = None,
    codecs: Annotated[
        str,
        typer.Option(
            help="CODEC or K/V, with :unit, +smoothing, +rotation, +mixing; CODEC>CODEC for another below the device;"
            " separated by commas"
        ),
    ] = DEFAULT_CODECS,
    baseline: Annotated[str, typer.Option(help="What the others are compared with")] = "bf16",
    windows: Annotated[int, typer.Option(min=1, help="Pieces of the text that are scored")] = 2,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of a piece before its first scored one")] = 256,
    scored: Annotated[int, typer.Option(min=1, help="Scored tokens of a piece")] = 1024,
    prefill: Annotated[
        str,
        typer.Option(
            help="What computes the tokens before the scored ones: the format (stored) or the baseline (exact)"
        ),
    ] = "stored",
    dtype: Annotated[str, typer.Option(help="Element type the model is computed in")] = "fp32",
    backend: Annotated[str, typer.Option(help="auto, cpu or reference")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of torch and of the kernels; default: all cores")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw errors and KL into this image file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")] = False,
) -> None:
    """Measure perplexity, agreement, KL divergence and attention error of stored formats against bf16."""
    import torch

    from kvpool.engine.embedded import load_model
    from kvpool.measure.quality import Meter, cut, default_texts, report
    from kvpool.measure.variants import parse_variant
    from kvpool.transformers import register_attention

    against = parse_variant(baseline)
    variants = [parse_variant(word) for word in codecs.split(",") if word.strip() and word.strip() != baseline]
    if text is not None and not text.is_file():
        raise KVError(f"no text file at {str(text)!r}")
    if threads:
        torch.set_num_threads(threads)
    network, tokenizer = load_model(model, dtype, notify=lambda line: print(line, file=sys.stderr, flush=True))
    network.set_attn_implementation(register_attention())
    default, calibration = default_texts()
    source = text.read_text(encoding="utf-8", errors="replace") if text else default
    ids, other = (tokenizer(words, verbose=False).input_ids for words in (source, calibration))
    pieces = cut(ids, other, prefix, scored, windows)
    with bar("first pass") as shown:
        meter = Meter(network, pieces, against, prefill=prefill, backend=backend, progress=shown.advance)
        shown.expect(meter.num_passes(variants))
        rows = meter.measure(variants)
    facts = {
        "model": model or "embedded",
        "text": str(text) if text else "pydoc_data.topics",
        "baseline": baseline,
        "scored_tokens": pieces.num_scored,
        "prefix_tokens": prefix,
        "prefill": prefill,
    }
    if as_json:
        print(json.dumps(report(rows, **facts)))
    else:
        print(f"{facts['model']} on {facts['text']}: {pieces.num_scored} scored tokens after {prefix} or more, {dtype}")
        print(PROCEDURES[prefill])
        _print(rows)
    if plot:
        from kvpool.measure.quality_plot import plot as draw

        draw(rows, plot, f"{facts['model']}, {facts['text']}, {pieces.num_scored} tokens, against {baseline}")


def _print(rows: Sequence[Row]) -> None:
    """Print the table, the worst heads and the warnings."""
    width = max(len("codec"), *(len(row.codec) for row in rows))
    print(f"\n{'codec':{width}}  {'bits':>5}  {'perplexity':>17}  {'top-1':>6}  {'KL +- stderr':>19}  {'attention':>9}")
    for row in rows:
        change = f"{row.perplexity:.3f} {100 * row.perplexity_change:+.2f}%"
        print(
            f"{row.codec:{width}}  {row.bits_per_element:5.2f}  {change:>17}  {100 * row.top1_agreement:5.1f}%"
            f"  {row.kl:.5f} +- {row.kl_stderr:.5f}  {100 * row.attention_error:8.2f}%"
        )
    print("\nworst heads (layer.head, error of the attention output)")
    for row in rows[1:]:
        print(f"{row.codec:{width}}  " + ", ".join(f"{la}.{h} {100 * e:.1f}%" for la, h, e in row.worst))
    for warning in (w for row in rows for w in row.warnings):
        print(f"\nwarning: {warning}")
