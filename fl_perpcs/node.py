"""A node: the users it hosts, and the one base LLM that its worker process keeps.

Worker processes outlive messages, so the base LLM is loaded once in each. Nothing of a user
stays behind between messages: a reply depends on the message and the user's data alone.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import psutil
import torch
from flwr.app import ConfigRecord, Context, Message

from fl_perpcs.config import Config, worker_config
from fl_perpcs.data import Example, Source, User, open_source
from fl_perpcs.disk import Drawer
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import (
    LM,
    adapter_digest,
    initial_adapter,
    load_lm,
    merge_into_base,
    put_adapter,
    shapes_of,
)
from fl_perpcs.messages import (
    ADAPTATION,
    adapter_of,
    arrays_of,
    open_envelope,
    unpack_adapter,
)
from fl_perpcs.pieces import Adapter, name_factors
from fl_perpcs.prompts import (
    Preamble,
    Prompt,
    preamble_of,
    prompts_of_history,
    prompts_of_queries,
)
from fl_perpcs.seeds import derive_seed
from fl_perpcs.text import Batch, Encoded, encode, in_batches


@dataclass
class _Loaded:
    """The base LLM of this process."""

    key: str
    adaptation: str
    lm: LM


_loaded: list[_Loaded] = []
_loads = 0


@dataclass(frozen=True)
class Job:
    """What a message asks of this node: a user, a phase, and the base LLM to do it with."""

    config: Config
    user: User
    phase: str
    lm: LM
    source: Source
    max_history: int = 0

    def seed(self, *parts: str) -> int:
        """Return a seed of this user and phase."""
        return derive_seed(self.config.seed, self.user.id, self.phase, *parts)

    @property
    def pad(self) -> int:
        """The padding token's id."""
        return self.lm.pad

    @property
    def items(self) -> tuple[Example, ...]:
        """The history items that are used."""
        return self.user.history[-self.max_history :]

    @cached_property
    def history(self) -> list[Encoded]:
        """The history as token ids; items that do not fit ``lm.max-length`` are left out."""
        prompts = prompts_of_history(self.items, self.source.task, self._preamble)
        return self._encode(prompts, self.items)

    @property
    def dropped(self) -> int:
        """How many of the history items that are used do not fit."""
        return len(self.items) - len(self.history)

    @cached_property
    def query_prompts(self) -> list[Prompt]:
        """The prompts of the user's queries."""
        return prompts_of_queries(self.user.queries, self.items, self.source.task, self._preamble)

    @cached_property
    def queries(self) -> list[Encoded]:
        """The queries with their golds as token ids, without those that do not fit."""
        return self._encode(self.query_prompts, self.user.queries)

    def _encode(self, prompts: Sequence[Prompt], examples: Sequence[Example]) -> list[Encoded]:
        responses = [example.output for example in examples]
        return encode(prompts, responses, self.lm.tokenizer, self.config.lm.max_length)

    @cached_property
    def _preamble(self) -> Preamble:
        return preamble_of(self.config.prompts, self.user.id, self.lm.device)

    def history_batches(self, size: int, last: int = 0) -> list[Batch]:
        """Return the history, or its last items, in batches.

        Raises
        ------
        PerPcsError
            If no item is left.
        """
        if not self.history:
            raise PerPcsError(
                f"no history item of user {self.user.id!r} fits lm.max-length ="
                f" {self.config.lm.max_length}; raise it"
            )
        return in_batches(self.history[-last:], size, self.pad)

    @property
    def choosing_batches(self) -> list[Batch]:
        """The batches of history that choose pieces.

        Raises
        ------
        PerPcsError
            If no item is left.
        """
        how = self.config.assembly
        return self.history_batches(how.batch_size, how.max_history)

    def start_adapter(self) -> Adapter:
        """Return the adapter that this user's training starts from."""
        owner = self.user.id if self.config.lora.init == "own" else ""
        lora = self.config.lora
        return initial_adapter(shapes_of(self.lm), lora.rank, self.config.seed, owner)


def open_job(message: Message, context: Context, *, target: bool = False) -> Job:
    """Check a message and make everything ready for it.

    Parameters
    ----------
    message : Message
    context : Context
    target : bool
        Whether the user is asked as a target, whose history may be cut (cold start).

    Raises
    ------
    PerPcsError
        If the sender's source differs, this node does not host the user, or its data or base
        LLM cannot be loaded.
    """
    user_id, phase = open_envelope(message)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    config = worker_config(tuple(sorted(context.run_config.items())))
    source = _source(config)
    if user_id not in hosted_users(source, context):
        raise PerPcsError(f"this node does not host user {user_id!r}")
    lm = _base_llm(config, *_adaptation(message))
    roles = config.roles
    limits = [roles.max_history, roles.target_history if target else 0]
    limit = min((n for n in limits if n), default=0)
    return Job(config, source.user(user_id), phase, lm, source, limit)


def node_source(context: Context) -> tuple[Config, Source]:
    """Return the config and the source of users, without loading the base LLM."""
    config = worker_config(tuple(sorted(context.run_config.items())))
    return config, _source(config)


def hosted_users(source: Source, context: Context) -> list[str]:
    """Return the ids of the users on this node: dealt one by one over all nodes."""
    node = int(context.node_config.get("partition-id", 0))
    return source.user_ids()[node :: num_nodes(context)]


def num_nodes(context: Context) -> int:
    """Return how many nodes the federation has."""
    return int(context.node_config.get("num-partitions", 1))


def worker_facts(start: float) -> dict[str, int | float]:
    """Return what a reply says of this process.

    Parameters
    ----------
    start : float
        ``time.perf_counter()`` when the message was taken up.

    Returns
    -------
    dict of str to int or float
        ``seconds``, ``pid``, ``lm-loads`` (base LLMs loaded so far), ``memory`` (bytes that the
        process takes) and ``gpu-bytes`` (peak).
    """
    return {
        "seconds": time.perf_counter() - start,
        "pid": os.getpid(),
        "lm-loads": _loads,
        "memory": psutil.Process().memory_info().rss,
        "gpu-bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def _adaptation(message: Message) -> tuple[str, Callable[[], Adapter]]:
    """Return the digest of a message's task adapter, "" for none, and how to get it.

    It is sent once; later messages name what this node has on disk.
    """
    if ADAPTATION in message.content.array_records:
        adapter = unpack_adapter(arrays_of(message, ADAPTATION))
        digest = adapter_digest(adapter)
        drawer = Drawer("adaptation", digest)
        if drawer.has("adapter"):
            drawer.keep()
        else:
            drawer.put("adapter", name_factors(adapter))
        return digest, lambda: adapter
    record = message.content.config_records.get(ADAPTATION, ConfigRecord())
    digest = str(record.get("digest", ""))
    return digest, lambda: adapter_of(Drawer("adaptation", digest).take("adapter")[0])


def exchange_drawer(job: Job, run: int) -> Drawer:
    """Return where a target keeps what it needs until the end of an exchange.

    Parameters
    ----------
    job : Job
    run : int
        Flower's id of the run: several may be under way.
    """
    return Drawer(f"run {run}", job.user.id)


@cache
def _source(config: Config) -> Source:
    return open_source(config)


def _base_llm(config: Config, wanted: str, adaptation: Callable[[], Adapter]) -> LM:
    """Return the base LLM with the adaptation merged into it, slot and counts as at the start."""
    global _loads
    key = repr((config.lm, config.lora))
    usable = _loaded and _loaded[0].key == key and _loaded[0].adaptation in ("", wanted)
    if not usable:
        _loaded.clear()
        # As many threads as CPUs of the worker: a sum must not depend on the machine's cores.
        torch.set_num_threads(config.federation.client_cpus)
        _loaded.append(_Loaded(key, "", load_lm(config)))
        _loads += 1
    loaded = _loaded[0]
    if wanted and loaded.adaptation != wanted:
        merge_into_base(loaded.lm, adaptation())
        loaded.adaptation = wanted
    put_adapter(loaded.lm, initial_adapter(shapes_of(loaded.lm), config.lora.rank, config.seed))
    loaded.lm.passes.forward = loaded.lm.passes.backward = 0
    return loaded.lm
