"""What bounds a decode step, weights or cache, and which formats to try first. Arithmetic only, nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.errors import PlanError
from kvpool.families.weights import Parameters
from kvpool.kinds import IndexerKind
from kvpool.plan import GroupPlan, Plan
from kvpool.plan.budget import format_bytes

#: Formats in the order to try them: half the bytes with nothing to prepare; a quarter, after measuring what it costs.
ORDER = ("fp8", "nvfp4")
#: From this batch on, the cache usually outweighs the weights; up to that one the weights do.
CACHE_FROM, WEIGHTS_UP_TO = 16, 4


def cache_bytes_per_step(plan: Plan, batch: int, context: int) -> int:
    """Return the bytes of cache one decode step reads: every token a layer sees, and states read and written."""
    return sum(batch * _bytes_per_sequence(group, context) for group in plan.groups)


def _bytes_per_sequence(group: GroupPlan, context: int) -> int:
    if group.lifetime is None:
        return 2 * group.payload_bytes_per_block
    seen = context
    if group.lifetime.window is not None:
        seen = min(context, group.lifetime.window + group.lifetime.sink_tokens)
    if group.lifetime.chunk is not None:  # half a chunk on average
        seen = min(context, (group.lifetime.chunk + 1) // 2)
    return seen * group.payload_bytes_per_block // group.tokens_per_block


def advise(
    make: Callable[[str | None], Plan], parameters: Parameters, weights: str, batch: int, context: int
) -> dict[str, Any]:
    """Compare weights and cache of a decode step.

    Args:
        make: Makes the plan for a codec, or for the choice given when None.
        parameters: Of the model.
        weights: Format of the weights.
        batch: Sequences of the step.
        context: Tokens of each.

    Raises:
        PlanError: Batch or context is not positive.
    """
    if batch < 1 or context < 1:
        raise PlanError(f"batch and context must be positive, got {batch} and {context}")
    plan = make(None)
    weight_bytes = parameters.step_bytes(weights, batch) // plan.tp_size
    cache = cache_bytes_per_step(plan, batch, context)
    formats: list[dict[str, Any]] = []
    for codec in ORDER:
        try:
            other = make(codec)
        except PlanError as error:
            formats.append({"codec": codec, "refused": str(error)})
            continue
        bytes_read = cache_bytes_per_step(other, batch, context)
        formats.append(
            {
                "codec": codec,
                "cache_bytes_per_step": bytes_read,
                "step_saved": round((cache - bytes_read) / (weight_bytes + cache), 4),
                "num_tokens": other.num_tokens,
            }
        )
    one = cache_bytes_per_step(plan, 1, context)
    always = parameters.step_bytes(weights, 1) // plan.tp_size
    return {
        "batch": batch,
        "context": context,
        "weights": weights,
        "weight_bytes_per_step": weight_bytes,
        "cache_bytes_per_step": cache,
        "bound_by": "weights" if weight_bytes >= cache else "cache",
        "cache_share": round(cache / (weight_bytes + cache), 4),
        "balanced_batch": _balanced_batch(parameters, weights, plan.tp_size, one),
        "balanced_context": context * always // one if one else None,
        "fits": plan.sequences(context).value,
        "formats": formats,
        "order": [f["codec"] for f in formats if "refused" not in f],
        "indexed": any(isinstance(pool.kind, IndexerKind) for group in plan.groups for pool in group.pools),
    }


def _balanced_batch(parameters: Parameters, weights: str, tp_size: int, one: int) -> int | None:
    """Return the least batch whose cache is as large as the weights it reads; None if there is none up to 65,536."""
    batch = 1
    while batch <= 65536:
        if batch * one >= parameters.step_bytes(weights, batch) // tp_size:
            break
        batch *= 2
    else:
        return None
    low, high = batch // 2, batch
    while high - low > 1:
        middle = (low + high) // 2
        if middle * one >= parameters.step_bytes(weights, middle) // tp_size:
            high = middle
        else:
            low = middle
    return high


def sentences(advice: dict[str, Any]) -> list[str]:
    """Return the advice in words."""
    batch, context = advice["batch"], advice["context"]
    weights, cache = format_bytes(advice["weight_bytes_per_step"]), format_bytes(advice["cache_bytes_per_step"])
    lines = [
        f"a decode step of {batch} sequences at {context:,} tokens reads {weights} of weights ({advice['weights']}) and"
        f" {cache} of cache ({advice['cache_share']:.0%}): bound by the {advice['bound_by']}"
    ]
    if advice["balanced_batch"]:
        lines.append(f"at this context both are equal at batch {advice['balanced_batch']:,}")
    if advice["bound_by"] == "weights":
        lines.append("quantise the weights first: a smaller cache shortens this step little, but holds more sequences")
    for entry in advice["formats"]:
        if "refused" in entry:
            lines.append(f"{entry['codec']}: {entry['refused']}")
        else:
            lines.append(
                f"{entry['codec']}: {format_bytes(entry['cache_bytes_per_step'])} of cache a step,"
                f" {entry['step_saved']:.0%} fewer bytes in all, room for {entry['num_tokens']:,} tokens"
            )
    if advice["order"]:
        lines.append(
            f"order: {', then '.join(advice['order'])}; fp8 first, nvfp4 when memory is what is short (measure the"
            f" accuracy with `kvpool quality`)"
        )
    lines.append(
        f"rule of thumb: up to batch {WEIGHTS_UP_TO} the weights dominate, from {CACHE_FROM} on the cache does, at long"
        f" contexts"
    )
    if advice["fits"] < batch:
        lines.append(f"only {advice['fits']} sequences of {context:,} tokens fit this plan: memory is what is short")
    if advice["indexed"]:
        lines.append(
            "with sparse attention a step reads the index keys of all tokens, but latents only of the chosen ones"
        )
    return lines
