"""Flower's ClientApp of a site, in a process that Flower starts for each message: of a federation, or of one's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedskew import __version__, components, methods, models
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import ModelLayout, pack, unpack
from fedskew.deploy._log import LOG
from fedskew.deploy._moments import weighted
from fedskew.deploy._site import MOST_SAID, CountsChangedError, Site, Worker, agreed_site, counts_reply, trained_reply
from fedskew.deploy.book import Book
from fedskew.deploy.site_data import SiteData, SiteStates
from fedskew.deploy.terms import CountsRequest, Neighbours, NotAgreedError, Release, ReleaseMode, Terms, terms_path
from fedskew.engine import LocalTraining, LocalWork
from fedskew.engine.contracts import hooked
from fedskew.errors import ConfigError, RunError, reason_of
from fedskew.experiment import read
from fedskew.hooks import Hooks
from fedskew.methods import Method
from fedskew.metrics import Tally
from fedskew.models import FlatModel

RAISED = 2
"""Flower's code of an error that a ClientApp raised."""

STOCK = "stock"
"""Run identifier of a site's states under a stock Flower server."""

Data = SiteData | Callable[[Context], SiteData]
Model = nn.Module | Callable[[], nn.Module]


class VersionError(RunError):
    """The server runs another version of fedskew."""


@dataclass(frozen=True)
class OwnClient:
    """A client in a Flower project of a user's own; `epochs`: how long it trains under a stock server."""

    worker: Worker
    request: CountsRequest
    epochs: float
    node: int

    def train(self, content: RecordDict) -> RecordDict:
        """Train as a message instructs. For a stock Flower server, which sends neither, the node's id is the client's
        index in random draws, and training starts from the latest state."""
        config, place = wire.config_of(content), self.worker.data.state
        instruction = wire.TrainInstruction.parse(config)
        if instruction is None and components.has(self.worker.work.local_step, "is_dynamic"):
            name = type(self.worker.work.local_step).__name__
            raise ConfigError(
                f"method: {name} is one half of {name}, and this server has not the other; use "
                f"fedskew.deploy.strategy('{name.lower()}', model=...)"
            )
        states = None if place is None else SiteStates(place, STOCK if instruction is None else instruction.run)
        newest = 0 if states is None else states.newest
        round = int(config.get(wire.ROUND, 0))  # type: ignore[arg-type]
        task = instruction or wire.TrainInstruction(STOCK, round, self.node, self.epochs, newest)
        trained = self.worker.train(content, task, states)
        if states is not None:
            states.keep(task.round, trained.update.state)  # also if it is empty, so that a lost state is noticed
        elif trained.update.state:
            raise ConfigError("data: this method keeps a state between rounds; give the site a folder (state)")
        if trained.update.reply and instruction is None:
            raise ConfigError("method: it returns arrays beside the model; use fedskew.deploy.strategy")
        tells = instruction is None or self.request.label_counts != "noisy"
        samples = {wire.SAMPLES: len(self.worker.data.targets)} if tells else {}
        return trained_reply(self.worker.layout, trained, instruction, samples)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Evaluate the model that a message contains: loss and accuracy."""
        self.worker.read(content)
        tally = Tally(self.worker.data.num_classes)
        counts, loss = self.worker.predict(tally)
        samples = tally.samples(counts)
        accuracy = tally.right(counts) / max(samples, 1)
        return RecordDict(
            {wire.METRICS: MetricRecord({wire.SAMPLES: samples, wire.EVALUATION_LOSS: loss, "accuracy": accuracy})}
        )

    def query(self, content: RecordDict) -> RecordDict:
        """Report exact or noisy label counts, or only the number of samples."""
        request, counts, state = self.request, self.worker.data.counts, self.worker.data.state
        if request.label_counts == "noisy" and (request.epsilon is None or state is None):
            raise ConfigError(
                "label_counts: noisy counts need epsilon, and a folder where the release is stored (state)"
            )
        made = Release.of(request, counts, request.plain(counts))
        return counts_reply(request, made if state is None else Book(state).release(request, counts, request.once))


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
    change the network (as MOON does). If a message does not fit, the reply is an error; the site's own log says why.

    Args:
        model: A network, or a function that makes one; the function is called once per message.
        data: The site's samples, or a function of Flower's `Context` that reads them. A method that keeps a state at
            its clients (SCAFFOLD) needs `SiteData.state`.
        method: A preset's name, the tables of a config's `[method]`, or a `Method`. Only its objective and local step
            are used here.
        training: Batch size, learning rate and the other settings of local training.
        epochs: Local epochs under a stock server; fedskew's server sets them itself.
        seed: Seed of shuffles, dropout and augmentation.
        label_counts: What the site replies to a query of its label counts (see `Agreement`).
        epsilon: Privacy parameter of noisy label counts. They are released once: queried again, with whatever epsilon,
            the site reports the same numbers.
        neighbours: What epsilon protects (see `Agreement`).

    Raises:
        ConfigError: The method can't be used in a Flower project of your own.

    Example:
        app = client_app(make_network, read_samples, "fedvls", epochs=2)
    """
    settings = training or LocalTraining()
    chosen = as_method(method, settings.momentum)

    def client(context: Context, _: ConfigRecord) -> OwnClient:
        held = data if isinstance(data, SiteData) else data(context)
        if held.multi_label:
            raise ConfigError("data: samples of several labels take fedskew's own server; use server_app and site_app")
        network = models.Dropout.swap(model if isinstance(model, nn.Module) else model())
        work = LocalWork(held, chosen.objective, chosen.local_step, settings, seed, hooks=hooked(chosen))
        flat = FlatModel(network)
        settings.check_groups(flat.names)
        classes = tuple(map(str, range(held.num_classes)))
        request = CountsRequest(label_counts, classes, epsilon, neighbours)
        return OwnClient(Worker(flat, ModelLayout(flat, whole=True), work, held), request, epochs, context.node_id)

    return _app(client)


def site_app(folder: str | Path) -> ClientApp:
    """Make the ClientApp of a federation's app folder, which contains `run.toml` and `deploy.toml`.

    Each node's config names the site's own `data.toml`, as `data="/path/of/data.toml"` (see `SiteData.load`). The file
    `agreed.toml` beside it says what the site agreed to (see `Terms`); without it, and for whatever goes beyond it, the
    site replies with an error, and its own log gives the reason. So it does if its data do not fit the agreement.
    """
    folder = Path(folder)

    def site(context: Context, config_of_message: ConfigRecord) -> Site:
        path = context.node_config.get("data")
        if not isinstance(path, str):
            raise ConfigError("data: the node's config names no data; start it with --node-config 'data=\"data.toml\"'")
        terms = Terms.read(terms_path(Path(path)))
        terms.check_app(folder)
        agreement = Agreement.read(folder / "deploy.toml").told(config_of_message)
        config = weighted(read(folder / "run.toml").weights_in(Path(path).parent), config_of_message)
        return agreed_site(config, agreement, SiteData.load(Path(path), agreement), terms, Path(path))

    return _app(site, (wire.FINISH, *wire.OVER_ALL, wire.AGAIN, wire.UNMASK, wire.KEEP, wire.SITES))


def as_method(method: str | Mapping[str, Any] | Method, momentum: float | None = None) -> Method:
    """Make the method for a Flower project of one's own; ConfigError where it needs fedskew's own server and sites."""
    if isinstance(method, Method):
        methods.check(method)
        built = method
    else:
        built = methods.build(methods.expand({"preset": method} if isinstance(method, str) else method), momentum)
    if built.pipeline is not None:
        raise ConfigError("method: FedConcat's stages are not deployed; simulate it")
    if built.personal is not None:
        raise ConfigError("method.personal: it needs fedskew's own sites, which keep it; use server_app and site_app")
    if built.finish is not None:
        raise ConfigError("method.finish: it needs fedskew's own server; use server_app and site_app")
    for component in hooked(built).values():
        if type(component).adapt is not Hooks.adapt:
            name = type(component).__name__
            raise ConfigError(
                f"method: {name} changes the network, so both sides have to be fedskew's; use server_app and site_app"
            )
    return built


def _app(make: Callable[[Context, ConfigRecord], Any], queries: Sequence[str] = ()) -> ClientApp:
    """Make the app that answers by the methods of what `make` makes for each message; `queries`: further ones."""
    app = ClientApp()

    def answer(work: str) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            config = wire.config_of(message.content)
            if (reason := config.get(wire.REFUSED)) is not None:
                LOG.warning("the server refused what this site sent: %s", str(reason)[:MOST_SAID])
            try:
                _check_version(config)
                who, question = make(context, config), unpack(message.content)
                answered = getattr(who, work)(question)
                if isinstance(who, Site):
                    who.note(work, question, answered)
                return Message(pack(answered) if wire.VERSION in config else answered, reply_to=message)
            except (Exception, SystemExit) as error:  # a reader's or a model's own can be anything
                LOG.error("%s", reason_of(error))
                # What is raised, Flower sends to the server, with its text, which may name files and values.
                return Message(Error(RAISED, _reason(error)), reply_to=message)

        return handle

    app.train()(answer("train"))
    app.evaluate()(answer("evaluate"))
    app.query()(answer("query"))
    for name in queries:
        app.query(name)(answer(name))
    return app


def _check_version(config: ConfigRecord) -> None:
    """Raise VersionError unless the server runs this version of fedskew. A stock Flower server tells none."""
    theirs = config.get(wire.VERSION)
    if theirs is not None and theirs != __version__:
        raise VersionError(
            f"the server runs fedskew {str(theirs)[:40]}, and this site {__version__}; install the server's version"
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, NotAgreedError):
        return f"not agreed: {error.kind}; its own log says more"
    if isinstance(error, CountsChangedError):
        return wire.CHANGED
    if isinstance(error, VersionError):
        return f"another version: it runs fedskew {__version__}"
    # A type that is neither Python's nor fedskew's may be named after data.
    known = (kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in ("builtins", "fedskew"))
    return f"{next(known).__name__} in its own log"
