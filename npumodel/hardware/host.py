"""The machine that executes when no NPU is the target: the blocks in which attention runs fast on a CPU."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """Block sizes (block_q, block_kv), each the fastest or within 5 % of it where it is used.

    Measured (confidence: one machine) on 2 cores of an AMD EPYC with AVX-512 and 1 MiB of L2 each, jax 0.10.1, float32,
    blocks of 128..1024, five calls with S in {1024, 2048, 4096}, D in {64, 128}; `python
    experiments/bench_attention.py --blocks` repeats it. Seconds are those of 8 heads, S 4096, D 64.

    dense      every key is seen: 0.235 (256 x 256: 0.248, 128 x 512: 0.291)
    skipping   causal, windows, lengths: smaller blocks waste less at the edges. Causal 0.134 (512 x 512: 0.132), but
               with a window of 256 0.037 (512 x 512: 0.064)
    backward   five products, and four arrays of the size of a tile: 0.668 (128 x 512: 0.633, 512 x 512: 0.86), causal
               0.343 (128 x 512: 0.375), with a window of 256 0.098 (0.238)
    """

    name: str = "host"
    dense: tuple[int, int] = (512, 512)
    skipping: tuple[int, int] = (256, 256)
    backward: tuple[int, int] = (256, 256)

    def forward(self, skips: bool) -> tuple[int, int]:
        """The blocks of a forward pass; skips: whether there may be blocks that no query sees."""
        return self.skipping if skips else self.dense


HOST = HostSpec()
