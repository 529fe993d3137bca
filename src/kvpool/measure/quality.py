"""What a stored format costs in accuracy, on the user's model and text. Knows no command line and no picture.

Two passes over real text, every token stored in the format, none kept aside:

- the model runs on a cache of each format; its next-token distributions are compared with those of the unquantised
  cache (KL divergence, agreement of the best token, perplexity). How the tokens before the scored ones got there is one
  of two procedures (`PREFILLS`): `stored` reads the format from the first token on, as kvpool's own attention does;
  `exact` computes them without loss and stores what came out, as a cache does whose prefill attends to the tensors of
  its own forward (transformers' QuantizedCache);
- the model runs once unquantised while every other cache sees the same queries, keys and values (`probe`): the error
  of attention outputs, layer by layer and head by head.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpool.cache import KVCache
from kvpool.codecs import get_codec
from kvpool.errors import KVError
from kvpool.measure.probe import Probe, logit_noise, outlier_ratio, sample
from kvpool.measure.variants import Variant
from kvpool.plan import make_plan
from kvpool.sequence import Sequence
from kvpool.spec import CacheSpec
from kvpool.transformers import PackedCache

#: Above this standard deviation of the attention logits' error, keys count as broken: weights are off by e^0.5.
BROKEN_LOGITS = 0.5
#: Above this share of elements stored as zero a constant scale is too large.
FLUSHED_SHARE = 0.125
#: Worst (layer, head) pairs that are named.
NUM_WORST = 3
#: Rows whose distributions are compared at once (memory: rows x vocabulary x 4 bytes, a few times).
CHUNK_ROWS = 64

#: What computes the tokens before the scored ones: the cache of the format itself, or the unquantised one.
PREFILLS = ("stored", "exact")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Windows:
    """Pieces of a text.

    Attributes:
        scored: Each `prefix + num_scored + 1` tokens.
        calibration: Tokens of another text.
        prefix: Tokens before the first scored position.
    """

    scored: tuple[torch.Tensor, ...]
    calibration: torch.Tensor
    prefix: int

    @property
    def num_scored(self) -> int:
        """Scored positions of all windows."""
        return sum(len(w) - self.prefix - 1 for w in self.scored)


@dataclass(slots=True)
class Row:
    """The figures of one format; see `kvpool quality` for their names.

    Attributes:
        layers: Relative error of the attention output, by layer.
        worst: (layer, KV head, relative error), worst first.
        warnings: What a reader should know.
    """

    codec: str
    bits_per_element: float
    perplexity: float = math.nan
    perplexity_change: float = math.nan
    top1_agreement: float = math.nan
    kl: float = math.nan
    kl_stderr: float = math.nan
    attention_error: float = math.nan
    layers: dict[int, float] = field(default_factory=dict)
    worst: list[tuple[int, int, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__} | {"layers": list(self.layers.values())}


def default_texts() -> tuple[str, str]:
    """Return two texts, to score and to calibrate on: the documentation topics that come with the interpreter."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    keys = sorted(topics)
    calibration = [key for key in keys if key.startswith("type")]
    return tuple("\n\n".join(topics[k] for k in keys if (k in calibration) is c) for c in (False, True))  # type: ignore[return-value]


def cut(ids: SequenceOf[int], calibration: SequenceOf[int], prefix: int, scored: int, num_windows: int) -> Windows:
    """Cut a text into scored windows, evenly spread, the first at its start.

    Args:
        ids: Token ids of the text.
        calibration: Token ids of another text; as many are used as a window has.
        prefix: Tokens a window has before its first scored position.
        scored: Scored positions of a window.
        num_windows: Windows asked for.

    Raises:
        KVError: The text is too short.
    """
    length = prefix + scored + 1
    if prefix < 1 or scored < 1 or num_windows < 1:
        raise KVError(f"prefix, scored and windows must be positive, got {prefix}, {scored}, {num_windows}")
    if len(ids) < length * num_windows:
        raise KVError(
            f"the text has {len(ids)} tokens; {num_windows} windows of {length} need {length * num_windows}: take fewer"
            " or shorter windows, or more text"
        )
    tokens = torch.tensor(list(ids), dtype=torch.int64)
    starts = [i * (len(ids) // num_windows) for i in range(num_windows)]
    scored_windows = tuple(tokens[s : s + length] for s in starts)
    return Windows(scored_windows, torch.tensor(list(calibration[:length]), dtype=torch.int64), prefix)


class Meter:
    """Measures formats on one model and one set of windows.

    Args:
        model: A causal language model of transformers, attending through kvpool.
        windows: The text.
        baseline: What the others are compared with.
        prefill: One of `PREFILLS`.
        backend: Of every cache.
        progress: Called with a label after every forward pass.

    Raises:
        KVError: There is no such procedure.
    """

    def __init__(
        self,
        model: Any,
        windows: Windows,
        baseline: Variant,
        *,
        prefill: str = "stored",
        backend: str = "auto",
        progress: Progress = lambda label: None,
    ) -> None:
        if prefill not in PREFILLS:
            raise KVError(f"unknown prefill {prefill!r}; known: {', '.join(PREFILLS)}")
        self.prefill = prefill
        self.model = model
        self.windows = windows
        self.baseline = baseline
        self.backend = backend
        self.progress = progress
        self.spec = CacheSpec.from_config(model.config)
        self._sample: dict[int, dict[str, torch.Tensor]] | None = None

    def num_passes(self, variants: SequenceOf[Variant]) -> int:
        """Forward passes `measure` makes, for a progress bar."""
        calibrating = any(v.needs_calibration for v in variants)
        shared = self.prefill == "exact"
        return (len(variants) + 1 + shared) * len(self.windows.scored) + 1 + calibrating

    def measure(self, variants: SequenceOf[Variant]) -> list[Row]:
        """Return the baseline's row and one for each variant."""
        everyone = (self.baseline, *variants)
        caches = [self.cache(v) for v in everyone]
        runs = [PackedCache(cache, self.model) for cache in caches]
        tallies = [Tally() for _ in everyone]
        for window in self.windows.scored:
            exact = None
            prefixes = self._exact_prefixes(caches, window) if self.prefill == "exact" else [None] * len(runs)
            for variant, run, prefix, tally in zip(everyone, runs, prefixes, tallies, strict=True):
                logits = self.logits(run, window, prefix, through_tiers=variant.below is not None)
                exact = logits if exact is None else exact
                tally.add(exact, logits, window[self.windows.prefix + 1 :])
                self.progress(variant.name)
        rows = []
        # What the tiers hold is measured where it is stored like that.
        caches = [c if v.below is None else self.cache(v.at_rest) for v, c in zip(everyone, caches, strict=True)]
        for variant, cache, tally in zip(everyone, caches, tallies, strict=True):
            row = Row(variant.name, bits_per_element(cache))
            tally.fill(row, tallies[0])
            rows.append(row)
        self._attention(caches, rows)
        num_tokens = sum(map(len, self.windows.scored)) + len(self.windows.scored[0])
        for row, cache in zip(rows, caches, strict=True):
            row.warnings += lossy_scales(row.codec, cache, num_tokens)
        return rows

    def cache(self, variant: Variant) -> KVCache:
        """Make a cache that holds one window, its constants set."""
        length = max(len(w) for w in (*self.windows.scored, self.windows.calibration))
        plan = make_plan(
            self.spec,
            codec=variant.codec,
            max_tokens=length,
            max_seq_len=length,
            max_step_tokens=length,
            max_sequences=1,
        )
        size = None if variant.below is None else plan.budget_bytes
        cache = KVCache(plan, backend=self.backend, host_size=size, host_codec=variant.below)
        variant.prepare(cache, self.sample() if variant.needs_calibration else {})
        return cache

    def sample(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return what the layers write and ask for the calibration tokens."""
        if self._sample is None:
            self._sample = sample(self.model, self.cache(self.baseline), self.windows.calibration)
            self.progress("calibration")
        return self._sample

    def logits(
        self, run: PackedCache, window: torch.Tensor, prefix: Sequence | None = None, *, through_tiers: bool = False
    ) -> torch.Tensor:
        """Return the logits of a window's scored positions, `[num_scored, vocabulary]`; the window is forgotten.

        One step computes all that is left: its rows read what the cache holds, each up to itself, which is what single
        steps would read.

        Args:
            run: The model on a cache.
            window: Its tokens.
            prefix: Holds the window's prefix already; None computes it here.
            through_tiers: The prefix comes back from the tiers below before the rest is computed.
        """
        done = self.windows.prefix if prefix or through_tiers else 0
        if prefix:
            prefix.extend(window[done:].tolist())
        sequence = prefix or run.cache.sequence(window.tolist())
        if through_tiers:
            if not prefix:
                with run.cache.step([(sequence, done)], commit=False) as step:
                    run.forward(step, rows=torch.tensor([0]))
            run.cache.below.pass_through(sequence.id)
        with run.cache.step([(sequence, len(window))], commit=False) as step:
            logits = run.forward(step, rows=torch.arange(self.windows.prefix, len(window) - 1) - done)
        sequence.release(keep=False)
        return logits

    def _exact_prefixes(self, caches: SequenceOf[KVCache], window: torch.Tensor) -> list[Sequence]:
        """Compute a window's prefix on the first cache and store what came out in all; return what holds it."""
        sequences = Probe(caches[0], caches[1:], compare=False).run(self.model, window[: self.windows.prefix])
        self.progress("prefix")
        return sequences

    def _attention(self, caches: SequenceOf[KVCache], rows: SequenceOf[Row]) -> None:
        """Fill the attention errors of the rows from one pass over the first window."""
        probe = Probe(caches[0], caches[1:])
        sequences = probe.run(self.model, self.windows.scored[0])
        self.progress("attention")
        rows[0].attention_error = 0.0
        rows[0].layers = dict.fromkeys(probe.written, 0.0)
        for row, cache, sequence, errors in zip(rows[1:], caches[1:], sequences[1:], probe.errors, strict=True):
            row.layers = errors.by_layer()
            row.attention_error = sum(row.layers.values()) / len(row.layers)
            heads = [(layer, h, float(e)) for layer, es in errors.relative().items() for h, e in enumerate(es)]
            row.worst = sorted(heads, key=lambda x: -x[2])[:NUM_WORST]
            row.warnings += broken_keys(row.codec, cache, sequence, probe)


@dataclass(slots=True)
class Tally:
    """What one format's distributions were, position by position: numbers, since small tensors would pin the heap."""

    kl: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, exact: torch.Tensor, lossy: torch.Tensor, targets: torch.Tensor) -> None:
        """Compare logits `[n, vocabulary]` with the exact ones and with the tokens that followed."""
        for begin in range(0, len(targets), CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            p, q = exact[rows].float().log_softmax(-1), lossy[rows].float().log_softmax(-1)
            self.kl += (p.exp() * (p - q)).sum(-1).tolist()
            self.agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
            self.loss += (-q.gather(1, targets[rows, None])[:, 0]).tolist()

    def fill(self, row: Row, baseline: Tally) -> None:
        """Write the means into a row."""
        loss, exact = statistics.fmean(self.loss), statistics.fmean(baseline.loss)
        row.kl = statistics.fmean(self.kl)
        row.kl_stderr = statistics.stdev(self.kl) / math.sqrt(len(self.kl)) if len(self.kl) > 1 else math.nan
        row.top1_agreement = statistics.fmean(self.agreed)
        row.perplexity = math.exp(loss)
        row.perplexity_change = math.exp(loss - exact) - 1


def bits_per_element(cache: KVCache) -> float:
    """Return the stored bits for one element of keys, values and latents, scales included."""
    bits = elements = 0.0
    for group in cache.plan.groups:
        for pool in () if group.is_state else group.pools:
            vectors = pool.num_heads * len(pool.layers) * pool.kv_factor
            bits += vectors * pool.vector.dim * get_codec(pool.codec).bits_per_element(pool.vector)
            elements += vectors * pool.vector.dim
    return bits / elements


def broken_keys(name: str, cache: KVCache, sequence: Sequence, probe: Probe) -> list[str]:
    """Return a warning when a format loses what keys say.

    Args:
        name: Of the format.
        cache: Holds the probe's tokens in that format.
        sequence: Those tokens.
        probe: What the model wrote and asked.
    """
    worst: tuple[float, int, int, float] | None = None
    num_broken = num_heads = 0
    for layer, tensors in probe.written.items():
        exact = tensors["k"] if "k" in tensors else torch.cat([tensors["latent"], tensors["rope"]], -1)
        decoded = cache.read(layer, sequence)
        lossy = decoded[0] if "k" in tensors else torch.cat(decoded, -1)
        noise = logit_noise(probe.queries[layer], exact, lossy, probe.scales[layer])
        ratio = outlier_ratio(exact)
        num_broken += int((noise > BROKEN_LOGITS).sum())
        num_heads += len(noise)
        head = int(noise.argmax())
        if worst is None or float(noise[head]) > worst[0]:
            worst = (float(noise[head]), layer, head, float(ratio[head]))
    if worst is None or not num_broken:
        return []
    off_by, layer, head, outliers = worst
    best = ("smoothing" if "latent" in tensors else "mixing", "rotation")
    fix = "".join(f"+{option}" for option in best) if any(f"+{o}" not in name for o in best) else "8 bits for K"
    return [
        f"{name} breaks keys: in {num_broken} of {num_heads} heads attention logits are off by more than"
        f" {BROKEN_LOGITS} (standard deviation), most in layer {layer}, head {head}, by {off_by:.2f}, where"
        f" the largest channel is {outliers:.0f} times the median one; try {fix}"
    ]


def lossy_scales(name: str, cache: KVCache, num_tokens: int) -> list[str]:
    """Return a warning for what constant scales lost of the tokens written so far."""
    worst: tuple[float, int, str, float, float] | None = None
    for (layer, part), counts in cache.lost().items():
        stored = cache.pools.part(layer, part)
        elements = num_tokens * stored.num_heads * stored.vector.dim
        saturated, flushed = (counts.saturated + counts.nonfinite) / elements, counts.flushed / elements
        if saturated and (worst is None or saturated > worst[0]):
            worst = (saturated, layer, part, saturated, flushed)
        elif flushed > FLUSHED_SHARE and (worst is None or flushed > worst[0]):
            worst = (flushed, layer, part, saturated, flushed)
    if worst is None:
        return []
    _, layer, part, saturated, flushed = worst
    return [
        f"{name}: the constant scale of layer {layer}, {part}, is the worst: {100 * saturated:.3g} % of its elements"
        f" were beyond the largest code, {100 * flushed:.3g} % were stored as zero"
    ]


def report(rows: SequenceOf[Row], **facts: object) -> Mapping[str, Any]:
    """Return the JSON object of `kvpool quality`."""
    return {**facts, "rows": [row.to_dict() for row in rows]}
