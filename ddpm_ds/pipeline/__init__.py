"""Pipeline of stages: cuts of the list of layers, messages between stages, and the engines that execute them."""

import sys


def import_deepspeed() -> None:
    """Import DeepSpeed, once the device has been chosen, without what a rank never uses: half of its start (a CPU's
    11 s) went to MLflow, which DeepSpeed's autotuner imports, and to PyTorch's compiler, which its Muon does.

    A process of its own logs to MLflow, which it imports itself; Muon is refused (docs/ds_configs.md).
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
