# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The series for upstream: what of the fork it could take, in steps that stand alone. Each step is declared in a module of
its own, as edits of upstream's files and of its tests. `patches.py` writes them as patches. See docs/fork.md.
"""
