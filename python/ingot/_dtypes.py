"""The dtypes of the format, by the names that frameworks call them by.

A framework that calls one otherwise says so in its own module.
"""

from __future__ import annotations

# Header code to name. F6 has no place here, since how 6-bit values are packed is not settled.
NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
CODES = {name: code for code, name in NAMES.items()}

# F4 has two names, which are two things: one element to a byte, and two.
F4_LOOSE = "float4_e2m1fn"
F4_PACKED = "float4_e2m1fn_x2"
