"""The machine, and the versions that results depend on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from tcm.foundation.counting import plural


def describe_machine(device: torch.device) -> str:
    """One line such as `AMD EPYC, 2 cores, Linux x86_64, cpu with up to 1 thread`."""
    if device.type == "cpu":
        used = f"cpu with up to {plural(torch.get_num_threads(), 'thread')}"
    else:
        used = f"{device.type} ({torch.get_device_module(device).get_device_name(device)})"
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, {used}"


def versions() -> str:
    """The versions that results depend on, in one line."""
    return f"tcm {version('truncated-consistency')}, torch {torch.__version__}, python {platform.python_version()}"


def _processor() -> str:
    """The processor's name if the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
