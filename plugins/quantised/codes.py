"""The value of every code, as Python floats: all of them are fp32 numbers."""

from __future__ import annotations

NAN = float("nan")


def _e4m3(code: int) -> float:
    exponent, mantissa, sign = code % 128 // 8, code % 8, -1.0 if code >= 128 else 1.0
    if code % 128 == 127:
        return NAN
    return sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-9 * mantissa)


E4M3 = tuple(_e4m3(code) for code in range(256))
E8M0 = (*(2.0 ** (code - 127) for code in range(255)), NAN)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_PAIRS = tuple((E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256))  # low nibble first
