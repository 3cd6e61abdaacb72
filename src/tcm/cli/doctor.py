"""`tcm doctor`: what this machine offers."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from tcm.errors import TcmError
from tcm.method.devices import available_devices, supports_bfloat16

EXTRAS = {
    "data": ("webdataset", "datasets"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "t2i": ("diffusers", "transformers"),
    "track": ("tensorboard", "wandb", "trackio"),
}
