"""Masked sums: a server learns the sum of its sites' vectors, and no single one.

Every site adds masks to its vector of integers, which then looks uniformly random. The masks cancel in the sum: for
each pair of sites one that both derive from their keys, added by one and subtracted by the other; and for each site one
of its own, which it reveals once it knows who arrived. All arithmetic is modulo 2**32 or 2**64, so that the sum is
exact.

    site    i:  SumContext -> mask -> (Masked, Pending);  it keeps the Pending, then sends Masked
    server   :  if all members sent a Masked in time: it asks them to open
    site    i:  Pending.answer(arrived) -> Opening, once
    server   :  unmask(those Masked, their Openings, context) -> the sum over `arrived`

A member that does not arrive costs an attempt: the server asks the others anew (`attempt + 1`) without it. One that
does not open its own mask costs the sum: what was sent stays hidden by the mask that nobody opened.

`Pending.answer` and `unmask` also open a sum without members that did not arrive: the others reveal the masks
that they share with them. This is safe only if sites make sure, without trusting the server, that all were told the
same `arrived` (Bonawitz's consistency check). The sites of `fedskew.deploy` have none, and open whole sums only.

Numbers become integers by `fixed_point` (`UPDATES`, `NUMBERS`, `COUNTS`), which needs no keys and no `cryptography`: a
simulation uses the same (`add`). Keys are X25519, pair masks are derived by HKDF-SHA256, masks are ChaCha20
streams, all from the package `cryptography` (extra `fedskew[flower]`).

The threat model is an honest but curious server that does not collude with sites; see `docs/privacy.md`.
"""

from fedskew.sums._keys import Key
from fedskew.sums._masking import Masked, Opening, Pending, SumContext, mask, unmask

__all__ = [
    "Key",
    "Masked",
    "Opening",
    "Pending",
    "SumContext",
    "mask",
    "unmask",
]
