"""Joules that the machine used, where it counts them: processors by RAPL, NVIDIA GPUs by their own counter."""

import importlib
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

import torch

POWERCAP = Path("/sys/class/powercap")
MICRO, MILLI = 1e-6, 1e-3


class EnergyMeter:
    """Context manager; afterwards ``joules`` are those used inside it by the part of the machine the model runs on:
    processor packages, or the GPU; None where the machine does not say. What else ran meanwhile is in it."""

    def __init__(self, device: torch.device):
        self._read = _gpu_joules if device.type == "cuda" else _package_joules
        self.joules: float | None = None

    def __enter__(self) -> "EnergyMeter":
        self._before = self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.joules = used(self._before, self._read(), _ranges())


def used(before: Mapping[str, float], after: Mapping[str, float], ranges: Mapping[str, float]) -> float | None:
    """Joules between two readings of the same counters; one that began anew at its range in between is understood.

    >>> used({"a": 9.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 10.0})
    3.0
    """
    if not before or before.keys() != after.keys():
        return None
    total = 0.0
    for name, start in before.items():
        passed = after[name] - start
        total += passed if passed >= 0 else passed + ranges.get(name, 0.0)
    return total


def _package_joules() -> dict[str, float]:
    """Counters of processor packages, by name: top-level RAPL zones; those inside them are counted by them. None can be
    read where the kernel keeps them from users."""
    return _of_zones("energy_uj")


def _ranges() -> dict[str, float]:
    return _of_zones("max_energy_range_uj")


def _of_zones(file: str) -> dict[str, float]:
    found = {}
    for zone in sorted(POWERCAP.glob("intel-rapl:?")):
        with suppress(OSError, ValueError):
            found[zone.name] = int((zone / file).read_text()) * MICRO
    return found


def _gpu_joules() -> dict[str, float]:
    read = _gpu_counter()
    if read is None:
        return {}
    with suppress(Exception):  # the driver may say no to a single question
        return {"gpu": read()}
    return {}


@cache
def _gpu_counter() -> Callable[[], float] | None:
    """Reads the counter of the GPU that PyTorch uses; None without NVIDIA's library for Python, or on an older GPU."""
    try:
        pynvml = importlib.import_module("pynvml")  # where it is installed
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI


# of nvidia-smi
GPU_FACTS = ("driver_version", "clocks.max.sm", "power.limit")  # what does not change in a run
GPU_STATE = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def gpu(facts: tuple[str, ...]) -> dict[str, str]:
    """What ``nvidia-smi`` says of the first GPU; nothing where there is no such command."""
    query = ["nvidia-smi", f"--query-gpu={','.join(facts)}", "--format=csv,noheader", "--id=0"]
    with suppress(OSError, subprocess.SubprocessError):
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return dict(zip(facts, (value.strip() for value in line.split(",")), strict=True))
    return {}
