"""Graph compiler: one attention call becomes a graph of ops, passes simplify it, and it is cut into kernels.

`lower` is a function from the call to its graph; `fold_mask` and `fuse` are passes, each of which says what it did and
why. The stage tables (`model/stages`) are derived from the kernels, so the graph decides how data flow between units.
"""

from __future__ import annotations

import dataclasses

from ..workload import AttentionShape, Shape


@dataclasses.dataclass(frozen=True)
class Op:
    """One node: `kind` is "qk" | "mask" | "softmax" | "pv", or an op of the graphs below; `unit` is "cube" or "vector";
    tensors by name."""

    kind: str
    title: str
    unit: str
    inputs: tuple[str, ...]
    output: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Ops that run as one launch. Tensors made and used inside never become kernel inputs or outputs."""

    ops: tuple[Op, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(op.kind for op in self.ops)


@dataclasses.dataclass(frozen=True)
class Graph:
    """Kernels in topological order, and what each pass had to say."""

    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        return len(self.kernels)

    def __str__(self):
        rows = [f"kernel {i}: " + " -> ".join(op.title for op in k.ops) for i, k in enumerate(self.kernels)]
        return "\n".join(rows + [f"  {note}" for note in self.notes])


_QK = Op("qk", "MatMul(Q,K)", "cube", ("q", "k"), "s")
_MASK = Op("mask", "Mask", "vector", ("s", "mask"), "s_masked")
_SOFTMAX = Op("softmax", "Softmax", "vector", ("s",), "p")
_PV = Op("pv", "MatMul(P,V)", "cube", ("p", "v"), "o")

#: Graphs of one op that are no part of attention.
_SINGLE = {
    "matmul": Op("matmul", "MatMul", "cube", ("a", "b"), "c"),
    "softmax": Op("row_softmax", "Softmax", "vector", ("x",), "y"),
}

#: The backward pass, one kernel as the vendor's FlashAttentionScoreGrad is.
_BACKWARD = (
    _QK,
    Op("dp", "MatMul(dO,V)", "cube", ("do", "v"), "dp"),
    _MASK,
    Op("softmax_grad", "SoftmaxGrad", "vector", ("s", "dp", "o", "do"), "ds"),
    Op("dv", "MatMul(P,dO)", "cube", ("p", "do"), "dv"),
    Op("dk", "MatMul(dS,Q)", "cube", ("ds", "q"), "dk"),
    Op("dq", "MatMul(dS,K)", "cube", ("ds", "k"), "dq"),
)

#: Titles of the three ops that every call has, in order, and the unit that runs each (the article's names).
STAGE_TITLES = (
    ("qk", "MatMul(Q,K)", "tensor_core"),
    ("softmax", "Softmax", "vector_core"),
    ("pv", "MatMul(P,V)", "tensor_core"),
)
#: Of the ops that only some calls have.
OTHER_TITLES = (
    ("mask", "Mask", "vector_core"),
    ("matmul", "MatMul", "tensor_core"),
    *((op.kind, op.title, f"{op.unit}_core".replace("cube", "tensor")) for op in _BACKWARD if op not in (_QK, _MASK)),
)


def lower() -> Graph:
    """One op per kernel: MatMul(Q,K) -> Mask -> Softmax -> MatMul(P,V). Without a mask the Mask op fills zeros."""
    softmax = dataclasses.replace(_SOFTMAX, inputs=("s_masked",))
    return Graph(tuple(Kernel((op,)) for op in (_QK, _MASK, softmax, _PV)))


def fold_mask(graph: Graph, masked: bool) -> Graph:
    """Drop the Mask op when there is no mask: its zero-fill changes nothing, and one launch goes with it."""
    if masked:
        return dataclasses.replace(graph, notes=graph.notes + ("fold_mask: refused, the call reads a mask tensor",))
    kept = []
    for kernel in graph.kernels:
        ops = tuple(_read_scores(op) for op in kernel.ops if op.kind != "mask")
        kept += [Kernel(ops)] if ops else []
    return Graph(tuple(kept), graph.notes + ("fold_mask: no mask tensor, one launch fewer",))


def _read_scores(op: Op) -> Op:
    return dataclasses.replace(op, inputs=tuple("s" if name == "s_masked" else name for name in op.inputs))


def fuse(graph: Graph, fusion: str) -> Graph:
    """Join kernels, and say for every pair of neighbours why or why not.

    Ops that depend on each other cannot share a task block side by side: joined, they hand blocks over inside the
    kernel, which needs (1) that the consumer can start on a block of its input: softmax needs the whole row, unless it
    keeps a running maximum and the product that follows rescales its sum (online softmax), so MatMul(Q,K) + Softmax
    without MatMul(P,V) is never joined; (2) room in L1, UB and L0C for what both keep (checked with the tile, see
    `estimate.illegal`). Each step across the matrix and the vector unit waits at a barrier.
    """
    kernels, notes = [graph.kernels[0]], []
    for kernel in graph.kernels[1:]:
        before = kernels[-1].ops[-1]
        joined, why = _joins(before, kernel.ops[0], fusion)
        notes.append(f"fuse: {before.title} + {kernel.ops[0].title}: {why}")
        if joined:
            kernels[-1] = Kernel(kernels[-1].ops + kernel.ops)
        else:
            kernels.append(kernel)
    return Graph(tuple(kernels), graph.notes + tuple(notes))


def _joins(before: Op, after: Op, fusion: str) -> tuple[bool, str]:
    """Whether two neighbours become one kernel, and why."""
    barrier = "a barrier between cube and vector unit every step"
    if fusion == "unfused":
        return False, f"not asked for, {before.output.upper()[0]} crosses global memory whole"
    if before.unit == after.unit:
        return True, f"joined, both on the {after.unit} unit"
    if fusion == "partly" and before.kind == "qk":
        why = f"{before.output.upper()[0]} crosses global memory whole"
        return False, f"not asked for, {why}, and the two launches are the barrier"
    return True, f"joined, {barrier}"


def compile_graph(masked: bool, fusion: str, kind: str = "attention") -> Graph:
    """The passes in order: lower, fold the mask, fuse. kind: see `tiling.Problem`.

    Raises ValueError for a backward pass in several kernels.
    """
    if kind == "backward":
        if fusion != "fused":
            raise ValueError(f"fusion: expected 'fused' for the backward pass, got {fusion!r}")
        return Graph((Kernel(tuple(op for op in _BACKWARD if masked or op is not _MASK)),))
    if kind in _SINGLE:
        return Graph((Kernel((_SINGLE[kind],)),))
    return fuse(fold_mask(lower(), masked), fusion)


def graph_of(shape: Shape, fusion: str = "fused") -> Graph:
    """The graph that a call of this shape runs as."""
    return compile_graph(masked(shape), fusion, shape.kind)


def masked(shape: Shape) -> bool:
    """Whether the call reads a mask tensor."""
    return isinstance(shape, AttentionShape) and shape.mask is not None
