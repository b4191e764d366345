"""Learning rates over rounds, against torch.optim.lr_scheduler; what makes no sense of them."""

import pytest
import torch
from torch.optim import lr_scheduler

from fedskew.engine import Group, LocalTraining
from fedskew.errors import ArgumentError

ROUNDS, LR = 20, 0.3


def theirs(warmup, schedule):
    """The rates of so many rounds under PyTorch's schedulers."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    after = schedule(optimiser, ROUNDS - warmup)
    if warmup:
        grows = lr_scheduler.LinearLR(optimiser, 1 / (warmup + 1), total_iters=warmup)
        after = lr_scheduler.SequentialLR(optimiser, [grows, after], milestones=[warmup])
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        after.step()
    return rates


PLANS = {
    "none": ({"lr_decay": 0.9}, lambda by, _: lr_scheduler.ExponentialLR(by, 0.9)),
    "step": ({"schedule": "step", "lr_decay": 0.5, "decay_every": 4}, lambda by, _: lr_scheduler.StepLR(by, 4, 0.5)),
    "cosine": ({"schedule": "cosine"}, lambda by, rounds: lr_scheduler.CosineAnnealingLR(by, rounds)),
    "cosine to 0.01": (
        {"schedule": "cosine", "final_lr": 0.01},
        lambda by, rounds: lr_scheduler.CosineAnnealingLR(by, rounds, 0.01),
    ),
    "linear to 0.03": (
        {"schedule": "linear", "final_lr": 0.03},
        lambda by, rounds: lr_scheduler.LinearLR(by, 1.0, 0.1, total_iters=rounds),
    ),
}


@pytest.mark.parametrize("warmup", [None, 1, 5])
@pytest.mark.parametrize("plan", PLANS)
def test_rates_are_pytorch_s(warmup, plan):
    keys, schedule = PLANS[plan]
    training = LocalTraining(lr=LR, rounds=ROUNDS, warmup=warmup, **keys)
    ours = [training.lr_of(round) for round in range(1, ROUNDS + 1)]
    assert ours == pytest.approx(theirs(warmup or 0, schedule), rel=1e-9)
    assert min(ours) > 0


def test_by_hand_and_after_the_last_round_the_rate_stays():
    cosine = LocalTraining(lr=1.0, schedule="cosine", warmup=1, rounds=5)
    rates = [cosine.lr_of(round) for round in range(1, 8)]
    assert rates == pytest.approx([0.5, 1, (1 + 0.5**0.5) / 2, 0.5, *[(1 - 0.5**0.5) / 2] * 3])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"schedule": "cosine"}, "rounds: a cosine schedule ends with the last one"),
        ({"schedule": "linear", "rounds": 9, "lr_decay": 0.9}, "lr_decay: a linear schedule has its own"),
        ({"schedule": "cosine", "rounds": 5, "warmup": 5}, "warmup: 5, of 5 in all, leaves no round for"),
        ({"schedule": "cosine", "rounds": 5, "final_lr": 0.01}, "final_lr: 0.01 is not below lr"),
        ({"final_lr": 0.001}, 'final_lr: is of schedule = "cosine" or "linear"'),
        ({"schedule": "step", "lr_decay": 0.5}, "decay_every: missing"),
        ({"schedule": "step", "decay_every": 3}, "lr_decay: at 1 a step schedule changes nothing"),
        ({"decay_every": 3, "lr_decay": 0.5}, 'decay_every: is of schedule = "step"'),
        ({"groups": (Group("head.*"),)}, "groups: one says neither lr nor weight_decay"),
    ],
)
def test_what_makes_no_sense_is_refused(keys, says):
    with pytest.raises(ArgumentError) as why:
        LocalTraining(**keys)
    assert str(why.value).startswith(says)


def test_a_group_that_nothing_belongs_to_is_refused_with_the_nearest_name():
    names, decay = ("fc.weight", "fc.bias", "head.weight"), 0.0
    LocalTraining(groups=(Group("*.bias", None, decay), Group("fc.*", 0.1))).check_groups(names)
    with pytest.raises(ArgumentError, match=r"groups\[0\]\.match: .* like 'haed.*' \(did you mean 'head.\*'\?\)"):
        LocalTraining(groups=(Group("haed.*", 0.1),)).check_groups(names)
    with pytest.raises(ArgumentError, match=r"groups\[1\]\.match: all that 'fc.bias' matches is in groups before it"):
        LocalTraining(groups=(Group("fc.*", 0.1), Group("fc.bias", None, decay))).check_groups(names)
