"""Prices for the autotuner of another tool, so that it measures only the configs that may win.

`PerfModel` follows `triton.autotune(prune_configs_by=...)` as triton-lang/triton and triton-lang/triton-ascend have it
(python/triton/runtime/autotuner.py, Autotuner.prune_configs), which calls

    early_config_prune(configs, named_arguments, **keywords) -> the configs to keep
    perf_model(**named_arguments, **keywords, **config.all_kwargs()) -> estimated time, of the `top_k` smallest are kept

The second cuts between configs of equal price and stops the launch if the model fails. `PerfModel.prune_configs_by`
therefore uses the first, and does there what triton-ascend's own cost model is planned to do (its pull request 1357).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npumodel import hardware
from npumodel.hardware import DeviceSpec
from npumodel.search.export import triton_names
from npumodel.search.space import seconds_of
from npumodel.tile import TileConfig
from npumodel.workload import DTYPE_BYTES, MASK_KINDS, AttentionShape

_log = logging.getLogger(__name__)
_FIELDS = tuple(field.name for field in dataclasses.fields(AttentionShape))
_NEEDED = ("batch", "q_heads", "q_len", "head_dim")
#: What Triton calls a dtype.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class PerfModel:
    """Predicted milliseconds of a launch of an attention kernel, from its arguments by name.

    device  a DeviceSpec, or the name of one
    shape   an AttentionShape, or its fields, each as the name of an argument ("N_CTX"), a function of all arguments by
            name (lambda a: a["STAGE"] == 3), or the value itself: {"batch": "Z", "q_heads": "H", "q_len": "N_CTX",
            "head_dim": "HEAD_DIM", "dtype": "q"}. As dtype, a tensor stands for its own.
    names   what the kernel calls a knob, beside or instead of BLOCK_M (block_q) and BLOCK_N (block_kv)
    base    the other knobs, as the kernel has them. `multibuffer` of a config sets the buffers to 2 or 1 unless `names`
            has a name for them; num_warps and num_stages change nothing on an NPU

    Raises ValueError (expected, got) for a field, a knob or a device that is none.
    """

    def __init__(
        self,
        device: DeviceSpec | str,
        shape: AttentionShape | Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        base: TileConfig | None = None,
    ):
        self.device = hardware.device(device) if isinstance(device, str) else device
        if not isinstance(self.device, DeviceSpec):
            raise ValueError(f"device: expected a DeviceSpec or the name of a device, got {device!r}")
        if not isinstance(shape, AttentionShape):
            if not isinstance(shape, Mapping):
                raise ValueError(f"shape: expected an AttentionShape or a mapping of its fields, got {shape!r}")
            if unknown := [name for name in shape if name not in _FIELDS]:
                raise ValueError(f"shape: expected fields out of {', '.join(_FIELDS)}, got {', '.join(unknown)}")
            if missing := [name for name in _NEEDED if name not in shape]:
                raise ValueError(f"shape: expected at least {', '.join(_NEEDED)}; {', '.join(missing)} missing")
        self.names = triton_names(names)
        self.base = base if base is not None else TileConfig(128, 128)
        self._shape = shape

    def shape(self, arguments: Mapping[str, Any]) -> AttentionShape:
        """The call that these arguments make. Raises ValueError that names a field whose argument is not there."""
        if isinstance(self._shape, AttentionShape):
            return self._shape
        fields = {name: _value(name, given, arguments) for name, given in self._shape.items()}
        return AttentionShape(**fields)

    def tile(self, arguments: Mapping[str, Any]) -> TileConfig:
        """The tile that these arguments name; the rest from `base`."""
        if missing := [name for name in self.names.values() if name not in arguments]:
            raise ValueError(
                f"arguments: expected {', '.join(missing)}, got {', '.join(sorted(arguments)) or 'none'}; "
                "say what the kernel calls a knob: names={'block_q': ...}"
            )
        knobs = {knob: arguments[name] for knob, name in self.names.items()}
        if "buffers" not in knobs and isinstance(arguments.get("multibuffer"), bool):
            knobs["buffers"] = 2 if arguments["multibuffer"] else 1
        return self.base.replace(**knobs)

    def __call__(self, **arguments: Any) -> float:
        """Milliseconds of the launch; infinite for a tile that does not fit on the device. Usable as `perf_model`.

        Raises ValueError for arguments that make no call or no tile, and a dtype that the device does not multiply.
        """
        return self._prices(self.shape(arguments), [self.tile(arguments)])[0]

    def ranked(self, configs: Sequence[Any], arguments: Mapping[str, Any]) -> list[tuple[Any, float]]:
        """(config, milliseconds) of every config, fastest first, equal ones in their order."""
        return sorted(zip(configs, self._of(configs, arguments), strict=True), key=lambda pair: pair[1])

    def prune_configs_by(self, top_k: int | float = 0.25, tie: float = 1e-9) -> dict[str, Callable[..., list]]:
        """The argument of `triton.autotune`: keep the `top_k` fastest configs (a share <= 1.0 of them, at least one, or
        a number), and those that are no more than `tie` (relative) slower than the last of these: the model cannot tell
        them apart. They stay in their order. Configs that do not fit go, and the log (level INFO) names all that go.

        If the model fails (an argument is not there, the device does not multiply the dtype, no config fits), all stay,
        with a warning. Raises ValueError for a top_k or a tie that is none.
        """
        share = isinstance(top_k, float) and 0 < top_k <= 1
        number = isinstance(top_k, int) and not isinstance(top_k, bool) and top_k >= 1
        if not share and not number:
            raise ValueError(f"top_k: expected a share in (0.0, 1.0] or a whole number >= 1, got {top_k!r}")
        if not tie >= 0 or not math.isfinite(tie):
            raise ValueError(f"tie: expected a number >= 0, got {tie!r}")
        return {"early_config_prune": functools.partial(self._prune, top_k, tie)}

    def _prune(
        self, top_k: int | float, tie: float, configs: Sequence[Any], named: Mapping[str, Any], /, **keywords: Any
    ) -> list[Any]:
        try:
            times = self._of(configs, {**(named or {}), **keywords})
        except Exception as error:  # whatever it is: an autotuner that measures too much is better than none
            return _unpruned(configs, f"{type(error).__name__}: {error}")
        finite = sorted(filter(math.isfinite, times))
        if not finite:
            return _unpruned(configs, f"none fits on {self.device.name or 'this device'}")
        count = max(1, int(len(configs) * top_k)) if isinstance(top_k, float) else top_k
        last = finite[min(count, len(finite)) - 1] * (1 + tie)
        for config, time in zip(configs, times, strict=True):
            if time > last:
                _log.info("not measured: %s (%s)", config, f"{time:.4g} ms" if math.isfinite(time) else "does not fit")
        return [config for config, time in zip(configs, times, strict=True) if time <= last]

    def _of(self, configs: Sequence[Any], arguments: Mapping[str, Any]) -> list[float]:
        every = [{**arguments, **_all_kwargs(config)} for config in configs]
        shapes, tiles = [self.shape(one) for one in every], [self.tile(one) for one in every]
        times = [math.inf] * len(every)
        for shape in dict.fromkeys(shapes):
            here = [i for i, other in enumerate(shapes) if other == shape]
            for i, time in zip(here, self._prices(shape, [tiles[i] for i in here]), strict=True):
                times[i] = time
        return times

    def _prices(self, shape: AttentionShape, tiles: Sequence[TileConfig]) -> list[float]:
        """Milliseconds of each tile, infinite where it is not legal."""
        return [seconds * 1e3 for seconds in seconds_of(shape, tiles, self.device)]


def _unpruned(configs: Sequence[Any], why: str) -> list[Any]:
    warnings.warn(f"npumodel: all {len(configs)} configs are measured, none is pruned: {why}", stacklevel=3)
    return [*configs]


def _all_kwargs(config: Any) -> Mapping[str, Any]:
    """The arguments that a config gives: of a triton.Config, or of one of `export.triton_configs`."""
    if callable(getattr(config, "all_kwargs", None)):
        return config.all_kwargs()
    if isinstance(config, Mapping) and isinstance(config.get("kwargs"), Mapping):
        return config["kwargs"]
    raise ValueError(f"configs: expected triton.Config objects or dictionaries of triton_configs, got {config!r}")


def _value(field: str, given: Any, arguments: Mapping[str, Any]) -> Any:
    """The value of one field of the call."""
    values = {"dtype": DTYPE_BYTES, "mask": MASK_KINDS}.get(field, ())
    value = given
    if callable(given):
        value = given(arguments)
    elif isinstance(given, str) and given in arguments:
        value = arguments[given]
    elif isinstance(given, str) and given not in values:
        raise ValueError(
            f"{field}: expected an argument named {given!r}, got {', '.join(sorted(arguments)) or 'none'}; "
            "give the name that the kernel has, a function of the arguments, or the value"
        )
    if field == "dtype":
        text = str(getattr(value, "dtype", value)).rpartition(".")[2]
        return _DTYPES.get(text, text)
    return value
