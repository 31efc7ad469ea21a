"""The Flower ClientApp: read the message, call the library, reply.

A message concerns one user. What each message and reply holds is listed in docs/messages.md.
"""

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fl_perpcs import users
from fl_perpcs.assembly import Recipe, cook, recipe_bytes
from fl_perpcs.assembly.passes import Queries
from fl_perpcs.disk import Drawer
from fl_perpcs.exchange import asking, caching, matching
from fl_perpcs.lm import put_adapter
from fl_perpcs.messages import (
    RECIPE,
    answer,
    arrays_of,
    fill_factors,
    numbers_of,
    pack_adapter,
    pack_factors,
    pack_pieces,
    pack_recipe,
    pack_request,
    pack_tensors,
    tensors_of,
    unpack_adapter,
    unpack_factors,
    unpack_pool,
    unpack_tensors,
)
from fl_perpcs.node import Job, hosted_users, node_source, num_nodes, open_job, worker_facts
from fl_perpcs.pieces import name_factors
from fl_perpcs.pool import check_base

app = ClientApp()

FLOAT_BYTES = 4
"""Of one number of an adapter, which is kept in float32."""


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Tell which users this node hosts."""
    _, source = node_source(context)
    hosted = [source.user(user) for user in hosted_users(source, context)]
    return answer(
        message,
        info={
            "nodes": num_nodes(context),
            "users": {
                user.id: {
                    "history": len(user.history),
                    "queries": len(user.queries),
                    "group": user.group,
                    "role": user.role,
                }
                for user in hosted
            },
        },
    )


@app.query("embed")
def embed(message: Message, context: Context) -> Message:
    """Embed a candidate's history."""
    start, job = time.perf_counter(), open_job(message, context)
    arrays = pack_tensors({"embedding": users.history_embedding(job)})
    return answer(message, arrays=arrays, worker=worker_facts(start))


@app.train()
def adapt(message: Message, context: Context) -> Message:
    """Train the task adapter for one round on a base user's examples."""
    start, job = time.perf_counter(), open_job(message, context)
    # FedProx sends the weight of its proximal term; other strategies send none.
    settings = numbers_of(message, "config")
    adapter, loss = users.adapt(
        job, unpack_adapter(arrays_of(message)), settings.get("proximal-mu", 0.0)
    )
    encoded, dropped = users.adaptation_examples(job)
    metrics = {"num-examples": len(encoded), "history-dropped": dropped, "train-loss": loss}
    return answer(
        message, arrays=pack_adapter(adapter), metrics=metrics, worker=worker_facts(start)
    )


@app.evaluate()
def evaluate_adaptation(message: Message, context: Context) -> Message:
    """Evaluate the task adapter on a base user's queries."""
    start, job = time.perf_counter(), open_job(message, context)
    loss, queries = users.query_loss(job, unpack_adapter(arrays_of(message)))
    metrics = {"num-examples": queries, "eval-loss": loss}
    return answer(message, metrics=metrics, worker=worker_facts(start))


@app.query("check_base")
def check_base_llm(message: Message, context: Context) -> Message:
    """Refuse a pool of another base LLM, before anyone assembles from it."""
    job = open_job(message, context)
    check_base(job.lm.fingerprint, str(message.content.config_records["pool"]["base"]), "the pool")
    return answer(message)


@app.train("share")
def share(message: Message, context: Context) -> Message:
    """Train a sharer's adapter and gates, and share pieces."""
    start, job = time.perf_counter(), open_job(message, context)
    pieces, metrics = users.make_pieces(job)
    return answer(
        message,
        arrays=pack_pieces(pieces, job.config.exchange.format),
        info={"base": job.lm.fingerprint},
        metrics={"num-examples": len(job.history), "history-dropped": job.dropped, **metrics},
        worker=worker_facts(start),
    )


@app.train("average")
def average(message: Message, context: Context) -> Message:
    """Train an adapter for one round of a strategy that averages adapters.

    ``trains`` and ``shares`` say which of A and B the round trains and the reply shares. A factor
    that is trained and not shared stays on the node, for the user's next round.
    """
    start, job = time.perf_counter(), open_job(message, context)
    settings = message.content.config_records["config"]
    trains, shares = str(settings["trains"]), str(settings["shares"])
    kept = Drawer(f"run {context.run_id}", job.user.id, "kept")
    received = unpack_factors(arrays_of(message), job.start_adapter())
    if int(str(settings.get("server-round", 1))) > 1 and kept.has("factors"):
        received = fill_factors(kept.take("factors")[0], received)
    adapter, loss = users.train_round(job, received, trains)
    if own := "".join(f for f in trains if f not in shares):
        kept.put("factors", name_factors(adapter, own))
    return answer(
        message,
        arrays=pack_factors(adapter, shares),
        metrics={
            "num-examples": len(job.history),
            "history-dropped": job.dropped,
            "train-loss": loss,
        },
        worker=worker_facts(start),
    )


@app.query("site_queries")
def site_queries(message: Message, context: Context) -> Message:
    """Tell what a user's history asks of each site, for the population's mean."""
    start, job = time.perf_counter(), open_job(message, context)
    queries = users.site_queries(job)
    return answer(message, arrays=pack_tensors(queries), worker=worker_facts(start))


@app.evaluate("base")
def evaluate_base(message: Message, context: Context) -> Message:
    """Answer a target's queries with the base LLM alone."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    return _evaluated(message, job, start)


@app.query("lacking")
def lacking(message: Message, context: Context) -> Message:
    """Tell which pieces of the pool a target's cache lacks."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    wanted = caching.lacking(job, context.run_id, tensors_of(message, "digests"))
    return _asked(message, job, start, wanted)


@app.query("choose")
def choose(message: Message, context: Context) -> Message:
    """Begin an exchange: choose by the pool's gates, and ask for pieces."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    gates = unpack_pool(message, job.lm.fingerprint)
    population = unpack_tensors(message, "population")
    return _asked(message, job, start, asking.choose(job, context.run_id, gates, population))


@app.query("advance")
def advance(message: Message, context: Context) -> Message:
    """Put pieces in place, go on to the next sites, and ask for pieces there."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    pieces = unpack_pool(message, job.lm.fingerprint)
    return _asked(message, job, start, asking.advance(job, context.run_id, pieces))


@app.query("all_queries")
def all_queries(message: Message, context: Context) -> Message:
    """Tell what a target's history asks of each site, from the base LLM, for the server."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    return _queries(message, job, start, matching.all_queries(job), more=False)


@app.query("first_queries")
def first_queries(message: Message, context: Context) -> Message:
    """Tell what a target's history asks of the first sites, for the server."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    return _queries(message, job, start, *matching.first_queries(job, context.run_id))


@app.query("next_queries")
def next_queries(message: Message, context: Context) -> Message:
    """Put merged factors in place, and tell what the history asks of the next sites."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    factors = tensors_of(message, "factors")
    return _queries(message, job, start, *matching.next_queries(job, context.run_id, factors))


@app.evaluate("assembled")
def evaluate_assembled(message: Message, context: Context) -> Message:
    """Assemble a target's adapter from the pool and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    stacks = unpack_pool(message, job.lm.fingerprint)
    if job.config.exchange.cache:
        stacks = caching.completed(job, context.run_id, stacks)
    recipe, trained = users.assemble_from(job, stacks, unpack_tensors(message, "population"))
    return _with_recipe(message, job, start, recipe, trained, _kept(job, recipe))


@app.evaluate("delivered")
def evaluate_delivered(message: Message, context: Context) -> Message:
    """Assemble a target's adapter from the pieces that it asked for, and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    pieces = unpack_pool(message, job.lm.fingerprint)
    recipe, stacks, trained = asking.finish(job, context.run_id, pieces)
    trained += users.settle(job, cook(recipe, stacks, job.config.assembly.merge))
    return _with_recipe(message, job, start, recipe, trained, _kept(job, recipe))


@app.evaluate("finished")
def evaluate_finished(message: Message, context: Context) -> Message:
    """Take the adapter that the server assembled, and answer a target's queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    adapter = unpack_adapter(arrays_of(message, "adapter"))
    trained = users.settle(job, adapter)
    stored = FLOAT_BYTES * sum(factor.numel() for both in adapter.values() for factor in both)
    return _evaluated(message, job, start, trained, stored)


@app.query("nearest")
def nearest(message: Message, context: Context) -> Message:
    """Tell which sharer's history is most similar to a target's."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    found = users.nearest_sharer(job, tensors_of(message, "embeddings"))
    return answer(message, info={"sharer": found}, metrics=_passes(job), worker=worker_facts(start))


@app.evaluate("lorahub")
def evaluate_lorahub(message: Message, context: Context) -> Message:
    """Search for weights of the pool's whole adapters, and answer queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    recipe = users.search_adapter(job, unpack_pool(message, job.lm.fingerprint))
    trained = len({sharer for weights in recipe.values() for sharer in weights})
    return _with_recipe(message, job, start, recipe, trained, recipe_bytes(recipe))


@app.evaluate("given")
def evaluate_given(message: Message, context: Context) -> Message:
    """Answer a target's queries with an adapter from the server, fine-tuned first if asked.

    ``trains`` of the record ``tune`` names the factors that are fine-tuned: A, B, both or none;
    ``stored`` how many bytes the target keeps to have the adapter again.
    """
    start, job = time.perf_counter(), open_job(message, context, target=True)
    adapter = unpack_adapter(arrays_of(message, "adapter"))
    tune = numbers_of(message, "tune")
    trains = str(tune.get("trains", ""))
    trained = users.train_given(job, adapter, trains) if trains else 0
    if not trains:
        put_adapter(job.lm, adapter)
    stored = FLOAT_BYTES * trained + int(tune.get("stored", 0))
    return _evaluated(message, job, start, trained, stored)


@app.evaluate("oppu")
def evaluate_oppu(message: Message, context: Context) -> Message:
    """Train a target's own adapter, which never leaves the node, and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    users.train_adapter(job)
    trained = users.trained_numbers(job)
    return _evaluated(message, job, start, trained, FLOAT_BYTES * trained)


def _asked(message: Message, job: Job, start: float, wanted: asking.Asking) -> Message:
    """Ask for pieces."""
    return answer(
        message,
        info={"more": wanted.more},
        metrics=_passes(job),
        worker=worker_facts(start),
        request=pack_request(wanted.request, list(job.lm.sites)),
    )


def _queries(message: Message, job: Job, start: float, queries: Queries, more: bool) -> Message:
    """Send queries of sites for the server to match."""
    arrays = pack_tensors(queries, job.config.exchange.format)
    return answer(
        message,
        arrays=arrays,
        info={"more": more},
        metrics=_passes(job),
        worker=worker_facts(start),
    )


def _kept(job: Job, recipe: Recipe) -> int:
    """Return the bytes of what a target keeps: its recipe, or the adapter if that was tuned."""
    tuned = job.config.tuning.factors != "none"
    return FLOAT_BYTES * users.trained_numbers(job) if tuned else recipe_bytes(recipe)


def _with_recipe(
    message: Message, job: Job, start: float, recipe: Recipe, trained: int, stored: int
) -> Message:
    """Answer the queries, and report the recipe."""
    reply = _evaluated(message, job, start, trained, stored)
    reply.content[RECIPE] = pack_recipe(recipe, list(job.lm.sites))
    return reply


def _evaluated(
    message: Message, job: Job, start: float, trained: int = 0, stored: int = 0
) -> Message:
    """Answer the queries, and report what it took to get ready for them.

    Parameters
    ----------
    trained : int
        Numbers that were trained for this target.
    stored : int
        Bytes that the target keeps of its own: an adapter in float32, or a recipe.
    """
    costs = {**_passes(job), "trained-parameters": trained, "stored-bytes": stored}
    result = users.answer_queries(job)
    report = {
        "queries": [query.id for query in job.user.queries],
        "golds": [query.output for query in job.user.queries],
        "predictions": result.predictions,
    }
    metrics = {"history-dropped": job.dropped, **costs, **result.metrics}
    return answer(message, report=report, metrics=metrics, worker=worker_facts(start))


def _passes(job: Job) -> dict[str, int]:
    """Return what the base LLM was put through for this message so far."""
    passes = job.lm.passes
    return {"forward-examples": passes.forward, "backward-examples": passes.backward}
