"""Implementations of attention on the CPU, each ready to be timed: for `bench_attention.py`.

tokamax, ringattention and PyTorch take part where they are installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import npumodel as npu
from npumodel.attention import blocked_attention

OURS, JAX_NN, TORCH = "npumodel", "jax.nn", "PyTorch"
FORWARD, BOTH = "forward", "forward + backward"
OPTIONAL = ("torch", "tokamax", "ringattention")


class Case(NamedTuple):
    """One call: q [batch, heads, q_len, dim], k and v [batch, kv_heads, kv_len, dim]; mode full, causal or
    window: the query's own key and the kv_len / 16 before it."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    mode: str = "full"

    @property
    def label(self) -> str:
        window = f" {self.window[0]}" if self.window else ""
        sizes = f"B{self.batch} N{self.heads}/{self.kv_heads} S{self.q_len}/{self.kv_len} D{self.dim}"
        return f"{sizes} {self.mode}{window}"

    @property
    def window(self) -> tuple[int, int] | None:
        return (self.kv_len // 16, 0) if self.mode == "window" else None

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD,) if self.q_len == 1 else (FORWARD, BOTH)

    def small(self) -> Case:
        return self._replace(q_len=-(-self.q_len // 16), kv_len=self.kv_len // 16)


class Entry(NamedTuple):
    """What is timed: `run` returns when all is computed. temporaries: in bytes, if known; rows: see `exact`."""

    name: str
    run: Callable[[], Any]
    temporaries: int | None = None
    rows: np.ndarray | None = None


# Implementations, each (case, q, k, v) -> output ---------------------------------------------------------------------


def ours(case: Case, q, k, v):
    return npu.flash_attention(q, k, v, **_our_options(case))


def _our_options(case: Case) -> dict[str, Any]:
    return {"is_causal": case.mode != "full", "window": case.window}


def naive(case: Case, q, k, v):
    k, v = (jnp.repeat(x, case.heads // case.kv_heads, axis=1) for x in (k, v))
    scores = jnp.einsum("bnqd,bnkd->bnqk", q, k) * case.dim**-0.5
    scores = scores if case.mode == "full" else jnp.where(seen(case, jnp), scores, -jnp.inf)
    return jnp.einsum("bnqk,bnkd->bnqd", jax.nn.softmax(scores), v)


def seen(case: Case, array: Any) -> Any:
    """The mask [Sq, Skv] as an array of NumPy or JAX (`array`)."""
    distance = array.arange(case.q_len)[:, None] + case.kv_len - case.q_len - array.arange(case.kv_len)
    return (distance >= 0) & (distance <= (case.window or (case.kv_len,))[0])


def jax_nn(case: Case, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, **_their_options(case))


def tokamax(case: Case, q, k, v):
    import tokamax
    from absl import flags

    flags.FLAGS(["tokamax"])  # else it takes our command line for its own
    return tokamax.dot_product_attention(q, k, v, implementation="xla_chunked", **_their_options(case))


def _their_options(case: Case) -> dict[str, Any]:
    return {"is_causal": case.mode != "full", "local_window_size": case.window}


def ring(case: Case, q, k, v):
    """On a ring of one device."""
    options = {"query_chunk_size": min(512, case.q_len), "key_chunk_size": min(512, case.kv_len), "dtype": q.dtype}
    options |= {"causal_block_size": None if case.mode == "full" else 1, "prevent_cse": True, "precision": None}
    options |= {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0}
    options["policy"] = jax.checkpoint_policies.nothing_saveable
    attention = _ring_module().ring_attention

    def local(q, k, v):
        return attention(q, k, v, None, None, None, "ring", True, options)

    mesh, whole = jax.make_mesh((1,), ("ring",), devices=jax.devices()[:1]), jax.sharding.PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(q, k, v)


def _ring_module() -> Any:
    """The one module that is needed, by its file: the package itself (0.1.2) asks this JAX for a name it lacks."""
    package = importlib.util.find_spec("ringattention")
    path = Path(package.submodule_search_locations[0]) / "ringattention_jax.py"
    spec = importlib.util.spec_from_file_location("ringattention_jax", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Library(NamedTuple):
    """A JAX implementation: its package, the layout of its arrays, and whether it has no window and no GQA."""

    name: str
    package: str
    attend: Callable[..., jax.Array]
    layout: str = "BSND"
    plain: bool = False

    def takes(self, case: Case) -> bool:
        return not (self.plain and (case.mode == "window" or case.heads != case.kv_heads))


LIBRARIES = (
    Library(OURS, "npumodel", ours, "BNSD"),
    Library("naive jnp", "jax", naive, "BNSD"),
    Library(JAX_NN, "jax", jax_nn),
    Library("tokamax chunked", "tokamax", tokamax),
    Library("ring attention", "ringattention", ring, plain=True),
)


# What is timed -------------------------------------------------------------------------------------------------------


def inputs(case: Case, dtype: str) -> list[jax.Array]:
    """q, k, v and the cotangent of the output, [B, N, S, D]."""
    q, kv = (case.batch, case.heads, case.q_len, case.dim), (case.batch, case.kv_heads, case.kv_len, case.dim)
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, (q, kv, kv, q), strict=True)]


def entries(case: Case, what: str, arrays: list[jax.Array]) -> list[Entry]:
    """Every implementation that is installed and takes the case."""
    found = [jax_entry(x, case, what, arrays) for x in LIBRARIES if installed(x.package) and x.takes(case)]
    return [*found, torch_entry(case, what, arrays)] if installed("torch") else found


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def jax_entry(library: Library, case: Case, what: str, arrays: list[jax.Array]) -> Entry:
    def attend(q, k, v):
        return library.attend(case, q, k, v)

    def both(q, k, v, cotangent):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    bsnd = library.layout == "BSND"
    arrays = jax.block_until_ready([x.swapaxes(1, 2) if bsnd else x for x in arrays])
    arrays, function = (arrays[:3], attend) if what == FORWARD else (arrays, both)
    compiled = jax.jit(function).lower(*arrays).compile()
    result = compiled(*arrays)
    first = result if what == FORWARD else result[1]
    rows = (first.swapaxes(1, 2) if bsnd else first)[0, 0]
    return Entry(
        library.name,
        lambda: jax.block_until_ready(compiled(*arrays)),
        compiled.memory_analysis().temp_size_in_bytes,
        np.asarray(rows, np.float64)[_rows(case)],
    )


def torch_entry(case: Case, what: str, arrays: list[jax.Array]) -> Entry:
    """PyTorch's CPU flash kernel (it raises RuntimeError where it would have to take another)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_num_threads(cores())
    dtype = getattr(torch, arrays[0].dtype.name)
    q, k, v, cotangent = (torch.from_numpy(np.array(x, np.float32)).to(dtype) for x in arrays)
    mask = torch.from_numpy(seen(case, np)) if case.mode == "window" else None
    options = {"attn_mask": mask, "is_causal": case.mode == "causal", "enable_gqa": case.heads != case.kv_heads}
    for x in (q, k, v):
        x.requires_grad_(what == BOTH)

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return out if what == FORWARD else torch.autograd.grad(out, (q, k, v), cotangent)[0]

    return Entry(TORCH, run, rows=run()[0, 0].double().numpy()[_rows(case)])


def _rows(case: Case) -> list[int]:
    """The last and the first 8 queries."""
    return [0] if case.q_len == 1 else list(range(-8, 8))


def exact(case: Case, what: str, arrays: list[jax.Array]) -> np.ndarray:
    """The output (forward) or the gradient of q (backward) at `_rows` of the first head, in float64."""
    q, k, v, cotangent = (np.asarray(x[0, 0], np.float64) for x in arrays)
    rows = _rows(case)
    scores = np.where(seen(case, np)[rows] | (case.mode == "full"), q[rows] @ k.T * case.dim**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if what == FORWARD:
        return weights @ v
    d_weights = cotangent[rows] @ v.T
    return weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) @ k * case.dim**-0.5


def block_entries(case: Case, blocks: tuple[int, int], arrays: list[jax.Array]) -> tuple[Entry, Entry]:
    """Our forward, and our backward alone, in these blocks (queries, keys)."""

    def attend(q, k, v):
        return blocked_attention(q, k, v, block_q=blocks[0], block_kv=blocks[1], **_our_options(case))

    *qkv, cotangent = arrays
    forward = jax.jit(attend)
    _, pull = jax.vjp(forward, *qkv)
    backward = jax.jit(lambda pull, cotangent: pull(cotangent))  # pull is a PyTree of what the forward kept
    return (
        Entry(f"{blocks} forward", lambda: jax.block_until_ready(forward(*qkv))),
        Entry(f"{blocks} backward", lambda: jax.block_until_ready(backward(pull, cotangent))),
    )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
