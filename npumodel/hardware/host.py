"""The machine that executes when no NPU is the target: the blocks in which attention runs fast on a CPU."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """Block sizes (block_q, block_kv) for both passes, each the fastest or within 5 % of it where it is used.

    Measured (confidence: one machine) on 2 cores of an AMD EPYC with AVX-512 and 1 MiB of L2 each, jax 0.10.1, float32,
    blocks of 128..1024, five calls with S in {1024, 2048, 4096}, D in {64, 128}: `python
    experiments/bench_attention.py --blocks` repeats it. Below, milliseconds of 8 heads, S 4096, D 64.

    dense      every key is seen: forward 229 (256 x 256: 255), backward 791 (256 x 256: 959, 128 x 512: 976)
    skipping   causal, windows, lengths: smaller blocks waste less at the edges. Causal: forward 136 (512 x 512: 133),
               backward 311 (322); with a window of 256: forward 37 (61), backward 88 (159)
    """

    name: str = "host"
    dense: tuple[int, int] = (512, 512)
    skipping: tuple[int, int] = (256, 256)

    def blocks(self, skips: bool) -> tuple[int, int]:
        """The blocks of a call; skips: whether there may be blocks that no query sees."""
        return self.skipping if skips else self.dense


HOST = HostSpec()
