"""Where a server's time goes: its counters and the CPU time of its processes, before and after some load."""

from __future__ import annotations

import http.client
import os
from dataclasses import dataclass
from pathlib import Path

STAGES = ("body", "tokenize", "queue", "score", "reply")
STATES = ("idle", "prepare", "wait")


@dataclass(frozen=True)
class Snapshot:
    """The counters of a server at one time.

    Args:
        values: Metrics by name with labels, as Prometheus' text format has them.
        tokenizers: CPU seconds of the server's child processes.
        clients: CPU seconds of the ended child processes of this process.
        host: CPU seconds that all processes of the machine used, and those that all cores had.
    """

    values: dict[str, float]
    tokenizers: float
    clients: float
    host: tuple[float, float]

    @classmethod
    def of(cls, port: int, pid: int) -> Snapshot:
        """Read the counters of the server with process id `pid` at `port` of this machine."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
        times = os.times()
        used, ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:9], os.sysconf("SC_CLK_TCK")
        total = sum(map(int, used)) / ticks
        idle = (int(used[3]) + int(used[4])) / ticks
        return cls(values, _children(pid), times.children_user + times.children_system, (total - idle, total))

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)


def _children(parent: int) -> float:
    """CPU seconds of the running children of a process."""
    found = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def lines(before: Snapshot, after: Snapshot, requests: int, seconds: float) -> list[str]:
    """Return lines that say where the time of a round went.

    Args:
        before: The counters before the round.
        after: The counters after it, when its clients have ended.
        requests: Answered requests.
        seconds: Length of the round.
    """

    def gained(name: str) -> float:
        return after.get(name) - before.get(name)

    stages = {name: 1000 * gained(f'ranker_stage_seconds_total{{stage="{name}"}}') / requests for name in STAGES}
    states = {name: gained(f'ranker_thread_seconds_total{{state="{name}"}}') for name in (*STATES, "prepare_cpu")}
    batches = max(gained("ranker_batch_seconds_count"), 1)
    tokens, budget = gained("ranker_batch_tokens_sum"), max(after.get("ranker_batch_max_tokens"), 1)
    server, tokenizers = gained("process_cpu_seconds_total"), after.tokenizers - before.tokenizers
    clients = after.clients - before.clients
    used, total = (end - start for start, end in zip(before.host, after.host, strict=True))
    shares = ", ".join(f"{name} {states[name] / seconds:.0%}" for name in STATES)
    return [
        "request, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in stages.items()),
        f"model's thread: {shares}; a batch, ms: prepare {1000 * states['prepare'] / batches:.1f} (CPU "
        f"{1000 * states['prepare_cpu'] / batches:.1f}), wait {1000 * states['wait'] / batches:.1f}",
        f"batches: {batches / seconds:.1f} a second, {gained('ranker_pairs_total') / batches:.0f} pairs of "
        f"{gained('ranker_batch_requests_sum') / batches:.1f} requests and {tokens / batches:.0f} tokens, "
        f"{tokens / batches / budget:.0%} of the budget",
        f"CPU, ms a request: server {1000 * server / requests:.1f}, its tokenizers {1000 * tokenizers / requests:.1f}, "
        f"clients {1000 * clients / requests:.1f}; cores: server {server / seconds:.1f}, tokenizers "
        f"{tokenizers / seconds:.1f}, clients {clients / seconds:.1f}, machine {used / seconds:.1f} of "
        f"{total / seconds:.0f}",
    ]
