"""Any iterable of images in, scores out."""
