"""A running llama.cpp server, over its own `/completion` endpoint. `--model` is its address, loopback only.

Start it with slots and context for the workload, e.g. `llama-server -m model.gguf -t 2 -np 64 -c 131072 --port 8080`.
Ready time is not measured here, and memory and CPU of the server are found through the port it listens on.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import protocol


def loopback(url: str) -> str:
    """The address without a trailing slash. Raises `SystemExit` unless it is plain HTTP on this machine."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise SystemExit(f"{url}: expected http:// on a loopback address; prompts are not sent to other machines")
    return url.rstrip("/")


def load(args: argparse.Namespace) -> protocol.Engine:
    """Ask the server for its properties and keep as many requests in flight as it has slots."""
    url = loopback(args.model)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with opener.open(request) as answer:
            return json.load(answer)

    properties = ask("/props")
    slots = int(properties.get("total_slots", 1))

    def complete(job: protocol.Job) -> tuple[int, int]:
        answer = ask(
            "/completion",
            {
                "prompt": job.prompt,
                "n_predict": job.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
            },
        )
        return int(answer["tokens_evaluated"]), int(answer["tokens_predicted"])

    def generate(jobs: list[protocol.Job]) -> protocol.Outcome:
        with ThreadPoolExecutor(slots) as pool:
            counts = list(pool.map(complete, jobs))
        return protocol.Outcome(sum(p for p, _ in counts), sum(g for _, g in counts))

    return protocol.Engine(str(properties.get("build_info", "unknown")), {"slots": slots}, generate)


if __name__ == "__main__":
    protocol.serve(protocol.parser().parse_args(), load)
