"""Memory that is left, and the peak of a stretch of work: of the GPU where the model is on one, else of the process."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
CGROUP = Path("/sys/fs/cgroup")


def available(device: torch.device) -> int:
    """Bytes that can still be allocated: on a GPU, or on the host within the limit of its container."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no container, or none with a limit ("max")
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # cached files give way
    return free


def release() -> None:
    """Give freed memory back to the system, where the allocator is one that keeps it (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Context manager; afterwards ``peak_bytes`` is the most memory held inside it.

    On a GPU: bytes allocated by PyTorch. On a CPU: resident bytes of the process, weights and code included. Linux can
    reset that peak; elsewhere it is the peak since the process began.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # not Linux, or not permitted: the peak since the process began
                CLEAR.write_text("5")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self.peak_bytes = _resident_peak()


def _resident_peak() -> int:
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # the kernel reports KiB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
