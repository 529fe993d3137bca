"""Random operations on a whole cache; every vector read is verified. One seed decides all, and is printed."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch

import kvpool as kv
from kvpool.backends.reference import ReferenceBackend
from kvpool.kinds import IndexerKind, KVKind, LatentKind, LayerSpec, Lifetime, SharedKind, StateKind
from kvpool.pools import Part
from kvpool.sequence import Sequence
from kvpool.step import Step

from . import in_flight  # noqa: F401  (registers its operation)
from .operations import OPERATIONS
from .world import Case, Fault, Storm

GQA = (LayerSpec((KVKind(3, 32),)),) * 2  # H, N and D differ in every case
MLA = (LayerSpec((LatentKind(64, 32),)),) * 2
DSA = (LayerSpec((LatentKind(64, 32), IndexerKind(32, quant_block=32))),) * 2
UNEQUAL = (LayerSpec((KVKind(2, 64, v_head_dim=32),)),) * 2
SHARED = (*GQA, LayerSpec((SharedKind(0),)))
WINDOW = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(2, 64),), Lifetime(window=13, sink_tokens=3)))
CHUNK = (LayerSpec((KVKind(3, 32),)), LayerSpec((KVKind(3, 32),), Lifetime(chunk=24)))

STATES = (StateKind("conv", (6, 3), "bf16"), StateKind("ssm", (2, 8, 4)))
HYBRID = (LayerSpec((KVKind(3, 32),)), LayerSpec(STATES), LayerSpec((KVKind(3, 32), *STATES)))
RECURRENT = (LayerSpec(STATES),) * 2
WINDOW_STATES = (*WINDOW, LayerSpec(STATES))

#: A kernel may round probabilities and decoded values to bf16: 2^-8 of the largest value, 128.
ROUNDED = 0.6

CASES = [
    Case("gqa-bf16", GQA, options={"num_draft": 4}),
    Case("gqa-fp32-nhd", GQA, codec="fp32", layout="NHD", tokens_per_block=2, num_blocks=50),
    Case("gqa-fp16-block-16", GQA, codec="fp16", tokens_per_block=16, num_blocks=12),
    Case("gqa-int8-k-fp8-v-nhd", GQA, codec={"k": "int8", "v": "fp8"}, layout="NHD"),
    Case("gqa-nvfp4-token-fp8-tensor", GQA, codec={"k": "nvfp4-token", "v": "fp8-tensor"}),
    Case("gqa-int8-tensor-calibrated", GQA, codec={"k": "int8-tensor", "v": "int8"}, constants="calibrated"),
    Case("gqa-int8-mixed", GQA, codec="int8", constants="mixed"),
    Case("gqa-fp8e5m2-tensor-unit-nhd", GQA, codec="fp8e5m2-tensor", layout="NHD", constants="unit"),
    Case("unequal-heads-bf16-nhd", UNEQUAL, layout="NHD"),
    Case("shared-bf16", SHARED),
    Case("mla-bf16", MLA, options={"num_draft": 4}),
    Case("mla-split", MLA, codec={"latent": "fp8", "rope": "bf16"}, layout="NHD"),
    Case("dsa-fp8", DSA, codec="fp8", options={"num_draft": 4}),
    Case("window-bf16", WINDOW),
    Case("chunk-bf16-nhd", CHUNK, layout="NHD"),
    Case("hybrid-bf16", HYBRID, options={"checkpoint_interval": 16}),
    Case("recurrent", RECURRENT, options={"checkpoint_interval": 16}),
    Case("gqa-bf16-host", GQA, host_blocks=60),
    Case("gqa-int8-disk-nhd", GQA, codec="int8", layout="NHD", host_blocks=20, disk=True),
    Case("window-bf16-host", WINDOW, host_blocks=60),
    Case("window-fp8-disk", WINDOW, codec="fp8", num_blocks=24, host_blocks=30, disk=True),
    Case("chunk-disk", CHUNK, num_blocks=24, disk=True),
    Case("hybrid-host", HYBRID, num_blocks=24, host_blocks=40, options={"checkpoint_interval": 16}),
    Case("hybrid-fp8-disk", HYBRID, codec="fp8", host_blocks=20, disk=True, options={"checkpoint_interval": 8}),
    Case("recurrent-disk", RECURRENT, num_blocks=16, disk=True, options={"checkpoint_interval": 8}),
    Case("window-states-host", WINDOW_STATES, host_blocks=40, options={"checkpoint_interval": 8}),
    Case("dsa-fp8-host", DSA, codec="fp8", host_blocks=40),
    Case(
        "gqa-bf16-cpu",
        GQA,
        backend="cpu",
        tokens_per_block=16,
        num_blocks=14,
        tolerance=ROUNDED,
        options={"num_draft": 4},
    ),
    Case("gqa-fp32-nhd-cpu", GQA, codec="fp32", layout="NHD", backend="cpu", tokens_per_block=32, num_blocks=10),
    Case("dsa-fp8-cpu", DSA, codec="fp8", backend="cpu", tokens_per_block=16, num_blocks=14, tolerance=ROUNDED),
    Case(
        "hybrid-cpu",
        HYBRID,
        codec="fp8",
        backend="cpu",
        num_blocks=24,
        tolerance=ROUNDED,
        options={"checkpoint_interval": 16},
    ),
    Case(
        "gqa-int8-fp8-cpu",
        GQA,
        codec={"k": "int8", "v": "fp8"},
        backend="cpu",
        tokens_per_block=16,
        num_blocks=14,
        tolerance=ROUNDED,
    ),
    Case(
        "gqa-nvfp4-nhd-cpu",
        GQA,
        codec="nvfp4",
        layout="NHD",
        backend="cpu",
        tokens_per_block=16,
        num_blocks=14,
        tolerance=ROUNDED,
    ),
    Case("mla-bf16-cpu", MLA, backend="cpu", tokens_per_block=16, num_blocks=14, tolerance=ROUNDED),
    Case("window-bf16-cpu", WINDOW, backend="cpu", tokens_per_block=16, num_blocks=14, tolerance=ROUNDED),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny: torch's threads would cost far more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int | None:
    given: int | None = request.config.getoption("--storm-seed")
    return given


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_read_in_a_storm_is_what_was_written(case: Case, seed: int | None) -> None:
    storm = Storm(case, zlib.crc32(case.name.encode()) if seed is None else seed)
    storm.run(150, OPERATIONS)
    assert storm.counts["serve"] > 20
    assert storm.cache.stats().hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_long_storm_of_a_fresh_seed_reads_what_was_written(case: Case, seed: int | None) -> None:
    chosen = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed {chosen}")
    Storm(case, chosen).run(5000, OPERATIONS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "seed", "operations"), [("hybrid-bf16", 2013321650, 230), ("hybrid-cpu", 1118921724, 490)]
)
def test_fits_counts_all_that_moving_memory_between_groups_makes_room_for(
    name: str, seed: int, operations: int
) -> None:
    """Groups once took blocks that the same step needed from each other, in turns, until the tries were used up."""
    Storm(next(case for case in CASES if case.name == name), seed).run(operations, OPERATIONS)


def skip_copies(backend: ReferenceBackend, *_: object) -> None:
    """A block written while it is shared is not copied first."""


def forget_a_head(
    backend: ReferenceBackend, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step
) -> None:
    """The last head of what is written is left as it was."""
    held = [part.planes["data"].tensor[:, -1].clone() for part in parts]
    WRITE(backend, parts, tensors, step)
    for part, old in zip(parts, held, strict=True):
        part.planes["data"].tensor[:, -1] = old


def shift_slots(
    backend: ReferenceBackend, parts: tuple[Part, ...], tensors: tuple[torch.Tensor, ...], step: Step
) -> None:
    """Tokens go to the slots of their neighbours."""
    slots = step.groups[0].slots
    slots.copy_(slots.roll(1))
    WRITE(backend, parts, tensors, step)
    slots.copy_(slots.roll(-1))


WRITE = ReferenceBackend.write


@pytest.mark.parametrize(
    ("method", "broken"),
    [("copy", skip_copies), ("write", forget_a_head), ("write", shift_slots)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_storm_notices_a_broken_backend(
    method: str, broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceBackend, method, broken)
    with pytest.raises(Fault, match=r"seed 1, after \d+ operations: .*(holds|attention is off)"):
        Storm(Case("gqa-bf16", GQA), 1).run(300, OPERATIONS)


def test_every_public_method_of_the_cache_is_in_the_storm() -> None:
    covered = {name for operation in OPERATIONS.values() for name in operation.covers} | ALWAYS
    public = {
        f"{kind.__name__}.{name}"
        for kind in (kv.KVCache, Sequence)
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert public - covered == set(), "write an operation for these in tests/storm/operations.py"
    assert covered - public == set(), "these are no public methods any more"


#: What the storm does after every operation.
ALWAYS = {"KVCache.check", "KVCache.stats", "KVCache.read", "KVCache.close"}
#: What making the cache of a case does.
ALWAYS |= {"KVCache.set_constants", "KVCache.set_scales", "KVCache.calibrate"}
