"""A grid without Ray: messages go straight to the ClientApp in this process."""

from collections.abc import Iterable
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class FakeGrid(Grid):
    """Nodes with scattered ids, each with its share of the users."""

    def __init__(self, app: ClientApp, run_config: dict, num_nodes: int = 2) -> None:
        # Flower sets these when it starts a ServerApp; messages cannot be made without.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app = app
        self.contexts = {
            1000 + 37 * i: Context(
                run_id=1,
                node_id=1000 + 37 * i,
                node_config={"partition-id": i, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=run_config,
            )
            for i in range(num_nodes)
        }
        self.sent: list[Message] = []
        self.waiting: dict[str, Message] = {}

    def set_run(self, run) -> None:
        pass

    @property
    def run(self):
        return None

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.sent.append(message)
            self.waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answer(self.waiting.pop(i)) for i in message_ids if i in self.waiting]

    def send_and_receive(self, messages, *, timeout=None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(code=1, reason=f"Message: {error}"), reply_to=message)
