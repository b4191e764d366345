"""Pages that show runs, made from their records alone.

The public names stand in `__init__.pyi`. A module is imported when the first of its names is used: reading a run needs
no library that draws.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
