"""Runs as an engine would have recorded them: cohorts, weights and mixes are consistent, accuracies are made up."""

import dataclasses
import math

import numpy as np

from fedskew.engine import ClientEvaluation, Evaluation, RoundRecord
from fedskew.metrics import SiteRow
from fedskew.report import SeedRun

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def example_run(
    label: str = "fedavg",
    seed: int = 0,
    *,
    rounds: int = 40,
    clients: int = 20,
    classes: int = 10,
    cohort: int = 5,
    skill: float = 0.75,
    towards_target: float = 0.0,
    target: bool = True,
    evaluate_every: int = 1,
    client_evaluations: bool = False,
    diverging: tuple[int, ...] = (),
    class_names: tuple[str, ...] | None = None,
) -> SeedRun:
    """`skill`: final accuracy; `towards_target`: how far weights lean to clients whose labels are the target's;
    `diverging`: clients that diverge whenever chosen."""
    rng = np.random.default_rng([seed, clients, classes])
    counts = np.stack(
        [rng.multinomial(rng.integers(50, 600), rng.dirichlet(np.full(classes, 0.2))) for _ in range(clients)]
    )
    marginals = counts / counts.sum(axis=1, keepdims=True)
    mix = np.linspace(2.0, 0.2, classes) / np.linspace(2.0, 0.2, classes).sum() if target else None
    difficulty = rng.uniform(0.5, 1.2, classes)
    lines = []
    for number in range(rounds + 1):
        chosen = [int(client) for client in rng.permutation(clients)[:cohort]] if number else []
        diverged = [client for client in chosen if client in diverging]
        answered = [client for client in chosen if client not in diverged]
        sizes = counts[answered].sum(axis=1)
        weights = sizes / sizes.sum() if answered else np.array([])
        if answered and mix is not None:
            lean = weights * np.exp(-towards_target * 20 * ((marginals[answered] - mix) ** 2).sum(axis=1))
            weights = lean / lean.sum()
        labels = counts[chosen].sum(axis=0)
        shares = labels[labels > 0] / labels.sum() if chosen else None
        entropy = None if shares is None else float(-(shares * np.log2(shares)).sum())
        progress = 1 - np.exp(-5 * number / max(rounds, 1))
        lines.append(
            RoundRecord(
                seed=seed,
                round=number,
                cohort=chosen,
                answered=answered,
                diverged=diverged,
                weights=[float(weight) for weight in weights],
                steps=[int(size // 32 + 1) for size in sizes],
                loss=float(2.3 * (1 - 0.8 * progress) + 0.05 * rng.random()) if answered else None,
                entropy=entropy,
                kl=None if entropy is None else float(np.log2(classes) - entropy),
                ess=float(1 / (weights**2 / sizes).sum()) if answered else None,
                ess_share=float(1 / (weights**2 / sizes).sum() / sizes.sum()) if answered else None,
                target_distance=float(((weights @ marginals[answered] - mix) ** 2).sum())
                if answered and mix is not None
                else None,
                drift=float(0.3 + 0.4 * progress + 0.1 * rng.random()) if answered else None,
                seconds=0.25,
                bytes_up=248_024 * len(chosen),
                bytes_down=248_024 * len(chosen),
                evaluation=_evaluation(rng, skill * progress, difficulty, mix)
                if number % evaluate_every == 0 or number == rounds
                else None,
                validation=None,
                clients=[_client(rng, client, progress) for client in answered] if client_evaluations else None,
            )
        )
    return SeedRun(
        label=label,
        seed=seed,
        config={
            "schema": 1,
            "name": label,
            "seeds": [seed],
            "data": {"name": "cifar10", "validation": 0.0},
            "method": {"weighting": {"name": label}, "selection": {"name": "uniform"}},
            "training": {"rounds": rounds, "lr": 0.01},
        },
        rounds=lines,
        counts=counts,
        client_names=tuple(f"client {client}" for client in range(clients)),
        class_names=class_names or (CIFAR if classes == 10 else tuple(f"class {index}" for index in range(classes))),
        target=mix,
        summary=_summary(lines),
    )


def with_sites(run: SeedRun, rows: dict[str, list[float]]) -> SeedRun:
    """The run with these accuracies of its clients by row; NaN: the client has no test samples."""
    made = [
        SiteRow(client, row, 10, value, value, value, math.nan, math.nan, 0.1, 1 - value)
        for row, values in rows.items()
        for client, value in enumerate(values)
        if not math.isnan(value)
    ]
    return dataclasses.replace(run, sites=tuple(made))


def _evaluation(
    rng: np.random.Generator, accuracy: float, difficulty: np.ndarray, mix: np.ndarray | None
) -> Evaluation:
    classes = len(difficulty)
    per_class = np.clip((0.1 + accuracy) * difficulty + rng.normal(0, 0.03, classes), 0, 1)
    right = np.round(100 * per_class).astype(int)
    return Evaluation(
        accuracy=float(per_class.mean()),
        loss=float(2.3 * (1 - accuracy)),
        balanced_accuracy=float(per_class.mean()),
        macro_f1=float(0.97 * per_class.mean()),
        per_class=[float(value) for value in per_class],
        confusion=(np.diag(right) + np.diag(100 - right)[:, ::-1]).tolist(),
        target_accuracy=None if mix is None else float(per_class @ mix),
    )


def _client(rng: np.random.Generator, client: int, progress: float) -> ClientEvaluation:
    return ClientEvaluation(
        client=client,
        per_class=[],
        confusion=[],
        majority=float(0.6 + 0.35 * progress),
        minority=float(0.5 * progress + 0.1 * rng.random()) if rng.random() < 0.9 else None,
        vacant=float(0.3 * progress * rng.random()),
    )


def _summary(lines: list[RoundRecord]) -> dict:
    names = ("accuracy", "balanced_accuracy", "macro_f1", "worst_class", "target_accuracy", "loss")
    evaluations = [line.evaluation for line in lines if line.evaluation is not None]
    figures = [{name: getattr(one, name) for name in names} for one in evaluations]

    def mean(key: str) -> float | None:
        values = [one[key] for one in figures[-10:] if one[key] is not None]
        return float(np.mean(values)) if values else None

    return {
        "final": figures[-1],
        "last10": {key: mean(key) for key in figures[-1]},
        "max": max(figures, key=lambda one: one["accuracy"]),
        "best_by_validation": None,
        "rounds": lines[-1].round,
        "seconds": sum(line.seconds for line in lines),
        "bytes_up": sum(line.bytes_up for line in lines),
        "bytes_down": sum(line.bytes_down for line in lines),
        "versions": {"fedskew": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        "machine": {"processor": "an example", "cores": 2},
        "revision": "0123abc",
    }


def rare_run(label: str, right: tuple[int, int], seed: int = 0) -> SeedRun:
    """A run of 941 negative and 59 positive test samples, whose every model gets so many of both right."""
    run = example_run(
        label, seed, rounds=20, clients=8, cohort=4, classes=2, class_names=("healthy", "ill"), target=False
    )
    sizes = (941, 59)
    shares = [number / size for number, size in zip(right, sizes, strict=True)]
    evaluation = dataclasses.replace(
        run.rounds[-1].evaluation,
        accuracy=sum(right) / sum(sizes),
        balanced_accuracy=sum(shares) / 2,
        per_class=shares,
        confusion=[[right[0], sizes[0] - right[0]], [sizes[1] - right[1], right[1]]],
    )
    figures = {name: getattr(evaluation, name) for name in run.summary["final"]}
    means = {
        key: value | figures for key, value in run.summary.items() if isinstance(value, dict) and "accuracy" in value
    }
    rounds = [dataclasses.replace(record, evaluation=evaluation) for record in run.rounds]
    return dataclasses.replace(run, rounds=rounds, summary=run.summary | means)
