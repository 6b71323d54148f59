"""Arithmetic for grids and tiles on the host: Triton's own functions of these names take microseconds a call there."""


def cdiv(n: int, d: int) -> int:
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n, n at least 1."""
    return 1 << (n - 1).bit_length()
