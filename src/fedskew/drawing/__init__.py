"""Figures as files: functions from arrays to matplotlib `Axes`, in one style, and their export.

`fedskew describe` and the papers' figures are drawn by these functions. They know nothing of runs or records: what they
draw are arrays. The public names stand in `__init__.pyi`. A module is imported when the first of its names is used:
what a line is drawn from needs no matplotlib.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
