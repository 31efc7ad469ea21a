"""The Flower ClientApp: read the message, call the library, reply.

A message concerns one user. What each message and reply holds is listed in docs/messages.md.
"""

import time

from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fl_perpcs import users
from fl_perpcs.messages import (
    answer,
    arrays_of,
    numbers_of,
    pack_adapter,
    pack_pieces,
    unpack_adapter,
    unpack_pool,
)
from fl_perpcs.node import Job, hosted_users, node_source, num_nodes, open_job, worker_facts
from fl_perpcs.pool import check_base

app = ClientApp()


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


@app.evaluate("base")
def evaluate_base(message: Message, context: Context) -> Message:
    """Answer a target's queries with the base LLM alone."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    return _evaluated(message, job, start)


@app.evaluate("assembled")
def evaluate_assembled(message: Message, context: Context) -> Message:
    """Assemble a target's adapter from the pool and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    recipe = users.assemble_from(job, unpack_pool(message, job.lm.fingerprint))
    return _evaluated(message, job, start, recipe=recipe)


@app.evaluate("oppu")
def evaluate_oppu(message: Message, context: Context) -> Message:
    """Train a target's own adapter, which never leaves the node, and answer its queries."""
    start, job = time.perf_counter(), open_job(message, context, target=True)
    users.train_adapter(job)
    return _evaluated(message, job, start)


def _evaluated(message: Message, job: Job, start: float, **info: object) -> Message:
    result = users.answer_queries(job)
    info |= {
        "queries": [query.id for query in job.user.queries],
        "golds": [query.output for query in job.user.queries],
        "predictions": result.predictions,
    }
    metrics = {"history-dropped": job.dropped, **result.metrics}
    return answer(message, info=info, metrics=metrics, worker=worker_facts(start))
