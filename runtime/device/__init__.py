"""What differs between kinds of device: memory, threads, and where device attention runs.

The engine sees only the `Device` protocol. `open_device` turns a `DeviceConfig` into one.
"""

from neo_compile.runtime.device.adversarial import AdversarialDevice
from neo_compile.runtime.device.base import Device, DeviceConfig, Ticket, Workers
from neo_compile.runtime.device.emulated import EmulatedDevice, open_device

__all__ = ["AdversarialDevice", "Device", "DeviceConfig", "EmulatedDevice", "Ticket", "Workers", "open_device"]
