"""The library that runs ONNX graphs in browsers, npm's onnxruntime-web (MIT): fetched, verified and kept."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tcm.foundation.errors import TcmError
from tcm.foundation.fetching import Source, data_folder, fetch, verify
from tcm.foundation.files import move

PACKAGE = Source("npm", "onnxruntime-web@1.30.0", 33_106_585)
CODE_FILE, WASM_FILE = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
SUMS = {
    CODE_FILE: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    WASM_FILE: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}


@dataclass(frozen=True)
class Runtime:
    """What a page needs: the library's code, and the WebAssembly that does its work."""

    code: bytes
    wasm: bytes


def runtime_in(folder: Path) -> Runtime:
    """The library in a folder of the user's, of any version: an npm package, or the `dist` in it."""
    inside = folder / "dist" if (folder / "dist").is_dir() else folder
    missing = [name for name in SUMS if not (inside / name).is_file()]
    if missing:
        raise TcmError(
            f"--runtime={folder} lacks {' and '.join(missing)}; give the dist folder of npm's onnxruntime-web"
        )
    return Runtime((inside / CODE_FILE).read_bytes(), (inside / WASM_FILE).read_bytes())


def fetched_runtime() -> Runtime:
    """The library from the user's cache; the first time it is fetched with npm, and stderr says so."""
    folder = data_folder() / PACKAGE.name.replace("@", "-")
    if any(not (folder / name).exists() for name in SUMS):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as aside:
            try:
                fetch(PACKAGE, tuple(SUMS), Path(aside))
            except TcmError as error:
                raise TcmError(
                    f"{PACKAGE.name} could not be fetched ({error}); get it with `{PACKAGE.command}` where npm works, "
                    "unpack it, and pass the folder as --runtime"
                ) from error
            for name, expected in SUMS.items():
                verify(Path(aside, name), expected)
                move(Path(aside, name), folder / name)
    for name, expected in SUMS.items():
        verify(folder / name, expected)
    return runtime_in(folder)
