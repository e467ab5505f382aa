"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.sign import (  # noqa: F401
    onebit_mean,
    onebit_pack,
    sign_majority,
    sign_mean,
    sign_pack,
    sign_pack_mean,
    sign_unpack,
)


def warm() -> None:
    pass
