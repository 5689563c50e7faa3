"""The C++ kernels for the CPU: compiled with the package or on first use, called through a plain C ABI.

in: the sources beside this file, a C++ compiler if there is one. out: a loaded library, or None and one warning.
never: is needed: without it, torch computes the same.
"""

from bough.kernels.cpu_build.marking import mark_kernels
from bough.kernels.cpu_build.shared_library import custom_kernels_allowed, forbid_custom_kernels, library

__all__ = ["custom_kernels_allowed", "forbid_custom_kernels", "library", "mark_kernels"]
