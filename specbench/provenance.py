"""Where a number came from: code, packages, machine, command."""

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import psutil
import torch

import specbench
from specbench import energy

THROTTLED = Path("/sys/devices/system/cpu")
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "scipy", "pandas", "hydra-core", "gguf")


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def collect(module: str = "specbench") -> dict[str, Any]:
    """Everything that is known before a run starts. ``module``: the command that was given."""
    return {
        "specbench": specbench.__version__,
        "code_sha256": code_sha256(),
        "git": git_state(),
        "command": ["python", "-m", module, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": packages(),
        "machine": machine(),
        "load_average_1min": os.getloadavg()[0],
    }


@cache
def machine() -> dict[str, Any]:
    """Processor, threads, memory and, where there is one, GPU."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags(),
        "governor": _governor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts |= {f"gpu_{name}": value for name, value in energy.gpu(energy.GPU_FACTS).items()}
    return facts


def clocks() -> dict[str, Any]:
    """What the machine's clocks are at now, in MHz, how often heat has held the processor back since it started, and
    what holds back a GPU, as far as the machine says."""
    found: dict[str, Any] = {}
    with suppress(OSError, NotImplementedError):
        frequency = psutil.cpu_freq()
        found["cpu_mhz"] = None if frequency is None else frequency.current
    counters = list(THROTTLED.glob("cpu*/thermal_throttle/*_throttle_count"))
    if counters:
        found["cpu_throttled"] = sum(int(path.read_text()) for path in counters)
    if torch.cuda.is_available():
        found |= {f"gpu_{name}": value for name, value in energy.gpu(energy.GPU_STATE).items()}
    return found


@cache
def code_sha256() -> str:
    """Digest of every Python file of the harness and of the drafters that come with it."""
    import drafters

    digest = hashlib.sha256()
    for package in (specbench, drafters):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def outside_code(config: Any) -> dict[str, str]:
    """Digest of each source file, not of this project, that a ``_target_`` anywhere in ``config`` points into."""
    if isinstance(config, list | tuple):
        return {name: digest for value in config for name, digest in outside_code(value).items()}
    if not isinstance(config, Mapping):
        return {}
    found = outside_code(list(config.values()))
    target = str(config.get("_target_", ""))
    if target and target.split(".")[0] not in ("specbench", "drafters"):
        module = _module(target)
        if module is not None and module.origin and Path(module.origin).is_file():
            found[module.name] = hashlib.sha256(Path(module.origin).read_bytes()).hexdigest()
    return found


def _module(target: str) -> ModuleSpec | None:
    """The module that holds ``package.module.Class.method``: the longest beginning that is one."""
    parts, found = target.split("."), None
    for end in range(1, len(parts)):
        try:
            spec = importlib.util.find_spec(".".join(parts[:end]))
        except (ImportError, ValueError):
            break
        if spec is None:
            break
        found = spec
    return found


def differences(origin: Mapping[str, Any]) -> list[str]:
    """In what the code, packages and machine of a record differ from ours, in words."""
    found = []
    if origin["code_sha256"] != code_sha256():
        commit = (origin["git"] or {}).get("commit")
        found.append(f"other code ({'commit ' + commit[:10] if commit else 'specbench ' + origin['specbench']})")
    here = {**machine(), **packages()}
    there = {**origin["machine"], **origin["packages"]}
    return found + [f"{k} {there.get(k)} (now {here.get(k)})" for k in here | there if here.get(k) != there.get(k)]


@cache
def packages() -> dict[str, str]:
    """Versions of the packages that can change a number."""
    return {name: metadata.version(name) for name in PACKAGES}


@cache
def git_state() -> dict[str, Any] | None:
    """Commit of the checkout the code runs from, and a digest of its uncommitted changes and new files; None outside a
    checkout."""
    root = Path(specbench.__path__[0]).parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    code = ("--", "*.py", "*.yaml")
    changed = (_git(root, "diff", "HEAD", *code) or "").strip().encode()
    for name in (_git(root, "ls-files", "--others", "--exclude-standard", *code) or "").splitlines():
        with suppress(OSError):
            changed += name.encode() + b"\0" + (root / name).read_bytes()
    return {"commit": commit.strip(), "uncommitted_sha256": hashlib.sha256(changed).hexdigest() if changed else None}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


FAST = ("avx", "amx", "fma", "f16c", "neon", "asimd", "sve", "bf16", "i8mm")  # kinds of instructions that matter


def _cpu_flags() -> list[str]:
    """The processor's instructions for arithmetic on many numbers at once."""
    for line in _cpu_info():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(flag for flag in flags.split() if flag.startswith(FAST))
    return []


def _governor() -> str | None:
    """Who sets the processor's clock; None where that is not said."""
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return path.read_text().strip() if path.exists() else None


def _cpu_info() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []


def _cpu_name() -> str:
    for line in _cpu_info():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
