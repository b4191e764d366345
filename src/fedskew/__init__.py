"""Federated learning when clients hold different labels.

`simulate` trains a federation on this machine; `describe` says how skewed its labels are. PyTorch is imported when the
first name that needs it is used, so that label counts can be looked at without waiting for it.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
