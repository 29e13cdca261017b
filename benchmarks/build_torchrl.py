"""Compiles TorchRL's C++ part for the torch that is installed: ``python -m benchmarks.build_torchrl``.

Its wheels are compiled for one version of torch and say so nowhere; with another one TorchRL imports, but its
prioritised sampler does not work. They bring their sources, which need a C++ compiler and ninja, for a minute
or two.
"""

from __future__ import annotations

import importlib.machinery
import shutil
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Compile it, and put it where TorchRL looks for it."""
    import torchrl
    from torch.utils.cpp_extension import load

    package = Path(torchrl.__file__).parent
    sources = [str(package / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")]
    # As upstream compiles it.
    built = load("_torchrl", sources, extra_cflags=["-O3"], with_cuda=False)
    target = package / f"_torchrl{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    shutil.copy(built.__file__, target)
    print(f"compiled {target}")


if __name__ == "__main__":
    main()
