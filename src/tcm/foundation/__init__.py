"""What every layer may use: errors, files, processes, devices, randomness, classes from outside."""
