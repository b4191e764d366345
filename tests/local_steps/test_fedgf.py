from __future__ import annotations

import pytest
import torch

from fedskew.hooks import RoundEnd
from fedskew.local_steps import INDEX, StepSettings

FedGF = INDEX["fedgf"]
FedSAM = INDEX["fedsam"]

PERTURBED, SHARE, WINDOW = "fedgf.perturbed", "fedgf.share", "fedgf.window"  # as in checkpoints

G = torch.Generator().manual_seed(0)
START = torch.randn(7, generator=G, dtype=torch.float64)


def gradient(parameters):
    return 4 * parameters**3


def round_end(old, new, distances) -> RoundEnd:
    changes = torch.tensor([[distance, 0.0] for distance in distances])
    nobody = torch.zeros(0).numpy()
    return RoundEnd(torch.tensor(old), torch.tensor(new), changes, nobody, nobody, [], clients=9)


def state_of(step: FedGF, *rounds: RoundEnd):
    state = step.init_server(torch.zeros(2), 9)
    for end in rounds:
        state = step.end_round(state, end)
    return state


def test_one_step_worked_out_by_hand():
    # theta (3, 4), gradient the identity, rho 0.5: ascended to (3.3, 4.4). Server's point (10, 0), c 0.25:
    # the gradient is taken at (0.75 * 3.3 + 2.5, 0.75 * 4.4) = (4.975, 3.3); lr 0.1.
    theta = torch.tensor([3.0, 4.0], dtype=torch.float64)
    broadcast = {
        PERTURBED: torch.tensor([10.0, 0.0], dtype=torch.float64),
        SHARE: torch.tensor(0.25, dtype=torch.float64),
    }
    settings = StepSettings(theta, 0.1, broadcast=broadcast)
    after, _ = FedGF(rho=0.5).step(theta, lambda at: at, torch.zeros_like(theta), settings)
    torch.testing.assert_close(after, theta - 0.1 * torch.tensor([4.975, 3.3], dtype=torch.float64), rtol=0, atol=1e-7)


def test_the_first_round_is_fedsam_to_the_bit():
    step = FedGF(rho=0.2)
    settings = StepSettings(START, 0.003, 0.9, 0.01, step.broadcast(step.init_server(START + 5, 9)))
    ours = theirs = START
    carried = buffer = {"momentum": torch.zeros_like(START)}
    for _ in range(5):
        ours, carried = step.step(ours, gradient, carried, settings)
        theirs, buffer = FedSAM(rho=0.2).step(theirs, gradient, buffer, settings)
    assert torch.equal(ours, theirs)


def test_the_server_perturbs_the_new_model_against_its_last_move():
    # From (1, 1) to (4, 5): uphill is (-3, -4) / 5, and reach 0.5 gives (4 - 0.3, 5 - 0.4).
    state = state_of(FedGF(rho=0.5), round_end([1.0, 1.0], [4.0, 5.0], [1.0]))
    torch.testing.assert_close(state[PERTURBED], torch.tensor([3.7, 4.6]))
    state = state_of(FedGF(rho=0.5, server_rho=1.0), round_end([1.0, 1.0], [4.0, 5.0], [1.0]))
    torch.testing.assert_close(state[PERTURBED], torch.tensor([3.4, 4.2]))


def test_c_is_the_share_of_divergent_rounds_in_the_window():
    step = FedGF(threshold=0.5, window=3)
    far, near = round_end([0.0, 0.0], [1.0, 1.0], [0.9, 0.2]), round_end([0.0, 0.0], [1.0, 1.0], [0.9, 0.05])
    # Mean distances 0.55 and 0.475.
    shares = [step.broadcast(state_of(step, *[far, near, near, far, far][:rounds]))[SHARE] for rounds in range(6)]
    assert [share.item() for share in shares] == pytest.approx([0, 1, 1 / 2, 1 / 3, 1 / 3, 2 / 3])
    assert len(state_of(step, far, near, near, far, far)[WINDOW]) == 3


def test_a_model_that_did_not_move_is_its_own_worst_point():
    state = state_of(FedGF(), round_end([1.0, 2.0], [1.0, 2.0], [0.0]))
    assert state[PERTURBED].tolist() == [1, 2]
    assert state[WINDOW].tolist() == [0]
