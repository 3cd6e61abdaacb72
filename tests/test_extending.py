"""The examples of docs/extending.md run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=["objective", "network"])
def test_example(example: str) -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(example, "docs/extending.md", "exec", dont_inherit=True), names)
