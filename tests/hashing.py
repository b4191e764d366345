"""The draws of `fedskew.randomness`, in plain integers."""


def hashed(*words: int) -> float:
    """What `randomness.uniform` draws for these words."""
    value = 0
    for word in words:
        value = (value * 0x01000193 + word + 0x1E3779B9) % 2**32
        value = (value ^ (value >> 16)) * 0x21F0AAAD % 2**32
        value = (value ^ (value >> 15)) * 0x735A2D97 % 2**32
        value ^= value >> 15
    return (value >> 8) / 2**24
