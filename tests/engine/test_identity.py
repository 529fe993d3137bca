"""Greedy tokens of the main job equal those of transformers with its own cache, on the embedded model in fp32."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest
import torch

import kvpool as kv
from kvpool.engine import Engine, Params
from kvpool.engine.embedded import load_model
from kvpool.transformers import PackedCache, register_attention

pytestmark = pytest.mark.model

NEW_TOKENS = 48
#: A token may differ only where the two best logits of transformers' own run are closer than this.
NEAR_TIE = 1e-4
LENGTHS = (5, 17, 64, 129, 250, 511, 900, 1500)


@dataclass
class Expected:
    """What transformers generates, and how sure it is of each token."""

    tokens: list[int]
    margins: list[float]


@pytest.fixture(scope="module")
def model():
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // workers, 1))
    network, tokenizer = load_model(None, "fp32", notify=lambda text: None)
    return network, tokenizer


@pytest.fixture(scope="module")
def prompts(model):
    """Eight prompts cut from real text; the last four share their first 200 tokens."""
    import pydoc_data.topics

    _, tokenizer = model
    ids = tokenizer(
        "\n".join(pydoc_data.topics.topics[t] for t in ("assert", "assignment", "class", "import"))
    ).input_ids
    rows = [ids[100 * i : 100 * i + n] for i, n in enumerate(LENGTHS)]
    return rows[:4] + [ids[:200] + row[200:] for row in rows[4:]]


@pytest.fixture(scope="module")
def expected(model, prompts):
    network, _ = model
    network.set_attn_implementation("sdpa")
    out = []
    for row in prompts:
        result = network.generate(
            torch.tensor([row]),
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2).values for logits in result.logits]
        out.append(Expected(result.sequences[0, len(row) :].tolist(), [float(b[0] - b[1]) for b in best]))
    return out


def run(model, prompts, *, together: bool, rounds: int = 1, **settings):
    """Generate with kvpool; with two rounds the second finds its prompts in the prefix tree."""
    network, tokenizer = model
    backend = settings.pop("backend")
    spec = kv.CacheSpec.from_config(network.config)
    blocks = 9000 // settings["tokens_per_block"]
    plan = kv.make_plan(spec, num_blocks=blocks, codec="fp32", max_seq_len=2048, **settings)
    engine = Engine(network, tokenizer, plan, backend=backend)
    params = Params(NEW_TOKENS, stop_ids=frozenset())
    answers = []
    for _ in range(rounds):
        batches = [prompts] if together else [[row] for row in prompts]
        answers.append([answer for batch in batches for answer in engine.generate(batch, params)])
        engine.cache.check()
    network.set_attn_implementation("sdpa")
    return answers, engine.cache


def assert_same(answers, expected):
    """Every token is equal, up to the first near-tie of transformers' own run; returns how many those were."""
    ties = 0
    for answer, want in zip(answers, expected, strict=True):
        assert len(answer.token_ids) == len(want.tokens)
        for got, token, margin in zip(answer.token_ids, want.tokens, want.margins, strict=True):
            if got != token:
                assert margin < NEAR_TIE, f"token {got} instead of {token}, decided by {margin}"
                ties += 1
                break  # what follows has another history
    return ties


LAYOUTS, SIZES, BACKENDS = ("HND", "NHD"), (16, 32, 64), ("cpu", "reference")
#: Every pair of (layout, size), (layout, backend), (size, backend), (reuse, each), (batched, each) occurs.
PAIRWISE = [
    ("HND", 16, "cpu", True, True),
    ("NHD", 32, "cpu", True, False),
    ("HND", 64, "cpu", False, False),
    ("NHD", 64, "cpu", True, True),
    ("NHD", 16, "reference", False, True),
    ("HND", 32, "reference", True, True),
]


def check_setting(model, prompts, expected, *, layout, size, backend, together, rounds):
    answers, cache = run(
        model, prompts, together=together, rounds=rounds, backend=backend, layout=layout, tokens_per_block=size
    )
    for number, answered in enumerate(answers):
        print(f"{layout} {size} {backend}, round {number}: {assert_same(answered, expected)} near-ties")
        for answer, row in zip(answered, prompts, strict=True):
            if number:  # every full block of the prompt, but for the one that holds its last token
                assert answer.cached_tokens >= (len(row) - 1) // size * size
    stats = cache.stats()
    assert stats.used + stats.cached + stats.free == stats.committed
    assert stats.used == 0


@pytest.mark.parametrize(("layout", "size", "backend", "together", "reuse"), PAIRWISE)
def test_greedy_tokens_are_those_of_transformers(model, prompts, expected, layout, size, backend, together, reuse):
    setting = {"layout": layout, "size": size, "backend": backend, "together": together}
    check_setting(model, prompts, expected, **setting, rounds=1 + reuse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "size", "backend", "together"), list(itertools.product(LAYOUTS, SIZES, BACKENDS, (True, False)))
)
def test_greedy_tokens_are_those_of_transformers_in_every_setting(
    model, prompts, expected, layout, size, backend, together
):
    """The first round finds nothing in the prefix tree, the second all of it."""
    setting = {"layout": layout, "size": size, "backend": backend, "together": together}
    check_setting(model, prompts, expected, **setting, rounds=2)


@pytest.mark.parametrize("size", [16, 64])
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(model, prompts, size):
    """Both runs round every activation to bf16 in the same places but one: attention, where ours keeps scores and sums
    in fp32. So the distance of our logits to the fp32 model's may not exceed that of transformers' own bf16 run by more
    than a quarter (the spread of rounding errors over texts), and two runs that far from the same point are at most
    the sum of their distances apart."""
    exact, _ = model
    rounded, _ = load_model(None, "bf16", notify=lambda text: None)
    ids = torch.tensor([prompts[5]])
    with torch.inference_mode():
        want = exact(ids).logits[0].float()
        theirs = rounded(ids).logits[0].float()
    spec = kv.CacheSpec.from_config(rounded.config)
    plan = kv.make_plan(spec, num_blocks=1024 // size, tokens_per_block=size, max_seq_len=1024)
    rounded.set_attn_implementation(register_attention())
    cache = kv.KVCache(plan)
    packed = PackedCache(cache, rounded)
    sequence = cache.sequence(prompts[5])
    ours = []
    while sequence.num_computed_tokens < len(sequence):
        with cache.step([(sequence, 200)]) as step:
            ours.append(packed.forward(step, torch.arange(step.total_tokens)).float())
    their_error = (theirs - want).norm() / want.norm()
    our_error = (torch.cat(ours) - want).norm() / want.norm()
    apart = (torch.cat(ours) - theirs).norm() / want.norm()
    print(f"relative distance to fp32: ours {our_error:.5f}, transformers {their_error:.5f}; apart {apart:.5f}")
    assert our_error < 1.25 * their_error
    assert apart < 2.25 * their_error
