"""What masked sums cost a site and the server, beside plain updates: CPU seconds and bytes, in one process.

    python benchmarks/masks.py [--largest 2000000]

For models of 62,006 (LeNet-5), 1,626,442 (cnn_w2) and 11,173,962 (ResNet-18) parameters, and 10 and 100 sites of which
one is lost after it was asked. `mask` is one site's encoding and masking, `open` what the server does with the replies
of all that are left (of 100 sites only up to `--largest` parameters, since it holds all of them: 45 MB a site for the
largest). `plain` is the encoding's counterpart: a float32 copy at the site, and the weighted sum of float32 updates at
the server. Bytes are what one site sends: update, commitments and opened seeds. CPU seconds of one thread, the least of
three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedskew.sums import Key, SumContext, mask, unmask
from fedskew.sums.fixed_point import UPDATES

SIZES = (62_006, 1_626_442, 11_173_962)


def least(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    taken = []
    for _ in range(times):
        began = time.process_time()
        done = work()
        taken.append(time.process_time() - began)
    return min(taken), done


def row(parameters: int, sites: int, largest: int) -> str:
    keys = {f"site-{at}": Key.generate() for at in range(sites)}
    peers = {name: key.public for name, key in keys.items()}
    context = SumContext("run", 1, 1, "train", tuple(peers))
    update = np.random.default_rng(0).normal(scale=1e-3, size=parameters).astype(np.float32)
    names = list(keys)
    site, _ = least(lambda: mask(UPDATES.encode(update, 1 / sites), keys[names[0]], peers, context))
    plain, _ = least(lambda: update.copy())
    server = summed = None
    if parameters * sites <= largest * 100 or sites == 10:
        both = {name: mask(UPDATES.encode(update, 1 / sites), keys[name], peers, context) for name in names}
        masked = {name: sent for name, (sent, _) in both.items()}
        openings = {name: opening for name, (_, opening) in both.items()}
        server, opened = least(lambda: unmask(masked, openings, context), 1 if sites > 10 else 3)
        assert np.abs(UPDATES.decode(opened) - update).max() <= UPDATES.error(sites)
        summed, _ = least(lambda: sum(update.astype(np.float64) / sites for _ in range(sites)))
    sent = 4 * parameters + Key.SEED * (sites + 2)
    shown = ["not measured" if value is None else f"{value:.3g}" for value in (server, summed)]
    costs = f"{site:.2g} | {plain:.1g} | {shown[0]} | {shown[1]}"
    return f"| {parameters:,} | {sites} | {costs} | {4 * parameters:,} | {sent:,} |"


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument(
        "--largest", type=int, default=2_000_000, help="parameters up to which the server opens 100 sites"
    )
    largest = said.parse_args().largest
    print(
        "| parameters | sites | mask, s a site | plain | open, s at the server | plain | bytes a site, plain | masked |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for sites in (10, 100):
        for parameters in SIZES:
            print(row(parameters, sites, largest), flush=True)


if __name__ == "__main__":
    main()
