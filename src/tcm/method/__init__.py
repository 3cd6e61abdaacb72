"""The paper, as pure functions of tensors: no files, no processes, no logging."""
