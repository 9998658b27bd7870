# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""A worker of the benchmark of other engines that counts on from the prompt's last token. `FAULT` makes it fail."""

import os

from benchmark.peers.protocol import Call, Description, Generate, Setup, serve


FAULT = os.environ.get("FAULT", "")


def load(setup: Setup) -> tuple[Description, Generate]:
    print(f"loading {setup.model}", flush=True)
    if FAULT == "load":
        raise ValueError("the model can't be read")

    def generate(call: Call) -> list[list[int]]:
        os.write(1, b"a line of the engine\n")
        if FAULT == "raise" and call.seed == 1:
            raise ValueError("out of blocks")
        if FAULT == "die" and call.seed == 1:
            os.abort()
        count = call.num_sequences - (FAULT == "short")
        return [[call.prompt[-1] + row + step for step in range(call.new_tokens)] for row in range(count)]

    return Description("1.2.3", f"float32, {setup.threads} threads"), generate


if __name__ == "__main__":
    serve(load)
