"""How one dim of a fused, cut or padded local is made up of rows of whole tensors. Pure.

An `Arrangement` is that of one dim on one tensor-parallel rank: runs of rows of the *parts* (q, k and v, or gate and
up). It is made once and serves a weight, its bias and its scales alike. `wsync.layouts` makes blocks of memory of it.
Arrangements are made of arrangements: `joined(heads(..), kv_heads(..), kv_heads(..))` is a fused QKV.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wsync.errors import ConfigError, ManifestMismatch


class TpRank(msgspec.Struct, frozen=True):
    """One of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and isinstance(self.size, int) and 0 <= self.rank < self.size):
            raise ConfigError(f"tensor-parallel rank {self.rank} of {self.size} is none")


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Rows [begin, begin + extent) of a part; they lie at `at`, `at + step`, ... of the local."""

    part: int
    begin: int
    extent: int
    at: int
    step: int = 1


class Arrangement(msgspec.Struct, frozen=True):
    """How one dim of a local is made up. `sizes` are the whole extents of the parts; `padding` lists (at, extent).

    Invariants, checked when built: every run lies in its part; runs and padding fill [0, extent) of the local, every
    index once.
    """

    sizes: tuple[int, ...]
    extent: int
    runs: tuple[Run, ...]
    padding: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes or min(self.extent, *self.sizes) < 0:
            raise ManifestMismatch(f"{self.extent} rows of parts of {list(self.sizes)} are no arrangement")
        for run in self.runs:
            is_part = 0 <= run.part < len(self.sizes)
            if not is_part or run.begin < 0 or run.begin + run.extent > self.sizes[run.part]:
                raise ManifestMismatch(f"{run} does not lie in a part: they have {list(self.sizes)} rows")
        filled = bytearray(self.extent)
        count = 0
        own = (Run(0, 0, extent, at) for at, extent in self.padding)
        for run in (*self.runs, *own):
            last = run.at + (run.extent - 1) * run.step
            if run.extent < 1 or run.step < 1 or run.at < 0 or last >= self.extent:
                raise ManifestMismatch(f"{run} is empty or does not lie in a local of {self.extent} rows")
            filled[run.at : run.at + run.extent * run.step : run.step] = b"\1" * run.extent
            count += run.extent
        if count != self.extent or 0 in filled:
            raise ManifestMismatch(f"runs {self.runs} and padding {self.padding} do not fill {self.extent} rows once")

    def unpadded(self) -> tuple[tuple[int, int], ...]:
        """What the padding leaves, as (at, extent)."""
        spans = []
        at = 0
        for start, extent in [*sorted(self.padding), (self.extent, 0)]:
            if at < start:
                spans.append((at, start - at))
            at = start + extent
        return tuple(spans)


def whole(size: int) -> Arrangement:
    """All rows of one part, in order."""
    return even("", size, TpRank())


def even(name: str, size: int, tp: TpRank) -> Arrangement:
    """The rank's equal share of the rows: column parallel for dim 0, row parallel for dim 1. It must divide."""
    if size % tp.size:
        raise ManifestMismatch(
            f"'{name}' has {size} rows, which {tp.size} tensor-parallel ranks cannot share evenly",
            hint="choose a tensor-parallel size that divides it, or declare how it is padded",
        )
    share = size // tp.size
    return Arrangement((size,), share, (Run(0, tp.rank * share, share, 0),) if share else ())


def heads(name: str, num_heads: int, head_dim: int, tp: TpRank) -> Arrangement:
    """The rank's share of query heads, which must divide."""
    _check_positive(name, num_heads=num_heads, head_dim=head_dim)
    if num_heads % tp.size:
        raise ManifestMismatch(
            f"'{name}' has {num_heads} heads, which {tp.size} tensor-parallel ranks cannot share evenly",
            hint="choose a tensor-parallel size that divides the number of heads",
        )
    return even(name, num_heads * head_dim, tp)


def kv_heads(name: str, num_heads: int, head_dim: int, tp: TpRank) -> Arrangement:
    """The rank's share of key or value heads (or of a norm per head). With more ranks than heads each head lies on
    `tp.size / num_heads` neighbouring ranks, whole.
    """
    _check_positive(name, num_heads=num_heads)
    if tp.size <= num_heads:
        return heads(name, num_heads, head_dim, tp)
    if tp.size % num_heads:
        raise ManifestMismatch(
            f"'{name}' has {num_heads} heads, which cannot be repeated evenly on {tp.size} tensor-parallel ranks",
            hint="choose a tensor-parallel size that is a multiple of the number of heads",
        )
    return heads(name, num_heads, head_dim, TpRank(tp.rank * num_heads // tp.size, num_heads))


def vocab_padded(size: int, multiple: int = 64) -> int:
    """The vocabulary rounded up. Engines take a multiple of 64, Megatron of `make_vocab_size_divisible_by * tp`."""
    _check_positive("vocabulary", multiple=multiple)
    return -(-size // multiple) * multiple


def padded(name: str, size: int, padded_size: int, tp: TpRank) -> Arrangement:
    """The rank's share of `size` rows padded at the end to `padded_size`; rows beyond `size` are the member's own."""
    if padded_size < size:
        raise ManifestMismatch(f"'{name}' has {size} rows, more than the {padded_size} that it is padded to")
    share = even(name, padded_size, tp).extent
    begin = min(tp.rank * share, size)
    real = min(share, size - begin)
    runs = (Run(0, begin, real, 0),) if real else ()
    return Arrangement((size,), share, runs, ((real, share - real),) if real < share else ())


def joined(*parts: Arrangement) -> Arrangement:
    """One after another: [q; k; v], [gate; up], or packed components, each cut by itself."""
    sizes: list[int] = []
    runs: list[Run] = []
    padding: list[tuple[int, int]] = []
    at = 0
    for arrangement in parts:
        runs += [Run(r.part + len(sizes), r.begin, r.extent, r.at + at, r.step) for r in arrangement.runs]
        padding += [(start + at, extent) for start, extent in arrangement.padding]
        sizes += arrangement.sizes
        at += arrangement.extent
    return Arrangement(tuple(sizes), at, tuple(runs), tuple(padding))


def interleaved(name: str, *parts: Arrangement) -> Arrangement:
    """Row by row in turn: g0, u0, g1, u1, ..."""
    if len({part.extent for part in parts}) != 1 or any(part.padding for part in parts):
        raise ManifestMismatch(f"'{name}' interleaves {[part.extent for part in parts]} rows: not the same of each")
    num = len(parts)
    together = joined(*parts)
    runs = (
        Run(r.part, r.begin, r.extent, r.at % parts[0].extent * num + r.at // parts[0].extent, r.step * num)
        for r in together.runs
    )
    return Arrangement(together.sizes, together.extent, tuple(runs))


def grouped(name: str, size: int, rows: Sequence[int], num_groups: int, tp: TpRank) -> Arrangement:
    """Per query group interleaved, as Megatron's linear_qkv: for each group `rows[p]` rows of part p, part after part.

    `size` is the whole dim 0 of the fused tensor. With attention gates the gate is one more part, in its place.
    """
    if num_groups * sum(rows) != size:
        raise ManifestMismatch(
            f"'{name}' has {size} rows, but {num_groups} groups of {list(rows)} are {num_groups * sum(rows)}",
            hint="name all segments of a group, the gate too",
        )
    mine = heads(name, num_groups, 1, tp).runs[0]  # there is one: 0 groups are refused
    runs: list[Run] = []
    at = 0
    for group in range(mine.begin, mine.begin + mine.extent):
        for part, extent in enumerate(rows):
            runs += [Run(part, group * extent, extent, at)] if extent else []
            at += extent
    return Arrangement(tuple(num_groups * extent for extent in rows), at, tuple(runs))


def rope_interleaved(name: str, halves: Arrangement, head_dim: int) -> Arrangement:
    """Each head's rows x0, x1, .., y0, y1, .. (rotated in halves, as in checkpoints) lie as x0, y0, x1, y1, .."""
    half = head_dim // 2
    if (
        head_dim < 2
        or head_dim % 2
        or halves.padding
        or any(run.step != 1 for run in halves.runs)
        or halves.extent % head_dim
    ):
        raise ManifestMismatch(f"'{name}' has {halves.extent} rows, not plain heads of {head_dim}")
    runs: list[Run] = []
    for run in halves.runs:
        done = 0
        while done < run.extent:
            head, row = divmod(run.at + done, head_dim)
            extent = min(run.extent - done, half - row % half)
            at = head * head_dim + row % half * 2 + row // half
            runs.append(Run(run.part, run.begin + done, extent, at, 2))
            done += extent
    return Arrangement(halves.sizes, halves.extent, tuple(runs))


def folded(arrangement: Arrangement, parts: Sequence[int], host: Arrangement) -> Arrangement:
    """The same local when `parts` are no tensors of their own, but lie in one tensor as `host` says.

    That tensor is part 0 of the result, then come the other parts in order. With gated attention the checkpoint's
    q_proj has for each head its query rows and its gate rows: `folded(qgkv, (q, gate), grouped(..., (head_dim,
    head_dim), num_heads, TpRank()))`.
    """
    rest = [part for part in range(len(arrangement.sizes)) if part not in parts]
    is_there = len(rest) + len(parts) == len(arrangement.sizes)  # all parts are known, none is named twice
    if not is_there or tuple(arrangement.sizes[part] for part in parts) != host.sizes:
        raise ManifestMismatch(f"parts {list(parts)} of {arrangement.sizes} rows do not lie in one of {host.sizes}")
    runs: list[Run] = []
    for run in arrangement.runs:
        if run.part in rest:
            runs.append(Run(1 + rest.index(run.part), run.begin, run.extent, run.at, run.step))
            continue
        for base in host.runs:
            low, high = max(run.begin, base.begin), min(run.begin + run.extent, base.begin + base.extent)
            if base.part != parts.index(run.part) or low >= high:
                continue
            # A region of the tensor has no steps: rows that lie apart there are runs of one row.
            stretch = high - low if base.step == 1 else 1
            for row in range(low, high, stretch):
                there, here = base.at + (row - base.begin) * base.step, run.at + (row - run.begin) * run.step
                runs.append(Run(0, there, stretch, here, run.step))
    sizes = (host.extent, *(arrangement.sizes[part] for part in rest))
    return Arrangement(sizes, arrangement.extent, tuple(runs), arrangement.padding)


def scales(name: str, rows: Arrangement, block_rows: int = 128, *, is_overlapping: bool = False) -> Arrangement:
    """The arrangement of a block scale's rows for that of its weight: row r of a part has scale row r // block_rows.

    Where the cut goes through a block, an engine that expects one scale row per block of its local has no right
    values: refused. With `is_overlapping` the local has instead, run after run, each scale row that any of its rows
    needs; neighbours then have the shared row both.
    """
    _check_positive(name, block_rows=block_rows)
    runs: list[Run] = []
    at = 0
    for run in sorted(rows.runs, key=lambda run: run.at):
        first, last = run.begin // block_rows, (run.begin + run.extent - 1) // block_rows
        is_end = run.begin + run.extent == rows.sizes[run.part]
        is_aligned = run.begin % block_rows == 0 and (is_end or run.extent % block_rows == 0)
        if run.step != 1 or not (is_overlapping or (is_aligned and run.at == at * block_rows)):
            raise ManifestMismatch(
                f"the scale of '{name}' is of {block_rows} rows a block, and rows {run.begin}:{run.begin + run.extent} "
                f"at {run.at} of the local do not lie on blocks",
                hint="choose a tensor-parallel size whose cuts fall on blocks, or an engine that overlaps scale rows",
            )
        runs.append(Run(run.part, first, last - first + 1, at))
        at += last - first + 1
    if rows.padding:
        raise ManifestMismatch(f"the scale of '{name}' is of {block_rows} rows a block, and the weight is padded")
    return Arrangement(tuple(-(-size // block_rows) for size in rows.sizes), at, tuple(runs))


def _check_positive(name: str, **counts: int) -> None:
    for what, count in counts.items():
        if count < 1:
            raise ManifestMismatch(f"{what} of '{name}' is {count}, it must be 1 or more")
