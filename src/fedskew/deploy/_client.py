"""A site: trains, evaluates and reports its label counts, in a process that Flower starts for each message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from fedskew import __version__, components, methods, models
from fedskew.deploy._agreement import Agreement, check_config, method_of, read_agreement
from fedskew.deploy._arrays import ModelLayout, RefusedError, decode, encode
from fedskew.deploy._finish import kind_of
from fedskew.deploy._ledger import (
    ROUNDING,
    CountsAsked,
    Ledger,
    Neighbours,
    NotAgreedError,
    ReleaseMode,
    converted,
    is_too_noisy,
)
from fedskew.deploy._log import LOG
from fedskew.deploy._mask_keys import public_keys, read_mask_key
from fedskew.deploy._masks import Masks
from fedskew.deploy._messages import (
    ANNOUNCED,
    ARRAYS,
    BROADCAST,
    CELLS,
    CHANGED,
    CLIENT,
    CONFIG,
    CONFUSION,
    COUNTS,
    EVALUATION_LOSS,
    FINISH,
    LOSS,
    METRICS,
    OUTCOMES,
    REFUSED,
    REPLY,
    REPORT_SAMPLES,
    REPORTED,
    ROUND,
    SAMPLES,
    SOURCE,
    STEPS,
    VERSION,
    TrainInstruction,
    fingerprint,
    hash_of_question,
)
from fedskew.deploy._replies import check_size
from fedskew.deploy._site_data import SiteData, SiteStates, load_site
from fedskew.deploy._sum_messages import AGAIN, EVALUATE, TRAIN, UNMASK, SumAsked, about_of
from fedskew.deploy._sum_messages import COUNTS as COUNTED
from fedskew.deploy._target_site import count_cells, count_outcomes
from fedskew.deploy._terms import Terms, Used, read_terms, terms_path
from fedskew.engine import (
    ClientSamples,
    Estimation,
    LocalTraining,
    LocalWork,
    Sent,
    SequentialBackend,
    answer,
    hooked,
    predict,
    stilled,
)
from fedskew.engine.sums import encode_answer, summable
from fedskew.errors import ArgumentError, ConfigError, FedskewError, RunError, in_one_line
from fedskew.experiment import Config, make_estimation, make_network, make_work, read
from fedskew.files import private_folder, write_text
from fedskew.finish import Finish
from fedskew.hooks import Hooks
from fedskew.methods import Method
from fedskew.models import FlatModel, ModelState
from fedskew.privacy import Protection, UpdateNoise
from fedskew.weighting import BySums

MOST_SAID = 300
"""Longest text of the server's that a site logs."""

PATIENCE = 60.0
"""Seconds for which a site still opens a sum beyond the two exchanges that it may take."""

RAISED = 2
"""Flower's code of an error that a ClientApp raised."""

SUMMED = "summed-counts.json"
"""In the folder of a site's terms: what stands for it in sums of label counts."""

STOCK = "stock"
"""Run identifier of a site's states under a stock Flower server."""

Data = SiteData | Callable[[Context], SiteData]
Model = nn.Module | Callable[[], nn.Module]


class CountsChangedError(RunError):
    """The site's label counts are no longer those that the server has."""


class VersionError(RunError):
    """The server runs another version of fedskew."""


@dataclass(frozen=True)
class Site:
    """A site's network, data and settings.

    Attributes:
        model: The network.
        work: Local training.
        data: The site's samples.
        asked: What the server asks the site to report of its label counts.
        epochs: Local epochs if the server does not set them; under terms, those that it has to set.
        confusion: Whether the site reports confusion matrices.
        terms: What the site agreed to; None in a Flower project of a user's own, whose app decides.
        steps: Under terms, the limit on local steps that the server has to set; None: no limit.
        quotas: Under terms, whether the server may say on how many samples of each class the site trains.
        earlier: How many earlier states the site keeps (see `SiteStates`).
        finish: What the method does after the last round; None: nothing.
        estimation: How the target's label mix is estimated; None: it is not.
        masks: What updates and evaluations are masked with; None: they leave the site as they are.
        rounds: Under terms, the number of rounds of the config.
    """

    model: FlatModel
    work: LocalWork
    data: SiteData
    asked: CountsAsked
    epochs: float = 1
    confusion: bool = True
    terms: Terms | None = None
    steps: int | None = None
    quotas: bool = False
    earlier: int = 1
    finish: Finish | None = None
    estimation: Estimation | None = None
    masks: Masks | None = None
    rounds: int = 0

    def train(self, content: RecordDict, node: int) -> RecordDict:
        """Train as a message instructs.

        A stock Flower server sends neither the site's client index nor the last round in which the site's update was
        aggregated. The node's id then takes the place of the client index in random draws, and training starts from the
        site's latest state.

        Args:
            content: The message's records.
            node: The node's id.

        Returns:
            The reply's records.
        """
        config = _config(content)
        given = TrainInstruction.parse(config)
        if given is None and components.has(self.work.local_step, "is_dynamic"):
            name = type(self.work.local_step).__name__
            raise ConfigError(
                f"method: {name} is one half of {name}, and this server has not the other; use "
                f"fedskew.deploy.strategy('{name.lower()}', model=...)"
            )
        asked = None if self.masks is None else self.masks.check(SumAsked.parse(config, TRAIN), TRAIN)
        self._check_training(given, content)
        round = int(config.get(ROUND, 0))  # type: ignore[arg-type]
        states = (
            None
            if self.data.state is None
            else SiteStates(self.data.state, STOCK if given is None else given.run, self.earlier)
        )
        counted = 0 if states is None else states.newest
        task = TrainInstruction(STOCK, round, node, self.epochs, counted) if given is None else given
        layout = ModelLayout(self.model)
        received = _broadcast(content)
        announced = {name: received.pop(name) for name in list(received) if name.startswith(ANNOUNCED)}
        sent = Sent(_model(content, layout), received)
        kept = {} if states is None else states.load(task.counted)
        for hooks in self.work.hooks.values():
            kept = dict(hooks.init_client(sent.model.parameters)) | kept

        backend = SequentialBackend(self.model, self.work)
        update, trained = backend.train_client(task.round, task.assignment(kept), sent)
        state = update.state
        if self.masks is not None and self.masks.protection is not None:  # its loss and norm are not sent
            if stilled(update) is not update:
                LOG.warning("this site's update is NaN or infinite; it takes part with noise alone, which tells nobody")
                state = kept
            update = stilled(update)._replace(loss=0.0, norm=torch.zeros(()))

        if states is not None:
            states.keep(task.round, state)  # also if it is empty, so that a lost state is noticed
        elif state:
            raise ConfigError("data: this method keeps a state between rounds; give the site a folder (state)")
        if self.masks is not None and asked is not None:
            if announced and self.terms is not None:
                said = RecordDict({BROADCAST: encode(announced)})
                self._used(self.terms).count("announced", hash_of_question(said, "announced"))
            training, weight = _hash_of_model(content), self._own_weight(announced)
            if self.work.training.batch_size < len(self.data.targets):  # else batches are the same in every round
                training += f" {task.round}"
            self.masks.keep_update(task.round, training, about_of(content), update, weight)
            return self._checked(self.masks.answer(asked, task.client))
        ours = given is not None
        figures: dict[str, Any] = {LOSS: update.loss}
        if ours:
            figures |= {CLIENT: task.client, ROUND: task.round, STEPS: update.steps}
        if not ours or (REPORT_SAMPLES in config and self.asked.label_counts != "noisy"):
            figures[SAMPLES] = len(self.data.targets)
        reply = RecordDict({ARRAYS: layout.to_record(trained), METRICS: MetricRecord(figures)})
        if update.reply:
            if not ours:
                raise ConfigError("method: it returns arrays beside the model; use fedskew.deploy.strategy")
            reply[REPLY] = encode(update.reply)
        self._check_reply(reply)
        return reply

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Evaluate the model that a message contains.

        Args:
            content: The message's records.

        Returns:
            The reply's records: loss and confusion matrix; where the target's mix is estimated the table of outcomes in
            its place, and the target site's cells; for a stock Flower server, loss and accuracy.
        """
        config = _config(content)
        asked = [config.get(key) for key in (ROUND, OUTCOMES, CELLS)]
        in_sum = None if self.masks is None else self.masks.check(SumAsked.parse(config, EVALUATE), EVALUATE)
        if self.terms is not None:
            self._check_evaluation(config, self.terms)
            self._used(self.terms).count("evaluate", hash_of_question(content, asked))
        self.model.write_state(_model(content, ModelLayout(self.model)))
        if self.masks is not None and in_sum is not None:
            self.masks.keep_evaluation(in_sum.round, _hash_of_model(content), about_of(content), *self._predicted())
            return self._checked(self.masks.answer(in_sum))
        if not {CONFUSION, OUTCOMES, CELLS} & config.keys():
            confusion, loss = self._predicted()
            right = float(np.trace(confusion) / max(confusion.sum(), 1))
            return RecordDict(
                {METRICS: MetricRecord({SAMPLES: int(confusion.sum()), EVALUATION_LOSS: loss, "accuracy": right})}
            )
        if not self.confusion:
            raise ConfigError("evaluation: the server asks for a confusion matrix, which this site does not report")
        metrics: dict[str, Any] = {ROUND: int(config[ROUND])}  # type: ignore[arg-type]
        if OUTCOMES in config:
            metrics |= self._outcomes()
        elif CONFUSION in config:
            metrics |= self._confusion()
        if CELLS in config:
            assert self.estimation is not None, "checked with the terms"
            assert self.data.unlabelled is not None, "checked with the terms"
            cells = count_cells(self.estimation, self.model.network, self.data.unlabelled())
            metrics[CELLS] = cells.tolist()
        return RecordDict({METRICS: MetricRecord(metrics)})

    def add_counts(self, content: RecordDict) -> RecordDict:
        """Answer a question about this site's label counts, in a sum over all sites.

        Args:
            content: The message's records.

        Returns:
            The reply's records.
        """
        masks = self.masks
        if masks is None or masks.by_sums is None or self.terms is None:
            raise NotAgreedError("label_counts", "label_counts: the server asks for sums of them; agreed to none")
        asked = masks.check(SumAsked.parse(_config(content), COUNTED), COUNTED)
        self._used(self.terms).count("counts", hash_of_question(content, "counts"))
        question = {name: values.numpy() for name, values in _broadcast(content).items()}
        values = encode_answer(masks.by_sums, self._summed_counts(), question)
        return self._checked(masks.answer_of_counts(asked, about_of(content), values))

    def mask_again(self, content: RecordDict) -> RecordDict:
        """Mask this site's last answer once more, for a sum over fewer sites; none of this round is opened yet.

        Args:
            content: The message's records.

        Returns:
            The reply's records.
        """
        asked = SumAsked.parse(_config(content))
        if self.masks is None or asked is None:
            raise NotAgreedError("updates", "updates: the server asks for masked ones; this site agreed to none")
        if asked.purpose == EVALUATE and self.terms is not None and self.terms.evaluation == "none":
            raise NotAgreedError("evaluation", "evaluation: the server asks for one; this site agreed to none")
        return self._checked(self.masks.answer(self.masks.check(asked, asked.purpose)))

    def unmask(self, content: RecordDict) -> RecordDict:
        """Open this site's part of a sum, once.

        Args:
            content: The message's records.

        Returns:
            The reply's records.
        """
        if self.masks is None:
            raise NotAgreedError("updates", "updates: the server asks to open a sum; this site has masked nothing")
        return self._checked(self.masks.unmask(content))

    def sums(self, content: RecordDict) -> RecordDict:
        """Answer a question of the method's finish: sums over this site's samples, none where it holds no such samples.

        Args:
            content: The message's records.

        Returns:
            The reply's records.
        """
        source = _config(content).get(SOURCE)
        if self.finish is None or self.terms is None or not self.terms.finish:
            raise NotAgreedError("finish", "finish: the server asks for sums; this site agreed to none")
        if source not in ("training", "held_out", "target"):
            raise ArgumentError(f"message: asks for sums over {str(source)[:40]!r} samples")
        data, question = self.data, _broadcast(content)
        if (kind := kind_of(source, question)) not in self.terms.questions:
            raise NotAgreedError(
                "finish", f"finish: the server asks for sums ({kind[:MOST_SAID]}) that this site did not agree to"
            )
        if source == "target" and (not self.terms.cells or data.unlabelled is None):
            raise NotAgreedError("cells", "cells: the server asks for sums over samples without labels; agreed to none")
        self._used(self.terms).count("models", _hash_of_model(content))
        self._used(self.terms).count("finish", hash_of_question(content, source))
        inputs, targets = (data.inputs, data.targets) if source == "training" else (data.test_inputs, data.test_targets)
        if source == "target" and data.unlabelled is not None:
            inputs = data.unlabelled()
            targets = torch.zeros(len(inputs), dtype=torch.int64)  # not shown to the finish
        if not len(targets):
            return RecordDict({REPLY: encode({})})
        self.model.write_state(_model(content, ModelLayout(self.model)))
        samples = ClientSamples(inputs, targets, np.arange(len(targets)), data.counts)
        labelled = source != "target"
        found = answer(self.finish, self.model.module, samples, question, labelled)
        reply = RecordDict({REPLY: encode(found)})
        _check_bytes(reply, self.terms)
        return reply

    def report_labels(self) -> RecordDict:
        """Return the reply to a query: exact or noisy label counts, or only the number of samples."""
        self._check_labelled()
        counts, asked, state = self.data.counts, self.asked, self.data.state
        if self._sums_counts:
            raise NotAgreedError("label_counts", "label_counts: the server asks for this site's own; they are summed")
        if asked.label_counts == "noisy" and (asked.epsilon is None or state is None):
            raise ConfigError(
                "label_counts: noisy counts need epsilon, and a folder where the release is stored (state)"
            )
        budget = None if self.terms is None else self.terms.budget
        if state is None:
            values, epsilon = [float(counts.sum())] if asked.label_counts == "withheld" else counts.tolist(), None
        else:
            values, release = Ledger(state).release(asked, counts, budget)
            epsilon = None
            if release.epsilon is not None and release.neighbours is not None:
                epsilon = converted(release.epsilon, release.neighbours, asked.neighbours)
        if asked.label_counts == "withheld":
            return RecordDict({METRICS: MetricRecord({SAMPLES: int(values[0])})})
        if epsilon is None:
            return RecordDict({METRICS: MetricRecord({COUNTS: [int(value) for value in values]})})
        return RecordDict({METRICS: MetricRecord({COUNTS: values, "epsilon": epsilon})})

    def _predicted(self) -> tuple[NDArray[np.int64], float]:
        data = self.data
        return predict(self.model.network, data.test_inputs, data.test_targets, data.num_classes)

    def _confusion(self) -> dict[str, Any]:
        confusion, loss = self._predicted()
        return {EVALUATION_LOSS: loss, CONFUSION: confusion.reshape(-1).tolist()}

    def _outcomes(self) -> dict[str, Any]:
        """Return the table of outcomes and the loss; the confusion matrix where the site has no such table."""
        assert self.estimation is not None, "checked with the terms"
        data = self.data
        if not len(data.test_targets):
            return self._confusion()
        try:
            table, loss = count_outcomes(self.estimation, self.model.network, data.test_inputs, data.test_targets)
        except ArgumentError as error:  # a ruined model, whose loss says so
            LOG.warning("%s", error)
            return self._confusion()
        return {EVALUATION_LOSS: loss, OUTCOMES: table.reshape(-1).tolist()}

    @property
    def _sums_counts(self) -> bool:
        return self.asked.label_counts == "summed"

    def _own_weight(self, announced: Mapping[str, torch.Tensor]) -> float:
        """Compute this site's weight from what was announced to all sites; 0 where the server tells it."""
        if self.masks is None or self.masks.by_sums is None:
            return 0.0
        facts = {name.removeprefix(ANNOUNCED): values.numpy() for name, values in announced.items()}
        return min(self.masks.by_sums.own_weight(self._summed_counts(), facts), self.masks.limit)

    def _summed_counts(self) -> NDArray[np.float64]:
        """Return what stands for this site in sums of label counts, with an epsilon its noisy release.

        It stays what it was when the site was first asked under its terms, as does what was announced of the sums.
        """
        state, terms = self.data.state, self.terms
        assert state is not None, "checked with the masks"
        assert terms is not None, "checked with the masks"
        path = terms.folder(state) / SUMMED
        if path.exists():
            try:
                return np.array(json.loads(path.read_text(encoding="utf-8")), dtype=np.float64)
            except (OSError, ValueError) as error:
                raise RunError(f"{path}: can't be read ({type(error).__name__}); restore it") from None
        counts = self.data.counts if self.asked.epsilon is None else self._noisy(state, terms, self.asked.epsilon)
        private_folder(path.parent)
        write_text(path, json.dumps(counts.tolist()), private=True)
        return counts

    def _noisy(self, state: Path, terms: Terms, wanted: float) -> NDArray[np.float64]:
        """Return noisy counts with the noise that was agreed on: nobody who gets a sum is told another epsilon."""
        asked = self.asked
        values, release = Ledger(state).release(asked._replace(label_counts="noisy"), self.data.counts, terms.budget)
        assert release.epsilon is not None, "of noisy counts"
        assert release.neighbours is not None, "of noisy counts"
        epsilon = converted(release.epsilon, release.neighbours, asked.neighbours)
        if epsilon > wanted * ROUNDING or is_too_noisy(epsilon, wanted):
            raise NotAgreedError(
                "epsilon",
                f"epsilon: this site released its label counts with {epsilon:g}, and what is summed is to have "
                f"{wanted:g}; to release them once more, agree: fedskew deploy site --check data.toml",
            )
        return summable(np.array(values))

    def _check_labelled(self) -> None:
        """Refuse what takes labels at a site that says that it has none."""
        if self.data.is_unlabelled:
            raise NotAgreedError(
                "data", "data: the server takes this site for one that trains, and its data.toml has no table [data]"
            )

    def _check_evaluation(self, config: ConfigRecord, terms: Terms) -> None:
        """Refuse an evaluation that goes beyond the terms."""
        self._check_round(config.get(ROUND), first=0)
        agreed = {"none": set(), "confusion": {CONFUSION}, "outcomes": {CONFUSION, OUTCOMES}}[terms.evaluation]
        asked = {CONFUSION, OUTCOMES, CELLS} & config.keys()
        bins = {config.get(key) for key in asked - {CONFUSION}}
        known = None if self.estimation is None else self.estimation.bins
        if not asked or not asked <= agreed | {CELLS} or not bins <= {known}:
            raise NotAgreedError("evaluation", "evaluation: this site did not agree to the one that is asked for")
        if CELLS in asked and (not terms.cells or self.data.unlabelled is None):
            raise NotAgreedError(
                "cells",
                "cells: the server asks for what the model makes of samples without labels; this site agreed "
                "to tell nothing of such samples",
            )

    def _check_round(self, round: object, first: int) -> None:
        """Refuse a round that is none of the config's: a learning rate may depend on its number."""
        if not isinstance(round, int) or not first <= round <= self.rounds:
            raise NotAgreedError(
                "rounds",
                f"rounds: the server asks for round {str(round)[:20]}; this site agreed to {first} to {self.rounds}",
            )

    def _check_training(self, given: TrainInstruction | None, content: RecordDict) -> None:
        """Refuse a training that goes beyond the terms, or for which the server has other label counts."""
        self._check_labelled()
        terms = self.terms
        if terms is not None:
            if given is None:
                raise NotAgreedError("message", "message: this is no instruction of fedskew's server, as was agreed")
            self._check_instruction(given, terms)
        known, state = _config(content).get(REPORTED), self.data.state
        if isinstance(known, str) and state is not None and not self._sums_counts:
            budget = None if terms is None else terms.budget
            reported = Ledger(state).current(self.asked, self.data.counts, budget)
            if reported is None or fingerprint(reported) != known:
                raise CountsChangedError("the data have changed since the label counts that the server has")
        if terms is not None:
            self._used(terms).count("train", hash_of_question(content, given))

    def _check_instruction(self, given: TrainInstruction, terms: Terms) -> None:
        """Refuse a training that is not the config's: by a few samples or steps, a reply would show single samples."""
        self._check_round(given.round, first=1)
        asks = f"in round {given.round}; this site agreed to"
        if given.epochs > terms.epochs:
            raise NotAgreedError(
                "epochs", f"epochs: the server asks for {given.epochs:g} {asks} {terms.epochs:g} at most"
            )
        if given.epochs != self.epochs:
            raise NotAgreedError("epochs", f"epochs: the server asks for {given.epochs:g} {asks} {self.epochs:g}")
        if given.steps != self.steps:
            limits = ["no limit" if steps is None else f"{steps} at most" for steps in (given.steps, self.steps)]
            raise NotAgreedError("steps", f"steps: the server asks for {limits[0]} {asks} {limits[1]}")
        if given.quota is not None and not self.quotas:
            raise NotAgreedError(
                "quota",
                f"quota: the server chooses samples of single classes {asks} none: that takes a selection that assigns "
                "quotas, and exact label counts",
            )

    def _check_reply(self, reply: RecordDict) -> None:
        """Refuse to send what goes beyond the terms."""
        if self.terms is None:
            return
        arrays = reply.get(REPLY)
        beyond = sorted(set(arrays) - set(self.terms.returns)) if isinstance(arrays, ArrayRecord) else []
        if beyond:
            raise NotAgreedError("returns", f"returns: the method returns {beyond[0]}; this site did not agree to it")
        _check_bytes(reply, self.terms)

    def _checked(self, reply: RecordDict) -> RecordDict:
        """Return a reply in masked sums, unless it is larger than was agreed."""
        if self.terms is not None:
            _check_bytes(reply, self.terms)
        return reply

    def _used(self, terms: Terms) -> Used:
        if self.data.state is None:
            raise ConfigError("data: give the site a folder (state), where it counts the rounds")
        return Used(self.data.state, terms)


def client_app(
    model: Model,
    data: Data,
    method: str | Mapping[str, Any] | Method = "fedavg",
    *,
    training: LocalTraining | None = None,
    epochs: float = 1,
    seed: int = 0,
    label_counts: ReleaseMode = "exact",
    epsilon: float | None = None,
    neighbours: Neighbours = "add-remove",
) -> ClientApp:
    """Make a Flower ClientApp that trains with a method's objective and local step.

    Under a stock Flower strategy such as FedAvg it supports any objective that needs only the model from the server;
    replies contain `arrays` and `num-examples`. Under `fedskew.deploy.strategy` it supports every method that does not
    change the network (as MOON does). If a message does not fit, the reply is an error, and the site's own log gives
    the reason.

    Args:
        model: A network, or a function that makes one; the function is called once per message.
        data: The site's samples, or a function of Flower's `Context` that reads them. A method that keeps a state at
            its clients (SCAFFOLD) needs `SiteData.state`.
        method: A preset's name, the tables of a config's `[method]`, or a `Method`. Only its objective and local step
            are used here.
        training: Batch size, learning rate and the other settings of local training.
        epochs: Local epochs under a stock server; fedskew's server sets them itself.
        seed: Seed of shuffles, dropout and augmentation.
        label_counts: What the site replies to a query of its label counts (see `Agreement`). Unless it is "exact",
            confusion matrices are not reported either.
        epsilon: Privacy parameter of noisy label counts. They are released once: queried again, with whatever epsilon,
            the site reports the same numbers.
        neighbours: What epsilon protects (see `Agreement`).

    Returns:
        The ClientApp.

    Raises:
        ConfigError: The method can't be used in a Flower project of your own.

    Example:
        app = client_app(make_network, read_samples, "fedvls", epochs=2)
    """
    chosen = as_method(method, (training or LocalTraining()).momentum)

    def site(context: Context) -> Site:
        held = data if isinstance(data, SiteData) else data(context)
        network = models.swap_dropout(model if isinstance(model, nn.Module) else model())
        work = LocalWork(
            held, chosen.objective, chosen.local_step, training or LocalTraining(), seed, hooks=hooked(chosen)
        )
        classes = tuple(map(str, range(held.num_classes)))
        asked = CountsAsked(label_counts, classes, epsilon, neighbours)
        return Site(FlatModel(network), work, held, asked, epochs, confusion=label_counts == "exact")

    return _app(site)


def site_app(folder: str | Path) -> ClientApp:
    """Make the ClientApp of a federation's app folder.

    Each node's config names the site's own `data.toml`, as `data="/path/of/data.toml"` (see `load_site`). The file
    `agreed.toml` beside it says what the site agreed to (see `Terms`); without it, and for whatever goes beyond it, the
    site replies with an error, and its own log gives the reason. So it does if its data do not fit the agreement.

    Args:
        folder: The app folder, which contains `run.toml` and `deploy.toml`.

    Returns:
        The ClientApp.
    """
    folder = Path(folder)

    def site(context: Context) -> Site:
        path = context.node_config.get("data")
        if not isinstance(path, str):
            raise ConfigError("data: the node's config names no data; start it with --node-config 'data=\"data.toml\"'")
        terms = read_terms(terms_path(Path(path)))
        terms.check_app(folder)
        agreement, config = read_agreement(folder / "deploy.toml"), read(folder / "run.toml")
        terms.check_agreement(agreement)
        return agreed_site(config, agreement, load_site(Path(path), agreement), terms, Path(path))

    return _app(site)


def agreed_site(config: Config, agreement: Agreement, data: SiteData, terms: Terms, place: Path) -> Site:
    """Make the site that a config and an agreement describe, and that keeps to its terms.

    Args:
        config: The config.
        agreement: The agreement.
        data: The site's samples.
        terms: What it agreed to.
        place: Its `data.toml`, beside which its keys are.
    """
    check_config(config, agreement, has_target=True)
    seed = config.seeds[0]
    method = method_of(config, agreement)
    network = make_network(config, seed, method, len(agreement.classes), tuple(agreement.shape))
    work = make_work(config, seed, method, data, tuple(agreement.mean), tuple(agreement.std))
    torch.set_num_threads(config.engine.threads)
    asked = CountsAsked(agreement.label_counts, tuple(agreement.classes), agreement.epsilon, agreement.neighbours)
    evaluated = config.evaluation.every if agreement.evaluates else 1
    return Site(
        FlatModel(network),
        work,
        data,
        asked,
        config.training.most_epochs,
        agreement.evaluates,
        terms,
        config.training.steps,
        quotas=agreement.label_counts == "exact" and components.has(method.selection, "assigns_quotas"),
        earlier=evaluated + config.output.checkpoint_every - 1,
        finish=method.finish,
        estimation=make_estimation(config, len(agreement.classes)),
        masks=None if agreement.updates == "plain" else _masks(config, agreement, method, data, terms, place),
        rounds=config.training.rounds,
    )


def _masks(
    config: Config,
    agreement: Agreement,
    method: Method,
    data: SiteData,
    terms: Terms,
    place: Path,
) -> Masks:
    """Make what a site masks its answers with."""
    if data.state is None:
        raise ConfigError("data: give the site a folder (state), where it keeps what it masked")
    name, key = read_mask_key(place, agreement.keys)
    limit, summed = config.training.weight_limit, agreement.label_counts == "summed"
    assert limit is not None, "checked with the config"
    return Masks(
        name=name,
        key=key,
        peers=public_keys(agreement.keys),
        app=terms.app,
        folder=terms.folder(data.state),
        state=data.state,
        least=max(agreement.sum_sites, terms.sum_sites),
        evaluated=tuple(filter(config.is_evaluated, range(config.training.rounds + 1))),
        limit=limit,
        seconds=PATIENCE + 2 * agreement.round_timeout,
        method=method,
        used=Used(data.state, terms),
        by_sums=method.weighting if summed and isinstance(method.weighting, BySums) else None,
        protection=_protection(config, limit, terms),
    )


def _protection(config: Config, limit: float, terms: Terms) -> Protection | None:
    """Make the noise of a site's updates, as the config says, and the budget, as the site agreed to it."""
    section = config.privacy
    if section is None:
        return None
    if terms.updates_epsilon is None or terms.updates_delta is None:
        raise NotAgreedError(
            "updates_epsilon", "updates_epsilon: this site agreed to none; look, and agree: fedskew deploy site --check"
        )
    noise = UpdateNoise(section.clip, section.noise, limit, section.answers)
    return Protection(noise, terms.updates_epsilon, terms.updates_delta)


def as_method(method: str | Mapping[str, Any] | Method, momentum: float | None = None) -> Method:
    """Make the method for a Flower project of a user's own.

    Args:
        method: A preset's name, the tables of a config's `[method]`, or a `Method`.
        momentum: Momentum of the clients' SGD.

    Raises:
        ConfigError: The method works only with fedskew's own server and sites.
    """
    if isinstance(method, Method):
        methods.check(method)
        built = method
    else:
        built = methods.build(methods.expand({"preset": method} if isinstance(method, str) else method), momentum)
    if built.pipeline is not None:
        raise ConfigError("method: FedConcat's stages are not deployed; simulate it")
    if built.finish is not None:
        raise ConfigError("method.finish: it needs fedskew's own server; use server_app and site_app")
    for component in hooked(built).values():
        if type(component).adapt is not Hooks.adapt:
            name = type(component).__name__
            raise ConfigError(
                f"method: {name} changes the network, so both sides have to be fedskew's; use server_app and site_app"
            )
    return built


def _app(site: Callable[[Context], Site]) -> ClientApp:
    app = ClientApp()

    def reply(message: Message, context: Context, work: Callable[[Site], RecordDict]) -> Message:
        refused = _config(message.content).get(REFUSED)
        if refused is not None:
            LOG.warning("the server refused what this site sent: %s", str(refused)[:MOST_SAID])
        try:
            _check_version(_config(message.content))
            return Message(work(site(context)), reply_to=message)
        except (Exception, SystemExit) as error:  # a reader's or a model's own can be anything
            LOG.error("%s", error if isinstance(error, FedskewError) else in_one_line(error))
            # What is raised, Flower sends to the server, with its text, which may name files and values of this site.
            return Message(Error(RAISED, _reason(error)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.train(message.content, context.node_id))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.evaluate(message.content))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.report_labels())

    @app.query(FINISH)
    def finish(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.sums(message.content))

    @app.query(COUNTED)
    def add_counts(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.add_counts(message.content))

    @app.query(AGAIN)
    def mask_again(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.mask_again(message.content))

    @app.query(UNMASK)
    def unmask(message: Message, context: Context) -> Message:
        return reply(message, context, lambda site: site.unmask(message.content))

    return app


def _check_bytes(reply: RecordDict, terms: Terms) -> None:
    """Raise NotAgreedError for a reply that is larger than was agreed."""
    try:
        check_size(reply, terms.bytes)
    except RefusedError as error:
        raise NotAgreedError("bytes", f"bytes: {error}, by what this site agreed to") from None


def _check_version(config: ConfigRecord) -> None:
    """Raise VersionError unless the server runs this version of fedskew. A stock Flower server tells none."""
    theirs = config.get(VERSION)
    if theirs is not None and theirs != __version__:
        raise VersionError(
            f"the server runs fedskew {str(theirs)[:40]}, and this site {__version__}; install the server's version"
        )


def _reason(error: BaseException) -> str:
    """Describe an error to the server: the term that it exceeds, or only its type."""
    if isinstance(error, NotAgreedError):
        return f"not agreed: {error.kind}; its own log says more"
    if isinstance(error, CountsChangedError):
        return CHANGED
    if isinstance(error, VersionError):
        return f"another version: it runs fedskew {__version__}"
    # A type that is neither Python's nor fedskew's may be named after data.
    known = (kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in ("builtins", "fedskew"))
    return f"failed: {next(known).__name__} in its own log"


def _config(content: RecordDict) -> ConfigRecord:
    record = content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise ArgumentError(f"message: has no ArrayRecord {key!r}")
    return record


def _hash_of_model(content: RecordDict) -> str:
    return hash_of_question(RecordDict({ARRAYS: _arrays(content, ARRAYS)}), "model")


def _model(content: RecordDict, layout: ModelLayout) -> ModelState:
    """Read the model that the server sent."""
    return layout.to_state(decode(_arrays(content, ARRAYS), layout.specs, "the server's array"))


def _broadcast(content: RecordDict) -> dict[str, torch.Tensor]:
    """Read the tensors sent beside the model; they are not checked, as they affect only this site's training."""
    if BROADCAST not in content:
        return {}
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in _arrays(content, BROADCAST).items()}
