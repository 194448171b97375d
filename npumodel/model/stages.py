"""Stage tables: what one kernel does on one architecture, derived from its ops and the chip's data paths.

Each stage says which pipe it occupies, what it waits for and which buffer it fills. The table is data; `pipeline` runs
it.

Paths between units (vendor's list of legal data paths, HARDWARE section 5):
  coupled  L0C -> UB by the vector unit itself; UB -> L1 by MTE3
  split    cube and vector are different cores: L0C -> GM by fixpipe, GM -> UB by MTE2; UB -> GM by MTE3,
           GM -> L1 by MTE2
  direct   L0C -> UB by fixpipe; UB -> L1 by MTE3
"""

from __future__ import annotations

import dataclasses

from .graph import Kernel

CUBE, VECTOR, FIXP = "CUBE", "VECTOR", "FIXP"

#: Data paths and the unit whose engines drive them: paths of the vector unit move its share of a block each.
GM_PATHS = ("gm_l1", "gm_ub", "ub_gm", "l0c_gm")
VECTOR_PATHS = ("gm_ub", "ub_gm", "ub_l1", "l0c_ub")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One row of a stage table.

    op       the graph op that it serves: "qk" | "mask" | "softmax" | "pv" | "matmul" | "dp" | "softmax_grad" | "dv" |
             "dk" | "dq"
    action   "matmul" | "vector", or the data path of a transfer: "gm_l1", "gm_ub", "ub_gm", "l0c_gm", "l0c_ub", "ub_l1"
    tensor   the tensor moved or made
    waits    stages of the same iteration that end before it starts
    sync     True: it crosses between cube and vector unit, and its waits cost one hand-over latency
    streams  those of `waits` that come in pieces where K and V do (the tile's kv_pieces): it works on each piece as it
             comes
    buffer   the buffer that it fills; one of its slots is taken until `freed_by` of the same iteration ends (of the
             last one, for what is loaded once a task: two slots where tasks are not drained). Where
             `freed_by` streams from this stage, a slot holds a piece
    group    "front" (up to the softmax) or "back": back stages lag by the tile's lookahead
    when     "task_start" | "step" | "task_end"
    """

    name: str
    pipe: str
    op: str
    action: str
    tensor: str
    waits: tuple[str, ...] = ()
    sync: bool = False
    buffer: str | None = None
    freed_by: str | None = None
    group: str = "front"
    when: str = "step"
    streams: tuple[str, ...] = ()

    @property
    def compute(self) -> bool:
        return self.action in ("matmul", "vector")


@dataclasses.dataclass(frozen=True)
class StageTable:
    """All stages of a kernel on an architecture, in program order, and the depth rule of each buffer.

    depths: buffer -> "buffers" (the tile's), "lookahead" (the tile's lookahead + 1) or a fixed number of slots.
    """

    arch: str
    stages: tuple[Stage, ...]
    depths: tuple[tuple[str, str | int], ...]

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    def when(self, when: str) -> tuple[Stage, ...]:
        return tuple(s for s in self.stages if s.when == when)

    @property
    def pipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.pipe for s in self.stages))

    def in_pieces(self, stage: Stage) -> bool:
        """Whether the buffer that a stage fills has slots for pieces rather than for whole blocks."""
        return bool(stage.freed_by) and stage.name in self.stage(stage.freed_by or "").streams

    def upstream(self, stage: Stage) -> tuple[str, ...]:
        """Compute stages that feed `stage`, straight or through transfers."""
        found = []
        for wait in map(self.stage, stage.waits):
            found += [wait.name] if wait.compute else self.upstream(wait)
        return tuple(dict.fromkeys(found))

    def serial(self) -> StageTable:
        """The same work with nothing overlapped: one pipe does everything, in order."""
        alone: dict = dict(pipe="SERIAL", buffer=None, freed_by=None, streams=())
        one = tuple(dataclasses.replace(s, **alone) for s in self.stages)
        return dataclasses.replace(self, stages=one, depths=())


#: Slots of each buffer. K and V by the tile; P waits in L1 (coupled, direct) or in the workspace (split) for a back
#: stage that lags by the lookahead; the rest is ping-pong (2), as the vendor's kernels do for L0C, UB and workspace.
_DEPTHS = {"L1.K": "buffers", "L1.V": "buffers", "L1.P_ahead": "lookahead", "GM.P": "lookahead"}
_DEPTHS |= {"L1.A": "buffers", "L1.B": "buffers"}
#: Backward: the operands of the first two products by the tile, those of the others one slot each; where K stays in L1
#: until dQ, and for P and dS, as P in the forward pass.
_DEPTHS |= {"L1.Q": "buffers", "L1.dO": "buffers", "L1.K_ahead": "lookahead", "L1.dS_ahead": "lookahead"}
_DEPTHS |= {"GM.dS": "lookahead", "L1.dO_again": 1, "L1.Q_again": 1, "L1.K_again": 1, "L1.dS": 1, "L1.dS_again": 1}
_PING_PONG = 2


def stage_table(kernel: Kernel, arch: str) -> StageTable:
    """Lower one kernel to its stages on "coupled", "split" or "direct"."""
    if "softmax_grad" in kernel.kinds:
        stages = _backward(arch, "mask" in kernel.kinds)
    elif len(kernel.ops) > 1:
        stages = _fused(arch, "qk" in kernel.kinds, "mask" in kernel.kinds)
    else:
        stages = _ALONE[kernel.kinds[0]](arch)
    buffers = dict.fromkeys(s.buffer for s in stages if s.buffer)
    return StageTable(arch, stages, tuple((b, _DEPTHS.get(b, _PING_PONG)) for b in buffers))


def _mte2_vector(arch: str) -> str:
    return "MTE2" if arch == "coupled" else "MTE2.V"


def _mte3(arch: str) -> str:
    return "MTE3" if arch == "coupled" else "MTE3.V"


def _qk(scores_freed_by: str) -> tuple[Stage, ...]:
    return (
        Stage("load_q", "MTE2", "qk", "gm_l1", "q", buffer="L1.Q_rows", freed_by="qk_matmul", when="task_start"),
        Stage("load_k", "MTE2", "qk", "gm_l1", "k", buffer="L1.K", freed_by="qk_matmul"),
        Stage(
            "qk_matmul", CUBE, "qk", "matmul", "s", ("load_q", "load_k"), buffer="L0C.S", freed_by=scores_freed_by,
            streams=("load_k",),
        ),
    )


def _load_v(group: str) -> Stage:
    return Stage("load_v", "MTE2", "pv", "gm_l1", "v", buffer="L1.V", freed_by="pv_matmul", group=group)


def _load_s(arch: str, op: str, reader: str) -> Stage:
    """S from global memory, where another kernel has left it."""
    return Stage("load_s", _mte2_vector(arch), op, "gm_ub", "s", buffer="UB.S", freed_by=reader)


# Fused: S and P stay inside the kernel ------------------------------------------------------------------------------


def _fused(arch: str, with_qk: bool, masked: bool) -> tuple[Stage, ...]:
    """Online softmax and P V, with Q K^T in the same kernel, or reading S from global memory."""
    reader = "mask" if masked else "softmax"  # the vector op that takes S over
    if with_qk:
        moves, ready = _cube_to_vector(arch, "qk_matmul", "s", "front", reader)
        scores = _qk(reader if arch == "coupled" else "fixpipe_s") + moves
    else:
        scores, ready = (_load_s(arch, "softmax", reader),), "load_s"
    crosses = with_qk and arch != "split"  # on split the transfer itself waits for the other core's flag
    mask = ()
    if masked:
        mask = (
            Stage("load_mask", _mte2_vector(arch), "softmax", "gm_ub", "mask", buffer="UB.mask", freed_by="mask"),
            Stage("mask", VECTOR, "softmax", "vector", "mask", (ready, "load_mask"), crosses),
        )
    waits, sync = (("mask",), False) if masked else ((ready,), crosses)
    softmax = Stage("softmax", VECTOR, "softmax", "vector", "p", waits, sync)
    return scores + mask + (softmax,) + _fused_pv(arch) + _fused_output(arch)


def _cube_to_vector(arch: str, source: str, tensor: str, group: str, reader: str) -> tuple[tuple[Stage, ...], str]:
    """Transfers from L0C to UB, and the stage that the vector op `reader` then waits for."""
    fix, load, name = f"fixpipe_{tensor}", f"load_{tensor}", tensor.upper()
    ub, gm = f"UB.{name}", f"GM.{name}"
    pieces = (source,) if tensor == "s" else ()  # O is summed over all pieces before it leaves L0C
    if arch == "coupled":
        return (), source
    if arch == "direct":
        stage = Stage(fix, FIXP, "softmax", "l0c_ub", tensor, (source,), False, ub, reader, group, streams=pieces)
        return (stage,), fix
    return (
        Stage(fix, FIXP, "softmax", "l0c_gm", tensor, (source,), False, gm, load, group, streams=pieces),
        Stage(load, "MTE2.V", "softmax", "gm_ub", tensor, (fix,), True, ub, reader, group),
    ), load


def _fused_pv(arch: str) -> tuple[Stage, ...]:
    """P to the cube, and P V. V is asked for before P, since it waits for nobody."""
    freed_by = "rescale" if arch == "coupled" else "fixpipe_o"
    pv = Stage(
        "pv_matmul", CUBE, "pv", "matmul", "o", ("store_p", "load_v"), True, "L0C.O", freed_by, "back",
        streams=("load_v",),
    )
    if arch != "split":
        store = Stage("store_p", _mte3(arch), "pv", "ub_l1", "p", ("softmax",), False, "L1.P_ahead", "pv_matmul")
        return (store, _load_v("back"), pv)
    return (
        Stage("store_p", "MTE3.V", "pv", "ub_gm", "p", ("softmax",), False, "GM.P", "load_p"),
        _load_v("back"),
        Stage("load_p", "MTE2", "pv", "gm_l1", "p", ("store_p",), True, "L1.P", "pv_matmul", "back"),
        dataclasses.replace(pv, waits=("load_p", "load_v"), sync=False, streams=("load_p", "load_v")),
    )


def _fused_output(arch: str) -> tuple[Stage, ...]:
    moves, ready = _cube_to_vector(arch, "pv_matmul", "o", "back", "rescale")
    return moves + (
        Stage("rescale", VECTOR, "softmax", "vector", "o", (ready,), arch != "split", group="back"),
        Stage("finalize", VECTOR, "softmax", "vector", "o_final", ("rescale",), when="task_end"),
        Stage("store_o", _mte3(arch), "pv", "ub_gm", "o_final", ("finalize",), when="task_end"),
    )


# Backward: five products, and one pass over the scores between them ------------------------------------------------


def _backward(arch: str, masked: bool) -> tuple[Stage, ...]:
    """A task is a q block, its steps are kv blocks, as in the forward pass; dQ, dK and dV of every step are added up in
    float32 in global memory (atomic adds by fixpipe; coupled: by MTE3), since no core sees all that goes into them.

    split, as the vendor's SameAB template (ops-transformer 2f82d47a, flash_attention_score_grad_s1s2_bn2gs1s2_sab.h):
    every product fetches its own operands from global memory. Elsewhere Q and dO stay in L1 for the task and K until
    dQ, and P and dS come from UB (vendor's design document of the 950: UB to L1, operands reused; which ones, and
    coupled cores, are assumed). What comes before and after all tasks is no part of the table: see `durations.BEFORE`.
    """
    again, crosses = arch == "split", arch != "split"
    reader = "mask" if masked else "softmax_grad"
    moves_s, ready_s = _cube_to_vector(arch, "qk_matmul", "s", "front", reader)
    moves_dp, ready_dp = _cube_to_vector(arch, "dp_matmul", "dp", "front", "softmax_grad")
    free_s, free_dp = (reader, "softmax_grad") if arch == "coupled" else ("fixpipe_s", "fixpipe_dp")
    mte2, when = _mte2_vector(arch), "step" if again else "task_start"
    resident = [("q", "qk", "L1.Q", "qk_matmul"), ("do", "dp", "L1.dO", "dp_matmul")]
    load_q, load_do = (
        Stage(f"load_{x}", "MTE2", op, "gm_l1", x, (), False, *((slot, user) if again else (None, None)), when=when)
        for x, op, slot, user in resident
    )
    k_slot = ("L1.K", "qk_matmul") if again else ("L1.K_ahead", "dq_matmul")
    front = (
        load_q,
        Stage("load_k", "MTE2", "qk", "gm_l1", "k", (), False, *k_slot),
        Stage("qk_matmul", CUBE, "qk", "matmul", "s", ("load_q", "load_k"), False, "L0C.S", free_s),
        load_do,
        Stage("load_v", "MTE2", "dp", "gm_l1", "v", (), False, "L1.V", "dp_matmul"),
        Stage("dp_matmul", CUBE, "dp", "matmul", "dp", ("load_do", "load_v"), False, "L0C.dP", free_dp),
        Stage("load_stats", mte2, "softmax_grad", "gm_ub", "stats", (), False, "UB.stats", "softmax_grad"),
        *(dataclasses.replace(stage, op="softmax_grad") for stage in moves_s + moves_dp),
    )
    if masked:
        front += (
            Stage("load_mask", mte2, "softmax_grad", "gm_ub", "mask", (), False, "UB.mask", "mask"),
            Stage("mask", VECTOR, "softmax_grad", "vector", "mask", (ready_s, "load_mask"), crosses),
        )
    waits = ("mask" if masked else ready_s, ready_dp, "load_stats")
    front += (Stage("softmax_grad", VECTOR, "softmax_grad", "vector", "ds", waits, crosses),)
    return front + _backward_products(arch)


def _backward_products(arch: str) -> tuple[Stage, ...]:
    """P and dS to the cube, and the three products that take them."""
    stages: tuple[Stage, ...] = ()
    for tensor, op, name, last in (("p", "dv", "P", "dv"), ("ds", "dk", "dS", "dq")):
        store = Stage(f"store_{tensor}", _mte3(arch), op, "ub_l1", tensor, ("softmax_grad",))
        if arch == "split":
            reader = "load_p" if tensor == "p" else "load_ds_again"
            store = dataclasses.replace(store, action="ub_gm", buffer=f"GM.{name}", freed_by=reader)
        else:
            store = dataclasses.replace(store, buffer=f"L1.{name}_ahead", freed_by=f"{last}_matmul")
        stages += (store,)
    for op, left, right in (("dv", "p", "do"), ("dk", "ds", "q"), ("dq", "ds_again", "k")):
        stored, matmul, more = f"store_{left.removesuffix('_again')}", f"{op}_matmul", f"{right}_again"
        slots = {"p": "L1.P", "ds": "L1.dS", "ds_again": "L1.dS_again", "do": "L1.dO", "q": "L1.Q", "k": "L1.K"}
        loads = (
            Stage(f"load_{left}", "MTE2", op, "gm_l1", left, (stored,), True, slots[left], matmul, "back"),
            Stage(f"load_{more}", "MTE2", op, "gm_l1", more, (), False, f"{slots[right]}_again", matmul, "back"),
        )
        loads = loads if arch == "split" else ()
        waits = tuple(stage.name for stage in loads) or (stored,)
        drained = f"drain_{op}" if arch == "coupled" else f"fixpipe_{op}"
        product = Stage(matmul, CUBE, op, "matmul", op, waits, not loads, f"L0C.{op}", drained, "back")
        stages += (*loads, product, *_accumulate(arch, op, matmul))
    return stages


def _accumulate(arch: str, op: str, matmul: str) -> tuple[Stage, ...]:
    """A block of a gradient from L0C, added to what is in global memory."""
    if arch != "coupled":
        return (Stage(f"fixpipe_{op}", FIXP, op, "l0c_gm", op, (matmul,), group="back"),)
    return (
        Stage(f"drain_{op}", VECTOR, op, "vector", op, (matmul,), True, f"UB.{op}", f"store_{op}", "back"),
        Stage(f"store_{op}", "MTE3", op, "ub_gm", op, (f"drain_{op}",), group="back"),
    )


# Unfused: one op a kernel, its operands from global memory and back -------------------------------------------------


def _qk_alone(arch: str) -> tuple[Stage, ...]:
    return _qk("drain_s" if arch == "coupled" else "fixpipe_s") + _cube_to_gm(arch, "qk", "qk_matmul", "s", "step")


def _pv_alone(arch: str) -> tuple[Stage, ...]:
    """O accumulates in L0C over the steps and leaves once."""
    load_p = Stage("load_p", "MTE2", "pv", "gm_l1", "p", buffer="L1.P", freed_by="pv_matmul")
    pv = Stage("pv_matmul", CUBE, "pv", "matmul", "o", ("load_p", "load_v"), streams=("load_p", "load_v"))
    return (load_p, _load_v("front"), pv) + _cube_to_gm(arch, "pv", "pv_matmul", "o_final", "task_end")


def _cube_to_gm(arch: str, op: str, source: str, tensor: str, when: str) -> tuple[Stage, ...]:
    name = tensor[0]
    if arch != "coupled":
        pieces = (source,) if when == "step" else ()
        return (Stage(f"fixpipe_{name}", FIXP, op, "l0c_gm", tensor, (source,), when=when, streams=pieces),)
    return (
        Stage(f"drain_{name}", VECTOR, op, "vector", tensor, (source,), True, when=when),
        Stage(f"store_{name}", "MTE3", op, "ub_gm", tensor, (f"drain_{name}",), when=when),
    )


def _vector_alone(op: str, result: str):
    def stages(arch: str) -> tuple[Stage, ...]:
        load = _load_s(arch, op, op)
        mask = (Stage("load_mask", _mte2_vector(arch), op, "gm_ub", "mask", buffer="UB.mask", freed_by=op),)
        loads = (load,) + mask * (op == "mask")
        work = Stage(op, VECTOR, op, "vector", result, tuple(s.name for s in loads))
        return loads + (work, Stage(f"store_{result}", _mte3(arch), op, "ub_gm", result, (op,)))

    return stages


def _matmul_alone(arch: str) -> tuple[Stage, ...]:
    """C = A B as P V: the same stages by names of their own, A and B in as many slots as the tile has buffers."""
    names = dict(load_p="load_a", load_v="load_b", pv_matmul="matmul", fixpipe_o="fixpipe_c", drain_o="drain_c")
    names |= {"store_o": "store_c", "L1.P": "L1.A", "L1.V": "L1.B"}
    return tuple(dataclasses.replace(_renamed(stage, names), op="matmul") for stage in _pv_alone(arch))


def _softmax_alone(arch: str) -> tuple[Stage, ...]:
    names = dict(load_s="load_x", store_p="store_y")
    return tuple(_renamed(stage, names) for stage in _vector_alone("softmax", "p")(arch))


def _renamed(stage: Stage, names: dict[str, str]) -> Stage:
    """The stage with other names of stages and buffers."""
    found = {field: getattr(stage, field) for field in ("name", "buffer", "freed_by")}
    fields: dict = {field: names.get(name, name) for field, name in found.items()}
    return dataclasses.replace(stage, **fields, waits=tuple(names.get(name, name) for name in stage.waits))


_ALONE = {
    "qk": _qk_alone,
    "mask": _vector_alone("mask", "s"),
    "softmax": _vector_alone("softmax", "p"),
    "pv": _pv_alone,
    "matmul": _matmul_alone,
    "row_softmax": _softmax_alone,
}
