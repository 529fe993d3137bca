"""Plans with only what a ledger reads."""

from __future__ import annotations

from kvpool.kinds import Lifetime
from kvpool.plan import GroupPlan, Plan
from kvpool.spec import CacheSpec

FULL = Lifetime()


def make_plan(
    *groups: tuple[Lifetime | None, int],
    n: int = 4,
    max_sequences: int = 16,
    max_step_tokens: int = 256,
    max_seq_len: int = 1024,
    num_draft: int = 0,
    checkpoint_interval: int = 1024,
    reserved: int = 0,
) -> Plan:
    """A plan with the given groups and block counts; what pools need is left out."""
    plans = tuple(
        GroupPlan(
            name=life.name if life else "state",
            lifetime=life,
            layers=(i,),
            num_blocks=blocks,
            num_blocks_reserved=max(reserved, blocks),
            tokens_per_block=n if life else 1,
            bytes_per_block=256,
            payload_bytes_per_block=256,
            pools=(),
        )
        for i, (life, blocks) in enumerate(groups)
    )
    spec = CacheSpec.__new__(CacheSpec)
    return Plan(
        spec, plans, n, 1 << 20, 1 << 20, "budget", 4096, max_seq_len, max_seq_len, max_sequences, max_step_tokens,
        num_draft, checkpoint_interval,
    )  # fmt: skip
