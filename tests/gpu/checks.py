"""What a GPU has to show: every check takes a device, and runs on `cpu` as a rehearsal in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kernel_checks import attention, formats, heads, indexer, latents, options, sparse, states
from memory_checks import high_ids, memory, tiers
from step_checks import graphs, steps_in_flight

from kvpool.codecs import CODECS

CHECKS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        formats,
        attention,
        heads,
        options,
        latents,
        sparse,
        indexer,
        states,
        high_ids,
        memory,
        tiers,
        graphs,
        steps_in_flight,
    )
}
#: On a GPU the longest are cut, so that their kernels are compiled by several processes at once.
GPU_CHECKS: dict[str, Callable[[str], None]] = {
    **{name: check for name, check in CHECKS.items() if name not in ("attention", "latents")},
    **{f"attention_{codec}": partial(attention, codecs=(codec,)) for codec in CODECS if not codec.startswith("index")},
    **{f"latents_{n}": partial(latents, num_heads=n) for n in (16, 128)},
}
