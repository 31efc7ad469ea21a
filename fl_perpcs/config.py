"""The typed run config: one place for names, defaults, ranges and what cannot be combined.

Keys are written as in ``[tool.flwr.app.config]``: ``assembly.top-k`` is ``config.assembly.top_k``.
"""

import difflib
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from fl_perpcs.errors import PerPcsError
from fl_perpcs.plugins import unknown
from fl_perpcs.roles import role_sizes, shortage

Value = str | int | float | bool

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ConfigError(PerPcsError):
    """A run config that cannot be run; lists every problem at once."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"the run config has {len(problems)} problem(s):\n{lines}")


class Section(BaseModel):
    """A table of the config: kebab-case outside, unknown keys refused, immutable."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunSection(Section):
    """Where the run is kept and how long it waits."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "demo"
    """Names the run folder."""
    dir: str = ""
    """The run folder, absolute. Empty: a new one in ``./runs`` with ``perpcs run``, in
    ``$PERPCS_HOME/runs`` with plain ``flwr run``."""
    timeout: Rate = 3600.0
    """Seconds without any reply after which a phase fails."""
    window: Count = 0
    """Messages under way at once; 0: two for each worker."""
    report: StrictBool = True
    """Write ``report.html`` at the end."""


class StrategySection(Section):
    """Which strategy runs."""

    name: str = "per-pcs"
    """A strategy of this package, of another one (entry point) or ``package.module:name``; see
    docs/strategies.md."""


class LMSection(Section):
    """The base LLM."""

    name: str = "tiny"
    """``tiny`` (embedded), ``smollm2`` (after ``perpcs fetch smollm2``), a Hugging Face
    model name or a folder."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the frozen weights; adapters and gates are trained in float32."""
    device: str = "auto"
    """``auto`` (a GPU if ``federation.client-gpus`` > 0), ``cpu``, ``cuda``, ``cuda:1`` …"""
    max_length: Annotated[int, Field(ge=16)] = 128
    """Tokens of a training example; longer inputs are shortened, responses never."""
    trust_remote_code: StrictBool = False
    """Allow code from a model's repository to run."""


class DataSection(Section):
    """Where users come from."""

    source: str = "personas"
    """``personas`` (synthetic), ``debian-synopsis``, ``lamp`` (LaMP's own files), ``per-pcs``
    (the folders that Per-Pcs and OPPU were published with) or ``table`` (JSONL, Parquet, CSV or
    a Hugging Face dataset with a row for each item)."""
    task: str = ""
    """A task's name or the absolute path of its TOML file (``lamp``, ``per-pcs``, ``table``)."""
    path: str = ""
    """The source's file or folder, absolute; empty: where ``perpcs fetch`` puts it."""
    split: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "train"
    """``train``, ``dev`` … (``lamp``, and Hugging Face datasets)."""
    dataset: str = ""
    """Name of a Hugging Face dataset, in place of a path (``table``)."""
    user_column: str = "user"
    """Column of the user's id (``table``)."""
    input_column: str = "input"
    """Column of the input; empty: items are plain text (``table``)."""
    output_column: str = "output"
    """Column of the output (``table``)."""
    time_column: str = ""
    """Column that orders a user's items; empty: the order of the rows (``table``)."""
    users: Positive = 54
    """Synthetic users (``personas``)."""
    communities: Positive = 6
    """Communities of synthetic users (``personas``)."""
    history: Annotated[int, Field(ge=4)] = 48
    """Mean history items of a synthetic user (``personas``)."""
    queries: Count = 20
    """Queries of each user: its last items are held out. Where the data has queries of its own
    (``lamp``, ``per-pcs``), at most so many, and 0: all."""
    leaks: Literal["remove", "keep", "stop"] = "remove"
    """History items with the input of one of the user's queries, or (without labels) its gold
    output: removed, kept, or the run stops."""


class RolesSection(Section):
    """How many users play which role; the roles are disjoint."""

    base: Count | Annotated[float, Field(gt=0, lt=1)] = 18
    """Base users adapt the base LLM to the task: how many, or their share of all users."""
    candidates: Positive | Annotated[float, Field(gt=0, lt=1)] = 24
    """Candidates may be selected as sharers: how many, or their share."""
    targets: Positive | Annotated[float, Field(gt=0, lt=1)] = 12
    """Targets assemble an adapter from the pool and are evaluated: how many, or their share."""
    order: Literal["random", "activity", "given"] = "random"
    """``activity``: the most active users are targets (as published); ``given``: as the data
    says (``per-pcs``)."""
    max_history: Count = 0
    """Only the last items of each history are used; 0: all."""
    target_history: Count = 0
    """The same for targets only, for cold starts; 0: as the others."""


class PromptsSection(Section):
    """What stands before the instruction in every prompt."""

    retrieve: Count = 0
    """Relevant history items shown (retrieval-augmented prompts; published: 1, 2 or 4)."""
    retriever: Literal["bm25", "dense"] = "bm25"
    """``bm25``, or ``dense``: cosine of sentence embeddings."""
    encoder: str = "minilm"
    """Sentence encoder of ``dense``: ``minilm`` (after ``perpcs fetch minilm``), a Hugging Face
    name or a folder."""
    profiles: str = ""
    """JSON file of users' profile texts by user id, absolute (profile-augmented prompts);
    ``perpcs data profiles`` writes one. Empty: no profile."""


class LoraSection(Section):
    """The adapters."""

    rank: Positive = 8
    """r, the rank of the adapters."""
    alpha: Rate = 8.0
    """α; an adapter's update is (α/r)·B·A, or (α/√r)·B·A with ``rslora``."""
    variant: Literal["lora", "rslora", "dora", "ia3"] = "lora"
    """``lora`` or ``rslora`` (Kalajdzievski, 2023); ``dora`` and ``ia3`` are refused: they do not
    break into pieces."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Dropout before A while training."""
    target_modules: str = "q_proj,k_proj,v_proj,o_proj"
    """Module names, comma-separated; a site is one of them in one layer."""
    init: Literal["shared", "own"] = "shared"
    """``shared``: every adapter starts from the same A; ``own``: one A per user."""

    @property
    def scale(self) -> float:
        """What an adapter's B·A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.variant == "rslora" else self.rank)


class FitSection(Section):
    """A training job."""

    lr: Rate = 5e-3
    """Learning rate of AdamW with betas (0.9, 0.95)."""
    steps: Positive = 60
    """Optimizer steps."""
    batch_size: Positive = 8
    """Examples in a batch."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    clip: Rate = 0.3
    """Largest norm of the gradient."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the steps; linear and cosine decay to 0 and stay there."""
    accumulate: Positive = 1
    """Batches whose gradients make one step."""


class AdapterSection(FitSection):
    """Adapters of sharers (and of targets, for the one-adapter-per-user reference)."""


class GatesSection(FitSection):
    """Gates, trained on frozen adapters."""

    lr: Rate = 3e-3
    """Learning rate of AdamW with betas (0.9, 0.95)."""
    steps: Positive = 50
    """Optimizer steps."""


class AdaptationSection(FitSection):
    """Base LLM adaptation."""

    mode: Literal["federated", "none", "load"] = "federated"
    """``federated``: base users train a task adapter; ``load``: take one from a folder."""
    strategy: str = "flwr.serverapp.strategy:FedAvg"
    """Import path of any Flower strategy; each base user is a node to it."""
    rounds: Positive = 3
    """Rounds of the Flower strategy."""
    steps: Positive = 20
    """Steps of each user in each round."""
    proximal_mu: Annotated[float, Field(ge=0)] = 0.0
    """μ of strategies with a proximal term, such as FedProx; 0: their own default."""
    examples: Literal["history", "queries", "both"] = "history"
    """What base users train on: their history, their queries (as published) or both."""
    fraction_train: Share = 1.0
    """Share of the base users that train in each round."""
    fraction_evaluate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the base users that evaluate the task adapter after each round."""
    adapter: str = ""
    """A PEFT folder, absolute, for ``mode = "load"``."""


class SharersSection(Section):
    """Which candidates share, and how much."""

    count: Positive = 18
    """Sharers wanted, or clusters; of a borrowed pool with more, so many drawn at random."""
    selection: str = "k-means"
    """``k-means`` (the most active user of each cluster of history embeddings), ``most-active``,
    ``random``, or a plug-in."""
    min_history: Count = 11
    """Fewer history items than this and a user is not selected."""
    ratio: Share = 1.0
    """Share of its pieces that a sharer shares."""
    pool: str = ""
    """An earlier run's pool folder, absolute; nobody shares then. The base LLM and its
    adaptation must be the same (``adaptation.mode = "load"``)."""


class PrivacySection(Section):
    """What protects sharers (docs/privacy.md)."""

    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """ε of one history item of a sharer, over adapter and gates together (DP-SGD); 0: off."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """δ that goes with ε; smaller than one over the number of history items."""
    clip: Rate = 0.3
    """Largest norm of one history item's gradient."""


class AdmissionSection(Section):
    """Who is let into the pool."""

    rules: str = ""
    """Comma-separated: ``norms``, ``duplicates``, ``popularity``. A sharer that breaks one, or
    whose pieces do not fit, is left out and named; without rules one that does not fit stops the
    run."""


class AssemblySection(Section):
    """How a target chooses pieces and merges them."""

    scorer: str = "published"
    """``published`` gate scores, ``centred`` (fit plus ``popularity``), or a plug-in."""
    popularity: Annotated[float, Field(ge=0)] = 0.0
    """λ of ``centred``: weight of a piece's score by users at large; 1: as published."""
    passes: Literal[1, 2] = 1
    """2: a first pass of the base LLM finds how well each sharer fits as a whole (its mean score
    over sites), which is added to the scores of all its pieces in the second."""
    per: Literal["batch", "history"] = "batch"
    """What chooses: each ``batch`` of history, weights averaged (published), or the whole
    ``history`` at once, by scores from the base LLM."""
    shortlist: Count = 0
    """Sharers that are left to choose from, by mean score in a first pass; 0: all."""
    merge: str = "factor"
    """``factor``: (Σ wB)(Σ wA), as published; ``delta``: Σ wBA, exact, of rank r times
    the number of pieces that any batch chose; or a plug-in."""
    selection: Literal["top-k", "top-p", "sample", "sample-top-p"] = "top-k"
    """Which of the scored pieces are chosen; see :func:`fl_perpcs.assembly.select`."""
    top_k: Positive = 3
    """Pieces chosen at each site."""
    temperature: Rate = 1.0
    """τ of the softmax over the chosen scores."""
    top_p: Share = 0.9
    """Probability mass kept (``top-p`` and ``sample-top-p``)."""
    sample_top_k: Positive = 10
    """Highest-scoring pieces that ``sample`` draws ``top-k`` from."""
    sample_temperature: Rate = 1.0
    """τ of the distribution that is cut or sampled."""
    batch_size: Positive = 8
    """History items that choose together, in one forward pass."""
    max_history: Count = 0
    """History items that are looked at, the last ones; 0: all."""


class ExchangeSection(Section):
    """How targets get at the pool (strategies that assemble), and what messages weigh."""

    protocol: Literal["broadcast", "layerwise", "one-shot", "server-match"] = "broadcast"
    """``broadcast``: the whole pool to each target; ``layerwise``: gates, then the chosen pieces
    stage by stage, with the same result; ``one-shot``: gates, then the pieces chosen by the base
    LLM's activations; ``server-match``: queries to the server, finished factors back. See
    docs/communication.md."""
    format: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """How pieces, gates, queries and factors are written into messages."""
    match: Literal["at-once", "by-stages"] = "at-once"
    """Queries of ``server-match``: from the base LLM, or stage by stage as published."""
    query_noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the Gaussian noise on each number of a query (``server-match``)."""
    decoys: Count = 0
    """Pieces asked for at each site beside the chosen ones (``layerwise``, ``one-shot``)."""
    cache: StrictBool = False
    """Targets keep the pool and are sent only what has changed since (``broadcast``)."""
    by_reference: StrictBool = False
    """Messages name a file in place of the pool, and the ledger counts the pool: for nodes on
    the server's machine."""


class RerankSection(Section):
    """Whole adapters weighed by the likelihood of the target's history, in place of gate scores."""

    items: Count = 0
    """History items that are looked at, the last ones; 0: no rerank."""
    sharpness: Rate = 20.0
    """β: weights are softmax(-β·loss), the loss in nats per response token."""


class MixingSection(FitSection):
    """Mixing weights trained on the target's history, from those that were chosen."""

    per: Literal["none", "target", "site"] = "none"
    """``none``: no training; ``target``: a weight for each sharer; ``site``: for each piece."""
    weights: Literal["convex", "free"] = "convex"
    """``convex``: a softmax of trained logits; ``free``: the weights themselves, of any sign."""
    lr: Rate = 0.1
    """Learning rate of AdamW with betas (0.9, 0.95), on logits or weights."""
    steps: Positive = 12
    """Optimizer steps."""


class TuningSection(FitSection):
    """Fine-tuning of the assembled adapter itself; the target keeps an adapter then."""

    factors: Literal["none", "A", "B", "AB"] = "none"
    """Which of the adapter's factors are trained."""
    steps: Positive = 12
    """Optimizer steps."""


class LoraHubSection(Section):
    """The LoRAHub baseline: gradient-free weights of whole adapters."""

    evaluations: Positive = 40
    """Weights that are tried, as published."""
    items: Positive = 8
    """History items that are looked at, the last ones (published: 5 examples)."""
    l1: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the mean absolute weight in what is minimized, as published."""


class AveragingSection(FitSection):
    """Local training in the baselines that average sharers' adapters."""

    rounds: Positive = 5
    """Rounds of averaging; with ``steps`` the demo's sharers train as long as for the pool."""
    steps: Positive = 12
    """Steps of each sharer in each round."""


class EvaluationSection(Section):
    """What is evaluated on the targets' queries."""

    references: str = "base,oppu"
    """Comma-separated methods to evaluate beside the strategy's own: ``base`` LLM, ``oppu`` (one
    adapter per user); may be empty."""
    batch_size: Positive = 16
    """Queries answered together."""
    answers: Literal["generate", "rank", "none"] = "generate"
    """``generate`` freely (published); ``rank`` the task's labels by likelihood; ``none``:
    response loss alone."""
    resamples: Count = 1000
    """Bootstrap samples of the targets behind the 95 % intervals; 0: no intervals."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy. Published: 0.1 with top-p 0.9."""
    top_p: Share = 0.9
    """Nucleus of sampled answers."""


class FederationSection(Section):
    """The simulated federation that ``perpcs run`` starts.

    Plain ``flwr run`` takes the same numbers with ``--federation-config``.
    """

    num_supernodes: Positive = 4
    """Nodes; users are dealt over them."""
    client_cpus: Positive = 1
    """CPUs of one worker; workers = CPUs / this. Flower takes whole numbers only."""
    client_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of one worker, fractions allowed."""


class Config(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything random; each user and phase draws its own."""
    run: RunSection = RunSection()
    strategy: StrategySection = StrategySection()
    lm: LMSection = LMSection()
    data: DataSection = DataSection()
    roles: RolesSection = RolesSection()
    prompts: PromptsSection = PromptsSection()
    lora: LoraSection = LoraSection()
    adaptation: AdaptationSection = AdaptationSection()
    sharers: SharersSection = SharersSection()
    adapter: AdapterSection = AdapterSection()
    gates: GatesSection = GatesSection()
    privacy: PrivacySection = PrivacySection()
    admission: AdmissionSection = AdmissionSection()
    assembly: AssemblySection = AssemblySection()
    exchange: ExchangeSection = ExchangeSection()
    rerank: RerankSection = RerankSection()
    mixing: MixingSection = MixingSection()
    tuning: TuningSection = TuningSection()
    lorahub: LoraHubSection = LoraHubSection()
    averaging: AveragingSection = AveragingSection()
    evaluation: EvaluationSection = EvaluationSection()
    federation: FederationSection = FederationSection()

    @property
    def target_modules(self) -> list[str]:
        """The adapted modules' names."""
        return words(self.lora.target_modules)

    @property
    def references(self) -> list[str]:
        """The methods to evaluate beside the strategy's own."""
        return words(self.evaluation.references)

    @property
    def rules(self) -> list[str]:
        """The rules of admission."""
        return words(self.admission.rules)

    def flat(self) -> dict[str, Value]:
        """Return the config as Flower writes it: ``{"assembly.top-k": 3, ...}``."""
        return _flatten(self.model_dump(by_alias=True))


NO_PIECES = {
    "dora": "it rescales each output by the norm of W + BA, so the sum of two pieces is no piece"
    " of a sum, and a gate on the adapter's input has no place",
    "ia3": "it has no factors, only a scale for each output of a frozen module, which pool, merges"
    " and exported adapters here do not hold",
}
"""PEFT methods that are not broken into pieces, and why."""
NEEDED = {"rag": "prompts.retrieve", "pag": "prompts.profiles"}
"""Strategies that are nothing without some key."""
REFERENCES = ("base", "oppu")
RULES = ("norms", "duplicates", "popularity")
SELECTIONS = ("k-means", "most-active", "random")
SCORERS = ("published", "centred")
MERGES = ("factor", "delta")
PATH_KEYS = ("run.dir", "data.path", "prompts.profiles", "adaptation.adapter", "sharers.pool")
"""Keys whose values are paths; absolute where Flower sees them."""


def load_config(values: Mapping[str, Value]) -> Config:
    """Check a flat run config as a whole.

    Parameters
    ----------
    values : mapping of str to str, int, float or bool
        As in ``context.run_config``; missing keys take their defaults.

    Returns
    -------
    Config

    Raises
    ------
    ConfigError
        Listing every unknown key, bad value and impossible combination, with remedies.
    """
    known = known_keys()
    problems = [_unknown_key(key) for key in values if key not in known]
    nested = _nest({key: value for key, value in values.items() if key in known})
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(problems + [_describe(e) for e in error.errors()]) from None
    problems += _conflicts(config)
    if problems:
        raise ConfigError(problems)
    return config


@cache
def worker_config(values: tuple[tuple[str, Value], ...]) -> Config:
    """Return :func:`load_config`, checked once in a worker process."""
    return load_config(dict(values))


def read_config_file(path: Path) -> dict[str, Value]:
    """Read a TOML run config, nested or dotted, as flat keys.

    Raises
    ------
    ConfigError
        If the file is missing or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return _flatten(tomllib.load(file))
    except FileNotFoundError:
        raise ConfigError([f"{path} does not exist; expected a TOML run config"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError([f"{path} is not a TOML run config: {error}"]) from None


@cache
def known_keys() -> frozenset[str]:
    """Return every key of the run config."""
    return frozenset(Config().flat())


def _conflicts(config: Config) -> list[str]:
    """Return what no single key shows: keys that do not go together."""
    data = config.data
    problems = _data_problems(data)
    problems += role_problems(config, data.users if data.source == "personas" else None)
    if data.source in ("personas", "debian-synopsis", "table") and config.roles.order == "given":
        problems.append(
            f'roles.order = "given", but data.source = {data.source!r} gives no roles; set it to'
            ' "random" or "activity"'
        )
    if config.adaptation.mode == "federated" and ":" not in config.adaptation.strategy:
        problems.append(
            f"adaptation.strategy = {config.adaptation.strategy!r} is not an import path;"
            ' expected "package.module:Class", for example "flwr.serverapp.strategy:FedAvg"'
        )
    if config.adaptation.mode == "load" and not config.adaptation.adapter:
        problems.append(
            'adaptation.mode = "load" needs adaptation.adapter, the absolute path of a PEFT folder'
        )
    flat = config.flat()
    for key in PATH_KEYS:
        value = str(flat[key])
        if value and not Path(value).is_absolute():
            problems.append(
                f"{key} = {value!r} is relative, but Flower runs the app in another folder;"
                " give an absolute path"
            )
    if [m for m in config.references if m not in REFERENCES]:
        problems.append(
            f"evaluation.references = {config.evaluation.references!r}; expected a comma-separated"
            f" list out of {', '.join(REFERENCES)}, or nothing"
        )
    if strange := [rule for rule in config.rules if rule not in RULES]:
        problems.append(
            f"admission.rules names {strange[0]!r}; expected a comma-separated list out of"
            f" {', '.join(RULES)}, or nothing"
        )
    if (needed := NEEDED.get(config.strategy.name)) and not flat[needed]:
        problems.append(
            f"strategy.name = {config.strategy.name!r} needs {needed};"
            " without it, it is the base LLM"
        )
    for key, known in (
        ("sharers.selection", SELECTIONS),
        ("assembly.scorer", SCORERS),
        ("assembly.merge", MERGES),
    ):
        if problem := unknown(key, str(flat[key]), known):
            problems.append(problem)
    if not config.target_modules:
        problems.append("lora.target-modules is empty; name at least one module, such as q_proj")
    if reason := NO_PIECES.get(config.lora.variant):
        problems.append(
            f"lora.variant = {config.lora.variant!r} cannot be used: {reason};"
            ' use "lora" or "rslora"'
        )
    if config.lm.dtype == "float16" and config.lm.device == "cpu":
        problems.append(
            'lm.dtype = "float16" cannot be trained on the CPU; use float32 or bfloat16'
        )
    problems += _exchange_problems(config)
    if config.privacy.epsilon and config.sharers.selection == "k-means":
        problems.append(
            f"privacy.epsilon = {config.privacy.epsilon:g} does not cover the history embeddings"
            ' that sharers.selection = "k-means" asks for; set it to "random" or "most-active"'
        )
    if config.assembly.selection == "sample":
        assembly = config.assembly
        if assembly.top_k > assembly.sample_top_k:
            problems.append(
                f"assembly.top-k = {assembly.top_k} pieces cannot be drawn from"
                f" assembly.sample-top-k = {assembly.sample_top_k}; raise the second"
            )
    return problems


def _exchange_problems(config: Config) -> list[str]:
    """Return what a protocol cannot do."""
    exchange, assembly = config.exchange, config.assembly
    protocol = exchange.protocol
    by_stages = protocol == "layerwise" or (
        protocol == "server-match" and exchange.match == "by-stages"
    )
    asked = {
        "rerank.items": config.rerank.items > 0,
        "mixing.per": config.mixing.per != "none",
        "assembly.passes": assembly.passes == 2,
        "assembly.shortlist": assembly.shortlist > 0,
        "assembly.per": assembly.per == "history",
    }
    cannot: dict[str, str] = {}
    if protocol == "server-match":
        why = "the server has no history to look at"
        cannot = dict.fromkeys(("rerank.items", "mixing.per"), why)
        why = "the server scores each site by itself"
        cannot |= dict.fromkeys(("assembly.passes", "assembly.shortlist"), why)
    if by_stages:
        cannot["rerank.items"] = "whole adapters are not asked for site by site"
        cannot["assembly.per"] = "each batch chooses when it comes to a site"
    flat = config.flat()
    problems = [
        f"{key} = {flat[key]!r} does not go with exchange.protocol = {protocol!r}: {why};"
        ' use "one-shot" or "broadcast"'
        for key, why in cannot.items()
        if asked[key]
    ]
    for key, on, protocols in (
        ("exchange.decoys", exchange.decoys > 0, ("layerwise", "one-shot")),
        ("exchange.cache", exchange.cache, ("broadcast",)),
        ("exchange.match", exchange.match != "at-once", ("server-match",)),
        ("exchange.query-noise", exchange.query_noise > 0, ("server-match",)),
    ):
        if on and protocol not in protocols:
            problems.append(
                f"{key} = {flat[key]!r} does nothing with exchange.protocol = {protocol!r};"
                f" it is for {' and '.join(protocols)}"
            )
    return problems


def role_problems(config: Config, users: int | None) -> list[str]:
    """Return why so many users cannot fill the roles.

    Parameters
    ----------
    config : Config
    users : int, optional
        All users; None if they are not counted yet. Shares are looked at only when they are.
    """
    roles, sharers = config.roles, config.sharers
    sizes = role_sizes(roles, sys.maxsize if users is None else users)
    problems = []
    if users is not None and roles.order != "given" and (short := shortage(sizes, users)):
        problems.append(short)
    base, candidates, _ = sizes
    if not sharers.pool and sharers.count > candidates:
        problems.append(
            f"sharers.count = {sharers.count} is more than roles.candidates ="
            f" {_with_share(roles.candidates, candidates)}; lower the first or raise the second"
        )
    if config.adaptation.mode == "federated" and base < 2:
        problems.append(
            f"roles.base = {_with_share(roles.base, base)}, but federated adaptation needs at"
            ' least 2 base users; raise it or set adaptation.mode = "none"'
        )
    return problems


def _with_share(size: float, users: int) -> str:
    return str(size) if isinstance(size, int) else f"{size} ({users} users)"


def _data_problems(data: DataSection) -> list[str]:
    """Return which keys the source needs, or that do not go with it."""
    problems = []
    if data.source == "personas" and data.communities > data.users:
        problems.append(
            f"data.communities = {data.communities} is more than data.users = {data.users};"
            " lower it"
        )
    if data.source in ("lamp", "per-pcs", "table") and not data.task:
        problems.append(
            f"data.source = {data.source!r} needs data.task, a built-in task's name or the"
            " absolute path of a TOML file"
        )
    if data.task.endswith(".toml") and not Path(data.task).is_absolute():
        problems.append(
            f"data.task = {data.task!r} is relative, but Flower runs the app in another folder;"
            " give an absolute path"
        )
    if data.source == "table":
        if bool(data.path) == bool(data.dataset):
            problems.append(
                f"data.path = {data.path!r} and data.dataset = {data.dataset!r}; set exactly one"
                " of them for data.source = 'table'"
            )
        for key, column in (("user", data.user_column), ("output", data.output_column)):
            if not column:
                problems.append(f"data.{key}-column is empty; name a column of the table")
    return problems


def _unknown_key(key: str) -> str:
    close = difflib.get_close_matches(key, known_keys(), n=1)
    hint = f"did you mean {close[0]}?" if close else "docs/config.md lists every key"
    return f"{key} is not a key of the run config; {hint}"


def _describe(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    return f"{key} = {error['input']!r}: {error['msg'].replace('Input should be', 'expected')}"


def words(text: str) -> list[str]:
    """Return the parts of a comma-separated value."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _nest(flat: Mapping[str, Value]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree
