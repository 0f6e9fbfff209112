"""The C library's allocator: how much it holds, and settings under which freed activations go back to the system.

PyTorch's CPU tensors come from malloc. glibc serves blocks above a threshold by mmap, which give their memory back when freed, and
others from a heap that keeps it. The threshold starts at 128 KiB and grows to the largest block freed so far (up to 32 MiB), so
after one step activations live in the heap, whose holes stay resident.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
