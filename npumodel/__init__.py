"""npumodel: execute FlashAttention in JAX, price the same plan on an Ascend NPU, and differentiate the price."""

# (doors come with api.py)
from .hardware import DeviceSpec, device, devices
from .model.cost import Cost
from .search.table import TileTable, use_table
from .tile import TileConfig
from .workload import AttentionShape

__version__ = "0.1.0"

