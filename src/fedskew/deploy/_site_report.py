"""A site's report for its own people: `site-report.html`, and its personal model in `personal/`, beside `data.toml`.

It is made at the site from what the site keeps, when the site asks for it; nothing of it is sent.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedskew import labels
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import FloatArray
from fedskew.deploy._home import HOME, ROUNDS, Home, own_models
from fedskew.deploy._moments import weighted
from fedskew.deploy._plan import Plan
from fedskew.deploy.app_files import APP, read_app, running
from fedskew.deploy.site_data import SiteData, SiteStates
from fedskew.deploy.terms import Terms, terms_path
from fedskew.engine import Assignment, Evaluation, RoundRecord
from fedskew.engine.target import logits_of
from fedskew.errors import ConfigError, FedskewError
from fedskew.experiment import RunFolder, read, summarise
from fedskew.files import private_folder, write_text
from fedskew.metrics import FindingScores, Scores, SiteRow
from fedskew.models import FlatModel, ModelState, last_layer
from fedskew.personal import HeldOut, OwnTraining
from fedskew.randomness import Purpose, generator
from fedskew.report import SeedRun, write_report

PAGE, PERSONAL = "site-report.html", "personal"
OFF = "own_models = false in agreed.toml"
POOLED = "Pooled: can't be had, as no place has the samples of all sites."


class _LackingError(FedskewError):
    """Raised where a model can't be had."""


class _Model(NamedTuple):
    """A model at the site: its network's logits of the test samples, and the common network with its weights."""

    logits: FloatArray
    network: nn.Module


@dataclass(frozen=True)
class SiteReport:
    """A site's report: figures of its models, what is said beside them, the page, and its personal model's folder."""

    rows: tuple[SiteRow, ...]
    notes: tuple[str, ...]
    page: Path
    model: Path | None

    @staticmethod
    def write(data: Path, app: Path | None = None) -> "SiteReport":
        """Train what the site's terms allow, evaluate its models, and write page and personal model beside `data.toml`.

        NotAgreedError where the site did not agree to the app (None: that in its folder); ConfigError where the
        server has not left the trained model here yet, or the site has no test samples.
        """
        terms, app = Terms.read(terms_path(data)), data.parent / APP if app is None else app
        terms.check_app(app)
        with running(read_app(app)) as folder:  # as it was agreed to
            config = read(folder / "run.toml").weights_in(data.parent)
            agreement = Agreement.read(folder / "deploy.toml")
            samples = SiteData.load(data, agreement)
            if (agreement.sums_moments or config.training.balances) and samples.state is not None:
                _, _, told = Home(terms.folder(samples.state) / HOME).common()
                agreement, config = agreement.told(told), weighted(config, told)
                samples = SiteData.load(data, agreement)
            if not len(samples.test_targets):
                raise ConfigError(f"{data}: the site has no test samples to report on; data.toml says where they are")
            made = _Models(Plan.of(config, agreement, at_site=True), terms, samples)
            return made.written(data.parent, (folder / "run.toml").read_text(encoding="utf-8"))


class _Models:
    """The models that a site has, and its report on them; `earlier` are records of rounds that are trained alone."""

    def __init__(self, plan: Plan, terms: Terms, data: SiteData) -> None:
        self.plan, self.terms, self.data = plan, terms, data
        self.notes: list[str] = []
        self.earlier: list[RoundRecord] = []
        self.config, self.untrained, self.work = plan.config, plan.model.read_state(), plan.work(data, plan.model)
        torch.set_num_threads(self.config.engine.threads)
        assert data.state is not None, "data.toml always has one"
        self.home = Home(terms.folder(data.state) / HOME)
        self.common, self.told, self.about = self.home.common()
        self.kept = SiteStates(data.state, self.about["run"]).load(self.about["counted"])

    @cached_property
    def models(self) -> dict[str, _Model]:
        """The models by their rows, in the order of a table; what is missing is said in `notes`."""
        found = {"common": self._model(self.plan.model, self.common)}
        for kind, make in (("alone", self._alone), ("personal", self._personal)):
            try:
                found[kind] = make()
            except _LackingError as error:
                self.notes.append(f"{kind.capitalize()}: there is none; {error}.")
        return {kind: found[kind] for kind in SiteRow.ROWS if kind in found}

    @property
    def rows(self) -> tuple[SiteRow, ...]:
        """Figures of each model on the site's test samples."""
        targets, several = [self.data.test_targets.cpu().numpy()], self.data.multi_label
        made = (SiteRow.of(kind, targets, [one.logits].__getitem__, several) for kind, one in self.models.items())
        return tuple(row for rows in made for row in rows)

    def written(self, folder: Path, config: str) -> SiteReport:
        """Make all models and figures, and write them."""
        found, rows = self.models, self.rows
        notes = (*map(_in_words, rows), POOLED, *self.notes, *self._sent())
        runs = [self._run(kind, model) for kind, model in found.items()]
        name = self.plan.agreement.names[self.about["client"]]
        page = write_report(runs, folder / PAGE, f"{self.config.name} at {name}", notes=notes)
        model = None
        if "personal" in found:
            model = folder / PERSONAL
            private_folder(model)
            write_text(model / "config.toml", config, private=True)
            write_text(model / "rounds.jsonl", "", private=True)
            info, network = self.plan.agreement.info, found["personal"].network
            RunFolder(model).save_model("model.safetensors", network.state_dict(), info)
            RunFolder(model).write_profile(info.profile(self.data.inputs))
        return SiteReport(rows, notes, page, model)

    @cached_property
    def _rounds(self) -> list[tuple[int, int]]:
        rounds = self.kept.get(ROUNDS, torch.zeros(0, 2)).tolist()
        return [(int(round), int(client)) for round, client in rounds]

    def _assignment(self, client: int, epochs: float) -> Assignment:
        return Assignment(client, epochs, steps=self.config.training.steps, samples=len(self.data.targets))

    def _model(self, model: FlatModel, state: ModelState) -> _Model:
        model.write_state(state)
        return _Model(logits_of(model.network, self.data.test_inputs, finite=False), copy.deepcopy(model.module))

    def _alone(self) -> _Model:
        if not self.terms.own_models:
            raise _LackingError(OFF)
        if not self._rounds:
            raise _LackingError("the site's training counted in no round")
        way = own_models(
            self.plan.model, self.work, self.plan.some_samples, "alone", OwnTraining("rounds"), self.untrained
        )
        kept: dict[str, Tensor] = {}
        for round, client in self._rounds:
            task = self._assignment(client, self.config.training.most_epochs)
            for _, trained in way.train(round, [task], self.untrained, lambda _: kept):
                kept.update(trained)
            if self.config.is_evaluated(round):
                self.earlier.append(self._record(round, self._model(way.model, way.of(self.common, kept)).logits))
        return self._model(way.model, way.of(self.common, kept))

    def _personal(self) -> _Model:
        personal = self.plan.method.personal
        if personal is None:
            raise _LackingError("the method has no personal model (method.personal)")
        private, told = self.work.private, self._held_out() if personal.reads_held_out else None
        if private is not None and not self._rounds:
            raise _LackingError("the site's training counted in no round")
        own = self._model(self.plan.model, self.common if private is None else private.start(self.common, self.kept))
        for wanted in personal.trainings():
            some, kept = self.plan.some_samples, dict(self.kept)
            way = own_models(self.plan.model, self.work, some, "personal", wanted)
            if not self.terms.own_models:
                raise _LackingError(OFF)
            if wanted.when == "end":
                task = self._assignment(self.about["client"], wanted.epochs or 1)
                for _, trained in way.train(self.about["round"] + 1, [task], self.common, lambda _: {}):
                    kept |= trained
            if f"{way.name}.parameters" not in kept:
                raise _LackingError("the site trained none that is finite")
            own = self._model(way.model, way.of(self.common, kept))
            if way.model is not self.plan.model:
                own = own._replace(network=_folded(own.network, self.plan.some_samples))
        counts = self.data.counts
        if told is not None:
            offsets = told.calibration.offsets(labels.own_mix(counts, len(counts)), told.mix)
            _move(own.network, self.plan.some_samples, 1 / told.calibration.temperature, offsets)
        return own._replace(logits=personal.moved(own.logits, told, counts))

    def _held_out(self) -> HeldOut:
        classes = self.data.num_classes
        shapes = {"temperature": (1,), "biases": (classes,), "mix": (classes,)}
        if {name: tuple(part.shape) for name, part in self.told.items()} != shapes:
            raise _LackingError(
                "the server did not calibrate the common model, which the sites' evaluations have to allow"
            )
        temperature, biases, mix = (self.told[name].double().numpy() for name in shapes)
        if not (np.isfinite(mix).all() and mix.min() >= 0 and np.isfinite(temperature).all() and temperature[0] > 0):
            raise _LackingError("what the server told of the common model's calibration is no such")
        return HeldOut(labels.Calibration(float(temperature[0]), biases), mix)

    def _record(self, round: int, logits: FloatArray) -> RoundRecord:
        targets, tally = self.data.test_targets.cpu(), self.plan.agreement.tally
        if tally.several:
            evaluation = Evaluation.of_findings(logits, targets.numpy())
        else:
            confusion = tally.table(tally.count(logits, targets))
            loss = float(functional.cross_entropy(torch.from_numpy(logits), targets))
            evaluation = Evaluation.of(confusion, loss, None, Scores.of(logits, targets))
        return RoundRecord(self.config.seeds[0], round, evaluation=evaluation)

    def _run(self, kind: str, model: _Model) -> SeedRun:
        """Make what the page shows of a model: its last evaluation, and earlier ones where there are any."""
        last = self._record(self.about["round"], model.logits)
        earlier = {"common": list(self._of_journal()), "alone": self.earlier}.get(kind, [])
        same = next((one for one in earlier if one.round == last.round), last)
        last.loss, last.bytes_up = same.loss, same.bytes_up
        records = [*(one for one in earlier if one.round < last.round), last]
        return SeedRun(
            label=kind,
            seed=self.config.seeds[0],
            config=self.config.tree(),
            rounds=records,
            counts=self.data.counts[None].astype(np.int64),
            sizes=np.array([len(self.data.targets)]),
            client_names=(self.plan.agreement.names[self.about["client"]],),
            class_names=tuple(self.plan.agreement.classes),
            target=None,
            summary=summarise(records, None, "final") | {"intervals": self._intervals(model.logits)},
        )

    def _intervals(self, logits: FloatArray) -> dict[str, list[float]]:
        targets, rng = self.data.test_targets.cpu().numpy(), generator(self.config.seeds[0], Purpose.BOOTSTRAP)
        if self.data.multi_label:
            return FindingScores(logits, targets).intervals(rng)
        scores = Scores.of(logits, targets)
        return Scores.intervals(scores.confusion(), rng, scores)

    def _of_journal(self) -> Iterator[RoundRecord]:
        """Yield a record of each round with the training loss, and the evaluation that the server asked for."""
        rounds: dict[int, dict[str, Any]] = {}
        for line in self.home.journal():
            if isinstance(line.get("round"), int):
                known = rounds.setdefault(line["round"], {"sent": 0})
                known |= {**line, "sent": known["sent"] + line["bytes"]}
        tally = self.plan.agreement.tally
        for round, line in sorted(rounds.items()):
            evaluation = None
            if wire.CONFUSION in line:
                counted = np.array(line[wire.CONFUSION], dtype=np.int64)
                evaluation = Evaluation.of_tally(tally, counted, line[wire.EVALUATION_LOSS])
            yield RoundRecord(
                self.config.seeds[0], round, loss=line.get("loss"), evaluation=evaluation, bytes_up=line["sent"]
            )

    def _sent(self) -> list[str]:
        journal, agreement = self.home.journal(), self.plan.agreement
        kinds = Counter(line["kind"] for line in journal)
        size = sum(line["bytes"] for line in journal)
        counted = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        noise = "" if agreement.epsilon is None else f" with noise for epsilon {agreement.epsilon:g}"
        masked = "; updates and evaluations in masked sums alone" if self.plan.is_masked else ""
        return [
            f"Answers sent to the server: {len(journal)} ({counted}), {size / 1e6:.3g} MB{masked}. Label counts: "
            f"{agreement.label_counts}{noise}. Rounds in which its training counted: {len(self._rounds)}.",
            "Nothing of this page, of the model alone or of the personal one was sent.",
        ]


def figures_of(plan: Plan, terms: Terms, data: SiteData) -> FloatArray:
    """Make the site's models; return their figures as masked sums have them (see `wire.FIGURES`). ConfigError, before
    any is trained, where it can't have all: a sum of fewer sites than agreed to must not come about. What is not finite
    counts as the worst: who fails would tell of its samples."""
    found = _Models(plan, terms, data)
    if not (len(data.test_targets) and terms.own_models and ROUNDS in found.kept):
        raise ConfigError(f"the site has no test samples, has trained in no round that counted, or {OFF}")
    figures = plan.agreement.summed_figures
    rows = {row.row: [getattr(row, figure) for figure in figures] for row in found.rows}
    values = np.array([rows.get(kind, [np.nan] * len(figures)) for kind in plan.site_models])
    worst = [{"ece": 1.0, "loss": wire.FIGURES_FORM.limit}.get(figure, 0.0) for figure in figures]
    values = np.where(np.isfinite(values), values, worst)
    sign = np.array([-1 if figure in SiteRow.LOW else 1 for figure in figures])
    return np.stack([values, sign * values > sign * values[0]])


def _in_words(row: SiteRow) -> str:
    shares = {"accuracy": row.accuracy, "balanced accuracy": row.balanced_accuracy, "macro F1": row.macro_f1}
    said = [f"{name} {100 * value:.1f} %" for name, value in shares.items() if np.isfinite(value)]
    others = {"AUROC": row.auroc, "PR-AUC": row.pr_auc, "calibration error": row.ece, "loss": row.loss}
    said += [f"{name} {value:.3f}" for name, value in others.items() if np.isfinite(value)]
    return f"{row.row.capitalize()}: {', '.join(said)}, on the test samples of this site ({row.samples})."


def _folded(network: nn.Module, samples: Tensor) -> nn.Module:
    """Return the common network with an added head in its last layer, which computes the same."""
    plain, added = network.get_submodule("network"), network.get_submodule("added")
    layer = last_layer(plain, samples)
    with torch.no_grad():
        layer.weight.add_(added.get_parameter("weight"))
        layer.bias.add_(added.get_parameter("bias"))
    return plain


def _move(network: nn.Module, samples: Tensor, slope: float, offsets: FloatArray) -> None:
    """Let a network's logits be `slope` times as large, and more by `offsets`, by its last layer."""
    layer = last_layer(network, samples)
    with torch.no_grad():
        layer.weight *= slope
        layer.bias.mul_(slope).add_(torch.from_numpy(offsets).to(layer.bias))
