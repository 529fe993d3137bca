"""Plans with only what a ledger reads: it must not need more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvpool.kinds import Lifetime
from kvpool.plan import Plan

FULL = Lifetime()


@dataclass(frozen=True)
class Group:
    lifetime: Lifetime | None
    num_blocks: int
    num_blocks_reserved: int
    tokens_per_block: int

    @property
    def is_state(self) -> bool:
        return self.lifetime is None


@dataclass(frozen=True)
class Limits:
    groups: tuple[Group, ...]
    tokens_per_block: int
    max_sequences: int
    max_step_tokens: int
    max_seq_len: int
    num_draft: int
    checkpoint_interval: int


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
    """Groups as (lifetime, blocks); None is a state group."""
    made = tuple(Group(life, blocks, max(reserved, blocks), n if life else 1) for life, blocks in groups)
    return cast(Plan, Limits(made, n, max_sequences, max_step_tokens, max_seq_len, num_draft, checkpoint_interval))
