"""The tables of a config, and what each key means, as `fedskew list keys`, new configs and editors show it."""

from dataclasses import fields
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from fedskew.engine import Group, LocalTraining
from fedskew.engine.target import Estimation
from fedskew.executors import cores
from fedskew.labels import MixMethod
from fedskew.local_steps import Adam
from fedskew.parameters import BelowOne, Count, NonNegative, Positive, Seed, Share, Size


class Section(BaseModel):
    """A table of a config; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )


class Named(Section):
    """A table that names a component; its further keys are parameters, checked when the component is made."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the named component."""
        return dict(self.model_extra or {})


class DataSection(Named):
    """The data set, with the parameters of its reader."""

    name: str
    """Name of a reader, or `module:function` for one of your own."""
    root: str | None = None
    """Folder of its files; without it: the environment variable `FEDSKEW_DATA`."""
    tokenizer: str | None = None
    """Folder of a tokeniser (tokenizer.json) by which texts become ids, `length` of each; it travels with the model.
    Without it: words of the training texts."""
    validation: BelowOne | Literal["own"] = 0.0
    """Share of the training samples of each class that is held out, for early stopping and for choosing values; "own":
    the samples that the data set itself sets aside, which are never trained on in any case."""
    held_out: BelowOne = 0.0
    """Share of each client's samples that it does not train on, drawn at random by class: it calibrates on them, and
    with them the label mix of a target is estimated. Label counts are those of the other samples."""
    client_test: BelowOne = 0.0
    """Share of each client's samples that it is tested on and never trains on, drawn at random by class: what the
    model is worth to each client (`fedskew sites`). Of each class that a client holds, one sample at least is trained
    on."""
    rows: Count | None = None
    """Use only so many of the training samples, drawn at random with the same share of every class (and the validation
    samples among them); without it: all."""


class PartitionSection(Named):
    """How the training samples are divided among clients, with the rule's parameters."""

    rule: str
    """A partition rule; "natural": the data set's own clients; "file": a saved partition, whose parameters are `path`
    and `target_client`, whether its last client is the target."""
    clients: Count | None = None
    """Number of clients, including a target client where the rule has one. "natural" merges whole clients until so many
    are left (without it: it keeps all); "file" has its own number."""
    seed: Seed | None = None
    """Seed of all that decides who holds what: samples that are held out or left out, and the rule's draws. With it,
    runs of different `seeds` train on one and the same federation; without it: a run's own seed."""
    oracle: bool = False
    """Deal the clients that train as many samples once more, from all training samples but a target client's, so that
    each has the target mix (the Oracle of FedPALS)."""
    baseline: Literal["pooled", "alone"] | None = None
    """What no federation gives: "pooled": one client holds what all that train hold; "alone": one of them trains and no
    other, with each seed the next in a random order, so that as many seeds as clients have each once."""


class ModelSection(Named):
    """The network, with its options."""

    name: str
    """Name of a network, or `module:function` for one of your own; `timm:NAME`, `torchvision:NAME`, or
    `transformers:FOLDER`, a folder of your own with config.json and model.safetensors. Nothing is downloaded."""
    weights: str | None = None
    """File that the first model's weights and running statistics are from, `.safetensors` or a state dict as `.pth`.
    Names and shapes have to be the network's; a last layer of other classes starts as it was drawn. Without it: all
    weights are drawn."""
    weights_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of that file, as fedskew fills it in: another file is refused."""
    freeze: Annotated[list[str], Field(min_length=1)] | None = None
    """Parameters that stay as they are, by patterns of names, such as ["layer1.*"] (`fedskew list models NAME`): they
    travel nowhere, and batch norm among them is in eval mode. Without it: all are trained."""
    train: Annotated[list[str], Field(min_length=1)] | None = None
    """Parameters that are trained, by such patterns, in place of `freeze`: all others stay as they are."""
    adapters: dict[str, Any] | None = None
    """Adapters by peft, which alone are trained: `kind`, such as "lora", and that kind's arguments by peft's names, or
    `rank` and `targets`; `modules_to_save` are layers that are trained too. Without it: none."""
    architecture: dict[str, Any] | None = None
    """The config.json of `transformers:FOLDER`, as fedskew fills it in."""

    @property
    def freezes(self) -> bool:
        """Whether some parameters stay as they are."""
        return any(one is not None for one in (self.freeze, self.train, self.adapters))

    @pydantic.model_validator(mode="after")
    def _one_of_both(self) -> "ModelSection":
        if sum(one is not None for one in (self.freeze, self.train, self.adapters)) > 1:
            raise ValueError("freeze, train and adapters each say what is trained; give one of them")
        return self


class GroupSection(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: str
    """Pattern of their names, such as "head.*" (`fedskew list models NAME`); the first that matches counts."""
    lr: Positive | None = None
    """Their learning rate in the first round; from then on it changes as `training.lr` does."""
    weight_decay: NonNegative | None = None
    """Their weight decay."""


class TrainingSection(Section):
    """Rounds, and the local training of each client in a round."""

    rounds: Size
    """Number of rounds."""
    participation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the clients that is selected in each round."""
    weight_limit: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """No client's update counts for more than this share, whatever the weighting says; what is cut off goes to the
    others by their weights. Without it: no limit."""
    epochs: Annotated[int | Annotated[float, Field(allow_inf_nan=False)], Field(ge=0, lt=2**31)] = 1
    """Local epochs; a fraction such as 0.5 trains on as many of an epoch's batches, at least one."""
    steps: Count | None = None
    """Local steps, the same at every client, in place of `epochs`; without it: as `epochs` says."""
    batch_size: Count = 64
    """Samples in a batch."""
    smallest_batch: Count = 1
    """A last batch of an epoch with fewer samples is left out."""
    lr: Positive = 0.01
    """Learning rate of the first round."""
    lr_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor of the learning rate from round to round; with the schedule "step" every `decay_every` rounds."""
    schedule: Literal["cosine", "step", "linear"] | None = None
    """How the learning rate goes down over the rounds: from `lr` to `final_lr` by half a cosine or a straight line, or
    in steps; without it: by `lr_decay`."""
    decay_every: Count | None = None
    """With `schedule = "step"`: rounds from one factor of `lr_decay` to the next."""
    final_lr: NonNegative | None = None
    """With "cosine" and "linear": the learning rate that the round after the last would have; without it: 0."""
    warmup: Count | None = None
    """So many rounds at first, in which the learning rate grows to `lr` by equal steps; the schedule comes after."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """What takes the clients' steps. "adamw": Adam with weight decay apart from the gradient."""
    momentum: BelowOne = 0.0
    """Momentum of SGD."""
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = Adam().betas
    """Of "adam" and "adamw": decay of the means of gradients, and of their squares."""
    eps: Positive = Adam().eps
    """Of "adam" and "adamw": added to the root of the mean square."""
    weight_decay: NonNegative = 0.0
    """L2 penalty, added to the gradient; of "adamw" the share of `lr` by which parameters shrink in a step."""
    keep_optimizer: bool = Field(False, validation_alias=AliasChoices("keep_optimizer", "persist_momentum"))
    """Each client keeps what its optimiser carries between participations (SGD's momentum buffer, as FedVLS's public
    code does for its baselines; Adam's means and number of steps); without it: it starts at zero in each round."""
    clip_norm: Positive | None = None
    """Gradients are scaled down to this Euclidean norm before each step; without it: they are not."""
    groups: Annotated[list[GroupSection], Field(min_length=1)] | None = None
    """Parameters with a learning rate or weight decay of their own: tables with `match`, a pattern of names such as
    "head.*", and `lr`, `weight_decay` or both. The first that matches a name counts."""
    precision: Literal["bf16"] | None = None
    """"bf16": networks compute their gradients in bfloat16, by autocast (losses, parameters and steps stay float32);
    faster where the processor has instructions for it, and slower where not; without it: float32."""
    teacher_train_mode: bool = False
    """The teacher's batch norm uses batch statistics, as FedVLS's public code does for itself."""
    class_weights: Literal["balanced"] | list[NonNegative] | None = None
    """What a sample of each class counts for in the classification loss, in the order of the classes; "balanced":
    inversely to the samples of its class in the whole federation, 1 in the mean over samples; of several labels a
    sample, what having each counts for, "balanced": samples without it by those with it; without it: all 1."""
    sampler: str | None = None
    """"balanced": a client's epoch draws as many samples as it has, with replacement, each of its classes as often as
    the others (of several labels a sample, by its rarest); or "module:function", a function of one's own (labels,
    counts, rng) -> rows; without it: every sample once, shuffled."""
    augmentation: str | None = None
    """Random changes of a batch's inputs, by name; without it: none."""

    @pydantic.field_validator("epochs")
    @classmethod
    def _whole(cls, epochs: float) -> float:
        """Return a whole number of epochs as one, so that 5.0 and 5 are the same config."""
        return int(epochs) if epochs == int(epochs) else epochs

    def local(self) -> LocalTraining:
        """Return the settings of local training."""
        own = {field.name: getattr(self, field.name) for field in fields(LocalTraining)}
        return LocalTraining(**own | {"groups": tuple(Group(**dict(group)) for group in self.groups or ())})

    @property
    def balances(self) -> bool:
        """Whether class weights go by the label counts of all clients."""
        return self.class_weights == "balanced"

    @property
    def most_epochs(self) -> float:
        """Local epochs, or more than a client can need for `steps`."""
        return self.epochs if self.steps is None else self.steps


class TargetSection(Section):
    """The label mix that the model is trained for."""

    mix: Literal["uniform", "pooled", "client", "data", "truth", "estimate"] | list[float] | None = None
    """Shares by class, sum 1, or percentages, or counts; "uniform"; "pooled": that of all clients that train; "client":
    that of the partition's target client; "data": the one that the data set defines; "truth": `truth`; "estimate":
    estimated in the run, from the target's unlabelled samples and those that clients hold out (`data.held_out`);
    without it: "client" or "data", whichever there is."""
    truth: Literal["uniform", "pooled", "data"] | list[float] | None = None
    """The mix by which accuracy on the target is measured, where the server is told another or estimates it; without
    it: `mix`, or where that is estimated, the target client's. With "estimate" and no target client, unlabelled samples
    of this mix are drawn from the validation samples."""
    unlabelled: Count | Annotated[str, Field(min_length=1)] = 1000
    """Number of unlabelled samples of a simulated target; fewer are drawn where a class runs short. Or where your own
    unlabelled samples of the target are: a folder of images, or an .npz file with an array x; `truth` may then be left
    out."""
    noise: NonNegative = 0.0
    """The server is given the mix plus noise * max(0, a standard normal draw) in each class, normalised (FedPALS,
    appendix A.4); accuracy on the target is measured with the exact mix."""
    warmup: Size = 10
    """With "estimate": the round after which the first estimate is made. Until then, and while none is sure enough,
    weightings that need a target give way to FedAvg's."""
    every: Count = 5
    """With "estimate": rounds from one estimate to the next; the newest that is sure enough is used."""
    estimator: MixMethod = "gls"
    """How the mix is estimated (see `fedskew.labels.estimate_mix`)."""
    bins: Annotated[int, Field(ge=1, le=4)] = 4
    """Confidence classes into which the samples of a predicted class are divided. With 1 nothing tests whether the
    target looks like a mix of the clients' classes."""
    on_misfit: Literal["warn", "fedavg", "stop"] = "fedavg"
    """What to do where the target looks like no mix of the clients' classes: "fedavg", weigh as FedAvg until another
    estimate fits; "warn", use the estimate in spite of that; "stop" the run."""
    ask: Count = 10_000
    """Held-out samples that an estimate is made from, about; where clients hold more, some clients are asked, drawn
    anew for each estimate."""

    @property
    def is_estimated(self) -> bool:
        """Whether the mix is estimated in the run."""
        return self.mix == "estimate"

    def estimation(self, classes: int) -> Estimation | None:
        """Return how the mix is estimated; None where it is not."""
        if not self.is_estimated:
            return None
        rules = {field.name: getattr(self, field.name) for field in fields(Estimation) if field.name != "classes"}
        return Estimation(classes, **rules)


class ConditionsSection(Section):
    """Clients that drop out or do less work, and noise on the label counts."""

    dropout: BelowOne = 0.0
    """Share of each cohort that drops out after selection."""
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    """"exact": that share, rounded down, and never the whole cohort; "bernoulli": each client on its own with this
    probability."""
    stragglers: Share = 0.0
    """Share of the clients that do fewer local epochs: from 1 to `epochs`, drawn once."""
    count_epsilon: Positive | None = None
    """Label counts carry Laplace noise of scale 1 / epsilon, drawn once; without it: they are exact. Numbers of samples
    stay exact."""
    count_use: Literal["selection", "all"] = "selection"
    """What noisy counts are used for: "selection", which includes FedConcat's clusters, or "all", weights too."""


class PrivacySection(Section):
    """Differential privacy of what clients send in training; it needs masked updates (`engine.updates`).

    It protects a client with all of its samples (see `fedskew.privacy`). Label counts are apart:
    `conditions.count_epsilon`.
    """

    clip: Annotated[float, Field(gt=0.0, le=8.0)]
    """Largest Euclidean norm of an update; longer ones are scaled down."""
    noise: Positive
    """Noise multiplier: standard deviation of the noise in the weighted sum of a round, divided by the most that one
    client can change that sum, which is about `training.weight_limit` times `clip`."""
    epsilon: Positive
    """What a client may spend over the whole run. It takes part in no round beyond that."""
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """The delta that epsilon goes with; below 1 divided by the number of clients."""
    answers: Annotated[int, Field(ge=3)] | None = None
    """Number of clients whose shares of noise are that of a round; with fewer the model stays as it was, and with more
    the noise is larger, so that the others may tell theirs to the server. Without it: those that reply."""


class EvaluationSection(Section):
    """When and what to evaluate."""

    every: Count = 1
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    clients: bool = False
    """Also evaluate each client's model after its local training."""
    sites: bool = False
    """Also evaluate the model at each client, on the client's own test samples (`data.client_test`), whenever it is
    evaluated; without it: after the last round alone."""
    baselines: list[Literal["alone", "pooled"]] = []
    """What the models at each client are compared with: "alone", each client's own training, as many steps as it takes
    in the federation, of which the best on its held-out samples counts; "pooled", one model of all training samples in
    one place, in every round as many steps as a client takes in the mean."""
    patience: Size = 0
    """Stop after so many evaluations in which validation samples give no better `measure`; 0: never."""
    intervals: bool = True
    """Intervals of the last model's figures, by bootstrap over the test samples (AUROC's takes half a second for 10,000
    samples of ten classes)."""
    summary: Literal["final", "last 10", "best on validation"] = "final"
    """What stands for a run in tables, on pages and in tests of differences. "final": the model after the last round.
    "last 10": the mean over the evaluations of the last 10 rounds. "best on validation": the model that is best on the
    validation samples. Beside it stands the mean over the last tenth of the rounds."""
    measure: Literal[
        "auto", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "ece", "worst_class", "target_accuracy"
    ] = "auto"
    """The figure by which models are ranked, and chosen on validation samples (of `ece`, the calibration error, the
    lowest is best). "auto": `target_accuracy` where there is a target; else `balanced_accuracy` where one class has
    more than 60 % of the samples, or than 1.5 times an even share, and `accuracy` where none has."""

    @property
    def reads_scores(self) -> bool:
        """Whether the measure is of all classes' scores, not of the predicted ones alone."""
        return self.measure in ("auroc", "pr_auc", "ece")


class TuneSection(Section):
    """A key whose value is chosen on validation samples, by `evaluation.measure`."""

    key: str
    """The dotted key."""
    values: Annotated[list[Any], Field(min_length=1)]
    """The values to try."""


class EngineSection(Section):
    """Where and how a cohort trains."""

    backend: Literal["auto", "sequential", "processes", "cohort"] = "auto"
    """"sequential": one client after another. "processes": several at a time, with the same bits. "cohort": all at
    once, equal to floating-point tolerance. "auto": "cohort" where that is known to be faster
    (`engine.cohort.CohortBackend.is_faster`); else, from the command line, "processes" where a run is worth their
    start; else "sequential". The run's summary names the backend."""
    chunk: Count | None = None
    """How many clients the backend "cohort" stacks at a time, at most; without it: as many as memory allows."""
    seeds_together: bool = False
    """With "cohort": the clients of all seeds train as one cohort; where a method draws a last layer that nobody
    trains, which differs between seeds, those of each seed."""
    processes: Count | None = None
    """Number of processes of the backend "processes", which does not change the result; without it: as many as the
    cores allow."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where there is one."""
    keep_features: bool = True
    """Where the first layers of the network are frozen (`model.freeze`), compute once what they make of a client's
    samples, and train the others on that. It is the same but for rounding; not done with augmentation, with dropout
    among these layers, and for more than 4 GiB, which the run's notes say."""
    updates: Literal["plain", "masked"] = "plain"
    """"plain": the server gets each client's update. "masked": it gets sums over the clients of a round, in fixed point
    and clipped, as where masks hide each update on real sites (`fedskew.sums`); the bits are those of real sites.
    Clients' weights are then those of the whole cohort, renormalised over the clients that replied."""
    label_counts: Literal["reported", "summed"] = "reported"
    """With masked updates: "reported": the server gets each client's label counts, exact or noisy
    (`conditions.count_epsilon`). "summed": it gets sums over all clients only, once before the first round, and each
    client computes its own weight from these (FedAvg, uniform, FedLA, FedPALS); with `conditions.count_epsilon` from
    noisy counts."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of every process. They are part of the result, as sums inside a convolution depend on them."""

    def number_of_processes(self) -> int:
        """Return the number of clients that train at a time: 1, except with the backend "processes"."""
        if self.backend != "processes":
            return 1
        return self.processes or max(1, cores() // self.threads)


class OutputSection(Section):
    """Files that a run writes in addition to its records."""

    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next."""
    trackers: list[Literal["tensorboard", "mlflow", "wandb"]] = []
    """Experiment trackers that get every record."""
