# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The peers, and the virtual environment of each, which is made when it is needed first."""

import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from .protocol import PeerError, Setup, Worker, last_lines


HERE = Path(__file__).parent
# Threads that wait by spinning take the cores from the engine whose turn it is
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True)
class Peer:
    """
    Another engine.

    Args:
        name (`str`): Name in the tables.
        worker (`str`): Module that serves it.
        requirements (`Path`): What is installed in its environment.
        removed (`tuple[str, ...]`): Packages that are then removed.
        environment (`dict[str, str]`): Variables of its process.
    """

    name: str
    worker: str
    requirements: Path
    removed: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, folder: Path, setup: Setup) -> Worker:
        """
        Starts the worker, in an environment that is made for it in `folder` unless it is there.

        Raises:
            PeerError: If the packages don't install, or the worker can't load.
        """
        python = install(self.requirements, self.removed, folder / "venv", folder / "install.log")
        environment = {"OMP_NUM_THREADS": str(setup.threads), **PASSIVE, **self.environment}
        return Worker([str(python), "-m", self.worker], folder / "worker.log", setup, environment)


def peer(name: str, removed: tuple[str, ...] = (), **environment: str) -> Peer:
    return Peer(name, f"benchmark.peers.{name}_worker", HERE / f"{name}.txt", removed, environment)


PEERS = {
    "ctranslate2": peer("ctranslate2"),
    "openvino": peer("openvino"),
    "vllm": peer(
        "vllm",
        # Not needed for text. Built for another torch, as they may be, they break its import where they are found
        removed=("torchaudio", "torchcodec", "torchvision"),
        # One process, so that its time is all of the engine's time
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # Its own choice of cores would keep off some
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CPU_KVCACHE_SPACE="3",  # GiB
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    ),
}


def install(requirements: Path, removed: tuple[str, ...], folder: Path, log: Path) -> Path:
    """
    Returns the Python of the virtual environment in `folder`, made anew unless it holds these requirements.

    Raises:
        PeerError: If a package doesn't install.
    """
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        venv.create(folder, clear=True)
        steps = [["install", "--only-binary", ":all:", "--requirement", str(requirements)]]
        if removed:
            steps.append(["uninstall", "--yes", *removed])
        with log.open("w") as file:
            for step in steps:
                command = [sys.executable, "-m", "pip", "--python", python, *step]
                if status := subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file):
                    told = last_lines(log)
                    raise PeerError(f"{requirements.name}: pip {step[0]} failed with exit code {status}: {told}")
        installed.write_text(wanted, encoding="utf-8")
    return python
