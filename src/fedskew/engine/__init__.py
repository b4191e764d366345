"""Rounds of federated learning: the algorithm, written once, and the backends that train a cohort."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
