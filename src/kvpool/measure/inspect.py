"""Pictures of a plan: the memory map down to heads, tokens and bytes, and bytes against context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.errors import PlanError
from kvpool.layout import LAYOUTS, inner_strides
from kvpool.plan import GroupPlan, Plan, PlanePlan, PoolPlan
from kvpool.plan.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour-blind safe (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
#: Two light tints for layers side by side.
LAYERS = ("#9ecae1", "#d3e5f2")
#: Heads and tokens drawn of a larger plane.
HEADS, TOKENS = 4, 8


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("drawing needs matplotlib; install kvpool[plot]") from None

    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot write {path}: {error}; give a name that ends in .png, .svg or .pdf") from None


def draw_map(plan: Plan, path: Path) -> None:
    """Draw the memory map of a plan: slabs, one block, one layer of it, and its heads and tokens in both layouts.

    Args:
        plan: The plan.
        path: A file name with the ending of a picture.

    Raises:
        PlanError: The file cannot be written.
    """
    group = max(plan.groups, key=lambda g: (not g.is_state, g.num_blocks * g.bytes_per_block))
    opened = [pool for pool in group.pools if pool.layers == group.pools[0].layers]
    scaled = any(len(pool.planes) > 1 for pool in opened)
    heights = [0.55 + 0.42 * len(plan.groups), 1.1, 1.9, 3.6] + ([1.5] if scaled else [])
    figure = _figure(15, 2.2 + 1.25 * sum(heights))
    grid = figure.add_gridspec(
        len(heights), 2, height_ratios=heights, hspace=0.62, wspace=0.14, left=0.07, right=0.98, top=0.93, bottom=0.045
    )
    title = f"{plan.spec.model}: {plan.num_tokens:,} tokens in {format_bytes(plan.used_bytes)}"
    figure.suptitle(f"{title}, {plan.tokens_per_block} tokens a block", fontsize=15, fontweight="bold")
    slabs, block, layer = (figure.add_subplot(grid[row, :]) for row in range(3))
    _draw_slabs(slabs, plan)
    _draw_block(block, group)
    _draw_layer(layer, group)
    _open(figure, block, (0, _layer_bytes(group)), layer, _layer_bytes(group))
    for column, name in enumerate(LAYOUTS):
        _draw_layout(figure.add_subplot(grid[3, column]), group.pools[0], name, group.tokens_per_block)
    if scaled:
        _draw_scales(figure.add_subplot(grid[4, :]), [plane for pool in opened for plane in pool.planes[1:]])
    _save(figure, path)


def _open(figure: Figure, above: Axes, part: tuple[float, float], below: Axes, whole: float) -> None:
    """Lead the eye from a part of one bar to the bar that shows it larger."""
    from matplotlib.patches import ConnectionPatch

    for x, to in zip(part, (0.0, whole), strict=True):
        line = ConnectionPatch((x, -0.42), (to, 0.42), "data", "data", axesA=above, axesB=below, color="#666666")
        line.set_linestyle((0, (4, 3)))
        figure.add_artist(line)


def _byte_ticks(limit: float) -> list[int]:
    """Multiples of a power of two, five to ten of them."""
    step = 1 << max(int(limit / 5).bit_length() - 1, 0)
    return list(range(0, int(limit) + 1, step))


def _bar_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks([])
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _segment(axes: Axes, start: float, width: float, colour: str, text: str, total: float, row: float = 0.0) -> bool:
    """Draw one piece of a bar, with its text where there is room; return whether there was."""
    axes.barh(row, width, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
    room, longest = 150 * width / total, max(len(line) for line in text.split("\n"))
    if text and room >= 0.8 * longest:
        axes.text(start + width / 2, row, text, ha="center", va="center", fontsize=9, clip_on=True)
    elif text and room >= 1.2 * len(text.split("\n")) and longest < 24:
        axes.text(start + width / 2, row, text, ha="center", va="center", fontsize=8, rotation=90, clip_on=True)
    else:
        return False
    return True


def _draw_slabs(axes: Axes, plan: Plan) -> None:
    _bar_axes(axes, "1  one slab a group: memory behind the first blocks, addresses for the rest (bytes)")
    most = max(g.committed_bytes(g.num_blocks, plan.granule_bytes) for g in plan.groups)
    for row, group in enumerate(reversed(plan.groups)):
        committed = group.committed_bytes(group.num_blocks, plan.granule_bytes)
        colour = COLOURS[(len(plan.groups) - 1 - row) % len(COLOURS)]
        axes.barh(row, most * 1.02, height=0.8, color="#eeeeee", edgecolor="#bbbbbb", hatch="///", linewidth=0.5)
        axes.barh(row, committed, height=0.8, color=colour)
        text = (
            f"{group.name}: {len(group.layers)} layers, {group.num_blocks:,} blocks of {group.bytes_per_block:,} B"
            f" = {format_bytes(committed)}"
        )
        axes.text(most * 0.01, row, text, va="center", fontsize=10, bbox={"facecolor": "white", "alpha": 0.8, "lw": 0})
    axes.set_xlim(0, most * 1.02)
    axes.set_xticks(_byte_ticks(most), [format_bytes(x) for x in _byte_ticks(most)])


def _layer_bytes(group: GroupPlan) -> int:
    """Bytes from one layer's record to the next, of the first pool's layers."""
    pool = group.pools[0]
    if group.layer_first:
        return group.ranges[0].row_bytes
    return pool.planes[0].strides[1] if len(pool.layers) > 1 else group.bytes_per_block


def _draw_block(axes: Axes, group: GroupPlan) -> None:
    record, pool = _layer_bytes(group), group.pools[0]
    where = "one row of each layer's range" if group.layer_first else "one contiguous range"
    _bar_axes(
        axes, f"2  block b of group {group.name!r}, bytes [b, b+1) * {group.bytes_per_block:,}: {where}, layer by layer"
    )
    end = record * len(pool.layers)
    for index, layer in enumerate(pool.layers):
        colour = COLOURS[1] if index == 0 else LAYERS[index % 2]
        _segment(axes, index * record, record, colour, f"layer {layer}", group.bytes_per_block)
    if end < group.bytes_per_block:
        others = {p.layers for p in group.pools} - {pool.layers}
        text = f"{' + '.join(sorted({p.parts[0] for p in group.pools if p.layers in others}))}" if others else "padding"
        _segment(axes, end, group.bytes_per_block - end, COLOURS[7], text, group.bytes_per_block)
    axes.set_xlim(0, max(group.bytes_per_block, end))
    axes.xaxis.set_major_formatter(lambda x, _: f"{int(x):,}")


def _draw_layer(axes: Axes, group: GroupPlan) -> None:
    """The planes of the first layer of a block, cut by part and head."""
    pools = [p for p in group.pools if p.layers == group.pools[0].layers]
    record = _layer_bytes(group)
    stored = ", ".join(f"{'+'.join(p.parts)} of {p.num_heads} heads x {p.vector.dim} in {p.codec}" for p in pools)
    _bar_axes(axes, f"3  layer {pools[0].layers[0]} opened ({record:,} B), plane after plane: {stored}")
    ticks, colour, narrow = [0], 0, 0
    for pool in pools:
        for plane in pool.planes:
            start, size = plane.offset, plane.bytes_per_block // len(pool.layers)
            each = size // pool.kv_factor
            for factor, part in enumerate(pool.parts):
                tint = COLOURS[colour % len(COLOURS)]
                text = f"{part.upper()} {plane.name}\n{plane.dtype}, {each:,} B"
                if not _segment(axes, start + factor * each, each, tint, text, record):
                    middle = start + (factor + 0.5) * each
                    narrow += 1
                    axes.annotate(text.replace("\n", ", "), (middle, 0.4), (middle, 0.38 + 0.14 * narrow), fontsize=8,
                                  ha="right", arrowprops={"arrowstyle": "-", "color": "#888888"})  # fmt: skip
                ticks.append(start + factor * each)
                colour += 1
            ticks.append(start + size)
    axes.set_xlim(0, record)
    axes.set_ylim(-0.45, 0.48 + 0.14 * narrow)
    wide = [t for i, t in enumerate(sorted(set(ticks))) if i == 0 or t - sorted(set(ticks))[i - 1] > record * 0.035]
    axes.set_xticks(wide, [f"{t:,}" for t in wide], fontsize=8, rotation=20)


def _draw_layout(axes: Axes, pool: PoolPlan, name: str, tokens: int) -> None:
    """Cells of (head, token) in the order of memory: one row a run, coloured by head."""
    plane, order = pool.planes[0], LAYOUTS[name].order
    sizes = {"F": pool.kv_factor, "H": pool.num_heads, "N": tokens, "C": plane.shape[5]}
    strides = inner_strides(order, sizes, plane.strides[5])
    heads, shown = min(pool.num_heads, HEADS), min(tokens, TOKENS)
    outer, inner = ("H", "N") if order.index("H") < order.index("N") else ("N", "H")
    counts = {"H": heads, "N": shown}
    title = f"4  {name}: {' '.join(order)}   next token +{strides['N']:,} B, next head +{strides['H']:,} B"
    cell = f"cells of {plane.shape[5]} x {plane.dtype}, left to right, then top to bottom; at the left the byte inside"
    axes.set_title(f"{title}\n{cell} {pool.parts[0].upper()} {plane.name}", loc="left", fontsize=10)
    for i in range(counts[outer]):
        for j in range(counts[inner]):
            head, token = (i, j) if outer == "H" else (j, i)
            axes.add_patch(_cell(j, -i, COLOURS[head % len(COLOURS)]))
            axes.text(j + 0.5, 0.5 - i, f"h{head}\nt{token}", ha="center", va="center", fontsize=8)
        axes.text(-0.15, 0.5 - i, f"{i * strides[outer]:,}", ha="right", va="center", fontsize=8, family="monospace")
        if counts[inner] < sizes[inner]:
            axes.text(counts[inner] + 0.15, 0.5 - i, f"... {sizes[inner]} {'tokens' if inner == 'N' else 'heads'}",
                      va="center", fontsize=8)  # fmt: skip
    if counts[outer] < sizes[outer]:
        axes.text(0.1, -counts[outer] + 0.55, f"... {sizes[outer]} {'tokens' if outer == 'N' else 'heads'}", fontsize=8)
    axes.set_xlim(-1.9, max(counts[inner], TOKENS) + 1.9)
    axes.set_ylim(-max(counts[outer], HEADS) + 0.3, 1.15)
    axes.set_axis_off()


def _cell(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 0.96, 0.92, facecolor=colour, alpha=0.75, edgecolor="white")


def _draw_scales(axes: Axes, planes: list[PlanePlan]) -> None:
    """The scale planes: values of one head side by side."""
    axes.set_title(
        "5  scale planes: a value for each token and head (token-contiguous), or for 16 elements",
        loc="left",
        fontsize=11,
    )
    for row, plane in enumerate(planes):
        values = plane.shape[5] if len(plane.shape) == 6 else 1
        _draw_scale_row(axes, plane, -1.3 * row, values)
    axes.set_xlim(-2.2, 21)
    axes.set_ylim(-1.3 * (len(planes) - 1) - 0.25, 1.25)
    axes.set_axis_off()


def _draw_scale_row(axes: Axes, plane: PlanePlan, y: float, values: int) -> None:
    axes.text(-0.2, y + 0.45, f"{plane.name}\n{plane.dtype}", ha="right", va="center", fontsize=9)
    tokens = min(plane.shape[4], 16 // min(values, 8))
    x = 0
    for token in range(tokens):
        for value in range(min(values, 8)):
            axes.add_patch(_cell(x, y, COLOURS[token % 2 + 3]))
            text = f"t{token}" if values == 1 else f"t{token}\n{value}"
            axes.text(x + 0.48, y + 0.45, text, ha="center", va="center", fontsize=7)
            x += 1
    step = plane.strides[4]
    axes.text(
        x + 0.1, y + 0.45, f"... next token +{step} B,\nnext head +{plane.strides[3]:,} B", va="center", fontsize=8
    )


def draw_budget(plans: Mapping[str, Plan], path: Path, contexts: Sequence[int] | None = None) -> None:
    """Draw bytes of one sequence against context length for each plan, and the split of each budget between groups.

    Args:
        plans: By label, such as a codec's name.
        path: A file name with the ending of a picture.
        contexts: Lengths; by default powers of two up to the longest sequence.

    Raises:
        PlanError: The file cannot be written.
    """
    figure = _figure(14, 6)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.subplots_adjust(left=0.07, right=0.98, top=0.88, bottom=0.11, wspace=0.2)
    first = next(iter(plans.values()))
    lengths = sorted(contexts or _lengths(first))
    for index, (label, plan) in enumerate(plans.items()):
        sizes = [sequence_bytes(plan, n) for n in lengths]
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": ("-", "--", ":", "-.")[index % 4]}
        left.plot(lengths, sizes, marker="o", markersize=4, linewidth=2, label=label, **style)
        left.annotate(format_bytes(sizes[-1]), (lengths[-1], sizes[-1]), xytext=(-4, 5), textcoords="offset points",
                      ha="right", fontsize=8)  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set_xticks(lengths, [_short(n) for n in lengths])
    left.yaxis.set_major_formatter(lambda y, _: format_bytes(int(y)))
    left.set_xlabel("tokens of one sequence")
    left.set_title("bytes one sequence holds", loc="left")
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    _draw_split(right, plans)
    figure.suptitle(f"{first.spec.model}, {first.tokens_per_block} tokens a block", fontweight="bold")
    _save(figure, path)


def sequence_bytes(plan: Plan, num_tokens: int) -> int:
    """Return the bytes of the blocks that one sequence holds, states included once."""
    return sum(group.blocks_for(num_tokens) * group.bytes_per_block for group in plan.groups)


def _lengths(plan: Plan) -> list[int]:
    top = max(plan.max_seq_len, 2048)
    return [1 << n for n in range(10, top.bit_length()) if 1 << n <= top] or [top]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}Ki" if tokens % 1024 == 0 else str(tokens)


def _draw_split(axes: Axes, plans: Mapping[str, Plan]) -> None:
    names = [g.name for g in next(iter(plans.values())).groups]
    for row, plan in enumerate(plans.values()):
        start = 0
        for group in plan.groups:
            size = group.committed_bytes(group.num_blocks, plan.granule_bytes)
            colour = COLOURS[names.index(group.name) % len(COLOURS)] if group.name in names else COLOURS[7]
            axes.barh(row, size, left=start, color=colour, alpha=0.8, label=group.name if row == 0 else None)
            start += size
        axes.text(start, row, f" {plan.num_tokens:,} tokens", va="center", ha="right", fontsize=9,
                  bbox={"facecolor": "white", "alpha": 0.7, "lw": 0})  # fmt: skip
    axes.set_yticks(range(len(plans)), list(plans))
    axes.invert_yaxis()
    ticks = _byte_ticks(max(plan.used_bytes for plan in plans.values()))
    axes.set_xticks(ticks, [format_bytes(x) for x in ticks], fontsize=8)
    axes.set_title("split of the budget between groups", loc="left")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4, fontsize=9)
