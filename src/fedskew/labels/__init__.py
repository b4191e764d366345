"""Which labels each client holds: counts, measures of skew, private release; which labels a target holds.

The estimates of a target's mix import scipy, and do so when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
