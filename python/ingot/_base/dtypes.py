"""The dtypes of the format, by the names that frameworks call them by.

If a framework has another name for a dtype, its own module maps it. The dtypes of callers are parsed here,
without an import of a framework.
"""

from __future__ import annotations

# Header code to name. F6 is missing, since the packing of 6-bit values is not settled.
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

# F4 has two dtypes in frameworks: with one element in a byte, and with two.
F4_LOOSE = "float4_e2m1fn"
F4_PACKED = "float4_e2m1fn_x2"

# Header code to NumPy's type string. Files are little-endian on every machine.
TYPE_STRINGS = {"BOOL": "|b1", "U8": "|u1", "I8": "|i1"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}"
    for kind, sizes in (("I", (2, 4, 8)), ("U", (2, 4, 8)), ("F", (2, 4, 8)), ("C", (8,)))
    for size in sizes
}

# The hint for complex numbers of another width.
ANOTHER_COMPLEX = ": convert it to complex64, or save its `.real` and `.imag`"

# Words that mean different dtypes in different libraries.
_AMBIGUOUS = {
    "f4": "F4 in a file and float32 to NumPy",
    "i8": "I8 in a file and int64 to NumPy",
    "u8": "U8 in a file and uint64 to NumPy",
    "float": "float32 to torch and float64 to NumPy",
    "int": "int32 to torch and int64 to NumPy",
}

# The codes of elements that are smaller than a byte.
PACKED = ("F4", "F6_E2M3", "F6_E3M2")

# Every code that a file may have.
IN_FILES = (*NAMES, *PACKED)

# Other words for a dtype, in lower case.
_OTHERS = {F4_LOOSE: "F4", F4_PACKED: "F4", "bool_": "BOOL", "half": "F16", "double": "F64"}
# NumPy's names for C types with the width of another type.
_OTHERS |= {"intc": "I32", "uintc": "U32", "longlong": "I64", "ulonglong": "U64"}
_ALL = {code.lower(): code for code in IN_FILES} | CODES | _OTHERS
_ALL |= {word: code for code, string in TYPE_STRINGS.items() for word in (string, string[1:])}
# Words in lower case, and codes as in a file, without ambiguous words.
_WORDS = {word: code for word, code in _ALL.items() if word not in _AMBIGUOUS}
_WORDS |= {code: code for code in IN_FILES}

# Python's own types, with NumPy's and torch's meaning.
_BUILTINS: dict[object, str] = {bool: "bool", int: "int64", float: "float64"}

# Modules before the name of a dtype in its repr.
_MODULES = ("torch", "numpy", "np", "ml_dtypes", "jax.numpy", "jnp", "tensorflow", "tf", "mlx.core", "paddle")


def word_of(dtype: object) -> str:
    """Return the word for `dtype` in lower case, without its framework's name.

    Other objects return any text.
    """
    if isinstance(dtype, type):
        return _BUILTINS.get(dtype) or dtype.__name__.lower()
    shown = str(dtype)
    module, _, word = shown.rpartition(".")
    if module in _MODULES:
        # The repr is checked before `name`, since the name of paddle.bfloat16 is "uint16".
        return word.lower()
    # For the dtypes of NumPy and TensorFlow, whose str() shows the byte order, or brackets.
    name = getattr(dtype, "name", None)
    return (name if isinstance(name, str) else shown).lower()


def code_of(dtype: object) -> str | None:
    """Return the header's code for a dtype in any spelling. None if there is no code, or more than one."""
    # Most words are in the table unchanged.
    code = _WORDS.get(dtype) if isinstance(dtype, str) else None
    return code or _WORDS.get(word_of(dtype))


def meant(dtype: object) -> str | None:
    """Return a hint for a dtype without a code if a similar one has a code, or None."""
    word = word_of(dtype)
    if word in _AMBIGUOUS:
        return f"{word!r} is {_AMBIGUOUS[word]}"
    near = word.replace("fp", "f").upper()
    # Codes come first, since NumPy's own words count bytes: its f8 is float64.
    return f"did you mean {near!r}?" if near in NAMES else None
