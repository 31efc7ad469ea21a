"""The Flower ClientApp: read the message, call the library, reply.

A message concerns one user. What each message and reply holds is listed in docs/messages.md.
"""

import time

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fl_perpcs import users
from fl_perpcs.assembly import recipe_bytes
from fl_perpcs.lm import put_adapter
from fl_perpcs.messages import (
    answer,
    arrays_of,
    numbers_of,
    pack_adapter,
    pack_factors,
    pack_pieces,
    pack_tensors,
    unpack_adapter,
    unpack_factors,
    unpack_pool,
    unpack_tensors,
)
from fl_perpcs.node import Job, hosted_users, node_source, num_nodes, open_job, worker_facts
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
    embedding = users.history_embedding(job)
    arrays = ArrayRecord({"embedding": Array(embedding.numpy())})
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
        arrays=pack_pieces(pieces),
        info={"base": job.lm.fingerprint},
        metrics={"num-examples": len(job.history), "history-dropped": job.dropped, **metrics},
        worker=worker_facts(start),
    )


@app.train("average")
def average(message: Message, context: Context) -> Message:
    """Train an adapter for one round of a strategy that averages adapters.

    ``factors`` says which of A and B the round trains and which the reply shares. The other
    factor is the common start's, or, if the user keeps its own, what it ended the last round
    with: clients remember nothing, so it travels along as ``kept``.
    """
    start, job = time.perf_counter(), open_job(message, context)
    factors = message.content.config_records["config"]
    kept = message.content.array_records.get("kept", ArrayRecord())
    received = unpack_factors(kept, unpack_factors(arrays_of(message), job.start_adapter()))
    trains, shares = str(factors["trains"]), str(factors["shares"])
    adapter, loss = users.train_round(job, received, trains)
    reply = answer(
        message,
        arrays=pack_factors(adapter, shares),
        metrics={
            "num-examples": len(job.history),
            "history-dropped": job.dropped,
            "train-loss": loss,
        },
        worker=worker_facts(start),
    )
    if own := "".join(f for f in trains if f not in shares):
        reply.content["kept"] = pack_factors(adapter, own)
    return reply


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


@app.evaluate("assembled")
def evaluate_assembled(message: Message, context: Context) -> Message:
    """Assemble a target's adapter from the pool and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    stacks = unpack_pool(message, job.lm.fingerprint)
    recipe, trained = users.assemble_from(job, stacks, unpack_tensors(message, "population"))
    tuned = job.config.tuning.factors != "none"
    stored = FLOAT_BYTES * users.trained_numbers(job) if tuned else recipe_bytes(recipe)
    return _evaluated(message, job, start, trained, stored, recipe=recipe)


@app.evaluate("retrieved")
def evaluate_retrieved(message: Message, context: Context) -> Message:
    """Take the whole adapter of the sharer whose history is most similar, and answer queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    stacks = unpack_pool(message, job.lm.fingerprint)
    recipe = users.retrieve_adapter(job, stacks, unpack_tensors(message, "embeddings") or {})
    return _evaluated(message, job, start, 0, recipe_bytes(recipe), recipe=recipe)


@app.evaluate("lorahub")
def evaluate_lorahub(message: Message, context: Context) -> Message:
    """Search for weights of the pool's whole adapters, and answer queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    recipe = users.search_adapter(job, unpack_pool(message, job.lm.fingerprint))
    trained = len({sharer for weights in recipe.values() for sharer in weights})
    return _evaluated(message, job, start, trained, recipe_bytes(recipe), recipe=recipe)


@app.evaluate("given")
def evaluate_given(message: Message, context: Context) -> Message:
    """Answer a target's queries with an adapter from the server, fine-tuned first if asked.

    ``trains`` of the record ``tune`` names the factors that are fine-tuned: A, B, both or none.
    """
    start, job = time.perf_counter(), open_job(message, context, target=True)
    adapter = unpack_adapter(arrays_of(message, "adapter"))
    trains = str(numbers_of(message, "tune").get("trains", ""))
    trained = users.train_given(job, adapter, trains) if trains else 0
    if not trains:
        put_adapter(job.lm, adapter)
    return _evaluated(message, job, start, trained, FLOAT_BYTES * trained)


@app.evaluate("oppu")
def evaluate_oppu(message: Message, context: Context) -> Message:
    """Train a target's own adapter, which never leaves the node, and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    users.train_adapter(job)
    trained = users.trained_numbers(job)
    return _evaluated(message, job, start, trained, FLOAT_BYTES * trained)


def _evaluated(
    message: Message, job: Job, start: float, trained: int = 0, stored: int = 0, **info: object
) -> Message:
    """Answer the queries, and report what it took to get ready for them.

    Parameters
    ----------
    trained : int
        Numbers that were trained for this target.
    stored : int
        Bytes that the target keeps of its own: an adapter in float32, or a recipe.
    """
    costs = {
        "forward-examples": job.lm.passes.forward,
        "backward-examples": job.lm.passes.backward,
        "trained-parameters": trained,
        "stored-bytes": stored,
    }
    result = users.answer_queries(job)
    info |= {
        "queries": [query.id for query in job.user.queries],
        "golds": [query.output for query in job.user.queries],
        "predictions": result.predictions,
    }
    metrics = {"history-dropped": job.dropped, **costs, **result.metrics}
    return answer(message, info=info, metrics=metrics, worker=worker_facts(start))
