"""Methods: named combinations of components, and what may be combined.

A method is one component for each of the six slots of a round, and perhaps a finish, which comes once after the last
one. In a config it is a preset, a table per slot, or both. A table that names a component replaces what the preset
brings for its slot; one without a name changes parameters of it.

    [method]
    preset = "fedentopt+fedprox"

    [method.local_step]
    mu = 0.1

    [method.weighting]
    name = "fedpals"
    ess = 0.25

    [method.finish]
    name = "adapt"

A user's own component is named `module:Class` wherever the name of one of ours may stand. Terms of one's own are added
to a preset's by `extra_terms`:

    [method]
    preset = "fedvls"
    objective.extra_terms = [{ name = "own:Mine", weight = 0.1 }]

Presets are joined by "+". Each brings components of slots, a classification loss, or terms; a slot that none fills is
FedAvg's. Two that bring the same thing are refused, unless one of them gives way (`presets.toml`): so "fedlc+fedvls" is
FedLC's loss with FedVLS's two terms, as in that paper's table 6.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
