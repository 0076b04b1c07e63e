"""Pipeline of stages: cuts of the list of layers, messages between stages, and the engines that execute them."""

import sys


def import_deepspeed() -> None:
    """Import DeepSpeed, after the device is chosen, without modules that a rank never uses.

    MLflow, which DeepSpeed's autotuner imports, and PyTorch's compiler, which its Muon imports, took half of the
    start-up (11 s on a CPU). A separate process logs to MLflow, and Muon is refused (docs/ds_configs.md).
    """
    absent = sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # as Python writes "can't be imported"
    try:
        from deepspeed.runtime import compiler
    finally:
        if absent is None:
            del sys.modules["mlflow"]
    compile_functions = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = compile_functions
