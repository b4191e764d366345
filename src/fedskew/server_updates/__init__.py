"""How the weighted updates of a round move the model."""

from fedskew.server_updates._plain import Plain, PlainState
from fedskew.server_updates._protocol import ServerUpdate

INDEX: dict[str, type] = {"plain": Plain}

__all__ = ["INDEX", "Plain", "PlainState", "ServerUpdate"]
