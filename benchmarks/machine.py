"""The machine that a run was measured on, and how much memory something takes in it."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.timing import seconds_of

__all__ = ["available_memory", "copy_speed", "facts", "folder_bytes", "resident"]

_PACKAGES = (
    "rlio",
    "numpy",
    "pyarrow",
    "torch",
    "gymnasium",
    "ale-py",
    "mujoco",
    "ray",
    "torchrl",
    "tensordict",
    "cpprb",
    "minari",
    "d3rlpy",
    "h5py",
)


def facts() -> dict[str, Any]:
    """What a reader of the figures needs to know of the machine."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "caches": _caches(),
        "load_average_at_start": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "copy_gb_per_s": round(copy_speed(), 2),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def copy_speed(megabytes: int = 256) -> float:
    """Gigabytes a second of a copy of memory that no cache holds, by one thread; the best of five."""
    source = np.ones(megabytes << 20, np.uint8)
    target = np.ones_like(source)
    return source.nbytes / min(seconds_of(lambda: np.copyto(target, source)) for _ in range(5)) / 1e9


def resident() -> int | None:
    """Bytes of memory that this process has in use, mapped files included; None: unknown."""
    gc.collect()
    if sys.platform.startswith("linux"):
        # Freed memory that allocators keep would be counted for the wrong contender.
        pa.default_memory_pool().release_unused()
        ctypes.CDLL(None).malloc_trim(0)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return None


def available_memory() -> int:
    """Bytes that can be had without swapping; 0: unknown."""
    return _meminfo("MemAvailable")


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()


def _caches() -> str:
    """Sizes of the caches of the first processor, from Linux."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


def _meminfo(name: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # Not Linux.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if name == "MemTotal" else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
