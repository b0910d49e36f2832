"""Compiles Triton kernels for Hopper on a machine without a GPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_MEMORY = 232448  # bytes of one block on sm_90

_COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget

for module, name, given in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    of_kernel = {key: value for key, value in given.items() if key in kernel.arg_names}
    options = {key: value for key, value in given.items() if key not in of_kernel}
    signature, constants = {}, {}
    for key, value in of_kernel.items():
        signature[key] = value if isinstance(value, str) else "constexpr"
        if not isinstance(value, str):
            constants[key] = value
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert result.asm["cubin"]
    parts = {"shared": result.metadata.shared, "ttir": result.asm["ttir"], "ptx": result.asm["ptx"]}
    print(json.dumps(parts))
"""


def compile_for_hopper(kernels: list[tuple[str, str, dict]]) -> list[dict]:
    """ "ttir" and "ptx" of each (module, kernel, arguments and options), whose shared memory fits.

    An argument that is a string is a type ("*bf16", "i32"); any other is a constant.
    """
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        input=json.dumps(kernels),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(kernels)
    assert max(result["shared"] for result in results) <= SHARED_MEMORY
    return results
