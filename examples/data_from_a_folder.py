"""Open a folder of images as a data set, look at it and draw batches: python examples/data_from_a_folder.py photos/"""

import sys

import numpy as np

from tcm.data import Batches, open_dataset, save_grid, summarize, to_float

dataset = open_dataset(sys.argv[1] if len(sys.argv) > 1 else "digits")
summary = summarize(dataset)
print(f"{summary.count} images {summary.shape}, {dataset.classes} classes, sigma_data {summary.sigma_data:.3f}")

save_grid("samples.png", dataset.pixels(np.arange(min(64, dataset.count))), scale=4)

batches = Batches(dataset, seed=0, batch=16, flip=True)
for loaded in batches.starting_at(step=1_000_000):  # any step, at once
    x = to_float(loaded.images)
    print(f"step {loaded.step}: {tuple(x.shape)} from {x.min():.2f} to {x.max():.2f}")
    if loaded.step == 1_000_002:
        break
