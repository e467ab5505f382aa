from collections.abc import Callable
from typing import Any

import numpy as np

from thinwire.kernels.cpu._jit import F32, U8, U64

Sum = Callable[[F32, int, U64, int, F32, int, np.float32], None]
Encode = Callable[[F32, int, np.float32, np.float32, np.uint32, np.uint32, U8, int], None]
EncodeDifference = Callable[[F32, F32, int, np.float32, np.float32, bool, U8, int], None]
AddDecoded = Callable[[F32, int, U8, int, np.float32, np.float32], None]

def sum_decoded64(bits: int, tables: bool) -> Any: ...

sum_decoded64_1bit: Sum
sum_decoded64_2bit: Sum
sum_decoded64_4bit: Sum
sum_decoded64_8bit: Sum
encode64_1bit: Encode
encode64_2bit: Encode
encode64_4bit: Encode
encode64_8bit: Encode
encode_difference64_1bit: EncodeDifference
encode_difference64_2bit: EncodeDifference
encode_difference64_4bit: EncodeDifference
encode_difference64_8bit: EncodeDifference
add_decoded64_1bit: AddDecoded
add_decoded64_2bit: AddDecoded
add_decoded64_4bit: AddDecoded
add_decoded64_8bit: AddDecoded
