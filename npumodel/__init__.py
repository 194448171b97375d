"""npumodel: execute FlashAttention in JAX, price the same plan on an Ascend NPU, and differentiate the price."""

from .api import estimate, explain, flash_attention, hints, sweep, target, trace, tune
from .attention import merge
from .hardware import DeviceSpec, device, devices
from .model.estimate import Cost
from .search.table import TileTable, use_table
from .tile import MatmulTile, SoftmaxTile, TileConfig
from .workload import AttentionShape, MatmulShape, SoftmaxShape

__version__ = "0.1.0"

__all__ = [
    "AttentionShape",
    "Cost",
    "DeviceSpec",
    "MatmulShape",
    "MatmulTile",
    "SoftmaxShape",
    "SoftmaxTile",
    "TileConfig",
    "TileTable",
    "device",
    "devices",
    "estimate",
    "explain",
    "flash_attention",
    "hints",
    "merge",
    "sweep",
    "target",
    "trace",
    "tune",
    "use_table",
]
