"""The GPU's identity and used memory, from NVML; asked by a thread of its own, so that nobody waits for the driver.

`read` answers at once with what was last measured, if that is fresh, and has it measured anew when it is older than a
second. While nobody asks, nothing is measured. Without NVML, or where it fails, there is no answer.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from typing import Final, NamedTuple

#: A reading this old is measured anew.
REFRESH_S: Final = 1.0
#: A reading this old is no answer any more: the driver hangs.
STALE_S: Final = 10.0

_LIBRARY: Final = "libnvidia-ml.so.1"
_UUID_BYTES: Final = 96


class Reading(NamedTuple):
    """What NVML said."""

    #: UUID of the GPU, as NVML writes it (`GPU-…`).
    device_id: str
    memory_used_bytes: int
    #: By a stand-in: nothing was measured.
    simulated: bool
    #: time.monotonic() of the reading.
    at_s: float


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Sampler:
    """Readings of one GPU: its index or UUID; by default the first of CUDA_VISIBLE_DEVICES, or GPU 0.

    NVML numbers GPUs by their place on the PCI bus, CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID: name a GPU by
    its UUID where there are different ones.
    """

    def __init__(self, device: int | str | None = None, library: str = _LIBRARY) -> None:
        self._device = device
        self._library = library
        self._reading: Reading | None = None
        self._asked_s = -STALE_S
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._failed = False

    def read(self) -> Reading | None:
        """The last reading, if there is a fresh one. Never blocks."""
        now = time.monotonic()
        if now - self._asked_s >= REFRESH_S and not self._failed:
            self._asked_s = now
            self._ask()
        reading = self._reading
        return reading if reading is not None and now - reading.at_s < STALE_S else None

    def _ask(self) -> None:
        # A thread does not survive a fork.
        if self._thread is None or self._process != os.getpid():
            self._process = os.getpid()
            self._wanted = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._wanted,), name="tracer-nvml", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # The interpreter is shutting down, or there can be no more threads: there is no reading.
                self._failed = True
                return
        self._wanted.set()

    def _run(self, wanted: threading.Event) -> None:
        try:
            nvml = ctypes.CDLL(self._library)
            if nvml.nvmlInit_v2() != 0:
                raise OSError("nvmlInit_v2 failed")
            device = _device(nvml, self._device)
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if nvml.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES) != 0:
                raise OSError("nvmlDeviceGetUUID failed")
            name = uuid.value.decode("ascii", "replace")
            simulated = hasattr(nvml, "tracer_standin")
            memory = _Memory()
            while wanted.wait():
                wanted.clear()
                if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                    self._reading = Reading(name, memory.used, simulated, time.monotonic())
        except (OSError, AttributeError):
            # No NVML, or none that we know: it will not come while this program runs.
            self._failed = True


def _device(nvml: ctypes.CDLL, device: int | str | None) -> ctypes.c_void_p:
    """NVML's handle of a GPU."""
    if device is None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        device = int(first) if first.isdecimal() else first or 0
    handle = ctypes.c_void_p()
    if isinstance(device, int):
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device), ctypes.byref(handle))
    else:
        code = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    if code != 0:
        raise OSError(f"NVML knows no GPU {device!r}: error {code}")
    return handle


@functools.cache
def sampler(device: int | str | None = None) -> Sampler:
    """The program's one sampler of a GPU."""
    return Sampler(device)
