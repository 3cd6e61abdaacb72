"""The package's extras: what each needs, and how to install one."""

from importlib.util import find_spec

EXTRAS = {
    "data": ("webdataset", "datasets"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "t2i": ("diffusers", "transformers", "peft"),
    "track": ("tensorboard", "wandb", "trackio"),
}


def how_to_install(extra: str) -> str:
    """What to do to get an extra; the package is installed from a clone of its repository.

    >>> how_to_install("data")
    "run `pip install -e '.[data]'` in your clone of the repository"
    """
    if extra not in EXTRAS:
        raise KeyError(extra)
    return f"run `pip install -e '.[{extra}]'` in your clone of the repository"


def is_installed(extra: str) -> bool:
    """Whether all that an extra needs is there; nothing is imported."""
    return all(find_spec(package) is not None for package in EXTRAS[extra])
