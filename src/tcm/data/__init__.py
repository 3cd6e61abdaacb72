"""Images in, uint8 batches out."""
