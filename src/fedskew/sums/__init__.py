"""Masked sums: a server learns the sum of its sites' vectors, and no single one.

Every site adds masks to its vector of integers, which then looks uniformly random. The masks cancel in the sum: for
each pair of sites one that both derive from their keys, added by one and subtracted by the other; and for each site one
of its own, which it reveals once all have masked. All arithmetic is modulo 2**32 or 2**64, so the sum is exact.

    site    i:  SumContext -> mask -> (Masked, bytes);  it keeps the bytes, then sends Masked
    server   :  if all members sent a Masked in time: it asks them to open
    site    i:  the bytes, once
    server   :  unmask(those Masked, what opens them, context) -> the sum over all members

A member that does not arrive costs an attempt: the server asks the others anew (`attempt + 1`) without it. One that
does not open its own mask costs the sum: what was sent stays hidden by the mask that nobody opened.

Numbers become integers by `fixed_point` (`UPDATES`, `NUMBERS`, `COUNTS`), which needs no keys and no `cryptography`: a
simulation uses the same (`add`). Keys are X25519, pair masks are derived by HKDF-SHA256, masks are ChaCha20
streams, all from the package `cryptography` (extra `fedskew[flower]`).

The threat model is an honest but curious server that does not collude with sites; see `docs/privacy.md`.
"""

from fedskew.sums._masking import Key as Key
from fedskew.sums._masking import Masked as Masked
from fedskew.sums._masking import SumContext as SumContext
from fedskew.sums._masking import mask as mask
from fedskew.sums._masking import unmask as unmask
