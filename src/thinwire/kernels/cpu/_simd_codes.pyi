from typing import Any, Literal

import numpy as np

from thinwire.kernels.cpu._jit import F32, U8, U64

Bits = Literal[1, 2, 4, 8]

def has_tables() -> bool: ...
def sum_decoder(tables: bool) -> Any: ...
def sum_decoded64(
    bits: Bits, out: F32, at: int, packed: U64, offset: int, steps: F32, workers: int, factor: np.float32
) -> None: ...
def add_decoded64(
    bits: Bits, last: F32, at: int, packed: U8, byte: int, step: np.float32, radius: np.float32
) -> None: ...
def encode64(
    bits: Bits,
    x: F32,
    at: int,
    inverse: np.float32,
    add: np.float32,
    counter: np.uint32,
    key: np.uint32,
    packed: U8,
    byte: int,
) -> None: ...
def encode_difference64(
    bits: Bits,
    grad: F32,
    last: F32,
    at: int,
    radius: np.float32,
    step: np.float32,
    update: bool,
    packed: U8,
    byte: int,
) -> None: ...
