"""Weights as releases store them: codes and scales of blocks, and the linear layer that reads them.

    e4m3 (fp8)    sign, 4 bits of exponent (bias 7), 3 of mantissa: largest 448, no infinity; 0x7F and 0xFF are NaN
    e2m1 (fp4)    sign, 2 bits of exponent (bias 1), 1 of mantissa: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives
    e8m0 (scale)  2^(b - 127) of a byte b; 0xFF is NaN. b = 0 is a subnormal fp32

    fp8:   W[i, k] = e4m3(q[i, k]) * s[i // 128, k // 128]           s: e8m0 bytes (V4) or fp32 (V3.2); it multiplies
    fp4:   W[i, k] = e2m1(nibble k of row i) * s[i, k // 32]         byte c: columns 2c (low nibble), 2c + 1

    y = x W^T

Every product of a code and an e8m0 scale is an fp32 number or beyond its range, so dequantising loses nothing.
Sources: OCP 8-bit floating point (E4M3) and OCP microscaling formats (MXFP4, E8M0) specifications; block sizes and
names from the releases of DeepSeek-V3.2 and DeepSeek-V4. Ops: `linear_fp8`, `dequantise_fp8`; the routed experts over
such banks are in `moe`.
"""
