"""Configs, runs and their folders, sweeps and their tables.

The public names stand in `__init__.pyi`. A module is imported when the first of its names is used, so that a site of a
real federation, which only reads its config, does not wait for the libraries that draw reports.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
