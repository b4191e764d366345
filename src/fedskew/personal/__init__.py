"""Personal models: what a client makes of the common model for itself. Nothing of it leaves the client."""

from fedskew.personal._prior import HeldOut, Prior

INDEX: dict[str, type] = {
    "prior": Prior,
}

__all__ = [
    "INDEX",
    "HeldOut",
    "Prior",
]
