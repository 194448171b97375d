"""What it runs on: the chips, one TOML file each, every number with its source."""

from npumodel.hardware.host import HOST, HostSpec
from npumodel.hardware.registry import device, devices, provenance
from npumodel.hardware.spec import DeviceSpec

__all__ = ["HOST", "DeviceSpec", "HostSpec", "device", "devices", "provenance"]
