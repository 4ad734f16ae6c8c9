"""Names of tensors: what trainers, adapters and engines put around those of a checkpoint.

Pure functions from names to names. Each is linear in the number of names: a checkpoint has tens of thousands. Nothing
is guessed: a name that could mean two tensors, and two names that would become one, are errors that name both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from wsync.errors import ManifestMismatch

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that wrappers add (DDP, torch.compile, FSDP1, activation checkpointing), anywhere in a name."""

ADAPTER = frozenset(
    {
        "original_module", "token_adapter", "trainable_tokens_delta", "trainable_tokens_original", "lora_A", "lora_B",
        "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
    }
)  # fmt: skip
"""Segments of tensors that only an adapter has: its factors, and frozen copies of what it replaces."""

COPIES = "modules_to_save"
"""Segment before the name of an adapter that trains a whole module; the module's tensors follow."""

ADAPTED = "base_model.model."
"""Before all names of a model that carries adapters."""

BASE_LAYER = "base_layer"
"""Segment that an adapter puts between a linear layer and its tensors."""


def plain_name(name: str) -> str:
    """`name` without the segments of wrappers."""
    return ".".join([segment for segment in name.split(".") if segment not in WRAPPERS])


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with its plain one. Two names that become one are an error naming both."""
    plain = {name: plain_name(name) for name in names}
    _check_distinct(plain, "are the same tensor without the prefixes of wrappers")
    return plain


class Kept(NamedTuple):
    """`names`: those that are of the model, with their plain names. `dropped`: how many of which kind."""

    names: dict[str, str]
    dropped: Counter[str]


def without_adapters(names: Iterable[str], *, adapter: str = "default") -> Kept:
    """What of a model with adapters is published: the base, and modules that `adapter` trains as a whole.

    A trained copy takes the plain name of its module; the frozen original, copies of other adapters and factors are
    dropped. `base_model.model.` and `base_layer` are taken out. This does not merge: publish merged weights, or a base
    that the engine itself adapts.
    """
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for name in names:
        segments = name.removeprefix(ADAPTED).split(".")
        reason = next((segment for segment in segments if segment in ADAPTER), None)
        if reason is None and COPIES in segments:
            at = segments.index(COPIES)
            owner = segments[at + 1] if at + 1 < len(segments) else ""
            del segments[at : at + 2]
            reason = None if owner == adapter else f"{COPIES}.{owner}"
        if reason is None:
            kept[name] = ".".join(segment for segment in segments if segment != BASE_LAYER)
        else:
            dropped[reason] += 1
    _check_distinct(kept, "are the same tensor without adapters")
    return Kept(kept, dropped)


def match_base_layers(
    sent: Iterable[str], wanted: Collection[str], *, packed: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Each sent name as the receiver has it: itself, or with exactly one segment `base_layer` more or less.

    `packed` says into which fused module a segment goes (`{"q_proj": "qkv_proj"}`): a name then also counts as wanted
    if it is with that segment replaced, and keeps its own segment. More than one way to read a name, and none, are
    errors.
    """
    wanted = wanted if isinstance(wanted, (set, frozenset, dict)) else set(wanted)
    packed = packed or {}
    found: dict[str, str] = {}
    lacking: list[str] = []
    for name in sent:
        ways = [way for way in _toggled(name) if way in wanted or _packed(way, packed) in wanted]
        if len(ways) > 1:
            raise ManifestMismatch(
                f"'{name}' can be {' or '.join(repr(way) for way in ways)} of the receiver",
                hint="send it under the name that is meant",
            )
        if ways:
            found[name] = ways[0]
        else:
            lacking.append(name)
    if lacking:
        raise ManifestMismatch(f"the receiver has no place for {_some(lacking)}, with or without '{BASE_LAYER}'")
    _check_distinct(found, "are the same tensor of the receiver")
    return found


class Rules(NamedTuple):
    """How names of one namespace become those of another: by the longest prefix that fits; others stay as they are."""

    prefixes: tuple[tuple[str, str], ...]

    def inverse(self) -> Rules:
        return Rules(tuple((new, old) for old, new in self.prefixes))

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """Each name with its new one. Two that become one are an error naming both."""
        table = dict(self.prefixes)
        lengths = sorted({len(old) for old in table}, reverse=True)
        renamed: dict[str, str] = {}
        for name in names:
            old = next((name[:length] for length in lengths if name[:length] in table), "")
            renamed[name] = table[old] + name[len(old) :] if old in table else name
        _check_distinct(renamed, "are the same tensor under these rules")
        return renamed


class Matched(NamedTuple):
    """`names`: sent name -> the receiver's. `unplaced`: sent, but not there. `unfed`: there, but not sent."""

    names: dict[str, str]
    unplaced: tuple[str, ...]
    unfed: tuple[str, ...]


def match(sent: Iterable[str], wanted: Collection[str], rules: Rules) -> Matched:
    """Pair the names of both sides one to one under `rules`. No name is dropped silently: what has no partner is
    listed."""
    wanted = wanted if isinstance(wanted, (set, frozenset, dict)) else dict.fromkeys(wanted)
    renamed = rules.rename(sent)
    names = {name: new for name, new in renamed.items() if new in wanted}
    fed = set(names.values())
    return Matched(
        names,
        tuple(name for name in renamed if name not in names),
        tuple(name for name in wanted if name not in fed),
    )


def _toggled(name: str) -> list[str]:
    """`name`, and all that it becomes with one `base_layer` less, or one more before its last segments."""
    segments = name.split(".")
    ways = [name]
    for at, segment in enumerate(segments):
        if segment == BASE_LAYER:
            ways.append(".".join(segments[:at] + segments[at + 1 :]))
        elif at:
            ways.append(".".join([*segments[:at], BASE_LAYER, *segments[at:]]))
    return list(dict.fromkeys(ways))


def _packed(name: str, packed: Mapping[str, str]) -> str:
    return ".".join([packed.get(segment, segment) for segment in name.split(".")]) if packed else name


def _check_distinct(names: Mapping[str, str], what: str) -> None:
    first: dict[str, str] = {}
    for name, new in names.items():
        if (other := first.setdefault(new, name)) != name:
            raise ManifestMismatch(
                f"'{other}' and '{name}' {what}: '{new}'", hint="leave one of them out, or give them other names"
            )


def _some(names: list[str], most: int = 10) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + rest
