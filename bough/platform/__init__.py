"""Facts about the machine: the only package that asks which device there is, and the object that provides its streams
and events.

in: /proc, the CUDA driver, one probe in a child process. out: `DeviceFacts`, `Device`, a prepared environment, whole files.
never: imports torch before `Device` or a measurement is asked for.
"""

from bough.platform.device import Device, DeviceStream, Event
from bough.platform.environment import prepare_environment
from bough.platform.facts import DeviceFacts, detect

__all__ = ["Device", "DeviceFacts", "DeviceStream", "Event", "detect", "prepare_environment"]
