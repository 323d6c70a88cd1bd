"""Devices an engine may be built for, and their memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

_BYTES: Mapping[str, int] = {
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
    "rtx-pro-6000": 96 * 10**9,
}

DEVICES = ("cpu", *_BYTES)


def memory_of(device: str) -> int:
    """Bytes of memory, as its maker gives them; of `cpu` those of this machine."""
    return _BYTES.get(device) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
