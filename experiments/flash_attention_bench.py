"""The article's attention calls on real arrays: wall time, and the largest error against plain attention.

    python experiments/flash_attention_bench.py [--batch 1] [--heads 2] [--full]
    npumodel trace experiments/flash_attention_bench.py --device ascend910b2 --batch 4 --heads 32

The second line records the calls and prices them on an NPU, here for batch 4 and 32 heads, though what runs is smaller.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

import npumodel as npu
from npumodel.attention import reference_attention


class Case(NamedTuple):
    """One call at its real size: q, k, v [batch, heads, length, dim]."""

    what: str
    batch: int
    heads: int
    length: int
    dim: int
    causal: bool = False


CASES = (
    Case("the article's call", 4, 32, 4096, 128),
    Case("one key more: padding", 4, 32, 4097, 128),
    Case("causal", 4, 32, 4096, 128, causal=True),
    Case("short: launches count", 4, 32, 512, 128),
    Case("shorter", 4, 32, 256, 128),
    Case("many short ones", 8, 32, 1024, 64),
    Case("one head: one core", 1, 1, 512, 128),
)


def main():
    options = _options()
    attention = jax.jit(npu.flash_attention, static_argnames="is_causal")
    print(f"{'case':<24}{'shape':<24}{'first':>12}{'jitted':>12}{'max error':>12}")
    for case in CASES:
        batch, heads = _size(case, options)
        q, k, v = _inputs((batch, heads, case.length, case.dim), options.dtype)
        first, out = _timed(npu.flash_attention, q, k, v, case.causal)
        _timed(attention, q, k, v, case.causal)  # compiles
        jitted, again = _timed(attention, q, k, v, case.causal)
        error = max(_error(x, q, k, v, case.causal) for x in (out, again))
        shape = f"B{batch} N{heads} S{case.length} D{case.dim}"
        print(f"{case.what:<24}{shape:<24}{first * 1e3:>9.1f} ms{jitted * 1e3:>9.1f} ms{error:>12.2e}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="largest batch that runs (default 1)")
    parser.add_argument("--heads", type=int, default=2, help="largest number of heads that runs (default 2)")
    parser.add_argument("--full", action="store_true", help="the article's own batch and heads; takes long on a CPU")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    return parser.parse_args()


def _size(case: Case, options: argparse.Namespace) -> tuple[int, int]:
    if options.full:
        return case.batch, case.heads
    return min(case.batch, options.batch), min(case.heads, options.heads)


def _inputs(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 3)]


def _timed(attention, q, k, v, causal: bool) -> tuple[float, jax.Array]:
    start = time.perf_counter()
    out = jax.block_until_ready(attention(q, k, v, is_causal=causal))
    return time.perf_counter() - start, out


def _error(out: jax.Array, q, k, v, causal: bool) -> float:
    """Of the first two heads of the first batch: plain attention keeps every score in memory."""
    out, q, k, v = (x[:1, :2] for x in (out, q, k, v))
    expected = reference_attention(q, k, v, is_causal=causal)
    return float(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max())


if __name__ == "__main__":
    main()
