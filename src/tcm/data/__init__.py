"""Images in, uint8 batches out; order and augmentation are a pure function of (seed, step)."""

from tcm.data.dataset import Annotations, ArrayDataset, Broken, ClassLabels, Dataset
from tcm.data.fetch import fetch_dataset
from tcm.data.grid import image_grid, save_grid
from tcm.data.inputs import open_data
from tcm.data.lanes import StreamBatches
from tcm.data.loader import Batches, BatchSource, LoadedBatch
from tcm.data.opening import open_dataset
from tcm.data.pixels import to_float, to_uint8
from tcm.data.prepare import prepare_dataset
from tcm.data.streams import ClassStream, Sample, Stream, open_stream
from tcm.data.summary import Summary, summarize

__all__ = [
    "Annotations",
    "ArrayDataset",
    "BatchSource",
    "Batches",
    "Broken",
    "ClassLabels",
    "ClassStream",
    "Dataset",
    "LoadedBatch",
    "Sample",
    "Stream",
    "StreamBatches",
    "Summary",
    "fetch_dataset",
    "image_grid",
    "open_data",
    "open_dataset",
    "open_stream",
    "prepare_dataset",
    "save_grid",
    "summarize",
    "to_float",
    "to_uint8",
]
