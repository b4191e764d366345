"""The arena: methods compared in many situations, tuned under one budget; what they gained where labels are alike.

The public names stand in `__init__.pyi`; advice is looked up without PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
