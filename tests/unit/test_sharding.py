"""Regions per rank, against numpy: chunking as torch.chunk defines it, flat ranges as ravel does."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from _reading import Array
from hypothesis import given
from hypothesis import strategies as st

from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Region
from wsync.sharding import (
    Cut,
    Mesh,
    OwnerMap,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    agreed_shape,
    cuts,
    flat_range,
    global_shape,
    is_same_everywhere,
    local_shape,
    row_strides,
)


def chunk(array: Array, num: int, dim: int) -> list[Array]:
    """torch.chunk, with empty chunks up to `num`: equal sizes, rounded up."""
    size = -(-array.shape[dim] // num)
    return [
        np.take(array, range(min(i * size, n := array.shape[dim]), min((i + 1) * size, n)), dim) for i in range(num)
    ]


def distribute(array: Array, sharding: Sharding, rank: int) -> Array:
    """The local array of a rank: the axes cut one after another."""
    mesh = sharding.mesh
    place = np.argwhere(np.array(mesh.ranks).reshape(mesh.shape) == rank)[0]
    for axis in (mesh.axes.index(name) for name in sharding.order):
        placement = sharding.placements[axis]
        if isinstance(placement, Shard):
            array = chunk(array, mesh.shape[axis], placement.dim)[place[axis]]
        elif isinstance(placement, StridedShard):
            inner = [
                chunk(c, mesh.shape[axis], placement.dim) for c in chunk(array, placement.split_factor, placement.dim)
            ]
            array = np.concatenate([c[place[axis]] for c in inner], placement.dim)
    return array


def assembled(array: Array, sharding: Sharding, rank: int) -> Array:
    local = np.full(local_shape("w", array.shape, sharding, rank), -1, dtype=np.int64)
    for cut in cuts("w", array.shape, sharding, rank):
        here = tuple(slice(s, s + e) for s, e in zip(cut.start, cut.region.extent, strict=True))
        there = tuple(map(slice, cut.region.offset, cut.region.end))
        assert (local[here] == -1).all(), "no element twice"
        local[here] = array[there]
    return local


@st.composite
def shardings(draw: st.DrawFn, num_dims: int) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = st.integers(0, num_dims - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, st.integers(1, 4)),
    )
    axes = tuple("abc"[: len(shape)])
    ranks = tuple(draw(st.permutations(range(100, 100 + math.prod(shape)))))
    order = tuple(draw(st.permutations(axes)))
    return Sharding(Mesh(shape, axes, ranks), tuple(draw(kinds) for _ in shape), order)


@given(st.data())
def test_every_rank_holds_what_chunking_gives_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    sharding = data.draw(shardings(len(shape)))
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    for rank in sharding.mesh.ranks:
        np.testing.assert_array_equal(assembled(array, sharding, rank), distribute(array, sharding, rank))


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_nested_is_a_cut_inside_the_other_cuts(size: int, dp: int, tp: int, ep: int) -> None:
    array = np.arange(size, dtype=np.int64)
    mesh = Mesh((dp, ep, tp), ("dp", "ep", "tp"))
    nested = Sharding(mesh, (StridedShard(0, ep * tp), Shard(0), Shard(0))).nested()
    for d, e, t in itertools.product(range(dp), range(ep), range(tp)):
        inside = chunk(chunk(chunk(array, ep, 0)[e], tp, 0)[t], dp, 0)[d]
        np.testing.assert_array_equal(assembled(array, nested, (d * ep + e) * tp + t), inside)


def test_nested_differs_from_placements_only_where_uneven() -> None:
    sharding = Sharding(Mesh((4, 2), ("dp", "tp")), (StridedShard(0, 2), Shard(0)))
    differ = [n for n in range(33) if not is_same_everywhere("w", (n,), sharding, sharding.nested())]
    # Of 9 rows the second TP shard has 4: dp rank 3 has one of them, but none of the first shard's 5. So with 17, 25.
    assert differ == [9, 17, 25]


def test_nested_cuts_the_leftmost_axis_last() -> None:
    sharding = Sharding(Mesh((2, 2, 2), ("a", "b", "c")), (StridedShard(0, 4), StridedShard(0, 2), Shard(0)))
    assert sharding.nested().order == ("c", "b", "a")
    assert is_same_everywhere("w", (8,), sharding, sharding.nested())
    rows = [assembled(np.arange(8), sharding.nested(), rank).tolist() for rank in range(8)]
    assert rows == [[0], [4], [2], [6], [1], [5], [3], [7]]


def test_nested_needs_the_factor_that_it_stands_for() -> None:
    sharding = Sharding(Mesh((2, 2), ("dp", "tp")), (StridedShard(0, 4), Shard(0)))
    with pytest.raises(ConfigError, match=r"split_factor=4.*'dp'.*dim 0 into 2"):
        sharding.nested()


def test_order_says_which_axis_cuts_first() -> None:
    mesh = Mesh((2, 2), ("x", "y"))
    rows = [
        assembled(np.arange(4), Sharding(mesh, (Shard(0), Shard(0)), ("y", "x")), rank).tolist() for rank in range(4)
    ]
    assert rows == [[0], [2], [1], [3]]


def test_adjacent_regions_are_one() -> None:
    (cut,) = cuts("w", (8, 3), Sharding(Mesh((1,), ("dp",)), (StridedShard(0, 2),)), 0)
    assert cut == Cut(Region((0, 0), (8, 3)), (0, 0))
    strided = Sharding(Mesh((2,), ("dp",)), (StridedShard(0, 2),))
    assert [cut.region.offset for cut in cuts("w", (8, 3), strided, 1)] == [(2, 0), (6, 0)]


def test_a_scalar_is_replicated_and_cannot_be_cut() -> None:
    mesh = Mesh((2,), ("dp",))
    (cut,) = cuts("scale", (), Sharding(mesh, (Replicate(),)), 1)
    assert cut == Cut(cut.region, ())
    assert cut.region.numel == 1
    with pytest.raises(ManifestMismatch, match=r"'scale' \[\] has no dim 0 to cut on 'dp'"):
        cuts("scale", (), Sharding(mesh, (Shard(0),)), 1)
    with pytest.raises(ManifestMismatch, match="has no dim -1"):
        cuts("w", (4,), Sharding(mesh, (Shard(-1),)), 0)


@pytest.mark.parametrize("placement", [Partial(), Partial("max")])
def test_partial_is_refused_wherever_it_is(placement: Placement) -> None:
    sharding = Sharding(Mesh((2, 2), ("dp", "tp")), (Shard(0), placement))
    for ask in (cuts, local_shape):
        with pytest.raises(ManifestMismatch, match=rf"'w' is Partial\({placement.reduce_op}\) on mesh axis 'tp'"):
            ask("w", (4,), sharding, 0)


@pytest.mark.parametrize(
    ("shape", "axes", "ranks"),
    [
        ((2, 2), ("a",), ()),
        ((2, 2), ("a", "a"), ()),
        ((2, 0), ("a", "b"), ()),
        ((2,), ("a",), (0, 0)),
        ((2,), ("a",), (0, 1, 2)),
    ],
)
def test_meshes_that_are_none_are_refused(
    shape: tuple[int, ...], axes: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError):
        Mesh(shape, axes, ranks)


def test_shardings_that_do_not_suit_their_mesh_are_refused() -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    for placements, order in (((Shard(0),), ()), ((Shard(0), Shard(0)), ("a",)), ((Shard(0), Shard(0)), ("a", "c"))):
        with pytest.raises(ConfigError, match="do not suit the mesh axes"):
            Sharding(mesh, placements, order)


@given(st.data())
def test_the_global_shape_follows_from_all_local_ones(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    sharding = data.draw(shardings(len(shape)))
    local_shapes = {rank: local_shape("w", shape, sharding, rank) for rank in sharding.mesh.ranks}
    assert global_shape("w", local_shapes, sharding) == shape


def test_local_shapes_that_no_tensor_has_are_refused() -> None:
    sharding = Sharding(Mesh((3,), ("dp",)), (Shard(0),))
    with pytest.raises(ManifestMismatch, match=r"with \[7\] those of ranks .*1: \[1\].*2: \[3\]"):
        global_shape("w", {0: [3], 1: [1], 2: [3]}, sharding)
    with pytest.raises(ManifestMismatch, match=r"ranks \[0, 1\], not of all the mesh"):
        global_shape("w", {0: [3], 1: [3]}, sharding)


def test_claims_of_another_shape_are_refused_with_ranks() -> None:
    assert agreed_shape("w", {0: (5, 2), 3: [5, 2]}) == (5, 2)
    with pytest.raises(ManifestMismatch, match=r"'w' is not agreed: \[5\] by ranks \[0, 2\], \[4\] by ranks \[1\]"):
        agreed_shape("w", {0: (5,), 1: (4,), 2: (5,)})
    with pytest.raises(ManifestMismatch, match="nobody claims one"):
        agreed_shape("w", {})


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 300), st.integers(0, 300))
def test_a_flat_range_is_the_same_stretch_of_the_ravelled_tensor(shape: list[int], start: int, length: int) -> None:
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    expected = array.ravel()[start : start + length]
    found = flat_range(shape, start, start + length)
    parts = [array[tuple(map(slice, cut.region.offset, cut.region.end))].ravel() for cut in found]
    assert [cut.start for cut in found] == [(sum(p.size for p in parts[:i]),) for i in range(len(parts))]
    assert np.concatenate([np.zeros(0, dtype=np.int64), *parts]).tolist() == expected.tolist()
    assert len(found) <= max(2 * len(shape) - 1, 1), "no more boxes than needed"


def test_row_strides() -> None:
    assert row_strides((2, 3, 4)) == (12, 4, 1)
    assert row_strides(()) == ()


def test_owners_when_ranks_do_not_divide_the_count() -> None:
    linear = OwnerMap.linear(180, 8)
    assert [len(owned) for owned in linear.owned] == [23, 23, 23, 23, 22, 22, 22, 22]
    assert sum(linear.owned, ()) == tuple(range(180))
    turns = OwnerMap.round_robin(180, 8)
    assert turns.owned[7] == tuple(range(7, 180, 8))
    assert sorted(sum(turns.owned, ())) == list(range(180))
    stages = OwnerMap.of_counts((3, 4, 2))
    assert stages.owned == ((0, 1, 2), (3, 4, 5, 6), (7, 8))
    assert OwnerMap.linear(2, 4).owned == ((0,), (1,), (), ())


def test_replicas_are_fine_and_losses_are_refused() -> None:
    replicated = OwnerMap(4, ((0, 1, 3), (2, 3, 3)))
    assert replicated.ranks_of(3) == (0, 1)
    assert replicated.ranks_of(2) == (1,)
    with pytest.raises(ConfigError, match=r"names \[5\] and leaves out \[1\]"):
        OwnerMap(4, ((0, 5), (2, 3)))
