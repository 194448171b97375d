"""The public doors: each takes what is convenient, makes it plain, and calls one function below.

Which device: the argument; else the innermost `with target(...)`; else NPUMODEL_DEVICE; else none, which for
`flash_attention` means the host that executes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer

from npumodel import hardware
from npumodel.attention import Arguments, blocked
from npumodel.explain_text import page
from npumodel.hardware import HOST, DeviceSpec
from npumodel.model import estimate as model_estimate
from npumodel.model import hints as model_hints
from npumodel.model.estimate import Cost
from npumodel.model.hints import Hints
from npumodel.report_text import Priced
from npumodel.search import auto, single, tuner
from npumodel.search import sweep as hardware_sweep
from npumodel.search.auto import Resolved
from npumodel.workload import AttentionShape, MatmulShape, Shape, SoftmaxShape, parse

if TYPE_CHECKING:
    from npumodel.model.trace import Timeline

#: Anything that names a device, and anything that names a shape.
DeviceLike = str | os.PathLike[str] | DeviceSpec
ShapeLike = str | AttentionShape
AnyShapeLike = str | Shape


# Which device --------------------------------------------------------------------------------------------------------

_UNSET: Any = object()
_target: contextvars.ContextVar[Any] = contextvars.ContextVar("npumodel_target", default=_UNSET)


@contextlib.contextmanager
def target(device: DeviceLike | None) -> Iterator[DeviceSpec | None]:
    """Plan and price for this device inside the `with`, in this thread; nests. None: for the host.

    Raises ValueError for an unknown device.
    """
    spec = None if device is None else _spec(device)
    token = _target.set(spec)
    try:
        yield spec
    finally:
        _target.reset(token)


def current_device() -> DeviceSpec | None:
    """The device of the innermost `with target(...)`, else of NPUMODEL_DEVICE, else None (the host)."""
    spec = _target.get()
    if spec is not _UNSET:
        return spec
    name = os.environ.get("NPUMODEL_DEVICE", "").strip()
    if not name:
        return None
    try:
        return _spec(name)
    except ValueError as error:
        raise ValueError(f"NPUMODEL_DEVICE: {error}") from None


def _spec(device: DeviceLike) -> DeviceSpec:
    """The spec; for a shipped name always the same object, so that caches by identity work."""
    if isinstance(device, str) and not device.strip().lower().endswith(".toml"):
        return _named(device)
    return hardware.device(device)


@functools.cache
def _named(name: str) -> DeviceSpec:
    return hardware.device(name)


def _chosen(device: DeviceLike | None) -> DeviceSpec | None:
    return current_device() if device is None else _spec(device)


def _needed(device: DeviceLike | None) -> DeviceSpec:
    spec = _chosen(device)
    if spec is None:
        names = ", ".join(hardware.devices())
        raise ValueError(
            "device: expected one, got none; give device=..., or use `with npumodel.target(...)`, or set "
            f"NPUMODEL_DEVICE (shipped: {names})"
        )
    return spec


def _shape(shape: ShapeLike) -> AttentionShape:
    if isinstance(shape, str):
        return AttentionShape.parse(shape)
    if isinstance(shape, MatmulShape | SoftmaxShape):
        raise ValueError(f"shape: expected attention, got the {shape.operation} {shape.label}; `estimate` prices it")
    if not isinstance(shape, AttentionShape):
        raise ValueError(f"shape: expected an AttentionShape or a text like 'B4,N32,S4096,D128', got {shape!r}")
    return shape


# Execute -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """One execution of `flash_attention`: its shape (under vmap: of one example), its tile, the device planned for
    (None: the host), and the arguments that its price leaves out ("window", "dropout", ...)."""

    shape: AttentionShape
    resolved: Resolved
    device_name: str | None
    unpriced: tuple[str, ...] = ()


#: Called with a `Call` at every execution of `flash_attention`. Append before the caller's functions are traced: a
#: function that was jitted while this was empty reports nothing. JAX runs asynchronously: under jit an event may come
#: after the call has returned; `jax.effects_barrier()` waits for all of them.
listeners: list[Callable[[Call], object]] = []


def _notify(call: Call):
    for listener in tuple(listeners):
        listener(call)


def _report(call: Call, traced: bool):
    """Tell the listeners: at once when eager, else from inside the compiled program, at each run (scan: each turn).

    The callback takes no operands, so that vmap runs it once, and not once per example.
    """
    if traced:
        jax.debug.callback(functools.partial(_notify, call))
    else:
        _notify(call)


_blocked = jax.jit(blocked, static_argnames=("block_q", "block_kv"))


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    *,
    bias: Any = None,
    is_causal: bool = False,
    causal_offset: Any = None,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    cu_q_lengths: Any = None,
    cu_kv_lengths: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    p_dtype: Any = None,
    layout: str = "BNSD",
    q_heads: int | None = None,
    kv_heads: int | None = None,
    return_lse: bool = False,
    tile_level: Any = "auto",
    device: DeviceLike | None = None,
) -> Any:
    """softmax(scale * q k^T + masks) v, in the blocks of the plan for `device`: [B, N, Sq, Dv] in q's dtype.

    q [B, N, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv]: float32, float16 or bfloat16, summed in float32. Other
    layouts: BSND, BSH and SBH (with q_heads, kv_heads), and TND with cu_q_lengths.
    attn_mask   bool (True takes part) or floats to add, [1/B, 1/N, 1/Sq, 1/Skv] or [Sq, Skv]; bias: floats to add
    is_causal   query i sees keys j <= i + Skv - Sq (bottom-right aligned); a row that sees no key gives 0
    scale       1 / sqrt(D) by default
    tile_level  "auto" | "small" | "large" | number of parts | (parts_q, parts_kv) | "128x512" | TileConfig;
                `search.auto` has the order in which "auto" looks for a tile
    device      whose plan is executed, whatever backend runs it; see the module for the default

    `attention.Arguments` says what each of the others means, and what the odd cases give. return_lse=True returns
    (output, log sum exp), which `merge` takes.

    The tile is resolved while tracing, so this works inside the caller's jit, vmap and scan, and compiles again only
    when shapes, dtype, kinds of arguments or block sizes change. Differentiable in reverse mode (grad, vjp, jacrev) by
    q, k, v, bias, additive attn_mask, sinks and scale, with memory O(Sq + Skv); forward mode (jvp) raises TypeError.

    Sharded arrays: use jax.shard_map over batch and heads, which needs no collectives; jit alone gathers them.

    Raises ValueError ("expected ..., got ...", with the cure) for arguments that do not fit together, a level that is
    none, a tile that does not fit on the device, a dtype that the device does not multiply.
    """
    arguments = Arguments(
        q=q,
        k=k,
        v=v,
        attn_mask=attn_mask,
        bias=bias,
        is_causal=is_causal,
        causal_offset=causal_offset,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        cu_q_lengths=cu_q_lengths,
        cu_kv_lengths=cu_kv_lengths,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        p_dtype=p_dtype,
        layout=layout,
        q_heads=q_heads,
        kv_heads=kv_heads,
        return_lse=return_lse,
    )
    shape = arguments.check()
    spec = _chosen(device)
    if shape is None:  # nothing to plan or to price; without value columns there may still be an LSE
        block_q, block_kv = HOST.blocks(arguments.skips)
        return _blocked(arguments.plain(), block_q=block_q, block_kv=block_kv)
    resolved = _resolve_now(shape, spec, tile_level, arguments.skips)
    if listeners:
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))
        _report(Call(shape, resolved, None if spec is None else spec.name, arguments.unpriced), traced)
    block_q, block_kv = min(resolved.tile.block_q, shape.q_len), min(resolved.tile.block_kv, shape.kv_len)
    return _blocked(arguments.plain(), block_q=block_q, block_kv=block_kv)


def _resolve_now(shape: AttentionShape, spec: DeviceSpec | None, tile_level: Any, skips: bool) -> Resolved:
    """Resolve outside of any trace that is going on: the model runs now, on plain numbers."""
    with jax.ensure_compile_time_eval():
        return auto.resolve(shape, spec, tile_level, skips=skips)


# Price ---------------------------------------------------------------------------------------------------------------


def resolve(
    shape: ShapeLike, device: DeviceLike | None = None, tile: Any = "auto", policy: str | None = None
) -> Resolved:
    """The tile that a call of this shape gets, and where it comes from. Raises as `search.auto.resolve`."""
    return auto.resolve(_shape(shape), _chosen(device), tile, policy)


def estimate(
    shape: AnyShapeLike,
    device: DeviceLike | None = None,
    tile: Any = "auto",
    *,
    policy: str | None = None,
    overlap: bool = True,
) -> Cost:
    """Price one call: seconds, per-stage busy and dma_wait, bytes per path, hit rates, breakdown.

    shape    an AttentionShape, or its short form "B4,N32,S4096,D128"; or a MatmulShape or SoftmaxShape, or its short
             form "M4096,N4096,K512" or "R4096,C4096"
    tile     anything that `flash_attention(tile_level=...)` takes; for the others "auto" (the cheapest of a small
             lattice), a MatmulTile or SoftmaxTile, or the text of one, "128x256x64" or "4x4096"
    policy   who picks the tile when it is "auto": "auto" (tables, then the model), "rule" (the article's),
             "cann" (the vendor's) or "default"
    overlap  False: no transfer beside any computation

    Raises ValueError for a missing or unknown device, a tile that does not fit on it, a dtype that it cannot multiply.
    """
    spec, asked = _needed(device), parse(shape) if isinstance(shape, str) else shape
    resolved = resolve_any(asked, spec, tile, policy)
    return model_estimate.estimate(asked, spec, resolved.tile, overlap=overlap)


def hints(
    shape: ShapeLike,
    device: DeviceLike | None = None,
    tile: Any = "auto",
    *,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
) -> Hints:
    """What it is worth, in seconds, to know the lengths of the examples of a padded call, and which kernel comes next.

    q_lengths, kv_lengths  valid positions of each example, [batch]; None: those of the shape

    Arguments and errors else as `estimate`; see `npumodel.model.hints`.
    """
    spec, asked = _needed(device), _shape(shape)
    return model_hints.hints(asked, spec, auto.resolve(asked, spec, tile).tile, q_lengths, kv_lengths)


def resolve_any(shape: Shape, spec: DeviceSpec, tile: Any = "auto", policy: str | None = None) -> Resolved:
    """The tile that a call of this shape gets, and where it comes from."""
    if not isinstance(shape, MatmulShape | SoftmaxShape):
        return auto.resolve(_shape(shape), spec, tile, policy)
    if policy is not None:
        raise ValueError(f"policy: expected none for a {shape.operation}, got {policy!r}; leave it out")
    return single.resolve(shape, spec, tile)


def explain(
    shape: ShapeLike, device: DeviceLike | None = None, tile: Any = "auto", *, policy: str | None = None
) -> str:
    """One page of text about one call: what runs, the plan, the stages, what bounds it, where the time goes, and which
    one change of the plan or of the hardware would help most. Arguments and errors as `estimate`."""
    spec, asked = _needed(device), _shape(shape)
    resolved = auto.resolve(asked, spec, tile, policy)
    return page(Priced(model_estimate.estimate(asked, spec, resolved.tile), resolved.source))


def trace(shape: ShapeLike, device: DeviceLike | None = None, tile: Any = "auto") -> Timeline:
    """When every stage of every step of one call runs. Arguments and errors as `estimate`; examples with lengths of
    their own are refused: trace one of `shape.groups`."""
    from npumodel.model.trace import timeline

    spec, asked = _needed(device), _shape(shape)
    return timeline(asked, spec, auto.resolve(asked, spec, tile).tile)


def tune(shape: ShapeLike | Sequence[ShapeLike], device: DeviceLike | None = None, **options) -> Any:
    """Find the fastest legal tile: a TuneResult, or TuneResults for a list of shapes.

    shape    an AttentionShape or its short form, or a list of them
    options  space, seed, strategy, max_evals, time_limit, progress, exhaustive: see `search.tuner.tune`
    """
    spec, (shapes, several) = _needed(device), _shapes(shape)
    return tuner.tune(shapes, spec, **options) if several else tuner.tune(shapes[0], spec, **options)


def sweep(
    shape: ShapeLike | Sequence[ShapeLike],
    device: DeviceLike | None,
    what: str | Sequence[str],
    factors: Sequence[float] = hardware_sweep.FACTORS,
    **options,
) -> Any:
    """What other hardware would buy: elasticities, and the price with the tile kept and re-tuned, over numbers of the
    device. A Sweep, or a list of them for a list of shapes.

    what     numbers by name, "l1_bytes" or ["l1_bytes", "hbm_bytes_per_s"]: see `DeviceSpec.numbers`
    factors  by which each is multiplied, one number at a time; grid=True crosses two
    options  grid, seed, strategy: see `search.sweep.sweep`
    """
    spec, (shapes, several) = _needed(device), _shapes(shape)
    found = [hardware_sweep.sweep(one, spec, what, factors, **options) for one in shapes]
    return found if several else found[0]


def _shapes(shape: ShapeLike | Sequence[ShapeLike]) -> tuple[list[AttentionShape], bool]:
    """The shapes, and whether they came as a list."""
    if isinstance(shape, str | Shape) or not isinstance(shape, Sequence):
        return [_shape(shape)], False
    if not shape:
        raise ValueError("shape: expected at least one, got an empty list")
    return [_shape(one) for one in shape], True
