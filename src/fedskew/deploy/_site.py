"""What a site does under its terms: it trains, evaluates and answers questions, and refuses what goes beyond them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedskew import components
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import ModelLayout, RefusedError, decode, encode
from fedskew.deploy._home import HOME, Home, behind_body, own_models
from fedskew.deploy._log import LOG
from fedskew.deploy._masks import Masks
from fedskew.deploy._moments import WEIGHTS, encoded_moments, encoded_profile
from fedskew.deploy._plan import Plan, kind_of
from fedskew.deploy._replies import arrays_of, check_size, size_of
from fedskew.deploy.book import EVALUATED_AGAIN, FINISHED_MODELS, Book, Kind
from fedskew.deploy.site_data import SiteData, SiteStates
from fedskew.deploy.terms import ROUNDING, CountsRequest, NotAgreedError, Release, Terms, is_too_noisy, refuse_unless
from fedskew.engine import ClientSamples, LocalWork, Sent, SequentialBackend, Update, predict, stilled
from fedskew.engine.contracts import tensors_of
from fedskew.engine.finish import answer
from fedskew.engine.sums import encode_answer, stand_ins, summable
from fedskew.engine.target import logits_of
from fedskew.errors import ArgumentError, RunError
from fedskew.experiment import Config
from fedskew.labels import outcome_table
from fedskew.metrics import Tally, finding_figures
from fedskew.models import FlatModel, ModelState
from fedskew.sums.fixed_point import AMOUNTS
from fedskew.weighting import BySums

MOST_SAID = 300
"""Longest text of the server's that a site logs."""

Figures = dict[str, Any]
Evaluation = tuple[NDArray[np.int64], float]


class CountsChangedError(RunError):
    """The site's label counts are no longer those that the server has."""


class Trained(NamedTuple):
    """What a training made: the update, the model, and the state that it began from."""

    update: Update
    model: ModelState
    before: dict[str, Tensor]


@dataclass(frozen=True)
class Worker:
    """A site's network, its arrays in messages, samples and training; `home` is what it does for itself beside that."""

    model: FlatModel
    layout: ModelLayout
    work: LocalWork
    data: SiteData
    home: Home | None = None

    def train(self, content: RecordDict, task: wire.TrainInstruction, states: SiteStates | None) -> Trained:
        """Train the model that a message contains, from the state after the last round that counted."""
        sent = Sent(model_of(content, self.layout), received_with(content)[0])
        before = {} if states is None else states.load(task.counted)
        for name, one in self.work.hooks.items():
            before = tensors_of(name, one, "init_client", sent.model.parameters, where=f"round {task.round}: ") | before
        own = {} if self.home is None else self.home.beside(task, len(self.data.targets), sent.model, before)
        update, model = SequentialBackend(self.model, self.work).train_client(task.round, task.assignment(before), sent)
        return Trained(update._replace(state={**update.state, **own}), model, before)

    def read(self, content: RecordDict) -> None:
        """Take the model that a message contains."""
        self.model.write_state(model_of(content, self.layout))

    def predict(self, tally: Tally) -> Evaluation:
        """Return what is counted of the test samples, and their mean loss."""
        data = self.data
        targets = data.test_targets.cpu().numpy()
        if data.multi_label:
            logits = logits_of(self.model.network, data.test_inputs, finite=False)
            return tally.count(logits, targets), finding_figures(logits, targets)["loss"] if len(targets) else 0.0
        found = predict(self.model.network, data.test_inputs, data.test_targets, data.num_classes)
        return tally.count(found.logits, targets), found.loss

    def confusion(self, tally: Tally) -> Figures:
        """Return the same as figures of a reply."""
        counts, loss = self.predict(tally)
        return {wire.EVALUATION_LOSS: loss, wire.CONFUSION: counts.tolist()}


@dataclass(frozen=True)
class Site:
    """A site that keeps to its terms: it checks what a message asks for, charges it in its book, and then does it. With
    `masks` its updates and evaluations leave it in masked sums alone. `figures` of its answer are for its own journal.
    The worker's inputs may be features of a frozen body, made of `data`."""

    worker: Worker
    plan: Plan
    terms: Terms
    data: SiteData
    state: Path
    masks: Masks | None
    figures: Figures = field(default_factory=dict)

    def note(self, kind: str, content: RecordDict, reply: RecordDict) -> None:
        """Write a line about an answer into the site's own journal, with figures that only the site sees."""
        round = wire.config_of(content).get(wire.ROUND)
        assert self.worker.home is not None, "as `agreed_site` makes it"
        self.worker.home.note(kind, size_of(reply), **({} if round is None else {"round": round}), **self.figures)

    def keep(self, content: RecordDict) -> RecordDict:
        """Keep the trained model that the server leaves here after the last round; nothing is told of it."""
        task, home = wire.TrainInstruction.parse(wire.config_of(content)), self.worker.home
        self._check_labelled()
        if task is None or home is None:
            raise NotAgreedError("message", "this is no trained model of fedskew's server")
        self._check_round(task.round, first=0)
        self._check_means()
        model = model_of(content, self.worker.layout)
        weights = self.plan.config.training.class_weights
        told = {**self.plan.agreement.means, **({} if weights is None else {WEIGHTS: weights})}
        home.keep_common(model, broadcast_of(content), task, told)
        LOG.info("the trained model is here; look at it: fedskew deploy site --report data.toml")
        return RecordDict({wire.METRICS: MetricRecord({wire.ROUND: task.round})})

    def sites(self, content: RecordDict) -> RecordDict:
        """Add what the models are worth that this site has to a masked sum over sites; asked again, it trains none."""
        from fedskew.deploy._site_report import figures_of  # it draws, which a round does not need

        masks, asked, about = self.masks, self._sum(content, wire.SITES), wire.about_of(content)
        if masks is None or asked is None:
            raise NotAgreedError("own_figures", "the server asks for figures of its models; agreed to none")
        self._count("sites", about, 1)
        if not masks.has_figures:
            self.keep(content)
            masks.keep_figures(asked.round, about, figures_of(self.plan, self.terms, self.data))
        return self._within(masks.answer(asked))

    @property
    def book(self) -> Book:
        """What the site has released, answered and opened."""
        return Book(self.state)

    def train(self, content: RecordDict) -> RecordDict:
        """Train as a message instructs; return the reply's records, or those for a sum."""
        masks, asked = self.masks, self._sum(content, wire.TRAIN)
        instruction = self._instruction(content)
        config = self.plan.config  # by whose evaluations and checkpoints a run can go back some rounds
        evaluated = config.evaluation.every if self.plan.agreement.evaluates else 1
        states = SiteStates(self.state, instruction.run, evaluated + config.output.checkpoint_every - 1)
        trained = self.worker.train(content, instruction, states)
        update, state, samples = trained.update, trained.update.state, len(self.worker.data.targets)
        self.figures.update({"loss": update.loss, "steps": update.steps})
        if masks is None or asked is None:
            states.keep(instruction.round, state)
            for name in sorted(update.reply.keys() - self.plan.returned.keys()):
                raise NotAgreedError("returns", f"the method returns {name}; this site did not agree to it")
            return self._within(trained_reply(self.worker.layout, trained, instruction, {}))
        if masks.protection is not None:  # its loss and norm are not sent
            if stilled(update) is not update:
                LOG.warning("this site's update is NaN or infinite; it takes part with noise alone, which tells nobody")
                state = trained.before
            update = stilled(update)._replace(loss=0.0, norm=torch.zeros(()))
        states.keep(instruction.round, state)
        training, weight = hash_of_model(content), self._own_weight(content, masks.limit)
        if self.worker.work.training.batch_size < samples:  # else batches are the same in every round
            training += f" {instruction.round}"
        masks.keep_update(instruction.round, training, wire.about_of(content), update, weight)
        return self._within(masks.answer(asked, instruction.client))

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Evaluate the model that a message contains; return figures, or integers for a sum."""
        config, masks, asked = wire.config_of(content), self.masks, self._sum(content, wire.EVALUATE)
        tally = self.plan.agreement.tally
        self._check_evaluation(content)
        self.worker.read(content)
        if masks is not None and asked is not None:
            counts, loss = self.worker.predict(tally)
            self.figures.update({wire.EVALUATION_LOSS: loss, wire.CONFUSION: counts.tolist()})
            whole = loss * tally.samples(counts)
            masks.keep_evaluation(asked.round, hash_of_model(content), wire.about_of(content), counts, whole)
            return self._within(masks.answer(asked))
        figures: Figures = {wire.ROUND: int(config[wire.ROUND])}  # type: ignore[arg-type]
        if wire.OUTCOMES in config:
            figures |= self._outcomes()
        elif wire.CONFUSION in config:
            figures |= self.worker.confusion(tally)
            self.figures.update(figures)
        if wire.CELLS in config:
            figures[wire.CELLS] = self._cells()
        return RecordDict({wire.METRICS: MetricRecord(figures)})

    def query(self, content: RecordDict) -> RecordDict:
        """Return the reply to a query: exact or noisy label counts, or only the number of samples."""
        self._check_labelled()
        request = CountsRequest.of(self.plan.agreement)
        is_own = request.label_counts != "summed"
        refuse_unless(is_own, "label_counts", "the server asks for this site's own; they are summed")
        return counts_reply(request, self.book.release(request, self.worker.data.reported, self.terms.budget))

    def finish(self, content: RecordDict) -> RecordDict:
        """Answer a question of the method's finish by sums over this site's samples; none where it has no such."""
        source, finish, data = wire.config_of(content).get(wire.SOURCE), self.plan.method.finish, self.worker.data
        if finish is None:
            raise NotAgreedError("finish", "the server asks for sums; this site agreed to none")
        if source not in ("training", "held_out", "target"):
            raise ArgumentError(f"message: asks for sums over {str(source)[:40]!r} samples")
        question = broadcast_of(content)
        kind, has_cells = kind_of(source, question), source != "target" or data.unlabelled is not None
        is_known = kind in map(str, self.plan.questions)
        refuse_unless(is_known, "finish", f"the server asks for sums ({kind[:MOST_SAID]}) that are not agreed to")
        refuse_unless(has_cells, "cells", "the server asks for sums over samples without labels; agreed to none")
        self._check_means()
        self._count("models", hash_of_model(content), FINISHED_MODELS)
        self._count("finish", wire.hash_of_question(content, source), self.plan.most_questions)
        inputs, targets = (data.inputs, data.targets) if source == "training" else (data.test_inputs, data.test_targets)
        if source == "target" and data.unlabelled is not None:
            inputs = data.unlabelled()
            targets = torch.zeros(len(inputs), dtype=torch.int64)  # not shown to the finish
        if not len(targets):
            return RecordDict({wire.REPLY: encode({})})
        self.worker.read(content)
        samples = ClientSamples(inputs, targets, np.arange(len(targets)), data.counts)
        sums = answer(finish, self.worker.model.module, samples, question, source != "target")
        return self._within(RecordDict({wire.REPLY: encode(sums)}))

    def counts(self, content: RecordDict) -> RecordDict:
        """Answer a question about this site's label counts, in a sum over all sites."""
        weighting = self.plan.by_sums
        if weighting is None or self.masks is None:
            raise NotAgreedError("label_counts", "the server asks for sums of them; agreed to none")
        asked = self._sum(content, wire.SUM_COUNTS)
        self._count("counts", wire.hash_of_question(content, "counts"), self.plan.most_questions)
        question = {name: values.numpy() for name, values in broadcast_of(content).items()}
        return self._over_all(content, asked, encode_answer(weighting, self._stand_in(weighting), question))

    def labels(self, content: RecordDict) -> RecordDict:
        """Answer with this site's label counts, in a sum over all sites, by which class weights are balanced."""
        is_agreed = self.masks is not None and self.plan.by_sums is not None and self.plan.config.training.balances
        refuse_unless(is_agreed, "class_weights", "the server asks for sums of label counts; agreed to none")
        asked = self._sum(content, wire.SUM_LABELS)
        self._count("labels", "", 1)
        return self._over_all(content, asked, AMOUNTS.encode(self._share()))

    def moments(self, content: RecordDict) -> RecordDict:
        """Answer with sums of the numbers in this site's table, where means are to be those over all sites."""
        agreement = self.plan.agreement
        schema = agreement.table
        if not agreement.sums_moments or schema is None:
            raise NotAgreedError("moments", "the server asks for sums of numbers; this site agreed to none")
        self._check_labelled()
        asked = self._sum(content, wire.SUM_MOMENTS)
        self._count("moments", "", 1)
        inputs = self.data.inputs
        assert isinstance(inputs, Tensor), "of a table"
        values = self.book.share(self.terms, lambda: encoded_moments(schema, inputs), "moments", np.int64)
        return self._over_all(content, asked, values)

    def profile(self, content: RecordDict) -> RecordDict:
        """Answer with what this site's inputs look like, in cells by the means that were told, or agreed to."""
        agreement = self.plan.agreement
        why = "the server asks what inputs look like; this site did not agree to tell"
        refuse_unless(self.plan.profile_size > 0, "input_profile", why)
        self._check_labelled()
        self._check_means()
        asked, cells = self._sum(content, wire.SUM_PROFILE), wire.fingerprint([*agreement.mean, *agreement.std])
        self._count("profile", cells, 1)
        inputs = self.data.inputs
        values = self.book.share(self.terms, lambda: encoded_profile(agreement, inputs), f"profile {cells}", np.int64)
        return self._over_all(content, asked, values)

    def _over_all(self, content: RecordDict, asked: wire.SumAsked | None, values: NDArray[Any]) -> RecordDict:
        if self.masks is None or asked is None:
            return RecordDict({wire.SUMS: ArrayRecord({wire.ANSWER: Array(values)})})
        return self._within(self.masks.answer_over_all(asked, wire.about_of(content), values))

    def again(self, content: RecordDict) -> RecordDict:
        """Mask this site's last answer once more, for a sum over fewer sites; none of this round is opened yet."""
        asked, masks = wire.SumAsked.parse(wire.config_of(content)), self.masks
        if masks is None or asked is None:
            raise NotAgreedError("updates", "the server asks for masked ones, or not for which; agreed to none")
        is_agreed = asked.purpose != wire.EVALUATE or self.plan.agreement.evaluates
        refuse_unless(is_agreed, "evaluation", "the server asks for one; this site agreed to none")
        return self._within(masks.answer(masks.check(asked, asked.purpose)))

    def unmask(self, content: RecordDict) -> RecordDict:
        """Open this site's part of a sum, once."""
        asked, masks = wire.SumAsked.parse(wire.config_of(content)), self.masks
        if masks is None or asked is None:
            raise NotAgreedError("updates", "the server asks to open a sum, or not which; this site has masked nothing")
        return masks.unmask(asked)

    def _sum(self, content: RecordDict, purpose: str) -> wire.SumAsked | None:
        """Read which sum an answer is for, within the terms; None where answers are not masked."""
        asked = wire.SumAsked.parse(wire.config_of(content), purpose)
        return None if self.masks is None else self.masks.check(asked, purpose)

    def _instruction(self, content: RecordDict) -> wire.TrainInstruction:
        """Read a training's instruction, within the terms, of a server that has the site's label counts; count it."""
        instruction = wire.TrainInstruction.parse(wire.config_of(content))
        self._check_labelled()
        if instruction is None:
            raise NotAgreedError("message", "this is no instruction of fedskew's server, as was agreed")
        self._check_means()
        self._check_class_weights()
        self._check_instruction(instruction)
        known, request = wire.config_of(content).get(wire.REPORTED), CountsRequest.of(self.plan.agreement)
        if isinstance(known, str) and request.label_counts != "summed":
            counts = self.worker.data.reported
            reported = request.plain(counts)
            if request.label_counts == "noisy":
                last = self.book.releases.answering(request, counts, self.terms.budget)
                reported = [] if last is None else last.values(request.classes)
            if wire.fingerprint(reported) != known:
                raise CountsChangedError("the data have changed since the label counts that the server has")
        self._count("train", wire.hash_of_question(content, instruction), self.terms.rounds)
        return instruction

    def _check_means(self) -> None:
        """Refuse to use samples that are not standardised, or that are so by other means than before."""
        agreement = self.plan.agreement
        refuse_unless(not agreement.sums_moments, "moments", "the server tells no means and deviations of all sites")
        if agreement.table is not None and agreement.is_told:
            self._count("means", wire.fingerprint([*agreement.mean, *agreement.std]), 1)

    def _check_class_weights(self) -> None:
        """Refuse to train without class weights by all sites' label counts, or with others than before."""
        weights = self.plan.config.training.class_weights
        why = "the server tells no weights by all sites' label counts"
        refuse_unless(not isinstance(weights, str), "class_weights", why)
        if isinstance(weights, list):
            self._count("weights", wire.fingerprint(weights), 1)

    def _check_labelled(self) -> None:
        why = "the server takes this site for one that trains, and its data.toml has no table [data]"
        refuse_unless(not self.worker.data.is_unlabelled, "data", why)

    def _check_round(self, round: object, first: int) -> None:
        """Refuse a round that is none of the config's: a learning rate may depend on its number."""
        rounds = self.plan.config.training.rounds
        why = f"the server asks for round {str(round)[:20]}; this site agreed to {first} to {rounds}"
        refuse_unless(isinstance(round, int) and first <= round <= rounds, "rounds", why)

    def _check_instruction(self, instruction: wire.TrainInstruction) -> None:
        """Refuse a training that is not the config's: by a few samples or steps, a reply would show single samples."""
        self._check_round(instruction.round, first=1)
        training, epochs, steps = self.plan.config.training, instruction.epochs, instruction.steps
        asks = f"in round {instruction.round}; this site agreed to"
        why = f"the server asks for {epochs:g} {asks} {training.most_epochs:g}"
        refuse_unless(epochs == training.most_epochs, "epochs", why)
        limits = ["no limit" if most is None else f"{most} at most" for most in (steps, training.steps)]
        refuse_unless(steps == training.steps, "steps", f"the server asks for {limits[0]} {asks} {limits[1]}")
        exact = self.plan.agreement.label_counts == "exact"
        refuse_unless(
            instruction.quota is None or (exact and components.has(self.plan.method.selection, "assigns_quotas")),
            "quota",
            f"the server chooses samples of single classes {asks} none: that takes a selection that assigns quotas, "
            "and exact label counts",
        )

    def _check_evaluation(self, content: RecordDict) -> None:
        config, data, estimation = wire.config_of(content), self.worker.data, self.plan.estimation
        self._check_round(config.get(wire.ROUND), first=0)
        self._check_means()
        agreed = {wire.CONFUSION, wire.OUTCOMES} if estimation is not None else {wire.CONFUSION}
        if not self.plan.agreement.evaluates or data.is_unlabelled:
            agreed = set()
        wanted = {wire.CONFUSION, wire.OUTCOMES, wire.CELLS} & config.keys()
        bins = {config.get(key) for key in wanted - {wire.CONFUSION}}
        known = None if estimation is None else estimation.bins
        is_agreed = bool(wanted) and wanted <= agreed | {wire.CELLS} and bins <= {known}
        refuse_unless(is_agreed, "evaluation", "this site did not agree to the one that is asked for")
        refuse_unless(
            wire.CELLS not in wanted or data.unlabelled is not None,
            "cells",
            "the server asks for what the model makes of samples without labels; this site agreed to tell nothing of "
            "such samples",
        )
        question = wire.hash_of_question(content, [config.get(key) for key in (wire.ROUND, wire.OUTCOMES, wire.CELLS)])
        self._count("evaluate", question, self.terms.rounds + 1 + EVALUATED_AGAIN)

    def _outcomes(self) -> Figures:
        """Return the table of outcomes and the loss; the confusion matrix where the site has no such table."""
        estimation, data = self.plan.estimation, self.worker.data
        assert estimation is not None, "checked with the terms"
        if not len(data.test_targets):
            return self.worker.confusion(self.plan.agreement.tally)
        try:
            logits = logits_of(self.worker.model.network, data.test_inputs)
            loss = float(functional.cross_entropy(torch.from_numpy(logits), data.test_targets.cpu()))
            cells = estimation.outcomes(logits)
        except ArgumentError as error:  # a ruined model, whose loss says so
            LOG.warning("%s", error)
            return self.worker.confusion(self.plan.agreement.tally)
        table = outcome_table(data.test_targets.cpu().numpy(), cells, estimation.classes, estimation.bins)
        return {wire.EVALUATION_LOSS: loss, wire.OUTCOMES: table.astype(np.int64).reshape(-1).tolist()}

    def _cells(self) -> list[int]:
        estimation, unlabelled = self.plan.estimation, self.worker.data.unlabelled
        assert estimation is not None, "checked with the terms"
        assert unlabelled is not None, "checked with the terms"
        cells = estimation.outcomes(logits_of(self.worker.model.network, unlabelled()))
        counts: list[int] = np.bincount(cells, minlength=estimation.classes * estimation.bins).tolist()
        return counts

    def _count(self, kind: Kind, question: str, most: int) -> None:
        self.book.count(self.terms, kind, question, most)

    def _within(self, reply: RecordDict) -> RecordDict:
        try:
            check_size(reply, self.plan.reply_bytes)
        except RefusedError as error:
            raise NotAgreedError("bytes", f"{error}, by what this site agreed to") from None
        return reply

    def _own_weight(self, content: RecordDict, limit: float) -> float:
        """Compute this site's weight from what was announced to all sites, once; 0 where the server tells it."""
        weighting, (_, announced) = self.plan.by_sums, received_with(content)
        if weighting is None:
            return 0.0
        if announced:
            said = RecordDict({wire.BROADCAST: encode(announced)})
            self._count("announced", wire.hash_of_question(said, "announced"), 1)
        facts = {name: values.numpy() for name, values in announced.items()}
        return min(weighting.own_weight(self._stand_in(weighting), facts), limit)

    def _stand_in(self, weighting: BySums) -> NDArray[np.float64]:
        """Return what stands for this site in the sums that a weighting asks for."""
        share, classes = self._share(), len(self.plan.agreement.classes)
        return stand_ins(weighting, share[:classes], share[-1] if len(share) > classes else None)

    def _share(self) -> NDArray[np.float64]:
        """Return what this site reports of its labels, for sums alone, with an epsilon its noisy release. It stays what
        it was when first asked under these terms, as does what was announced of the sums."""
        noisy = self.plan.agreement.epsilon is not None
        return self.book.share(self.terms, self._noisy if noisy else lambda: self.worker.data.reported)

    def _noisy(self) -> NDArray[np.float64]:
        """Return noisy counts with the noise that was agreed on: nobody who gets a sum is told another epsilon."""
        request = CountsRequest.of(self.plan.agreement)._replace(label_counts="noisy")
        release = self.book.release(request, self.worker.data.reported, self.terms.budget)
        epsilon, wanted = release.epsilon_for(request.neighbours), request.epsilon
        assert epsilon is not None, "of noisy counts"
        assert wanted is not None, "of noisy counts"
        refuse_unless(
            epsilon <= wanted * ROUNDING and not is_too_noisy(epsilon, wanted),
            "epsilon",
            f"this site released its label counts with {epsilon:g}, and what is summed is to have {wanted:g}; to "
            "release them once more, agree: fedskew deploy site --check data.toml",
        )
        return summable(np.array(release.values(request.classes)))


def agreed_site(config: Config, agreement: Agreement, data: SiteData, terms: Terms, place: Path) -> Site:
    """Make the site that a config and an agreement describe, and that keeps to its terms."""
    plan = Plan.of(config, agreement, at_site=True)
    assert data.state is not None, "data.toml always has one"
    torch.set_num_threads(config.engine.threads)
    folder = terms.folder(data.state) / HOME
    model, seen, some = behind_body(plan, data, folder)
    work = plan.work(seen, model)
    wanted = () if plan.method.personal is None or not terms.own_models else plan.method.personal.trainings()
    ways = tuple(own_models(model, work, some, "personal", one) for one in wanted if one.when == "rounds")
    masks = Masks.of(plan, terms, data.state, place) if plan.is_masked else None
    worker = Worker(model, plan.layout, work, seen, Home(folder, ways))  # what trains is the same behind a body
    return Site(worker, plan, terms, data, data.state, masks)


def trained_reply(
    layout: ModelLayout, trained: Trained, instruction: wire.TrainInstruction | None, more: Figures
) -> RecordDict:
    """Make the reply to a training: the model, figures, and what the method returns beside them."""
    update, figures = trained.update, {wire.LOSS: trained.update.loss, **more}
    if instruction is not None:
        figures |= {wire.CLIENT: instruction.client, wire.ROUND: instruction.round, wire.STEPS: update.steps}
    reply = RecordDict({wire.ARRAYS: layout.to_record(trained.model), wire.METRICS: MetricRecord(figures)})
    if update.reply:
        reply[wire.REPLY] = encode(update.reply)
    return reply


def counts_reply(request: CountsRequest, release: Release) -> RecordDict:
    """Make the reply to a query of label counts."""
    values, epsilon = release.values(request.classes), release.epsilon_for(request.neighbours)
    figures: Figures = {wire.COUNTS: values if epsilon is not None else [int(value) for value in values]}
    if epsilon is not None:
        figures["epsilon"] = epsilon
    if request.label_counts == "withheld":
        figures = {wire.SAMPLES: int(values[0])}
    return RecordDict({wire.METRICS: MetricRecord(figures)})


def hash_of_model(content: RecordDict) -> str:
    """Hash the model that a message contains."""
    return wire.hash_of_question(RecordDict({wire.ARRAYS: arrays_of(content, wire.ARRAYS)}), "model")


def model_of(content: RecordDict, layout: ModelLayout) -> ModelState:
    """Read the model that the server sent."""
    return layout.to_state(decode(arrays_of(content, wire.ARRAYS), layout.specs, "the server's array"))


def broadcast_of(content: RecordDict) -> Mapping[str, Tensor]:
    """Read the tensors sent beside the model; they are not checked, as they affect only this site's training."""
    if wire.BROADCAST not in content:
        return {}
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays_of(content, wire.BROADCAST).items()}


def received_with(content: RecordDict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read what the method sends beside the model, and what is announced to all sites from sums."""
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, values in broadcast_of(content).items():
        parts[name.startswith(wire.ANNOUNCED)][name.removeprefix(wire.ANNOUNCED)] = values
    return parts
