"""What a torch process holds of a model that is cut over many: local tensors in, `Holding` out.

First step on a trainer's side, before planning. It knows the ways in which torch trainers cut their weights (DTensor
of FSDP2 and tensor parallelism, FSDP1, ZeRO-3, Megatron's attributes, and plain tensors with a declared layout), and
says each as a `Block` of whole tensors. Every rank reads what it holds itself: nothing here runs a collective or waits
for another rank. What ranks believe about a tensor is compared where the plan is made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from wsync.engine.groups import near, some
from wsync.engine.tensors import dtype_name, select
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region
from wsync.integrations.names import plain_name, plain_names
from wsync.integrations.torch import check_bytes
from wsync.layouts import Block, Patch, flattened
from wsync.manifest import ITEMSIZE
from wsync.sharding import (
    Cut,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    cuts,
    local_shape,
    row_strides,
)


class Held(NamedTuple):
    """What this rank has. `locals` are the live tensors by local name: they share memory with the model.

    A tensor of which this rank has no element is not in its holding. `left_out` says what of the source is not
    published, and why.
    """

    holding: Holding
    locals: dict[str, torch.Tensor]
    left_out: dict[str, str]


class _Part(NamedTuple):
    """What this rank has of a tensor (or of several that are fused): locals, each with what lies where in it."""

    dtype: torch.dtype
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name, and the global shape that this rank believes in."""
    blocks: tuple[tuple[torch.Tensor, Block], ...]

    def identity(self) -> object:
        """Equal for parts that are the same regions of tensors of the same shapes, in the very same memory."""
        number = {name: index for index, (name, _) in enumerate(self.tensors)}
        return (
            tuple(shape for _, shape in self.tensors),
            tuple(
                (
                    t.data_ptr(),
                    t.device,
                    t.dtype,
                    t.stride(),
                    tuple((number[p.tensor], p.region, p.start, p.dims, p.steps) for p in b.patches),
                )
                for t, b in self.blocks
            ),
        )


def read_state(
    source: torch.nn.Module | Mapping[str, Any],
    *,
    dtypes: Mapping[str, str | torch.dtype] | None = None,
    layouts: Mapping[str, Block] | None = None,
    names: Iterable[str] | None = None,
    tp: tuple[int, int] | None = None,
) -> Held:
    """What this rank has of the tensors of a module, a state dict or any mapping of names to tensors.

    Names are those of the source without the prefixes of wrappers; `names` declares a part of them. A tensor travels
    in its own dtype unless `dtypes` says otherwise (a torch dtype or its name); then it is cast once, when it is
    packed. `layouts` says what a plain tensor is made of that is a shard, or fused; for one that is only sharded,
    `placed` makes it. `tp` is (rank, size) in the tensor-parallel group, for tensors that have only Megatron's
    attributes.

    Raises ManifestMismatch naming a tensor that cannot be published, ConfigError for an argument that fits none.
    """
    found, left_out = _tensors_of(source)
    chosen = select(list(found), tuple(names) if names is not None else None)
    dtypes, layouts = dtypes or {}, layouts or {}
    if unknown := sorted((set(dtypes) | set(layouts)) - set(found)):
        raise ConfigError(
            f"dtypes= or layouts= names tensors that are not there: {some(unknown)}", hint=near(unknown, found)
        )
    if tp is not None and not 0 <= tp[0] < tp[1]:
        raise ConfigError(f"tp={tp} is no (rank, size) of a tensor-parallel group")
    collected = _Collected()
    with torch.no_grad():
        for name in chosen:
            part = _part_of(name, found[name], layouts.get(name), tp)
            collected.add(name, part, _wire_dtype(name, part.dtype, dtypes.get(name)))
    return Held(collected.builder.build(), collected.locals, left_out)


def placed(name: str, shape: Sequence[int], sharding: Sharding, rank: int) -> Block:
    """The layout of a plain tensor that is this rank's shard of tensor `name`, whose global shape is `shape`."""
    return _block(name, tuple(shape), local_shape(name, shape, sharding, rank), cuts(name, shape, sharding, rank))


class _Collected:
    """Parts of tensors. The first of several parts in the same memory carries the bytes of all."""

    def __init__(self) -> None:
        self.builder = HoldingBuilder()
        self.locals: dict[str, torch.Tensor] = {}
        self._first: dict[object, tuple[_Part, str]] = {}

    def add(self, name: str, part: _Part, dtype: str) -> None:
        if not any(block.patches for _, block in part.blocks):
            for tensor, shape in part.tensors:
                if not math.prod(shape):
                    self.builder.tensor(tensor, dtype, shape)
            return
        carrier, carried = self._first.setdefault(part.identity(), (part, dtype))
        if carried != dtype:
            raise ManifestMismatch(
                f"'{name}' is tied to '{carrier.tensors[0][0]}', but is to travel as {dtype} and that one as {carried}",
                hint="give tied tensors one dtype",
            )
        if carrier is not part:
            for (tensor, shape), (alias_of, _) in zip(part.tensors, carrier.tensors, strict=True):
                self.builder.tensor(tensor, dtype, shape, alias_of)
            return
        for number, (local, block) in enumerate(part.blocks):
            local_name = name if len(part.blocks) == 1 else f"{name}@{number}"
            block.add(self.builder, local_name, dtype_name(local.dtype), dtype)
            self.locals[local_name] = local


def _tensors_of(source: torch.nn.Module | Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors, or already known parts of tensors, by plain name; and what is left out, with the reason."""
    left_out: dict[str, str] = {}
    named: Mapping[str, Any]
    if isinstance(source, torch.nn.Module):
        flat = dict(_fsdp1_parts(source))
        # FSDP1 gathers whole parameters for a state dict; other modules hand out what they have.
        named = {**flat, **_own_state(source, skip=flat)} if flat else source.state_dict(keep_vars=True)
    elif isinstance(source, Mapping):
        named = source
    else:
        raise ConfigError(
            f"cannot read tensors from a {type(source).__name__}",
            hint="pass an nn.Module, a state dict, or a mapping of names to tensors",
        )
    plain = plain_names(named)
    found = {plain[name]: value for name, value in named.items()}
    for name in [name for name in found if name.rpartition(".")[2] == "_extra_state"]:
        left_out[name] = "extra state of a module, not a tensor"
        del found[name]
    if isinstance(source, torch.nn.Module):
        left_out.update((name, why) for name, why in _unpublished(source) if name not in found)
    return found, left_out


def _unpublished(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Tensors that a module has and a state dict does not."""
    for path, sub in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in sub._non_persistent_buffers_set:
            if sub._buffers.get(name) is not None:
                yield plain_name(prefix + name), "non-persistent buffer: every process makes its own"
        for name, value in vars(sub).items():
            if isinstance(value, torch.Tensor):
                yield plain_name(prefix + name), "plain attribute: neither a parameter nor a buffer"


def _own_state(module: torch.nn.Module, *, skip: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers as they are registered, without running the hooks of a state dict."""
    state: dict[str, torch.Tensor] = {}
    known = {plain_name(name) for name in skip}
    for path, sub in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in itertools.chain(sub._parameters.items(), sub._buffers.items()):
            is_own = name not in sub._non_persistent_buffers_set and not hasattr(value, "_shard_param_infos")
            if value is not None and is_own and plain_name(prefix + name) not in known:
                state[prefix + name] = value
    return state


def _part_of(name: str, value: Any, layout: Block | None, tp: tuple[int, int] | None) -> _Part:
    """Whether a tensor is a shard, and of what, as each framework says it."""
    if isinstance(value, _Part):
        return value
    if not isinstance(value, torch.Tensor):
        raise ManifestMismatch(f"'{name}' is a {type(value).__name__}, not a tensor", hint="leave it out with names=")
    if layout is not None:
        local = _checked(name, value)
        _check_shape(name, local, layout.shape)
        return _Part(value.dtype, layout.tensors, ((local, layout),))
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        return _dtensor_part(name, value)
    if hasattr(value, "local_shards"):
        return _sharded_tensor_part(name, value)
    if hasattr(value, "ds_tensor") and hasattr(value, "ds_shape"):
        return _zero3_part(name, value)
    if getattr(value, "tensor_model_parallel", False):
        return _megatron_part(name, value, tp)
    shape = tuple(value.shape)
    return _Part(value.dtype, ((name, shape),), ((_checked(name, value), _whole(name, shape)),))


def _dtensor_part(name: str, value: Any) -> _Part:
    """The global shape is that of the DTensor's spec: for `from_local` without a shape it is a guess of each rank."""
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return _Part(value.dtype, ((name, shape),), ())
    placements = tuple(_placement(name, placement) for placement in value.placements)
    ways = _ways(shape, tuple(value.device_mesh.shape), tuple(coordinate), placements)
    return _cut_part(name, shape, _checked(name, value.to_local()), ways)


def _placement(name: str, placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "_StridedShard":
        return StridedShard(placement.dim, placement.split_factor)
    raise ManifestMismatch(
        f"'{name}' has the placement {placement}: what a rank has of it is not a part of its values",
        hint="redistribute it to Shard or Replicate before it is published",
    )


_Way = tuple[tuple[int, ...], tuple[Cut, ...]]
"""Shape of a local, and what lies where in it."""


@functools.lru_cache(maxsize=4096)  # layers are alike
def _ways(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[_Way, ...]:
    """What a rank may have: as the placements say it, and as `fully_shard` really cuts an uneven dim inside a shard."""
    rank = sum(place * stride for place, stride in zip(coordinate, row_strides(mesh), strict=True))
    shardings = [Sharding(Mesh(mesh, tuple(str(axis) for axis in range(len(mesh)))), placements)]
    if any(isinstance(placement, StridedShard) for placement in placements):
        with contextlib.suppress(ConfigError):  # strided otherwise than `fully_shard` does it: there is only one way
            shardings.append(shardings[0].nested())
    ways = [(local_shape("", shape, sharding, rank), cuts("", shape, sharding, rank)) for sharding in shardings]
    return tuple(dict.fromkeys(ways))


def _cut_part(name: str, shape: tuple[int, ...], local: torch.Tensor, ways: tuple[_Way, ...]) -> _Part:
    """A local that is cut in the one way that suits its shape."""
    if not local.numel() and not all(math.prod(way[0]) for way in ways):  # `fully_shard` of nothing may be (0, 0)
        return _Part(local.dtype, ((name, shape),), ())
    fitting = [way for way in ways if way[0] == tuple(local.shape)] or [ways[0]]
    if len(fitting) > 1:
        raise ManifestMismatch(
            f"'{name}' {list(shape)} is cut unevenly, FSDP inside a shard: torch does not agree with itself on which "
            "elements this rank has",
            hint="choose a mesh that divides the dim, or declare this rank's part with layouts=",
        )
    _check_shape(name, local, fitting[0][0])
    return _Part(local.dtype, ((name, shape),), ((local, _block(name, shape, *fitting[0])),))


def _sharded_tensor_part(name: str, value: Any) -> _Part:
    shape = tuple(value.metadata().size)
    blocks = []
    for shard in value.local_shards():
        region = Region(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        local = _checked(name, shard.tensor)
        _check_shape(name, local, region.extent)
        if local.numel():
            blocks.append((local, _block(name, shape, region.extent, (Cut(region, (0,) * len(shape)),))))
    return _Part(value.metadata().tensor_properties.dtype, ((name, shape),), tuple(blocks))


def _zero3_part(name: str, value: Any) -> _Part:
    """Each rank has an equal run of the flattened tensor; the last ones are padded, or have only padding."""
    shape = tuple(value.ds_shape)
    local = _checked(name, value.ds_tensor.view(-1))
    rank, size = value.ds_process_group.rank(), value.ds_process_group.size()
    if local.numel() != -(-math.prod(shape) // size):
        raise ManifestMismatch(
            f"'{name}' {list(shape)} is cut over {size} ranks, but this one has {local.numel()} elements of it",
            hint="partitions that are swapped out must be back while they are published",
        )
    return _flat_part(name, shape, local, local.numel() * rank)


def _megatron_part(name: str, value: Any, tp: tuple[int, int] | None) -> _Part:
    """Cut along `partition_dim`; with a stride, into that many blocks each of which is cut over the ranks."""
    if tp is None:
        raise ManifestMismatch(
            f"'{name}' is a tensor-parallel shard (partition_dim {value.partition_dim})",
            hint="pass tp=(rank, size) of the tensor-parallel group",
        )
    (rank, size), dim, stride = tp, value.partition_dim, value.partition_stride
    shape = tuple(extent * size if d == dim else extent for d, extent in enumerate(value.shape))
    if value.shape[dim] % stride:
        raise ManifestMismatch(f"'{name}' {list(value.shape)} does not have {stride} equal blocks along dim {dim}")
    return _cut_part(name, shape, _checked(name, value), _ways(shape, (size,), (rank,), (StridedShard(dim, stride),)))


def _fsdp1_parts(module: torch.nn.Module) -> Iterator[tuple[str, _Part]]:
    """The parameters that FSDP1 has flattened, read from its flat shards: its state dicts would gather them."""
    paths = {id(sub): path for path, sub in module.named_modules()}
    for sub in module.modules():
        handle: Any = getattr(sub, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_shard_param_infos"):
            continue
        path = paths[id(handle._fully_sharded_module)]
        prefix = plain_name(path) + "." if plain_name(path) else ""
        shard = getattr(flat, "_local_shard", flat)
        of: dict[tuple[str, str], tuple[torch.Size, Any]] = {}
        for param, size, is_dense, place in zip(
            flat._param_infos, flat._shapes, flat._contiguities, flat._shard_param_infos, strict=True
        ):
            if not is_dense:
                raise ManifestMismatch(f"'{prefix}{param.param_name}' was not contiguous when FSDP1 flattened it")
            of[param.module_name, param.param_name] = (size, place)
        for shared in flat._shared_param_infos:
            of[shared.module_name, shared.param_name] = of[shared.prim_module_name, shared.prim_param_name]
        for (owner, param_name), (size, place) in of.items():
            name = plain_name(f"{prefix}{owner}.{param_name}" if owner else prefix + param_name)
            part = _Part(flat.dtype, ((name, tuple(size)),), ())
            if place.in_shard:
                local = _checked(name, shard)[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard]
                part = _flat_part(name, tuple(size), local, place.intra_param_start_idx)
            yield name, part


def _flat_part(name: str, shape: tuple[int, ...], local: torch.Tensor, first: int) -> _Part:
    """A 1-d local that begins with element `first` of the flattened tensor; beyond the tensor's end it is padding."""
    block = flattened([(0, _whole(name, shape))], first, first + local.numel())
    return _Part(local.dtype, ((name, shape),), ((local, block),))


def _whole(name: str, shape: tuple[int, ...]) -> Block:
    return _block(name, shape, shape, (Cut(Region.whole(shape), (0,) * len(shape)),) if math.prod(shape) else ())


def _block(name: str, shape: tuple[int, ...], local: tuple[int, ...], held: tuple[Cut, ...]) -> Block:
    dims, steps = tuple(range(len(shape))), (1,) * len(shape)
    patches = tuple(Patch(name, cut.region, cut.start, dims, steps) for cut in held)
    return Block(local, ((name, shape),), patches)


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without autograd, if it has bytes that can be copied."""
    tensor = tensor.detach()
    check_bytes(name, tensor)
    return tensor


def _check_shape(name: str, local: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(local.shape) != shape:
        raise ManifestMismatch(
            f"this rank's part of '{name}' is {list(local.shape)}, but its layout says {list(shape)}",
            hint="offloaded weights must be back while they are published; an uneven DTensor needs its true shape",
        )


def _wire_dtype(name: str, own: torch.dtype, wanted: str | torch.dtype | None) -> str:
    if wanted is None:
        return dtype_name(own)
    wire = dtype_name(wanted)
    problem = f"'{name}' is {dtype_name(own)} and cannot travel as '{wire}'"
    if wire not in ITEMSIZE or not isinstance(getattr(torch, wire, None), torch.dtype):
        raise ConfigError(problem, hint=f"dtypes are {', '.join(sorted(ITEMSIZE))}")
    if not torch.can_cast(own, getattr(torch, wire)):
        raise ConfigError(problem, hint="publish it as it is: torch does not cast one into the other")
    return wire
